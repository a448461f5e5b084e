"""Training on CUDA tensors equals the references: one rank per GPU, and ranks that share one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dear
from dear.training.algorithm import algorithm_class, algorithm_names
from tests.contract.algorithms import Meaning, skip_if_unavailable
from tests.contract.training import OnRank, Script, States, difference, serial
from tests.gpu.cuda_worlds import keep_busy, settle, side_stream, worlds

VARIANTS = [
    *(
        (name, Meaning.of(name).options[0])
        for name in algorithm_names()
        if "cuda" in algorithm_class(name).capabilities.devices and not Meaning.of(name).in_turn
    ),
    ("dear", {"threshold_mb": 0.0002}),
    ("neighbor", {"combine": "atc"}),
    ("neighbor", {"combine": "awc", "hierarchical": True, "local_size": 1}),
]


class OnDevice(OnRank):
    """Gradients come late: whoever does not wait for them sends old ones."""

    device = torch.device("cpu")

    def _new_model(self) -> torch.nn.Module:
        return super()._new_model().to(self.device)

    def _backward(self, step: int) -> Any:
        keep_busy(self.device)
        loss = super()._backward(step)
        keep_busy(self.device)
        return loss


def train(
    device: torch.device, name: str, options: dict[str, Any], script: Script, aside: bool
) -> States:
    """`aside`: on another stream than the ordinary one."""
    OnDevice.device = device
    body = OnDevice(name, options, script)
    settle(device)  # the parameters were made on the ordinary stream
    if not aside:
        return body.run()
    with side_stream(device):
        states = body.run()
        settle(device)
    return states


@worlds()
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_equals_its_reference(run_in, world, name, options):
    _equals_its_reference(run_in, world, name, options, "SGD", aside=False)


@worlds(cpu_is_quick=False)
@pytest.mark.parametrize(("optimizer", "aside"), [("SGD", True), ("AdamW", False)])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_equals_its_reference_aside_and_by_adamw(run_in, world, name, options, optimizer, aside):
    _equals_its_reference(run_in, world, name, options, optimizer, aside)


def _equals_its_reference(
    run_in: Any, world: Any, name: str, options: dict[str, Any], optimizer: str, aside: bool
) -> None:
    skip_if_unavailable(name)
    # Double precision: no tensor cores, whose rounding would hide what is looked for.
    script = Script(model="awkward64", optimizer=optimizer)
    wanted = serial(name, options, script, world.size)
    results = run_in(world, train, name, options, script, aside)
    assert max(map(difference, results, wanted)) < 1e-7


def _broadcast(device: torch.device) -> list[float]:
    """The parameters that `broadcast_parameters` gives this rank, and its optimizer's state."""
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(dear.rank() + 1)
    model(torch.ones(1, 3, device=device) * (dear.rank() + 1)).sum().backward()
    optimizer.step()
    with side_stream(device):
        keep_busy(device)
        dear.broadcast_parameters(model.state_dict(), root_rank=0)
        dear.broadcast_optimizer_state(optimizer, root_rank=0)
        settle(device)
    state = [optimizer.state[param]["momentum_buffer"] for param in model.parameters()]
    return [float(value.sum()) for value in (*model.parameters(), *state)]


@worlds()
def test_replicas_start_equal(run_in, world):
    results = run_in(world, _broadcast)
    # Rank 0's weights are 1 and its input is 1: a step of 0.1 against gradients of 1.
    assert all(result == pytest.approx([5.4, 1.8, 6.0, 2.0]) for result in results)


def _half(device: torch.device) -> float:
    """A parameter in bfloat16 that only averages."""
    model = torch.nn.Linear(3, 1, bias=False).to(device, torch.bfloat16)
    torch.nn.init.constant_(model.weight, float(dear.rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dear.DistributedOptimizer(optimizer, model, algorithm="neighbor", topology="complete")
    model(torch.ones(1, 3, device=device, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.close()
    return model.weight[0, 0].item()


@worlds()
def test_bfloat16_averages(run_in, world):
    assert run_in(world, _half) == [(world.size - 1) / 2] * world.size
