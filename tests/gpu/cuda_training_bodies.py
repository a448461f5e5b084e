"""What each rank does in the tests of training on CUDA or CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import dear
from tests.contract import awkward
from tests.gpu.cuda_worlds import keep_busy, settle, side_stream

# Double precision: no tensor cores, whose rounding would hide what is looked for.
DTYPE = torch.float64


def error_of(
    device: torch.device, algorithm: str, options: dict[str, Any], kind: str, on_side_stream: bool
) -> float:
    """How far the algorithm ends from one process's training on the joined batch."""
    model = awkward.make_model().to(device, DTYPE)
    optimizer = awkward.make_optimizer(kind, model)
    optimizer = dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    rows = slice(dear.rank() * awkward.BATCH, (dear.rank() + 1) * awkward.BATCH)
    if on_side_stream:
        settle(device)  # the parameters were made on another stream
        with side_stream(device):
            _train(model, optimizer, device, rows)
            optimizer.synchronize()
            settle(device)
    else:
        _train(model, optimizer, device, rows)
    reached = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    plain = awkward.make_model().to(device, DTYPE)
    _train(plain, awkward.make_optimizer(kind, plain), device, slice(None))
    return awkward.error([reached], [plain.state_dict()])


def _train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, rows: slice
) -> None:
    for step in range(awkward.STEPS):
        optimizer.zero_grad()
        x, y = awkward.data(step, 0, dear.size())
        scores = model(x[rows].to(device, DTYPE))
        keep_busy(device)  # gradients come late: whoever does not wait for them sends old ones
        functional.cross_entropy(scores, y[rows].to(device)).backward()
        keep_busy(device)
        optimizer.step()


def state_is_broadcast(device: torch.device) -> list[float]:
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
