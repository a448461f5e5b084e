"""Plays the bandwidth trace of a network while a trial is measured."""

from __future__ import annotations

import itertools
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from common.emulation.cluster import EmulatedCluster
from common.emulation.faults import phase_of, wait_until_measuring


class TracePlayer:
    """One trace in one repeat of one trial: `start()` before the ranks, `stop()` after them.

    Args:
        cluster: with links of a profile that has a trace.
        folder: the trial's folder, where the ranks write what they are doing.
    """

    def __init__(self, cluster: EmulatedCluster, folder: Path, repeat: int) -> None:
        self._cluster, self._phase = cluster, partial(phase_of, folder, repeat)
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._changes = 0
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)

    def start(self) -> None:
        """Begins to wait for rank 0 to measure."""
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Gives the links their own rate again.

        Returns:
            `changes`: how many times the rates were changed.

        Raises:
            RuntimeError: the links could not be given a rate.
        """
        self._ended.set()
        self._thread.join()
        if self._error is not None and self._cluster.broken() is None:
            raise RuntimeError(f"the trace stopped: {self._error}") from self._error
        if self._changes and self._cluster.broken() is None:
            self._cluster.restore()
        return {"changes": self._changes}

    def _run(self) -> None:
        if not wait_until_measuring(self._phase, self._ended):
            return
        due = time.monotonic()
        try:
            for stretch in itertools.cycle(self._cluster.profile.trace):
                for host in range(len(self._cluster.hosts)):
                    self._cluster.set_rate(host, stretch.gbps)
                self._changes += 1
                # From when it was due: what the change took is no part of the next stretch.
                due += stretch.for_s * self._cluster.time_scale
                if self._ended.wait(max(0.0, due - time.monotonic())):
                    return
        except RuntimeError as error:  # told by `stop`, in the thread that can do something
            self._error = error
