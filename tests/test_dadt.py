"""dadt trains as a written-out delayed schedule does."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import dear
from common.harness.worker import correctness as check
from common.models.workload import Workload
from dear.comm import runtime
from dear.errors import UserError
from tests import awkward, delayed

WORLDS = (1, 2, 3, 4)


def _wrap(model, optimizer, **options):
    return dear.DistributedOptimizer(optimizer, model, algorithm="dadt", **options)


def _awkward(kind, options, loop):
    model = awkward.make_model()
    optimizer = _wrap(model, delayed.make_optimizer(kind, model), **options)
    states = awkward.train(model, optimizer, dear.rank(), dear.size(), **loop)
    optimizer.flush()
    states.append(copy.deepcopy(model.state_dict()))
    optimizer.close()
    wanted = delayed.awkward_states(
        kind, dear.size(), options.get("delay", 1), loop.get("micro_steps", 1)
    )
    return awkward.error(states, wanted)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("kind", delayed.KINDS)
def test_every_step_equals_the_serial_schedule(world, kind, delay, world_size):
    loop = {"read_every_step": True}
    errors = world(world_size).run(_awkward, kind, {"delay": delay}, loop)
    assert max(errors) < 1e-5


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize(
    "loop",
    [
        {"micro_steps": 2},
        {"micro_steps": 3, "no_sync": True},
        {"evaluate": "grad"},
        {"evaluate": "no_grad", "micro_steps": 2},
    ],
    ids=str,
)
def test_other_loops_equal_the_serial_schedule(world, loop, delay):
    assert max(world(3).run(_awkward, "sgd", {"delay": delay}, loop)) < 1e-5


@pytest.mark.parametrize(
    "options", [{"buffer_mb": 0.0}, {"buffer_mb": 0.0005}, {"cycle_time_ms": 0.05}], ids=str
)
def test_how_gradients_are_joined_does_not_matter(world, options):
    assert max(world(3).run(_awkward, "sgd", options, {"read_every_step": True})) < 1e-5


class _Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.full((3,), 5.0))

    def forward(self, slope):
        return (self.x * slope).sum()


def _constant(steps, delay, average):
    model = _Constant()
    optimizer = _wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), delay=delay)
    if not average:
        optimizer.close()
        optimizer = _wrap(model, optimizer, delay=delay, average=False)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([1.0, 2.0, 3.0]) * (dear.rank() + 1)).backward()
        optimizer.step()
        values.append(model.x.tolist())
    optimizer.flush()
    values.append(model.x.tolist())
    optimizer.close()
    return values


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("delay", [1, 3])
def test_a7_after_t_steps_t_minus_delay_gradients_are_applied_and_all_after_a_flush(
    world, delay, average
):
    steps, ranks = 5, 3
    total = torch.tensor([1.0, 2.0, 3.0]) * sum(r + 1 for r in range(ranks))
    gradient = total / ranks if average else total
    for values in world(ranks).run(_constant, steps, delay, average):
        applied = [max(0, t - delay) for t in range(1, steps + 1)] + [steps]
        for value, count in zip(values, applied, strict=True):
            torch.testing.assert_close(torch.tensor(value), 5.0 - count * gradient)


class _Residual(nn.Module):
    """Autograd gives the branches of an addition one and the same gradient tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x):
        inner = self.a + self.b
        inner.retain_grad()
        self.inner = inner
        return (inner * x).sum()


def _residual():
    model = _Residual()
    optimizer = _wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mine = torch.arange(4.0) + 10 * dear.rank()
    for _ in range(3):
        optimizer.zero_grad()
        model(mine).backward()
        runtime.communicator().barrier()  # the transfers, which are queued before it, have ended
        for gradient in (model.a.grad, model.b.grad, model.inner.grad):
            assert torch.equal(gradient, mine)
        optimizer.step()
        assert torch.equal(model.a.grad, mine)
    optimizer.close()


def test_a8_no_gradient_is_written_to_whoever_shares_it(world):
    world(2).run(_residual)


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.common = nn.Linear(4, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x, branch):
        x = torch.tanh(self.common(x))
        return x.square().sum() if branch is None else self.branches[branch](x).square().sum()


def _branch(step, rank):
    """Each rank another one; in some steps none at all, and the last branch from step 4 on only."""
    table = [[0, 1, None], [1, 1, None], [None] * 3, [0, None, 0], [2, 0, None], [1, 2, 2]]
    return table[step % 6][rank % 3]


