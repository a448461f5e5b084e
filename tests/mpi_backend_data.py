"""Inputs, references and the list of cases for tests/mpi_backend_program.py."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
CASES: dict[str, Callable[[], None]] = {}

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, *COMPLEX]
LENGTHS = [0, 1, 7, 1023, 70_001]


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def data(rank: int, length: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What rank `rank` contributes. Small integers, so that sums and products are exact."""
    values = np.random.default_rng([seed, rank, length]).integers(0, 3, length)
    if dtype in COMPLEX:
        return torch.from_numpy(values - 1j * (values - 1)).to(dtype)
    return torch.from_numpy(values).to(dtype)


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy() if tensor.dtype in FLOATS else tensor.numpy()


def same(got: torch.Tensor, wanted: torch.Tensor | np.ndarray) -> None:
    wanted = numbers(wanted) if isinstance(wanted, torch.Tensor) else wanted
    # Sums are exact; an average is rounded once, not everywhere in the same way.
    exact = got.dtype not in FLOATS + COMPLEX
    rtol = 0.0 if exact else 2 * torch.finfo(got.dtype).eps
    np.testing.assert_allclose(numbers(got), wanted, rtol=rtol, atol=0.0)


def reduced(op: dist.ReduceOp, length: int, dtype: torch.dtype) -> np.ndarray:
    rows = np.stack([numbers(data(rank, length, dtype)) for rank in range(SIZE)])
    if dtype == torch.bool and op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
        return rows.any(axis=0) if op == dist.ReduceOp.SUM else rows.all(axis=0)
    if op == dist.ReduceOp.AVG:
        mean = torch.from_numpy(rows.sum(axis=0)).to(dtype)
        return numbers((mean / SIZE).to(dtype))
    folds = {
        dist.ReduceOp.SUM: np.add,
        dist.ReduceOp.PRODUCT: np.multiply,
        dist.ReduceOp.MIN: np.minimum,
        dist.ReduceOp.MAX: np.maximum,
        dist.ReduceOp.BAND: np.bitwise_and,
        dist.ReduceOp.BOR: np.bitwise_or,
        dist.ReduceOp.BXOR: np.bitwise_xor,
    }
    return folds[op].reduce(rows, axis=0, dtype=rows.dtype)


def ops_of(dtype: torch.dtype) -> list[dist.ReduceOp]:
    op = dist.ReduceOp
    ops = [op.SUM]
    if dtype not in COMPLEX:  # torch itself refuses their product
        ops += [op.PRODUCT, op.MIN, op.MAX]
    if dtype in FLOATS or dtype in COMPLEX:
        ops += [op.AVG]
    else:
        ops += [op.BAND, op.BOR, op.BXOR]
    return ops


def raises(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), f"{words!r} not in {str(error)!r}"
    else:
        raise AssertionError(f"no {kind.__name__} about {words!r}")


def backend_of(group: dist.ProcessGroup | None = None) -> dist.Backend:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
