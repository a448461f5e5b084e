"""dadt: checkpoints of what is held back, and sparse gradients."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import dear
from dear.algorithms.delayed.dadt import PENDING
from dear.errors import UserError
from tests.contract import delayed


def _wrap(model, optimizer, **options):
    return dear.DistributedOptimizer(optimizer, model, algorithm="dadt", **options)


def _model():
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def _steps(model, optimizer, first, last):
    for step in range(first, last):
        torch.manual_seed(100 * step + dear.rank())
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()


def _saved(model, optimizer):
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _rewound():
    """The same objects go back to an earlier state."""
    model = _model()
    optimizer = _wrap(model, _adamw(model), delay=2)
    _steps(model, optimizer, 0, 3)
    weights, state = _saved(model, optimizer)
    ends = []
    for _ in range(2):
        _steps(model, optimizer, 3, 8)
        ends.append(copy.deepcopy(model.state_dict()))
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    optimizer.close()
    return all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_going_back_to_a_checkpoint_drops_what_was_held_back_since(world):
    assert world(2).run(_rewound) == [True, True]


def _other_holders():
    model = _model()
    optimizer = _wrap(model, _adamw(model), delay=2)
    _steps(model, optimizer, 0, 4)
    weights, state = _saved(model, optimizer)
    plain = _model()
    plain.load_state_dict(weights)
    alone = _adamw(plain)
    alone.load_state_dict(state)  # what is held back means nothing to it
    assert alone.state_dict()["state"][0]["step"] == 2
    one = _model()
    shorter = _wrap(one, _adamw(one), delay=1)
    with pytest.raises(UserError, match="2 steps, more than delay=1: flush"):
        shorter.load_state_dict(state)
    shorter.close()
    # A state of plain training holds nothing back.
    optimizer.load_state_dict(alone.state_dict())
    assert optimizer.state_dict()[PENDING] == []
    _steps(model, optimizer, 4, 7)
    optimizer.flush()
    assert optimizer.state_dict()[PENDING] == []
    assert optimizer.state_dict()["state"][0]["step"] == 2 + 3
    optimizer.close()


def test_states_are_understood_by_plain_optimizers_and_theirs_here(world):
    world(2).run(_other_holders)


def _broadcast():
    model = _model()
    optimizer = _wrap(model, _adamw(model), delay=2)
    _steps(model, optimizer, 0, 3)
    if dear.rank() == 0:
        optimizer._engine._held[0].gradients()[model[0].bias].fill_(7.0)
    dear.broadcast_optimizer_state(optimizer)
    held = optimizer.state_dict()[PENDING]
    optimizer.close()
    return [entry["gradients"][1].tolist() for entry in held]


def test_the_state_that_is_broadcast_contains_what_is_held_back(world):
    first, second = world(2).run(_broadcast)
    assert first == second
    assert first[0] == [7.0] * 6


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
    make = {
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    }[kind]
    optimizer = _wrap(model, make(model), delay=delay, buffer_mb=0.0)
    serial = delayed.Serial(plain, make(plain), delay)
    for step in range(8):
        optimizer.zero_grad()
        model(*_inputs(step, dear.rank())).backward()
        assert model.words.weight.grad.layout is torch.sparse_coo
        own = model.words.weight.grad.to_dense()
        optimizer.step()
        assert torch.equal(model.words.weight.grad.to_dense(), own)
        of_ranks = [serial.gradients_of(plain(*_inputs(step, rank))) for rank in range(dear.size())]
        means = []
        for several in zip(*of_ranks, strict=True):
            there = [gradient for gradient in several if gradient is not None]
            means.append(sum(there) / dear.size() if there else None)
        serial.step(means)
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want)
    optimizer.load_state_dict(_saved(model, optimizer)[1])
    optimizer.flush()
    serial.flush()
    torch.testing.assert_close(model.words.weight, plain.words.weight)
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_sparse_gradients_train_as_dense_ones(world, kind, world_size):
    world(world_size).run(_sparse, kind, 1)
    world(world_size).run(_sparse, kind, 2)


def _sparse_adam():
    """Only the entries that some rank has are updated."""
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
    return moved


def test_sparse_adam_updates_the_entries_of_all_ranks(world):
    assert world(2).run(_sparse_adam) == [[True, True, False, True, False, False]] * 2


def _changing():
    words = nn.Embedding(6, 2, sparse=True)
    optimizer = _wrap(words, torch.optim.SGD(words.parameters(), lr=0.1))
    words(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UserError, match="is dense now, and was sparse"):
        words.weight.sum().backward()
    words = nn.Embedding(6, 2, sparse=True)
    optimizer = _wrap(words, torch.optim.SGD(words.parameters(), lr=0.1))
    words.weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UserError, match="is sparse now, and was dense"):
        words(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    words = nn.Embedding(6, 2, sparse=True)
    optimizer = _wrap(words, torch.optim.SGD(words.parameters(), lr=0.1))
    words(torch.tensor([1])).sum().backward()
    words.weight.grad.mul_(2)
    with pytest.raises(UserError, match=r"optimizer\.synchronize\(\)"):
        optimizer.step()


def test_a_gradient_must_stay_of_one_kind(own_pool):
    own_pool(1).run(_changing)


def _differing():
    words = nn.Embedding(6, 2, sparse=True)
    optimizer = _wrap(words, torch.optim.SGD(words.parameters(), lr=0.1))
    loss = words(torch.tensor([1])).sum() if dear.rank() else words.weight.sum()
    with pytest.raises(UserError, match="sparse on some ranks and dense on others"):
        loss.backward()
    assert optimizer is not None


def test_a_gradient_must_be_of_one_kind_on_all_ranks(own_pool):
    own_pool(2).run(_differing)
