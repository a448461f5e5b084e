"""The backend `comm_core`: mistakes of one rank, and ranks that disagree."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.comm import bodies
from tests.comm.operations import TORCH, Call, Case, me
from tests.comm.worlds import lent
from tests.ranks import RankPool

WORLDS = ["shm3", "tcp3", "hosts001"]


@pytest.fixture(params=WORLDS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ranks(name: str) -> Iterator[RankPool]:
    with lent(name) as pool:
        yield pool


def _error(name: str, call: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__} instead: {error}") from error
    raise AssertionError(f"{name}: no error")


def _mistakes(n: int) -> list[tuple[type[Exception], str, Callable[[], Any]]]:
    """The exception's type, a word of its text, and the call."""
    tensor, six, several = torch.ones(6), torch.ones(6 * n), [torch.ones(6)] * n
    odd, minus = torch.empty(6 * n + 1), [-1, 13, *[6] * (n - 2)]
    whole, numbers = tensor.int(), tensor.to(torch.complex64)
    all_reduce, reduce, min_of = dist.all_reduce, dist.reduce, ReduceOp.MIN
    exchange, gather = dist.all_to_all_single, dist.all_gather_into_tensor
    # Some of it torch turns away in words of its own, or takes (meta), before a backend sees it.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    quantized = torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
    pairs = torch.empty(4, dtype=torch.float4_e2m1fn_x2)
    return [
        (TypeError, "Float8", lambda: all_reduce(torch.zeros(4).to(torch.float8_e4m3fn))),
        (TypeError, "Float4", lambda: dist.broadcast(pairs, 0)),
        (ValueError, "avg of uint16", lambda: all_reduce(tensor.to(torch.uint16), ReduceOp.AVG)),
        (ValueError, "share memory", lambda: all_reduce(torch.ones(1).expand(6))),
        (ValueError, str(2**32), lambda: dist.broadcast(tensor, group_src=2**32)),
        (ValueError, str(2**32), lambda: reduce(tensor, group_dst=2**32)),
        (TypeError, "QInt8", lambda: backend.allreduce([quantized])),
        (TypeError, "dense", lambda: backend.broadcast(tensor.to_sparse(), 0)),
        (TypeError, "dense", lambda: all_reduce(tensor.to_sparse())),
        (ValueError, "meta", lambda: backend.allreduce([tensor.to("meta")])),
        (ValueError, "avg of int32", lambda: all_reduce(whole, ReduceOp.AVG)),
        (ValueError, "avg of bool", lambda: reduce(whole.bool(), 0, ReduceOp.AVG)),
        (ValueError, "band of float", lambda: all_reduce(tensor, ReduceOp.BAND)),
        (ValueError, "max", lambda: reduce(numbers, 0, ReduceOp.MAX)),
        (
            ValueError,
            "min of complex64",
            lambda: dist.reduce_scatter_tensor(numbers, six.to(numbers.dtype), min_of),
        ),
        (ValueError, "reduction", lambda: all_reduce(tensor, dist._make_nccl_premul_sum(2.0))),
        (ValueError, str(n), lambda: dist.broadcast(tensor, n)),
        (ValueError, "root", lambda: dist.broadcast(tensor, group_src=n)),
        (ValueError, "-1", lambda: reduce(tensor, group_dst=-1)),
        (ValueError, "peer", lambda: dist.send(tensor, group_dst=n + 3)),
        (ValueError, "peer", lambda: dist.recv(tensor, group_src=n)),
        (ValueError, "elements", lambda: gather(odd, tensor)),
        (ValueError, "elements", lambda: dist.reduce_scatter_tensor(tensor, odd)),
        (ValueError, "one per rank", lambda: dist.all_gather([torch.empty(6)] * (n + 1), tensor)),
        (ValueError, "sizes", lambda: dist.all_gather([torch.empty(5) for _ in several], tensor)),
        (ValueError, "sizes", lambda: dist.reduce_scatter(torch.empty(5), several)),
        (TypeError, "differ in type", lambda: gather(six, whole)),
        (ValueError, "equal parts", lambda: exchange(torch.empty(n + 1), torch.empty(n + 1))),
        (ValueError, "add up", lambda: exchange(six, six.clone(), [6] * n, [6] * (n - 1) + [5])),
        (ValueError, "negative", lambda: exchange(six, six.clone(), [6] * n, minus)),
        (ValueError, "one per rank", lambda: exchange(six, six.clone(), [6 * n], [6 * n])),
        (ValueError, "one per rank", lambda: dist.all_to_all([tensor], several)),
    ]