def _some_unused(delay):
    model = _Branches()
    made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    optimizer = _wrap(model, made, delay=delay, buffer_mb=0.0)
    serial_model = _Branches()
    serial = delayed.Serial(
        serial_model,
        torch.optim.SGD(serial_model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
        delay,
    )
    size = dear.size()
    for step in range(12):
        torch.manual_seed(step)
        x = torch.randn(size, 5, 4)
        optimizer.zero_grad()
        model(x[dear.rank()], _branch(step, dear.rank())).backward()
        optimizer.step()
        of_ranks = [
            serial.gradients_of(serial_model(x[rank], _branch(step, rank))) for rank in range(size)
        ]
        means = []
        for several in zip(*of_ranks, strict=True):
            there = [gradient for gradient in several if gradient is not None]
            means.append(sum(there) / size if there else None)
        serial.step(means)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, serial_model.state_dict()[name])
    optimizer.close()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("delay", [1, 2])
def test_a9_parameters_unused_on_some_ranks_or_on_all(world, delay, world_size):
    world(world_size).run(_some_unused, delay)


def _two_optimizers():
    torch.manual_seed(1)
    first, second = nn.Linear(3, 3), nn.Linear(3, 2)
    plain = copy.deepcopy([first, second])
    optimizers = [
        _wrap(m, torch.optim.SGD(m.parameters(), lr=0.1), delay=i + 1)
        for i, m in enumerate((first, second))
    ]
    serials = [
        delayed.Serial(m, torch.optim.SGD(m.parameters(), lr=0.1), i + 1)
        for i, m in enumerate(plain)
    ]
    for step in range(5):
        torch.manual_seed(step)
        x = torch.randn(dear.size(), 2, 3)
        for optimizer in optimizers:
            optimizer.zero_grad()
        second(first(x[dear.rank()])).square().mean().backward()
        gradients = torch.autograd.grad(
            plain[1](plain[0](x.view(-1, 3))).square().mean(),
            [*serials[0].params, *serials[1].params],
        )
        for optimizer in optimizers:
            optimizer.step()
        serials[0].step(list(gradients[:2]))
        serials[1].step(list(gradients[2:]))
        for got, want in zip((first, second), plain, strict=True):
            torch.testing.assert_close(got.weight, want.weight)
    for optimizer in optimizers:
        optimizer.close()


def test_a9_two_optimizers_at_a_time(world):
    world(2).run(_two_optimizers)


def _lone_backward():
    """Rank 1 has a backward pass in some steps only; nobody has one in the first."""
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    optimizer = _wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    plain = copy.deepcopy(model)
    made = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1)
    serial = delayed.Serial(plain, made, 1)
    for step in range(6):
        used = [step > 0, step in (2, 3)]
        optimizer.zero_grad()
        if used[dear.rank()]:
            model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        gradients = serial.gradients_of(plain(torch.ones(1, 3)).sum())
        share = sum(used) / 2
        serial.step([g * share if share else None for g in gradients])
        torch.testing.assert_close(model.weight, plain.weight)
    optimizer.close()


def test_a_rank_without_a_backward_pass_takes_part(world):
    world(2).run(_lone_backward)


def _discarded():
    """A pass whose gradients are discarded before step() leaves no trace."""
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    optimizer = _wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = copy.deepcopy(model)
    serial = delayed.Serial(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
    for step in range(5):
        x = torch.full((1, 3), 1.0 + step)
        optimizer.zero_grad()
        if step % 2:
            model(100 * x).sum().backward()
            optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        serial.step(serial.gradients_of(plain(x).sum()))
        torch.testing.assert_close(model.weight, plain.weight)
    optimizer.close()


def test_a_discarded_pass_leaves_no_trace(world):
    world(2).run(_discarded)


def _mixed():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2).double())
    model[0].to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)

    def forward(net, x):
        x = x.to(memory_format=torch.channels_last)
        return net[2](net[1](net[0](x)).double()).square().mean()

    optimizer = _wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    serial = delayed.Serial(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), 1)
    for step in range(5):
        torch.manual_seed(step)
        x = torch.randn(dear.size(), 2, 3, 5, 5)
        optimizer.zero_grad()
        forward(model, x[dear.rank()]).backward()
        optimizer.step()
        serial.step(serial.gradients_of(forward(plain, x.flatten(0, 1))))
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want)
    optimizer.close()


def test_dtypes_and_memory_formats_may_differ(world):
    world(2).run(_mixed)


