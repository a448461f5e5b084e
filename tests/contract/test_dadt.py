"""Promises of `dadt` alone: messages, what it holds back and saves, sparse gradients."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from torch import nn

import dear
from common.harness.worker.checking import deviation
from common.harness.worker.checking.plain_training import plain_steps
from common.harness.worker.checking.serial import Ranks
from common.models.workload import Workload
from dear.algorithms import reference as references
from dear.algorithms.delayed.dadt import PENDING
from dear.comm import runtime
from dear.training.algorithm import algorithm_options
from tests.contract.loops import make_model, message, mine, steps, wrap
from tests.ranks import on_ranks


def _wrap(model, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return wrap(optimizer, model, "dadt", **options)


def _serial(model, optimizer, delay):
    """The reference, for one process that has the joined batch."""
    return references.dadt(Ranks([model], [optimizer]), algorithm_options("dadt", {"delay": delay}))


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


@on_ranks(2)
def test_a8_no_gradient_is_written_to_whoever_shares_it():
    model = _Residual()
    optimizer = _wrap(model)
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


@on_ranks(2)
def test_a9_two_optimizers_at_a_time():
    torch.manual_seed(1)
    models = [nn.Linear(3, 3), nn.Linear(3, 2)]
    plain = copy.deepcopy(models)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in plain]
    serials = [_serial(m, sgd[i], i + 1) for i, m in enumerate(plain)]
    optimizers = [_wrap(m, delay=i + 1) for i, m in enumerate(models)]
    for step in range(5):
        x = torch.randn(dear.size(), 2, 3, generator=torch.Generator().manual_seed(step))
        for optimizer in [*optimizers, *sgd]:
            optimizer.zero_grad()
        models[1](models[0](x[dear.rank()])).square().mean().backward()
        plain[1](plain[0](x.view(-1, 3))).square().mean().backward()
        for optimizer, serial in zip(optimizers, serials, strict=True):
            optimizer.step()
            next(serial)
        for got, want in zip(models, plain, strict=True):
            torch.testing.assert_close(got.weight, want.weight)
    for optimizer in optimizers:
        optimizer.close()


@on_ranks(2)
def test_a_pass_that_is_discarded_before_step_leaves_no_trace():
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer, serial = _wrap(model), _serial(plain, sgd, 1)
    for step in range(5):
        x = torch.full((1, 3), 1.0 + step)
        optimizer.zero_grad()
        if step % 2:
            model(100 * x).sum().backward()
            optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        sgd.zero_grad()
        plain(x).sum().backward()
        next(serial)
        torch.testing.assert_close(model.weight, plain.weight)
    optimizer.close()


def _refusals():
    model = nn.Linear(3, 2)
    assert "LBFGS" in message(lambda: _wrap(model, torch.optim.LBFGS(model.parameters())))
    optimizer = _wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def backward():
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()

    backward()
    model.weight.grad.mul_(2)
    assert "optimizer.synchronize()" in message(lambda: optimizer.step())
    backward()
    assert "optimizer.synchronize()" in message(lambda: scaler.step(optimizer))
    del optimizer.grad_scale, optimizer.found_inf  # the scaler has not come to it
    backward()
    optimizer.synchronize()
    assert "backward() after synchronize" in message(
        lambda: model(torch.ones(1, 3)).sum().backward()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    assert "present scale" in message(lambda: scaler.step(optimizer))
    del optimizer.grad_scale, optimizer.found_inf
    assert "parameter groups" in message(lambda: optimizer.add_param_group({"params": []}))
    backward()
    optimizer.step()
    optimizer.flush()
    model.double()
    optimizer.zero_grad()
    assert "before you move the model" in message(
        lambda: model(torch.ones(1, 3).double()).sum().backward()
    )


def test_what_cannot_be_is_refused(own_pool):
    own_pool(1).run(_refusals)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def _saved(model, optimizer):
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@on_ranks(2)
def test_going_back_to_a_checkpoint_drops_what_was_held_back_since():
    model = make_model()
    optimizer = _wrap(model, _adamw(model), delay=2)
    steps(model, optimizer, mine(), range(0, 3))
    weights, state = _saved(model, optimizer)
    ends = []
    for _ in range(2):
        steps(model, optimizer, mine(), range(3, 8))
        ends.append(copy.deepcopy(model.state_dict()))
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    optimizer.close()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@on_ranks(2)
def test_a_state_without_a_parameter_that_was_taken_out_is_loaded():
    model = make_model()
    optimizer = _wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), delay=2)
    steps(model, optimizer, mine(), range(0, 3))
    out = optimizer.param_groups[0]["params"].pop(0)
    before = out.detach().clone()
    optimizer.load_state_dict(optimizer.state_dict())
    steps(model, optimizer, mine(), range(3, 5))
    optimizer.close()
    assert torch.equal(out, before)


@on_ranks(2)
def test_states_are_understood_by_plain_optimizers_and_theirs_here():
    model = make_model()
    optimizer = _wrap(model, _adamw(model), delay=2)
    steps(model, optimizer, mine(), range(0, 4))
    weights, state = _saved(model, optimizer)
    plain = make_model()
    plain.load_state_dict(weights)
    alone = _adamw(plain)
    alone.load_state_dict(state)  # what is held back means nothing to it
    assert alone.state_dict()["state"][0]["step"] == 2
    fresh = make_model()
    shorter = _wrap(fresh, _adamw(fresh), delay=1)
    assert "2 steps, more than delay=1: flush" in message(lambda: shorter.load_state_dict(state))
    shorter.close()
    # A state of plain training holds nothing back.
    optimizer.load_state_dict(alone.state_dict())
    assert optimizer.state_dict()[PENDING] == []
    steps(model, optimizer, mine(), range(4, 7))
    optimizer.flush()
    assert optimizer.state_dict()[PENDING] == []
    assert optimizer.state_dict()["state"][0]["step"] == 2 + 3
    optimizer.close()


@on_ranks(2)
def test_the_state_that_is_broadcast_contains_what_is_held_back():
    model = make_model()
    optimizer = _wrap(model, _adamw(model), delay=2)
    steps(model, optimizer, mine(), range(0, 3))
    if dear.rank() == 0:
        optimizer._engine._held[0].gradients()[model[0].bias].fill_(7.0)
    dear.broadcast_optimizer_state(optimizer)
    held = [entry["gradients"][1].tolist() for entry in optimizer.state_dict()[PENDING]]
    optimizer.close()
    assert held[0] == [7.0] * 8
    assert runtime.communicator().gather_objects(held) == [held] * 2


class _Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(11, 3, sparse=sparse)
        self.places = nn.Embedding(5, 3, sparse=sparse)
        self.out = nn.Linear(3, 2)

    def forward(self, words, places=None):
        x = self.words(words).sum(0)
        if places is not None:
            x = x + self.places(places).sum(0)
        return self.out(x).square().sum()


def _inputs(step, rank):
    """Ranks have different words, and different numbers of them; some have no places."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    words = torch.randint(11, (1 + (step + rank) % 4,), generator=generator)
    # Nobody in the first two steps and in the fifth, then now and then.
    places = torch.randint(5, (2,), generator=generator) if step > 1 and step != 4 else None
    return words, places if (step + rank) % 2 else None


