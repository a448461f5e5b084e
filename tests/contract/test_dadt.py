"""dadt trains as a written-out delayed schedule does."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import dear
from common.harness.worker import correctness as check
from common.harness.worker.training import plain_steps
from common.models.workload import Workload
from dear.comm import runtime
from dear.errors import UserError
from tests.contract import delayed


def _wrap(model, optimizer, **options):
    return dear.DistributedOptimizer(optimizer, model, algorithm="dadt", **options)


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


def _workload(delay, steps):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    task = Workload(model=model, inputs=(torch.ones(2, 4),), targets=(), criterion=torch.mean)
    other = copy.deepcopy(model)
    start = check.snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wanted, _ = plain_steps(task, optimizer, runtime.communicator(), steps, delay)
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
