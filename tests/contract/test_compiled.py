"""Models that `torch.compile` compiles, before or after they are wrapped, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.contract.algorithms import Meaning, algorithm_names, skip_if_unavailable
from tests.contract.loops import (
    error,
    everybody,
    make_model,
    make_sgd,
    mine,
    steps,
    wrap,
)


class Net(nn.Module):
    """Model of blocks whose class is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = make_model(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


graphs: list[int] = []
"""Number of operations of each graph."""


def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
    graphs.append(sum(node.op.startswith("call_") for node in graph.graph.nodes))
    return graph.forward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def runs_compiled(name: str) -> list[int]:
    """Returns in each step how many of 12 equal blocks run compiled."""
    torch._dynamo.reset()
    calls, result = 0, []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        def call(*args: object) -> object:
            nonlocal calls
            calls += 1
            return graph.forward(*args)

        return call

    torch.manual_seed(7)
    model = nn.Sequential(*(Block() for _ in range(12)), nn.Linear(6, 4))
    optimizer = wrap(make_sgd(model), model, name, **Meaning.of(name).options[0])
    for block in list(model)[:-1]:
        block.compile(backend=counting)
    for step in range(4):
        calls = 0
        steps(model, optimizer, mine(), [step])
        result.append(calls)
    optimizer.close()
    return result


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend=backend)


def handed_over(model: nn.Module, use: Callable[[nn.Module], None]) -> nn.Module:
    use(whole := compiled(model))
    return whole


def afterwards(model: nn.Module, use: Callable[[nn.Module], None]) -> nn.Module:
    use(model)
    return compiled(model)


def method(model: nn.Module, use: Callable[[nn.Module], None]) -> nn.Module:
    use(model)
    model.compile(backend=backend)
    return model


def run_before(model: nn.Module, use: Callable[[nn.Module], None]) -> nn.Module:
    model.compile(backend=backend)
    model(torch.ones(3, 6)).sum().backward()
    model.zero_grad()
    use(model)
    return model


def by_layers(model: nn.Module, use: Callable[[nn.Module], None]) -> nn.Module:
    use(model)
    for child in model.children():
        child.compile(backend=backend)
    return model


WAYS = {way.__name__: way for way in (handed_over, afterwards, method, run_before, by_layers)}


def uncompiled(name: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state after the same steps of a model that is not compiled.

    The steps are serial for algorithms that compute the same, and the algorithm's own for others.
    """
    if name in SYNCHRONOUS:
        steps(model, make_sgd(model), everybody(), range(5))
        return model.state_dict()
    optimizer = wrap(make_sgd(model), model, name, **Meaning.of(name).options[0])
    steps(model, optimizer, mine(), range(5))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer.close()
    return state


def far(name: str, make: Callable[[], nn.Module], way: str, eager: int) -> tuple[float, list[int]]:
    """Returns the distance from a model that is not compiled, and the sizes of the graphs.

    Args:
        eager: number of steps before the model is compiled.
    """
    torch._dynamo.reset()
    graphs.clear()
    torch.manual_seed(7)
    model, options = make(), Meaning.of(name).options[0]
    torch.manual_seed(7)
    wanted = uncompiled(name, make())
    optimizers = []

    def use(model: nn.Module) -> None:
        optimizers.append(wrap(make_sgd(model), model, name, **options))
        steps(model, optimizers[0], mine(), range(eager))

    model = WAYS[way](model, use)
    steps(model, optimizers[0], mine(), range(eager, 5))
    state = {key.removeprefix("_orig_mod."): v for key, v in model.state_dict().items()}
    if name not in SYNCHRONOUS:  # whose values `close` may change once more
        state = {key: value.clone() for key, value in state.items()}
    optimizers[0].close()
    return error(state, wanted), graphs


SYNCHRONOUS = [n for n in algorithm_names() if Meaning.of(n).family == "synchronous"]


def _cases() -> list[object]:
    """Every algorithm in every way; marked `full` are all but one way of each.

    The last three are repeatable: they wait for messages, win-put with `barrier=True`.
    """
    names = [*SYNCHRONOUS, "exact-diffusion", "decentralized", "win-put"]
    return [
        pytest.param(name, way, marks=[pytest.mark.full] if (i + j) % len(WAYS) else [])
        for i, name in enumerate(names)
        for j, way in enumerate(WAYS)
    ]


@pytest.mark.parametrize(("name", "way"), _cases())
def test_compiled_models_train_as_others_do(world, name, way):
    skip_if_unavailable(name)
    for make, eager in ((make_model, 0), (Net, 2)):
        for off, sizes in world(2, name).run(far, name, make, way, eager):
            assert off < 1e-5, (make, eager)
            parts = {"by_layers": 4, "run_before": 2}.get(way, 2)
            changes = name == "auto"  # to the hooks of another algorithm
            assert len(sizes) <= parts * (1 + (eager == 0) + changes), sizes


@pytest.mark.parametrize("name", ["dear", "bytescheduler", "auto", "exact-diffusion"])
def test_each_of_many_equal_blocks_runs_compiled(world, name):
    """Torch gives up a function that it has compiled 8 times, so blocks must share the result."""
    skip_if_unavailable(name)
    assert world(2, name).run(runs_compiled, name) == [[12] * 4] * 2
