"""Parameters that a script reads or writes between a step and the next forward pass."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import dear
from dear.errors import UserError
from tests.contract.algorithms import Meaning, algorithm_names, skip_if_unavailable
from tests.contract.loops import make_model, make_sgd, mine, steps, wrap
from tests.ranks import on_ranks

Touch = Callable[..., object]


def _each(change: Callable[[nn.Parameter], object]) -> Touch:
    return lambda model, held: [change(param) for param in held]


def _saved(model: nn.Module, held: list[nn.Parameter]) -> object:
    file = io.BytesIO()
    torch.save(list(model.parameters()), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _vector(model: nn.Module, held: list[nn.Parameter]) -> object:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.clamp(-0.1, 0.1), model.parameters())
    return [vector]


def _replaced(model: nn.Module, held: list[nn.Parameter]) -> None:
    for param in model.parameters():
        param.data = param.data / 2


TOUCHES: dict[str, Touch] = {
    "clamp_": lambda model, held: [p.clamp_(-0.1, 0.1) for p in model.parameters()],
    "data.clamp_": lambda model, held: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()],
    "foreach": lambda model, held: torch._foreach_mul_(list(model.parameters()), 0.5),
    "held, read": _each(lambda param: param.clone()),
    "held, written": _each(lambda param: param.data.clamp_(-0.1, 0.1)),
    "one layer": lambda model, held: [model[4].weight.div_(model[4].weight.norm())],
    "deepcopy": lambda model, held: list(copy.deepcopy(model).parameters()),
    "save": _saved,
    "vector": _vector,
    "replaced": _replaced,
    "numpy": lambda model, held: [torch.tensor(p.numpy(force=True)) for p in model.parameters()],
}


def _in_turn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Iterable[int],
    after_step: Callable[[torch.optim.Optimizer, nn.Module], None],
) -> None:
    """The loop of `steps`, one rank after another, so that it is known what has been sent.

    Nothing moves in the first step, in which all ranks must take part.
    """
    (group,) = optimizer.param_groups
    rate, group["lr"] = group["lr"], 0.0
    steps(model, optimizer, ranks, range(1))
    group["lr"] = rate
    optimizer.synchronize()
    for step in (1, 2):
        for rank in range(dear.size()):
            dear.allreduce(torch.zeros(1))  # the one before has ended its turn
            if rank == dear.rank():
                steps(model, optimizer, ranks, [step], after_step=after_step)
                optimizer.synchronize()


def outcome(
    name: str, options: dict[str, object], touch: Touch, *, settle: bool
) -> list[torch.Tensor] | str:
    """Returns what a script sees that touches parameters after each step, or the `UserError`."""
    model = make_model()
    held, seen = list(model.parameters()), []
    optimizer = wrap(make_sgd(model), model, name, **options)

    def after(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if settle:
            optimizer.synchronize()
        with torch.no_grad():
            seen.extend(value.clone() for value in touch(model, held) or ())

    loop = _in_turn if Meaning.of(name).in_turn else steps
    try:
        loop(model, optimizer, mine(), after_step=after)
    except UserError as error:
        return str(error)
    return [*seen, *model.state_dict().values()]


CASES = [(name, Meaning.of(name).options[0]) for name in algorithm_names() if name != "fsdp"]
CASES += [("dear", {"update": "replicated"}), ("neighbor", {"combine": "atc"})]


def _cases() -> list[object]:
    """Every second touch with each algorithm, and, marked `full`, the others."""
    names, cases = list(TOUCHES), []
    for place, (name, options) in enumerate(CASES):
        label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        for rest in (False, True):
            marks = pytest.mark.full if rest else ()
            touches = names[(place + rest) % 2 :: 2]
            shown = f"{label}-{'the rest' if rest else 'every second'}"
            cases.append(pytest.param(name, options, touches, id=shown, marks=marks))
    return cases


@pytest.mark.parametrize(("name", "options", "touches"), _cases())
def test_whoever_touches_parameters_after_a_step_sees_settled_ones(world, name, options, touches):
    skip_if_unavailable(name)
    world(2, name).run(settled, name, options, touches)


def settled(name: str, options: dict[str, object], touches: list[str]) -> None:
    for what in touches:
        got, wanted = (
            outcome(name, options, TOUCHES[what], settle=settle) for settle in (False, True)
        )
        if isinstance(wanted, str):
            assert got == wanted and "changed while they were being sent" in wanted, (name, what)
        else:
            assert all(map(torch.equal, got, wanted)), (name, what)


@on_ranks(2)
def test_parameters_in_flight_cost_nothing_but_for_those_who_read_them():
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear")
    steps(model, optimizer, mine())
    engine, kinds = optimizer._engine, {type(param) for param in model.parameters()}
    assert engine.pending and nn.Parameter not in kinds
    assert {param.shape for param in model.parameters()} and sum(map(torch.numel, engine.params))
    model.zero_grad()
    model.requires_grad_(True)
    assert engine.pending and isinstance(model[0].weight, nn.Parameter)
    model[0].weight.sum()
    assert not engine.pending and {type(p) for p in model.parameters()} == {nn.Parameter}
