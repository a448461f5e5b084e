"""Steps on a real GPU are timed by events: the host runs ahead, the moments are the device's."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from common.harness.worker.timing.stopwatch import stopwatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

BUSY_CYCLES = 50_000_000


def test_moments_are_those_of_the_device_and_the_host_does_not_wait():
    watch = stopwatch("cuda")
    watch.start()
    began = time.perf_counter()
    watch.mark()
    for _ in range(4):
        torch.cuda._sleep(BUSY_CYCLES)
        watch.mark()
    issued_s = time.perf_counter() - began
    marks = watch.read()
    ended = time.perf_counter()
    steps = [after - before for before, after in pairwise(marks)]
    assert len(steps) == 4 and min(steps) > 0
    assert sum(steps) > issued_s, "the host has waited"
    # On the clock of the host, between its begin and its end.
    assert began - 1e-3 <= marks[0] and marks[-1] <= ended + 1e-3