def _closure():
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    optimizer = _wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    serial = delayed.Serial(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
    for step in range(4):
        x = torch.full((1, 3), 1.0 + step)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        serial.step(serial.gradients_of(plain(x).square().sum()))
        torch.testing.assert_close(model.weight, plain.weight)
    optimizer.close()


def test_steps_with_a_closure(world):
    world(2).run(_closure)


def _clip(own):
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    optimizer = _wrap(model, torch.optim.SGD(model.parameters(), lr=0.5), delay=2)
    serial = delayed.Serial(plain, torch.optim.SGD(plain.parameters(), lr=0.5), 2)
    for step in range(7):
        torch.manual_seed(step)
        x = torch.randn(dear.size(), 4, 3)
        optimizer.zero_grad(set_to_none=False)
        loss = model(x[dear.rank()]).square().mean()
        (mine,) = torch.autograd.grad(loss, [model.weight], retain_graph=True)
        loss.backward()
        runtime.communicator().barrier()  # the transfers, which are queued before it, have ended
        torch.testing.assert_close(model.weight.grad, mine)
        if own:
            norm = optimizer.clip_grad_norm_(0.2)
        else:
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        wanted = []
        serial.step(
            serial.gradients_of(plain(x.flatten(0, 1)).square().mean()),
            lambda wanted=wanted: wanted.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.2)),
        )
        torch.testing.assert_close(norm, wanted[0] if wanted else torch.tensor(0.0))
        torch.testing.assert_close(model.weight, plain.weight)
    optimizer.close()


@pytest.mark.parametrize("own", [True, False])
def test_clipping_sees_the_averages_that_the_next_update_applies(world, own):
    world(2).run(_clip, own)


def _scaled(kind, inf_at):
    """The scale changes while gradients are held back."""
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    make = {
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
    }[kind]
    optimizer = _wrap(model, make(model), delay=2)
    serial = delayed.Serial(plain, make(plain), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    seen = []
    for step in range(8):
        torch.manual_seed(step)
        x = torch.randn(dear.size(), 4, 3)
        optimizer.zero_grad()
        loss = model(x[dear.rank()]).square().mean()
        if step == inf_at and dear.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
        gradients = serial.gradients_of(plain(x.flatten(0, 1)).square().mean())
        if step == inf_at:
            gradients = [None] * len(gradients)  # the update is skipped
        serial.step(gradients)
        torch.testing.assert_close(model.weight, plain.weight)
    optimizer.flush()
    serial.flush()
    torch.testing.assert_close(model.weight, plain.weight)
    optimizer.close()
    return seen


@pytest.mark.parametrize("kind", ["sgd", "fused"])
@pytest.mark.parametrize("inf_at", [None, 3, 7])
def test_a_scaler_divides_by_the_scale_of_the_step_that_the_gradients_are_of(world, kind, inf_at):
    first, second = world(2).run(_scaled, kind, inf_at)
    assert first == second
    assert len(set(first)) > 3
    # What is not finite is seen when it is to be applied.
    assert (sorted(first) != first) == (inf_at == 3)


def _refusals():
    model = nn.Linear(3, 2)
    with pytest.raises(UserError, match="LBFGS"):
        _wrap(model, torch.optim.LBFGS(model.parameters()))
    optimizer = _wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def backward():
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()

    backward()
    model.weight.grad.mul_(2)
    with pytest.raises(UserError, match=r"optimizer\.synchronize\(\)"):
        optimizer.step()
    backward()
    with pytest.raises(UserError, match=r"optimizer\.synchronize\(\)"):
        scaler.step(optimizer)
    del optimizer.grad_scale, optimizer.found_inf  # the scaler has not come to it
    backward()
    optimizer.synchronize()
    with pytest.raises(UserError, match=r"backward\(\) after synchronize"):
        model(torch.ones(1, 3)).sum().backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with pytest.raises(UserError, match="present scale"):
        scaler.step(optimizer)
    del optimizer.grad_scale, optimizer.found_inf
    with pytest.raises(UserError, match="parameter groups"):
        optimizer.add_param_group({"params": []})
    backward()
    optimizer.step()
    optimizer.flush()
    model.double()
    optimizer.zero_grad()
    with pytest.raises(UserError, match="before moving the model"):
        model(torch.ones(1, 3).double()).sum().backward()


def test_what_cannot_be_is_refused(own_pool):
    own_pool(1).run(_refusals)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"delay": 0}, "'delay'"),
        ({"delay": 1.5}, "'delay'"),
        ({"buffer_mb": -1.0}, "'buffer_mb'"),
        ({"cycle_time_ms": 0.0}, "'cycle_time_ms'"),
        ({"cycle_ms": 5.0}, "did you mean 'cycle_time_ms'"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, named):
    from dear.training.algorithm import algorithm_options

    with pytest.raises(UserError) as caught:
        algorithm_options("dadt", options)
    text = str(caught.value)
    assert named in text
    assert "dadt" in text
    assert "\n" not in text


def _closed():
    model = awkward.make_model()
    optimizer = _wrap(model, awkward.make_optimizer("sgd", model))
    x, y = awkward.data(0, 0, 1)
    before = model.late.weight.clone()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert torch.equal(before, model.late.weight)
    optimizer.close()
    assert not torch.equal(before, model.late.weight)
    assert type(optimizer) is torch.optim.SGD
    assert not [p for p in model.parameters() if p._post_accumulate_grad_hooks]