def _sparse(kind, delay):
    model, plain = _Words(True), _Words(False)
    make = getattr(torch.optim, kind)
    optimizer = _wrap(model, make(model.parameters(), lr=0.1), delay=delay, buffer_mb=0.0)
    dense = make(plain.parameters(), lr=0.1)
    serial = _serial(plain, dense, delay)
    for step in range(8):
        optimizer.zero_grad()
        model(*_inputs(step, dear.rank())).backward()
        assert model.words.weight.grad.layout is torch.sparse_coo
        gradient = model.words.weight.grad.to_dense()
        optimizer.step()
        assert torch.equal(model.words.weight.grad.to_dense(), gradient)
        dense.zero_grad()
        for rank in range(dear.size()):
            (plain(*_inputs(step, rank)) / dear.size()).backward()
        next(serial)
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want)
    optimizer.load_state_dict(_saved(model, optimizer)[1])
    optimizer.flush()
    serial.close()
    torch.testing.assert_close(model.words.weight, plain.words.weight)
    optimizer.close()


@pytest.mark.parametrize(
    ("size", "kind", "delay"), [(1, "SGD", 2), (2, "Adagrad", 1), (3, "SGD", 1), (3, "Adagrad", 2)]
)
def test_sparse_gradients_train_as_dense_ones(world, kind, size, delay):
    world(size).run(_sparse, kind, delay)


