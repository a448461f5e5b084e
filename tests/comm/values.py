"""Values and expected results for the tests of the backend `comm_core`."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, *COMPLEX]

ARITHMETIC = [ReduceOp.SUM, ReduceOp.PRODUCT]
ORDERED = [ReduceOp.MIN, ReduceOp.MAX]
BITS = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]


def reductions(dtype: torch.dtype) -> list[ReduceOp.RedOpType]:
    """What has a meaning for the type."""
    if dtype in FLOATS:
        return [*ARITHMETIC, *ORDERED, ReduceOp.AVG]
    if dtype in COMPLEX:
        return [ReduceOp.SUM, ReduceOp.AVG]  # torch refuses products before a backend sees them
    return [*ARITHMETIC, *ORDERED, *BITS]


def sizes(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n, n + 1})


LARGE = 1000003


def values(
    rank: int, numel: int, dtype: torch.dtype = torch.float32, salt: int = 0
) -> torch.Tensor:
    """A rank's tensor: whole numbers from 1 to 4, unlike those of other ranks and places."""
    whole = (torch.arange(numel) * (2 * rank + 3) + rank + salt) % 7 % 4 + 1
    if dtype == torch.bool:
        return whole % 2 == 0
    if dtype in COMPLEX:
        return torch.complex(whole.double(), whole.flip(0).double() - 2).to(dtype)
    return whole.to(dtype)


def reduced(tensors: list[torch.Tensor], op: ReduceOp.RedOpType) -> torch.Tensor:
    """What a reduction of the ranks' tensors gives, in exact arithmetic, in their type."""
    dtype = tensors[0].dtype
    if dtype in COMPLEX:
        wide = torch.complex128
    else:
        wide = torch.float64 if dtype in FLOATS else torch.int64
    pair = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }[op]
    total = functools.reduce(pair, [t.to(wide) for t in tensors])
    if op == ReduceOp.AVG:
        total = total / len(tensors)
    return total.to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor, what: object = "") -> None:
    exact = got.dtype not in FLOATS + COMPLEX
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    # assert_close is slow on large tensors; most are equal.
    if got.dtype == wanted.dtype and torch.equal(got, wanted):
        return
    torch.testing.assert_close(got, wanted, **tolerance, msg=lambda text: f"{what}: {text}")


def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with gaps between them."""
    wide = torch.zeros(*tensor.shape, 3, dtype=tensor.dtype)
    wide[..., 1] = tensor
    return wide[..., 1]
