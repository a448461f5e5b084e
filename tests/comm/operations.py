"""The contract of collectives: their results written out serially, and cases in which axes meet.

Every interface (torch.distributed on each backend, `dear`'s communicator, that of the seeds) puts
the operations in its own words; `check` runs them on all ranks and compares with `wanted`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.contract.pairs import pairwise

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, *COMPLEX]

PAIRS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_ARITHMETIC = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]

LARGE = 550007
"""Numbers of bytes one above a piece of any way, or 8 or 16 above what is streamed or held."""
UNEVEN: dict[str, Callable[[int, int], int]] = {
    "all_gather": lambda s, d: s,
    "reduce_scatter": lambda s, d: d,
    "all_to_all": lambda s, d: (s + 2 * d) % 3,
    "all_to_all single": lambda s, d: (s + 2 * d) % 3,
    "exchange": lambda s, d: (s + 2 * d) % 3,
}
"""Size of what rank s has for rank d where sizes may differ, in blocks of others."""


def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def values(
    rank: int, numel: int, dtype: torch.dtype = torch.float32, salt: int = 0
) -> torch.Tensor:
    """A rank's tensor: whole numbers from 1 to 4, unlike those of other ranks and places."""
    whole = (torch.arange(7) * (2 * rank + 3) + rank + salt) % 7 % 4 + 1
    if dtype == torch.bool:
        whole = whole % 2 == 0
    elif dtype in COMPLEX:
        whole = torch.complex(whole.double(), whole.flip(0).double() - 2)
    return whole.to(dtype).repeat(numel // 7 + 1)[:numel]


def reduced(tensors: Sequence[torch.Tensor], op: ReduceOp.RedOpType) -> torch.Tensor:
    """Returns the reduction of the ranks' tensors in exact arithmetic, in their type."""
    dtype = tensors[0].dtype
    wide = torch.complex128 if dtype in COMPLEX else torch.int64
    wide = torch.float64 if dtype in FLOATS else wide
    total = functools.reduce(PAIRS[op], [t.to(wide) for t in tensors])
    return (total / len(tensors) if op == ReduceOp.AVG else total).to(dtype)


def total(n: int, numel: int, salt: int = 0) -> torch.Tensor:
    return reduced([values(r, numel, salt=salt) for r in range(n)], ReduceOp.SUM)


def same(got: torch.Tensor, wanted: torch.Tensor, what: object = "") -> None:
    # assert_close is slow on large tensors; most are equal.
    if got.dtype == wanted.dtype and torch.equal(got, wanted):
        return
    exact = got.dtype not in FLOATS + COMPLEX
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    if got.dtype == torch.float16:
        tolerance = {"rtol": 2e-3, "atol": 0}  # each of three terms of a mean is rounded
    torch.testing.assert_close(got, wanted, **tolerance, msg=lambda text: f"{what}: {text}")


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with gaps between them."""
    wide = torch.zeros(*tensor.shape, 3, dtype=tensor.dtype)
    wide[..., 1] = tensor
    return wide[..., 1]


@dataclass(frozen=True)
class Case:
    """One operation on all ranks. `uneven` concerns only what `UNEVEN` names."""

    operation: str  # a family, then perhaps the form of the call: "all_gather in place"
    dtype: torch.dtype = torch.float32
    op: Any = ReduceOp.SUM
    numel: int = 5  # of a block
    gaps: bool = False
    root: int = 0
    uneven: bool = False

    @property
    def family(self) -> str:
        return self.operation.split()[0]

    def block(self, s: int, d: int) -> torch.Tensor:
        """Size of what rank s has for rank d."""
        numel = self.numel
        if self.uneven and self.operation in UNEVEN:
            numel = min(numel, 50001) * 2 * UNEVEN[self.operation](s, d)
        return values(s, numel, self.dtype, salt=d)

    def given(self, n: int, rank: int) -> list[torch.Tensor]:
        if self.family == "exchange":
            return [self.block(rank, (self.root - rank) % n)]
        several = self.family in ("scatter", "reduce_scatter", "all_to_all")
        return [self.block(rank, d) for d in range(n if several else 1)]

    def wanted(self, n: int, rank: int) -> list[torch.Tensor]:
        """The result on a rank; nothing where it is undefined."""
        ranks, here = range(n), rank == self.root
        match self.family:
            case "barrier":
                return []
            case "broadcast":
                return [self.block(self.root, 0)]
            case "scatter":
                return [self.block(self.root, rank)]
            case "exchange":
                return [self.block((self.root - rank) % n, rank)]
            case "all_to_all":
                return [self.block(s, rank) for s in ranks]
            case "all_gather" | "gather":
                return [self.block(s, 0) for s in ranks if here or self.family == "all_gather"]
            case "reduce_scatter":
                return [reduced([self.block(s, rank) for s in ranks], self.op)]
            case "all_reduce" | "reduce":
                everyone = [self.block(s, 0) for s in ranks]
                return [reduced(everyone, self.op)] if here or self.family == "all_reduce" else []
        raise ValueError(self.operation)


class Call:
    """A rank's tensors in a case, `mine` and `out`, each in one piece and cut into its blocks."""

    def __init__(
        self, case: Case, rank: int, n: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.case, self.rank, self.n = case, rank, n
        self.torch = {"group": group, "async_op": True}
        self.root, self.op, self.peer = case.root, case.op, (case.root - rank) % n
        given, self.wanted = case.given(n, rank), case.wanted(n, rank)
        self.mine, self.mine_parts = self._laid_out(given)
        self.in_place = case.family in ("all_reduce", "reduce", "broadcast")
        outputs = given if self.in_place else [torch.ones_like(w) for w in self.wanted]
        self.out, self.out_parts = self._laid_out(outputs)

    def _laid_out(self, blocks: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        flat = torch.cat(blocks) if blocks else torch.empty(0, dtype=self.case.dtype)
        flat = strided(flat) if self.case.gaps else flat
        return flat, list(flat.split([block.numel() for block in blocks]))

    def check(self) -> None:
        for got, wanted in zip(self.out_parts, self.wanted, strict=bool(self.wanted)):
            same(got, wanted, self.case)


Interface = Mapping[str, Callable[[Call], Callable[[], Any]]]
"""Functions by operation; each starts it and returns what waits for it."""


def cases(
    n: int,
    operations: Sequence[str],
    dtypes: Sequence[torch.dtype] = DTYPES,
    ops: Callable[[torch.dtype], Sequence[Any]] | None = None,
    gaps: Callable[[str], bool] = lambda operation: True,
) -> list[Case]:
    """Cases in which every two of these meet: operation, type, reduction, size, layout, root.

    Args:
        ops: the reductions that have a meaning for a type; default: all of torch's.
        gaps: whether an operation takes tensors with gaps between their elements.
    """
    sizes = [5, *sorted({0, 1, n - 1, n, n + 1} - {5}), LARGE]
    axes = {"operation": operations, "dtype": dtypes, "op": range(7), "numel": sizes}
    axes |= {"gaps": (False, True), "root": range(n), "uneven": (False, True)}
    chosen = pairwise(axes, lambda case: gaps(case["operation"]) or not case["gaps"])
    meaningful = ops or reductions
    for case in chosen:
        of_type = meaningful(case["dtype"])
        case["op"] = of_type[case["op"] % len(of_type)]
    return [Case(**case) for case in chosen]


def reductions(dtype: torch.dtype) -> list[Any]:
    """Returns the reductions that torch lets through and that have a meaning for the type."""
    if dtype in FLOATS:
        return [*_ARITHMETIC, ReduceOp.AVG]
    if dtype in COMPLEX:
        return [ReduceOp.SUM, ReduceOp.AVG]
    return [*_ARITHMETIC, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]


def check(
    interface: Interface,
    chosen: Sequence[Case],
    at_once: int = 1,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Runs the cases, `at_once` of them under way together and waited for in any order."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    shuffle = random.Random(rank).shuffle
    for first in range(0, len(chosen), at_once):
        calls = [Call(case, rank, n, group) for case in chosen[first : first + at_once]]
        waits = [interface[call.case.operation](call) for call in calls]
        shuffle(waits)
        for wait in waits:
            wait()
        for call in calls:
            call.check()


# torch.distributed, on any backend ------------------------------------------------------------


def _all_gather_in_place(c: Call) -> Any:
    c.out_parts[c.rank].copy_(c.mine)
    return dist.all_gather_into_tensor(c.out, c.out_parts[c.rank], **c.torch)


def _reduce_scatter_in_place(c: Call) -> Any:
    c.out_parts = [c.mine_parts[c.rank]]
    return dist.reduce_scatter_tensor(c.out_parts[0], c.mine, c.op, **c.torch)


def _all_to_all_single(c: Call) -> Any:
    if not c.case.uneven:
        return dist.all_to_all_single(c.out, c.mine, **c.torch)
    # Sizes count rows.
    rows = [[part.numel() // 2 for part in parts] for parts in (c.out_parts, c.mine_parts)]
    return dist.all_to_all_single(c.out.view(-1, 2), c.mine.view(-1, 2), *rows, **c.torch)


def _exchange(c: Call) -> Any:
    if c.peer == c.rank:
        c.out.copy_(c.mine)
        return []
    to = {"group": c.torch["group"], "group_peer": c.peer}
    ops = [dist.P2POp(dist.irecv, c.out, **to), dist.P2POp(dist.isend, c.mine, **to)]
    return dist.batch_isend_irecv(ops)


_TORCH: dict[str, Callable[[Call], Any]] = {
    "barrier": lambda c: dist.barrier(**c.torch),
    "all_reduce": lambda c: dist.all_reduce(c.out, c.op, **c.torch),
    "reduce": lambda c: dist.reduce(c.out, op=c.op, group_dst=c.root, **c.torch),
    "broadcast": lambda c: dist.broadcast(c.out, group_src=c.root, **c.torch),
    "gather": lambda c: dist.gather(c.mine, c.out_parts or None, group_dst=c.root, **c.torch),
    "scatter": lambda c: dist.scatter(
        c.out, c.mine_parts if c.rank == c.root else None, group_src=c.root, **c.torch
    ),
    "all_gather": lambda c: dist.all_gather(c.out_parts, c.mine, **c.torch),
    "all_gather tensor": lambda c: dist.all_gather_into_tensor(c.out, c.mine, **c.torch),
    "all_gather in place": _all_gather_in_place,
    "reduce_scatter": lambda c: dist.reduce_scatter(c.out, c.mine_parts, c.op, **c.torch),
    "reduce_scatter tensor": lambda c: dist.reduce_scatter_tensor(c.out, c.mine, c.op, **c.torch),
    "reduce_scatter in place": _reduce_scatter_in_place,
    "all_to_all": lambda c: dist.all_to_all(c.out_parts, c.mine_parts, **c.torch),
    "all_to_all single": _all_to_all_single,
    "exchange": _exchange,
}


def _started(start: Callable[[Call], Any], call: Call) -> Callable[[], None]:
    work = start(call)
    works = work if isinstance(work, list) else [work]

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


TORCH: Interface = {name: functools.partial(_started, start) for name, start in _TORCH.items()}


def coalesced() -> None:
    """Several operations of one kind in one call."""
    rank, n = me()
    for name in ("all_reduce", "reduce_scatter tensor", "all_gather tensor"):
        calls = [Call(Case(name, numel=numel), rank, n) for numel in (0, 1, 5, 40000)]
        with dist._coalescing_manager(group=dist.group.WORLD, async_ops=True) as pending:
            for call in calls:
                _TORCH[name](call)
        pending.wait()
        for call in calls:
            call.check()


def over_torch(chosen: Sequence[Case], at_once: int = 1) -> None:
    check(TORCH, chosen, at_once)
