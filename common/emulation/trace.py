"""Plays the bandwidth trace of a network while a trial is measured."""

from __future__ import annotations

import itertools
import threading
import time
from functools import partial
from pathlib import Path

from common.emulation.cluster import EmulatedCluster
from common.emulation.faults import MEASURING, phase_of, wait_until_measuring

_LOOK_S = 0.2
"""Real seconds between looks whether the trial still measures."""


class TracePlayer:
    """Player of one trace in one repeat of one trial; the ranks run inside its `with` block. The
    profile of `cluster` has a trace. `folder` is the trial's, where the ranks write their phases.
    `changes` is the number of times that the rates were changed. `error` is why the trace stopped
    before the trial ended, or None."""

    def __init__(self, cluster: EmulatedCluster, folder: Path, repeat: int) -> None:
        self._cluster, self._phase = cluster, partial(phase_of, folder, repeat)
        self._ended = threading.Event()
        self.changes = 0
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)

    def __enter__(self) -> TracePlayer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        if not wait_until_measuring(self._phase, self._ended):
            return
        try:
            self._play()
            # What comes after the measurement, as costs of collectives, is that of the profile.
            if self._cluster.links.broken() is None:
                self._set_rates(self._cluster.profile.gbps)
        except RuntimeError as error:
            self.error = f"the trace of the network stopped: {error}"

    def _play(self) -> None:
        due = time.monotonic()
        for stretch in itertools.cycle(self._cluster.profile.trace):
            self._set_rates(stretch.gbps)
            self.changes += 1
            # Relative to the due time, so that the duration of changes does not add up.
            due += stretch.for_s * self._cluster.time_scale
            while (left_s := due - time.monotonic()) > 0:
                if self._ended.wait(min(left_s, _LOOK_S)) or self._phase(0)[1] != MEASURING:
                    return

    def _set_rates(self, gbps: float) -> None:
        for host in range(len(self._cluster.hosts)):
            self._cluster.set_rate(host, gbps)
