"""One-sided windows: what arrives, what is refused, and that the target's Python takes no part."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(3, backend="comm_core")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def alone():
    pool = RankPool(1, backend="comm_core")
    yield pool
    pool.close()


def _window(*args, **kwargs):
    from comm_core.windows import Window

    return Window(*args, **kwargs)


def _put_get_accumulate(dtype: torch.dtype, numel: int) -> list[str]:
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), []
    window = _window(size, numel, dtype)
    mine = torch.arange(numel).to(dtype) + rank
    for work in [window.put(mine, target, slot=rank) for target in range(size)]:
        work.wait()
    dist.barrier()
    if not torch.equal(
        window.read(0, size), torch.stack([torch.arange(numel).to(dtype) + r for r in range(size)])
    ):
        wrong.append("put")
    if window.versions() != [1] * size:
        wrong.append("versions")
    dist.barrier()
    for target in range(size):
        window.accumulate(torch.ones(numel, dtype=dtype), target, slot=0).wait()
    dist.barrier()
    got = torch.empty(numel, dtype=dtype)
    window.get(got, (rank + 1) % size, slot=0).wait()
    if not torch.equal(got, torch.arange(numel).to(dtype) + size):
        wrong.append("accumulate, get")
    dist.barrier()
    taken = window.read(0, 1, reset_versions=True, clear=True)
    if not torch.equal(taken[0], got) or window.read(0).any() or window.versions()[0] != 0:
        wrong.append("reset")
    dist.barrier()
    window.free()
    window.free()
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 7, 1003, 300_007])
def test_what_is_put_is_there(pool, dtype, numel):
    if dtype is torch.bfloat16 and numel > 7:
        numel = 100  # sums beyond 256 are not exact
    assert pool.run(_put_get_accumulate, dtype, numel) == [[], [], []]


def test_a_rank_alone_has_windows_too(alone):
    assert alone.run(_put_get_accumulate, torch.float32, 11) == [[]]


def _offset() -> list[float]:
    window = _window(1, 6)
    if dist.get_rank() == 0:
        window.put(torch.tensor([[1.0, 2.0]]), 1, offset=3).wait()
    dist.barrier()
    values = window.read()[0].tolist()
    window.free()
    return values


def test_an_offset_counts_elements(pool):
    assert pool.run(_offset)[1] == [0, 0, 0, 1, 2, 0]


def _asleep() -> float:
    """Seconds that rank 0 waits for a reply of rank 1, whose Python is busy."""
    window, waited = _window(1, 1000), 0.0
    dist.barrier()
    if dist.get_rank() == 1:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
    if dist.get_rank() == 0:
        time.sleep(0.05)
        began = time.monotonic()
        window.accumulate(torch.ones(1000), 1).wait()
        waited = time.monotonic() - began
    window.free()
    return waited


def test_the_target_takes_no_part(pool):
    assert pool.run(_asleep)[0] < 0.4


def _counter(times: int) -> float:
    """Read, add one, write back: right only if the mutex keeps the others away meanwhile."""
    window = _window(1, 1)
    value = torch.empty(1)
    for _ in range(times):
        with window.mutex(0):
            window.get(value, 0).wait()
            window.put(value + 1, 0).wait()
    dist.barrier()
    total = window.read()[0, 0].item()
    dist.barrier()
    window.free()
    return total


def test_the_mutex_keeps_others_away(pool):
    assert pool.run(_counter, 40)[0] == 120


def _update() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    window = _window(1, 2)
    window.put(torch.full((2,), float(rank)), (rank + 1) % size).wait()
    dist.barrier()
    mixed = window.update(torch.full((1, 2), float(rank)), 0.25, {0: 0.75})
    versions = window.versions()
    window.free()
    return [*mixed.flatten().tolist(), *versions]


def test_update_mixes_what_has_arrived(pool):
    for rank, values in enumerate(pool.run(_update)):
        wanted = 0.25 * rank + 0.75 * ((rank - 1) % 3)
        assert values == [wanted, wanted, 0]


def _refusals() -> dict[str, str]:
    window = _window(2, 4)
    calls = {
        "slot": lambda: window.put(torch.ones(4), 1, slot=2),
        "long": lambda: window.put(torch.ones(5), 1),
        "offset": lambda: window.get(torch.ones(4), 1, offset=1),
        "type": lambda: window.put(torch.ones(4).double(), 1),
        "rank": lambda: window.put(torch.ones(4), 3),
        "negative": lambda: window.put(torch.ones(4), 1, slot=-1),
        "unlock": lambda: window._operation("unlock", 1, 0, 0, None),
        "op": lambda: window.accumulate(torch.ones(4), 1, op=dist.ReduceOp.BXOR),
    }
    said = {}
    for name, call in calls.items():
        try:
            call().wait()
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
    dist.barrier()  # the group is unharmed
    window.free()
    return said


def test_what_does_not_fit_is_refused_and_harms_nothing(pool):
    words = {
        "slot": "2 slots",
        "long": "16 bytes, not 20",
        "offset": "16 bytes",
        "type": "float32, not of float64",
        "rank": "no rank",
        "negative": "negative",
        "unlock": "does not hold the lock",
        "op": "bxor of float32",
    }
    for said in pool.run(_refusals):
        assert {k: w for k, w in words.items() if w not in said[k]} == {}


def _other_backend() -> str:
    gloo = dist.new_group(backend="gloo")
    try:
        _window(1, 1, group=gloo)
    except ValueError as error:
        return str(error)
    return ""


def test_a_group_of_another_backend_has_none(pool):
    assert all("comm_core" in said for said in pool.run(_other_backend))
