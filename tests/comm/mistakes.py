"""What the ranks do in tests/comm/test_core_errors.py: mistakes, alone or against each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.comm.values import me, same

Call = Callable[[], Any]


def _mistakes(n: int) -> dict[str, tuple[Call, type[Exception], str]]:
    """Name: the call, the exception's type, and a word of its text."""
    one, six = torch.ones(6), torch.ones(6 * n)
    whole = torch.ones(6, dtype=torch.int32)
    # Some of it torch turns away in words of its own, or takes (meta), before a backend sees it.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return {
        "float8": (
            lambda: dist.all_reduce(torch.zeros(4).to(torch.float8_e4m3fn)),
            TypeError,
            "Float8",
        ),
        "uint16": (
            lambda: dist.broadcast(one.to(torch.uint16), 0),
            TypeError,
            "UInt",
        ),
        "quantized": (
            lambda: backend.allreduce([torch.quantize_per_tensor(one, 0.1, 0, torch.qint8)]),
            TypeError,
            "QInt8",
        ),
        "sparse": (lambda: backend.broadcast(one.to_sparse(), 0), TypeError, "dense"),
        "sparse all_reduce": (lambda: dist.all_reduce(one.to_sparse()), TypeError, "dense"),
        "meta": (lambda: backend.allreduce([one.to("meta")]), ValueError, "meta"),
        "avg of int": (lambda: dist.all_reduce(whole, ReduceOp.AVG), ValueError, "avg of int32"),
        "avg of bool": (
            lambda: dist.reduce(whole.bool(), 0, ReduceOp.AVG),
            ValueError,
            "avg of bool",
        ),
        "band of float": (lambda: dist.all_reduce(one, ReduceOp.BAND), ValueError, "band of float"),
        "max of complex": (
            lambda: dist.reduce(one.to(torch.complex64), 0, ReduceOp.MAX),
            ValueError,
            "max",
        ),
        "min of complex": (
            lambda: dist.reduce_scatter_tensor(
                one.to(torch.complex64), six.to(torch.complex64), ReduceOp.MIN
            ),
            ValueError,
            "min of complex64",
        ),
        "premultiplied sum": (
            lambda: dist.all_reduce(one, dist._make_nccl_premul_sum(2.0)),
            ValueError,
            "reduction",
        ),
        "root": (lambda: dist.broadcast(one, n), ValueError, str(n)),
        "group root": (lambda: dist.broadcast(one, group_src=n), ValueError, "root"),
        "negative root": (lambda: dist.reduce(one, group_dst=-1), ValueError, "-1"),
        "peer to send to": (lambda: dist.send(one, group_dst=n + 3), ValueError, "peer"),
        "peer to receive from": (lambda: dist.recv(one, group_src=n), ValueError, "peer"),
        "all_gather_into_tensor": (
            lambda: dist.all_gather_into_tensor(torch.empty(6 * n + 1), one),
            ValueError,
            "elements",
        ),
        "reduce_scatter_tensor": (
            lambda: dist.reduce_scatter_tensor(one, torch.empty(6 * n + 1)),
            ValueError,
            "elements",
        ),
        "all_gather count": (
            lambda: dist.all_gather([torch.empty(6)] * (n + 1), one),
            ValueError,
            "ranks",
        ),
        "all_gather own size": (
            lambda: dist.all_gather([torch.empty(5) for _ in range(n)], one),
            ValueError,
            "sizes",
        ),
        "reduce_scatter own size": (
            lambda: dist.reduce_scatter(torch.empty(5), [one] * n),
            ValueError,
            "sizes",
        ),
        "types": (
            lambda: dist.all_gather_into_tensor(six, whole),
            TypeError,
            "differ in type",
        ),
        "rows that cannot be cut": (
            lambda: dist.all_to_all_single(torch.empty(n + 1), torch.empty(n + 1)),
            ValueError,
            "equal parts",
        ),
        "split sizes": (
            lambda: dist.all_to_all_single(six, six.clone(), [6] * n, [6] * (n - 1) + [5]),
            ValueError,
            "add up",
        ),
        "negative split sizes": (
            lambda: dist.all_to_all_single(six, six.clone(), [6] * n, [-1, 13, *[6] * (n - 2)]),
            ValueError,
            "negative",
        ),
        "number of split sizes": (
            lambda: dist.all_to_all_single(six, six.clone(), [6 * n], [6 * n]),
            ValueError,
            "ranks",
        ),
        "all_to_all count": (lambda: dist.all_to_all([one], [one] * n), ValueError, "ranks"),
    }


def mistakes_harm_nothing() -> None:
    rank, n = me()
    for everybody in (True, False):
        for name, (call, kind, word) in _mistakes(n).items():
            if everybody or rank == n - 1:
                text = _error(name, call, kind)
                assert word in text and "\n" not in text, f"{name}: {text}"
            after = torch.ones(10)
            dist.all_reduce(after)
            same(after, torch.full((10,), float(n)), name)


def _error(name: str, call: Call, kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__} instead: {error}") from error
    raise AssertionError(f"{name}: no error")