@on_ranks(2)
def test_sparse_adam_updates_the_entries_of_all_ranks():
    torch.manual_seed(4)
    model = nn.Embedding(6, 2, sparse=True)
    start = model.weight.detach().clone()
    optimizer = _wrap(model, torch.optim.SparseAdam(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([dear.rank(), 3])).sum().backward()
        optimizer.step()
    moved = (model.weight != start).any(dim=1).tolist()
    optimizer.close()
    assert moved == [True, True, False, True, False, False]


def _changing():
    words = nn.Embedding(6, 2, sparse=True)
    optimizer = _wrap(words)
    words(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert "is dense now, but was sparse" in message(lambda: words.weight.sum().backward())
    words = nn.Embedding(6, 2, sparse=True)
    optimizer = _wrap(words)
    words.weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert "is sparse now, but was dense" in message(
        lambda: words(torch.tensor([1])).sum().backward()
    )
    optimizer.zero_grad()
    words = nn.Embedding(6, 2, sparse=True)
    optimizer = _wrap(words)
    words(torch.tensor([1])).sum().backward()
    words.weight.grad.mul_(2)
    assert "optimizer.synchronize()" in message(lambda: optimizer.step())


def test_a_gradient_must_stay_of_one_kind(own_pool):
    own_pool(1).run(_changing)


def _differing():
    words = nn.Embedding(6, 2, sparse=True)
    optimizer = _wrap(words)
    loss = words(torch.tensor([1])).sum() if dear.rank() else words.weight.sum()
    assert "sparse on some ranks and dense on others" in message(lambda: loss.backward())
    assert optimizer is not None


def test_a_gradient_must_be_of_one_kind_on_all_ranks(own_pool):
    own_pool(2).run(_differing)


def _workload(delay, steps):
    """Returns how far training is from the harness's, and whether anything moved."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    task = Workload(model=model, inputs=(torch.ones(2, 4),), targets=(), criterion=torch.mean)
    other = copy.deepcopy(model)
    start = deviation.snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wanted, _ = plain_steps(task, optimizer, steps, delay)
    optimizer = _wrap(other, delay=delay)
    for _ in range(steps):
        optimizer.zero_grad()
        other(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    optimizer.synchronize()
    moved = deviation.movements(wanted, start, start, least=0)
    errors = deviation.distances(other.state_dict(), wanted, moved)
    off = deviation.worst_deviation(errors, moved).error
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
    optimizer = _wrap(model, **options)
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
    optimizer = _wrap(model, timeline=path, buffer_mb=0.0)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("backend", ["comm_core", "gloo"])
def test_a_timeline_shows_what_was_sent_when(world, tmp_path, backend):
    world(2, backend).run(_timeline, str(tmp_path / "trace.json"))
    for rank in range(2):
        trace = json.loads((tmp_path / f"trace-rank{rank}.json").read_text())
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        rows = {
            event["tid"]: event["args"]["name"]
            for event in trace["traceEvents"]
            if event["name"] == "thread_name"
        }
        spans = [(rows[e["tid"]], e["args"].get("step")) for e in events]
        assert {row for row, _ in spans} == {
            "pack", "in queue", "transfer", "waits for update", "update"
        }  # fmt: skip
        assert spans.count(("transfer", 4)) == 4
        assert {event["pid"] for event in events} == {rank}
        updates = {e["name"]: e["ts"] for e in events if rows[e["tid"]] == "update"}
        assert len(updates) == 4
        for event in events:
            assert event["dur"] >= 0
            if rows[event["tid"]] == "transfer":
                step = event["args"]["step"]
                assert event["ts"] + event["dur"] <= updates[f"step {step}"] + 1e4