def _mistakes_harm_nothing() -> None:
    rank, n = me()
    for everybody in (True, False):
        for place, (kind, word, call) in enumerate(_mistakes(n)):
            name = f"mistake {place}, {word}"
            if everybody or rank == n - 1:
                text = _error(name, call, kind)
                assert word in text and "\n" not in text, f"{name}: {text}"
            bodies.unharmed(name)


def _use_after_destroy() -> None:
    rank, n = me()
    cpu = torch.device("cpu")
    group, aborted = dist.new_group(), dist.new_group()
    backend, other = group._get_backend(cpu), aborted._get_backend(cpu)
    pending = dist.irecv(torch.ones(3), (rank + 1) % n, group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)
    text = _error("pending", pending.wait, dist.DistBackendError)
    assert "destroyed" in text or "left the group" in text, text  # who was first
    call = lambda: backend.allreduce([torch.ones(3)])  # noqa: E731
    assert "destroyed" in _error("destroyed", call, dist.DistBackendError)
    backend.shutdown()
    if rank == 0:
        other.abort()
    text = _error("aborted", lambda: dist.barrier(aborted), dist.DistBackendError)
    assert "aborted on rank 0" in text, text
    dist.destroy_process_group(aborted)
    bodies.unharmed()


def _against() -> list[tuple[Case, Case]]:
    """Calls in which one rank, the odd one, disagrees with the others."""
    pairs = []
    for small, large in ((10, 11), (300000, 300001), (10, 300000), (300000, 10)):
        pairs.append((Case("all_reduce", numel=small), Case("all_reduce", numel=large)))
    for numel in (10, 300000):
        usual = Case("all_reduce", numel=numel)
        for odd in (
            Case("all_reduce", torch.int32, numel=numel),
            Case("all_reduce", op=ReduceOp.MAX, numel=numel),
            Case("broadcast", numel=numel),
            Case("reduce", numel=numel),
            Case("reduce_scatter tensor", numel=numel),
            Case("all_gather tensor", numel=numel),
            Case("barrier"),
        ):
            pairs.append((usual, odd))
    for name, numel in (
        ("all_gather tensor", 1000),
        ("reduce_scatter tensor", 100000),
        ("all_to_all single", 1000),
    ):
        pairs.append((Case(name, numel=numel), Case(name, numel=numel + 1)))
    return pairs


# Each rank waits for another root, and none has anything to compare: the time-out ends it.
ROOTS = [(Case(name, numel=100), Case(name, numel=100, root=1)) for name in ("broadcast", "gather")]


def _disagreements(
    pairs: list[tuple[Case, Case]], odd: int, timeout_s: float
) -> list[tuple[str, str]]:
    """Each pair of cases, and what this rank is told, or nothing."""
    rank, n = me()
    answers = []
    for pair in pairs:
        group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        dist.barrier()  # nobody is still joining
        text = ""
        try:
            call = Call(pair[rank == odd], rank, n, group)
            TORCH[call.case.operation](call)()
            dist.barrier(group)
        except dist.DistBackendError as error:
            text = f"{type(error).__name__}: {error}"
        dist.destroy_process_group(group)
        bodies.unharmed(pair)
        answers.append((f"{pair}, rank {rank}", text))
    return answers


def test_mistakes_and_disagreements_are_typed_errors_and_harm_nothing(ranks: RankPool, name: str):
    ranks.run(_mistakes_harm_nothing)
    ranks.run(_use_after_destroy)
    _all_learn_of_both_sides(ranks, WORLDS.index(name))
    for answers in ranks.run(_disagreements, ROOTS, 1, 1.0):
        for about, text in answers:
            assert "the ranks disagree" in text or "timed out after 1.0" in text, about


@pytest.mark.full
def test_any_rank_may_be_the_one_that_disagrees(ranks: RankPool, name: str):
    for odd in {0, 1, 2} - {WORLDS.index(name)}:
        _all_learn_of_both_sides(ranks, odd)


def _all_learn_of_both_sides(ranks: RankPool, odd: int) -> None:
    for answers in ranks.run(_disagreements, _against(), odd, 30.0):
        for about, text in answers:
            assert text.startswith("MismatchError: "), f"{about}: {text}"
            assert "the ranks disagree: " in text and "\n" not in text, f"{about}: {text}"
            assert "timed out" not in text, f"{about}: {text}"
            assert re.search("rank [012] [(]host", text), f"{about}: {text}"