def use_after_destroy() -> None:
    _rank, n = me()
    cpu = torch.device("cpu")
    group, aborted = dist.new_group(), dist.new_group()
    backend, other = group._get_backend(cpu), aborted._get_backend(cpu)
    pending = dist.irecv(torch.ones(3), (me()[0] + 1) % n, group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)
    text = _error("pending", pending.wait, dist.DistBackendError)
    assert "destroyed" in text or "left the group" in text, text  # who was first
    call = lambda: backend.allreduce([torch.ones(3)])  # noqa: E731
    assert "destroyed" in _error("destroyed", call, dist.DistBackendError)
    backend.shutdown()
    if me()[0] == 0:
        other.abort()
    text = _error("aborted", lambda: dist.barrier(aborted), dist.DistBackendError)
    assert "aborted on rank 0" in text, text
    dist.destroy_process_group(aborted)
    after = torch.ones(10)
    dist.all_reduce(after)
    same(after, torch.full((10,), float(n)))


def _against(group: dist.ProcessGroup, odd: bool) -> dict[str, Call]:
    """Calls in which one rank, the odd one, disagrees with the others."""
    n = group.size()

    def zeros(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def either(usual: Call, oddly: Call) -> Call:
        return oddly if odd else usual

    def reduce_all(numel: int, dtype: torch.dtype = torch.float32, op: Any = ReduceOp.SUM) -> Call:
        return lambda: dist.all_reduce(zeros(numel, dtype), op, group=group)

    def rooted(call: Callable[..., Any], root: int) -> Call:
        return lambda: call(root)

    def gather(root: int) -> None:
        outputs = [zeros(100) for _ in range(n)] if group.rank() == root else None
        dist.gather(zeros(100), outputs, group=group, group_dst=root)

    def scatter(root: int) -> None:
        inputs = [zeros(100) for _ in range(n)] if group.rank() == root else None
        dist.scatter(zeros(100), inputs, group=group, group_src=root)

    def gather_all(numel: int) -> Call:
        return lambda: dist.all_gather_into_tensor(zeros(n * numel), zeros(numel), group=group)

    def reduce_scatter(numel: int) -> Call:
        return lambda: dist.reduce_scatter_tensor(zeros(numel), zeros(n * numel), group=group)

    def exchange(numel: int) -> Call:
        return lambda: dist.all_to_all_single(zeros(n * numel), zeros(n * numel), group=group)

    calls = {
        "shape, small": either(reduce_all(10), reduce_all(11)),
        "shape, large": either(reduce_all(300000), reduce_all(300001)),
        "shape, small against large": either(reduce_all(10), reduce_all(300000)),
        "shape, large against small": either(reduce_all(300000), reduce_all(10)),
        "dtype": either(reduce_all(10), reduce_all(10, torch.int32)),
        "dtype, large": either(reduce_all(300000), reduce_all(300000, torch.int32)),
        "reduction": either(reduce_all(10), reduce_all(10, op=ReduceOp.MAX)),
        "reduction, large": either(reduce_all(300000), reduce_all(300000, op=ReduceOp.MAX)),
        "all_reduce, all_gather": either(reduce_all(10 * n), gather_all(10)),
        "all_reduce, all_gather, large": either(reduce_all(100000 * n), gather_all(100000)),
        "all_reduce, barrier": either(reduce_all(10), lambda: dist.barrier(group)),
        "all_reduce, reduce_scatter": either(reduce_all(300000), reduce_scatter(300000)),
        "all_gather sizes": either(gather_all(1000), gather_all(1001)),
        "reduce_scatter sizes": either(reduce_scatter(100000), reduce_scatter(100001)),
        "all_to_all sizes": either(exchange(1000), exchange(1001)),
    }
    for numel in (100, 300000):
        for name, call in {
            "broadcast": lambda r, k=numel: dist.broadcast(zeros(k), group=group, group_src=r),
            "reduce": lambda r, k=numel: dist.reduce(zeros(k), group=group, group_dst=r),
        }.items():
            calls[f"{name} root, {numel}"] = either(rooted(call, 0), rooted(call, 1))
            calls[f"all_reduce, {name}, {numel}"] = either(reduce_all(numel), rooted(call, 0))
    calls["gather root"] = either(rooted(gather, 0), rooted(gather, 1))
    calls["scatter root"] = either(rooted(scatter, 0), rooted(scatter, 1))
    return calls


def message_sizes(numel: int, other: int) -> list[str]:
    """Rank 0 sends, rank 1 wants another size."""
    rank, _n = me()
    group = dist.new_group(timeout=timedelta(seconds=5))
    dist.barrier()
    text = ""
    try:
        if rank == 0:
            dist.send(torch.zeros(numel), 1, group=group)
            dist.barrier(group)
        elif rank == 1:
            dist.recv(torch.zeros(other), 0, group=group)
        else:
            dist.barrier(group)
    except dist.DistBackendError as error:
        text = str(error)
    dist.destroy_process_group(group)
    return text


def mismatch_names() -> list[str]:
    return list(_against(dist.group.WORLD, False))


def mismatch(name: str, odd: int, timeout_s: float) -> tuple[str, str, float]:
    """Where the error came on this rank, its text, and after what time."""
    rank, n = me()
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    dist.barrier()  # nobody is still joining
    begin = time.monotonic()
    where, text = "call", ""
    try:
        _against(group, rank == odd)[name]()
        where = "the next barrier"
        dist.barrier(group)
        where = "nowhere"
    except dist.DistBackendError as error:
        text = str(error)
    took = time.monotonic() - begin
    dist.destroy_process_group(group)
    after = torch.ones(3)
    dist.all_reduce(after)
    same(after, torch.full((3,), float(n)), name)
    return where, text, took
