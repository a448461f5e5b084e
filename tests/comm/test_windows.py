"""One-sided windows: what arrives, what is refused, and that the target's Python takes no part."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm import bodies
from tests.comm.operations import me
from tests.comm.worlds import on_ranks


@contextlib.contextmanager
def _window(*args: Any, **named: Any) -> Iterator[Any]:
    from comm_core.windows import Window

    window = Window(*args, **named)
    yield window
    window.free()
    window.free()


def _place() -> Any:
    return contextlib.nullcontext(me())


@on_ranks(_place, 1, 3)
def test_what_is_put_is_there(place: tuple[int, int]) -> None:
    rank, size = place
    dtypes = (torch.float32, torch.float64, torch.int64, torch.bfloat16)
    for dtype, numel in itertools.product(dtypes, (1, 7, 1003, 300_007)):
        # Sums of bfloat16 beyond 256 are not exact.
        values = torch.arange(100 if dtype is torch.bfloat16 and numel > 7 else numel).to(dtype)
        with _window(size, values.numel(), dtype) as window:
            for work in [window.put(values + rank, target, slot=rank) for target in range(size)]:
                work.wait()
            dist.barrier()
            assert torch.equal(window.read(0, size), torch.stack([values + r for r in range(size)]))
            assert window.versions() == [1] * size
            dist.barrier()
            for target in range(size):
                window.accumulate(torch.ones_like(values), target, slot=0).wait()
            dist.barrier()
            got = torch.empty_like(values)
            window.get(got, (rank + 1) % size, slot=0).wait()
            assert torch.equal(got, values + size)
            dist.barrier()
            taken = window.read(0, 1, reset_versions=True, clear=True)
            assert torch.equal(taken[0], got)
            assert not window.read(0).any() and window.versions()[0] == 0
            dist.barrier()


@on_ranks(_place, 3)
def test_an_offset_counts_elements(place: tuple[int, int]) -> None:
    with _window(1, 6) as window:
        if place[0] == 0:
            window.put(torch.tensor([[1.0, 2.0]]), 1, offset=3).wait()
        dist.barrier()
        assert window.read()[0].tolist() == ([0, 0, 0, 1, 2, 0] if place[0] == 1 else [0] * 6)


def _busy_target(path: str) -> None:
    with _window(1, 1000) as window:
        call = lambda: window.accumulate(torch.ones(1000), 1).wait()  # noqa: E731
        bodies.while_python_is_busy(path, call)


def test_the_target_takes_no_part(world, tmp_path):
    (tmp_path / "flags").write_bytes(bytes(2))
    world(3).run(_busy_target, str(tmp_path / "flags"))


@on_ranks(_place, 3)
def test_the_mutex_keeps_others_away(place: tuple[int, int]) -> None:
    # Read, add one, write back: right only if the mutex keeps the others away meanwhile.
    with _window(1, 1) as window:
        value = torch.empty(1)
        for _ in range(40):
            with window.mutex(0):
                window.get(value, 0).wait()
                window.put(value + 1, 0).wait()
        dist.barrier()
        assert window.read()[0, 0].item() == (120 if place[0] == 0 else 0)
        dist.barrier()


@on_ranks(_place, 2)
def test_a_window_may_be_asked_for_while_its_group_ends(place: tuple[int, int]) -> None:
    from comm_core.windows import Window

    def ask(window: Window, going: threading.Event, ends: list[str]) -> None:
        with pytest.raises((dist.DistBackendError, ValueError), match="destroyed") as caught:
            while True:
                window.versions()
                going.set()
        ends.append(str(caught.value))

    switches_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    ends: list[str] = []
    for _ in range(30):
        group = dist.new_group()
        window, going = Window(1, 4, group=group), threading.Event()
        with ThreadPoolExecutor(6) as pool:
            for _ in range(6):
                pool.submit(ask, window, going, ends)
            going.wait()
            dist.destroy_process_group(group)
    sys.setswitchinterval(switches_s)
    assert len(ends) == 6 * 30


@on_ranks(_place, 3)
def test_update_mixes_what_has_arrived(place: tuple[int, int]) -> None:
    rank, size = place
    with _window(1, 2) as window:
        window.put(torch.full((2,), float(rank)), (rank + 1) % size).wait()
        dist.barrier()
        mixed = window.update(torch.full((1, 2), float(rank)), 0.25, {0: 0.75})
        wanted = 0.25 * rank + 0.75 * ((rank - 1) % size)
        assert mixed.flatten().tolist() == [wanted, wanted] and window.versions() == [0]


@on_ranks(_place, 3)
def test_what_does_not_fit_is_refused_and_harms_nothing(place: tuple[int, int]) -> None:
    four = torch.ones(4)
    with _window(2, 4) as window:
        for text, call in [
            ("2 slots", lambda: window.put(four, 1, slot=2)),
            ("16 bytes, not 20", lambda: window.put(torch.ones(5), 1)),
            ("16 bytes", lambda: window.get(four, 1, offset=1)),
            ("float32, not float64", lambda: window.put(four.double(), 1)),
            ("not a rank", lambda: window.put(four, 3)),
            ("negative", lambda: window.put(four, 1, slot=-1)),
            (str(2**32), lambda: window.put(four, 1, slot=2**32)),
            ("outside every window", lambda: window.put(four, 1, offset=2**62)),
            ("2 slots, not 1 from slot 2", lambda: window.read(2)),
            ("2 slots, not", lambda: window.read(1, 2**62)),
            ("does not hold the lock", lambda: window._operation("unlock", 1, 0, 0, None)),
            ("bxor of float32", lambda: window.accumulate(four, 1, op=dist.ReduceOp.BXOR)),
        ]:
            with pytest.raises(ValueError, match=text):
                call().wait()
        dist.barrier()  # the group is unharmed
        assert not window.read(0, 2).any()
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="comm_core"), _window(1, 1, group=gloo):
        pass