def test_close_applies_what_is_held_back_and_takes_every_hook_out(world):
    world(2).run(_closed)


def _workload(delay, steps):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    task = Workload(model=model, inputs=(torch.ones(2, 4),), targets=(), criterion=torch.mean)
    other = copy.deepcopy(model)
    start = check.snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wanted, _ = check.plain_steps(task, optimizer, runtime.communicator(), steps, delay)
    optimizer = _wrap(other, torch.optim.SGD(other.parameters(), 0.1), delay=delay)
    for _ in range(steps):
        optimizer.zero_grad()
        other(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    optimizer.synchronize()
    off = check.distance(other.state_dict(), wanted, start, list(start))
    moved = any(not torch.equal(start[name], wanted[name]) for name in start)
    optimizer.close()
    return off, moved


@pytest.mark.parametrize("delay", [1, 2])
def test_the_harness_compares_with_the_delayed_schedule(world, delay):
    for off, moved in world(2).run(_workload, delay, delay + 2):
        assert off < 1e-6
        assert moved
    assert [moved for _, moved in world(2).run(_workload, delay, delay)] == [False, False]


def _late_peer(delay):
    """Rank 1's backward pass begins late; says how long rank 0 was in its step before."""
    torch.manual_seed(3)
    model = nn.Linear(300, 200)
    optimizer = _wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), delay=delay)
    clock = runtime.communicator().clock
    spent = []
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 300)).sum()
        if step == 3 and dear.rank() == 1:
            end = clock() + LATE_S
            while clock() < end:
                torch.ones(1000).sum()
        loss.backward()
        began = clock()
        optimizer.step()
        spent.append(clock() - began)
    optimizer.close()
    return spent


LATE_S = 1.0


@pytest.mark.parametrize("delay", [1, 2])
def test_a_step_waits_for_gradients_of_delay_steps_before_only(world, delay):
    spent = world(2).run(_late_peer, delay)[0]
    # The transfer of step 3 cannot end before rank 1 has begun it.
    assert sum(spent[3 : 3 + delay]) < LATE_S / 2
    assert spent[3 + delay] > LATE_S / 2


def _sent(options):
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)), nn.Linear(64, 512))
    optimizer = _wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    groups = [len(message.params) for message in optimizer._engine._held[0].messages]
    optimizer.close()
    return groups


def test_a6_gradients_share_buffers_up_to_their_size_in_the_order_of_arrival(world):
    kib = 1 / 1024
    # In backward order: bias 2 KiB or weight 128 KiB first, then four of 16 KiB.
    whole = world(2).run(_sent, {})
    assert whole == [[6], [6]]
    assert world(2).run(_sent, {"buffer_mb": 0.0}) == [[1] * 6] * 2
    (groups, other) = world(2).run(_sent, {"buffer_mb": 48 * kib})
    assert groups == other
    assert groups[-1] == 1
    assert sum(groups) == 6
    # So long a cycle that everything arrives in one, and so short a one that nothing does.
    assert world(2).run(_sent, {"cycle_time_ms": 1e4}) == [[6], [6]]
    assert world(2).run(_sent, {"cycle_time_ms": 1e-4}) == [[1] * 6] * 2


def _timeline(path):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    optimizer = _wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.1), timeline=path, buffer_mb=0.0
    )
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("backend", ["comm_core", "gloo"])
def test_a_timeline_shows_what_was_sent_when(tmp_path, backend):
    from tests.ranks import RankPool

    pool = RankPool(2, backend=backend)
    try:
        pool.run(_timeline, str(tmp_path / "trace.json"))
    finally:
        pool.close()
    for rank in range(2):
        trace = json.loads((tmp_path / f"trace-rank{rank}.json").read_text())
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        rows = {
            event["tid"]: event["args"]["name"]
            for event in trace["traceEvents"]
            if event["name"] == "thread_name"
        }
        found = [(rows[e["tid"]], e["args"].get("step")) for e in events]
        assert {row for row, _ in found} == {
            "pack", "in queue", "transfer", "waits for update", "update"
        }  # fmt: skip
        assert found.count(("transfer", 4)) == 4
        assert {event["pid"] for event in events} == {rank}
        updates = {e["name"]: e["ts"] for e in events if rows[e["tid"]] == "update"}
        assert len(updates) == 4
        for event in events:
            assert event["dur"] >= 0
            if rows[event["tid"]] == "transfer":
                step = event["args"]["step"]
                assert event["ts"] + event["dur"] <= updates[f"step {step}"] + 1e4
