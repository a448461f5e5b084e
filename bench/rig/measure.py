"""What a rank does for one row of the table: check, warm up, time, check again."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

from bench.rig.rank import Place, cpu_seconds
from dear.lazy import torch

_WARM_UP_S = 0.05
_SPOILT = -1.0


class _Buffers:
    """Buffers of one operation, filled with integers whose sums float32 holds exactly.

    Element i of rank r is base(i) + 2**r, with base different for neighbouring i: among sums of
    as many terms as there are ranks, only that of every rank once is base * size + 2**size - 1.
    """

    def __init__(self, place: Place, op: str, count: int) -> None:
        self._place, self._op = place, op
        size, part = place.size, count // place.size
        self._mine = slice(place.rank * part, (place.rank + 1) * part)
        prime = 1000003 if size <= 16 else 250007
        if size > 64:
            raise ValueError(f"{size} ranks: sums would not be exact in float32")
        # Ranks beyond 16 reuse the powers; the sum must stay below 2**24.
        self._weights = [float(2 ** (r % 16)) for r in range(size)]
        self._base = ((torch.arange(count) * 48271) % prime).to(torch.float32)
        shard_in = op == "all_gather"
        self.source = place.engine.empty(part if shard_in else count)
        self._shard = None if op in ("all_reduce", "all_gather") else place.engine.empty(part)
        self._whole = place.engine.empty(count) if op in ("all_gather", "rs_ag") else None
        self._result: Any = None

    def run(self) -> None:
        """The operation, once."""
        engine = self._place.engine
        if self._op == "all_reduce":
            self._result = engine.all_reduce(self.source)
        elif self._op == "all_gather":
            self._result = engine.all_gather(self._whole, self.source)
        else:
            self._result = engine.reduce_scatter(self._shard, self.source)
            if self._op == "rs_ag":
                self._result = engine.all_gather(self._whole, self._result)

    def wrong(self) -> int:
        """Runs once on fresh data; the number of wrong elements of the result."""
        weight = self._weights[self._place.rank]
        mine = self._base[self._mine] if self._op == "all_gather" else self._base
        self.source.copy_(mine).add_(weight)
        for output in (self._shard, self._whole):
            if output is not None:
                output.fill_(_SPOILT)
        self._place.meet()
        self.run()
        if self._op == "all_gather":
            rows = self._base.view(self._place.size, -1) + torch.tensor(self._weights)[:, None]
            want = rows.view(-1)
        else:
            base = self._base[self._mine] if self._op == "reduce_scatter" else self._base
            want = base * self._place.size + sum(self._weights)
        if self._result.numel() != want.numel():
            return int(want.numel())
        return int((self._result != want).sum())


def collective(
    place: Place, op: str, nbytes: int, budget_s: float, iterations: tuple[int, int]
) -> dict[str, Any]:
    """One round of one operation.

    Args:
        nbytes: size of the whole bucket.
        budget_s: how long the timed iterations should take together.
        iterations: least and greatest number of them.

    Returns:
        `times_s` of this rank per iteration, its `cpu_s` for all of them, `wrong` elements.
    """
    buffers = _Buffers(place, op, nbytes // 4)
    wrong = buffers.wrong()
    # An all-reduce works in place, so that its numbers grow to infinity; that costs no time.
    took = statistics.median(_timed(place, buffers, 3)[0])
    count = min(50, int(_WARM_UP_S / took))
    took = statistics.median([*_timed(place, buffers, int(place.barrier(count)))[0], took])
    count = max(iterations[0], min(iterations[1], int(budget_s / took)))
    times, cpu = _timed(place, buffers, int(place.barrier(count)))
    wrong += buffers.wrong()
    place.barrier()
    return {"times_s": times, "cpu_s": cpu, "wrong": wrong}


def _timed(place: Place, buffers: _Buffers, count: int) -> tuple[list[float], float]:
    times = []
    gc.collect()
    gc.disable()
    cpu = cpu_seconds()
    for _ in range(count):
        # What this thread spends in the barrier is the benchmark's, not the engine's; the
        # engine's own threads are counted all the time.
        between = time.thread_time()
        place.meet()
        cpu += time.thread_time() - between
        start = time.perf_counter()
        buffers.run()
        times.append(time.perf_counter() - start)
    place.engine.fence()
    cpu = cpu_seconds() - cpu
    gc.enable()
    return times, cpu