def _blocks_that_differ(name: str, shared: bool) -> str:
    """The ranks agree about the total only; rank 0 has another idea of the blocks of 1 and 2."""
    import comm_core

    rank, _n = me()
    group = dist.new_group(timeout=timedelta(seconds=20))
    new = comm_core.empty if shared else torch.zeros
    sizes = [100_000, 200_000, 300_000]
    believed = [100_000, 300_000, 200_000] if rank == 0 else sizes
    whole, mine = new(sum(sizes)), new(sizes[rank])
    dist.barrier()
    text = ""
    try:
        if name == "all_gather":
            dist.all_gather(list(whole.split(believed)), mine, group=group)
        else:
            dist.reduce_scatter(mine, list(whole.split(believed)), group=group)
        dist.barrier(group)
    except dist.DistBackendError as error:
        text = f"{type(error).__name__}: {error}"
    dist.barrier()  # a rank that looked beyond a buffer would have read what is no longer there
    dist.destroy_process_group(group)
    return text


def test_ranks_that_disagree_about_blocks_touch_no_others_memory(ranks: RankPool):
    for operation in ("all_gather", "reduce_scatter"):
        for shared in (False, True):
            for text in ranks.run(_blocks_that_differ, operation, shared):
                assert text.startswith("MismatchError: "), (operation, shared, text)
                assert "the ranks disagree: " in text and "rank 0" in text, text


def _message_sizes(numel: int, other: int) -> str:
    """Rank 0 sends, rank 1 wants another size."""
    rank, _n = me()
    group = dist.new_group(timeout=timedelta(seconds=20))
    dist.barrier()
    text = ""
    try:
        if rank == 0:
            dist.send(torch.zeros(numel), 1, group=group)
        if rank == 1:
            dist.recv(torch.zeros(other), 0, group=group)
        dist.barrier(group)
    except dist.DistBackendError as error:
        text = str(error)
    dist.destroy_process_group(group)
    return text


@pytest.mark.parametrize("sizes", [(10, 11), (100000, 11), (11, 100000), (100000, 100001)])
def test_a_message_of_another_size_names_both(world, sizes: tuple[int, int]):
    for text in world(3).run(_message_sizes, *sizes):
        sent, wanted = (f"{4 * size} bytes of float32" for size in sizes)
        assert f"here expects {wanted}, rank 0 " in text and f"sends {sent}" in text, text


def _joins(settings: list[list[dict[str, str]]]) -> list[tuple[str, str]]:
    """Returns the errors that a rank gets that joins with each setting, given for each rank."""
    import comm_core

    answers = []
    for places in settings:
        os.environ.update(places[me()[0]])
        try:
            dist.new_group(backend="comm_core")
            answers.append(("", ""))
        except Exception as error:
            answers.append((type(error).__name__, str(error)))
        dist.barrier()
        comm_core._core.shut_down()  # the next engine reads the environment anew
        for variable in places[0]:
            del os.environ[variable]
    return answers


def test_a_setting_that_is_none_is_named():
    hosts = [{"COMM_CORE_HOST_ID": f"host{k}"} for k in (0, 1)]
    wrong = {
        "COMM_CORE_TRANSPORT=pigeon": " must be auto, tcp or shm",
        "COMM_CORE_TCP_CHUNK=12": " must be a number of bytes from 4096",
        "COMM_CORE_SHM_SLOT=big": " must be a number of bytes",
    }
    settings = [[dict([setting.split("=")])] * 2 for setting in wrong]
    settings += [[{"COMM_CORE_IFNAME": "nope0"}] * 2]
    # Several hosts do not meet over loopback, and share no memory.
    settings += [hosts, [{**host, "COMM_CORE_TRANSPORT": "shm"} for host in hosts]]
    texts = [*map("".join, wrong.items()), "no interface 'nope0'", "COMM_CORE_IFNAME", "COMM_CORE"]
    ranks = RankPool(2)
    try:
        for answers in ranks.run(_joins, settings):
            for (kind, line), text in zip(answers, texts, strict=True):
                assert kind in ("ValueError", "DistBackendError") and text in line, (kind, line)
    finally:
        ranks.close()
