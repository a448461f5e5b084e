"""Load on the machine while steps were timed: waits of the ranks for cores, and use by others.

Threads that wait for a core disturb a measurement; a busy machine alone does not. Foreign load may
leave enough cores, and a short burst of the ranks themselves does not show in a mean. So the kernel
is asked for the waits (schedstat), and for the use of cores, which tells who caused the waits.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common.emulation.flow import cores_s
from common.machine import cgroups
from common.models.replay import pace
from common.results.records.trust import Strain

_TASKS = Path("/proc/self/task")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NS_PER_S = 1e9
_MAIN, _BACKWARD = "main", "pt_autograd"
"""Names of training threads: on a GPU torch runs backward passes, with hooks, in the second one."""


@dataclass(kw_only=True)
class Pressure:
    """Counts of one rank during its timed steps, in seconds of this machine."""

    machine: str
    """Machine of the rank; virtual hosts share one."""
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of this process."""
    ran_s: dict[str, float] = field(default_factory=dict)
    """CPU time by thread; threads with the same name count together."""
    waited_s: dict[str, float] | None = field(default_factory=dict)
    """Waits for a core by thread; None if the kernel does not count them."""
    absorbed_s: float | None = None
    """Waits of the training thread that did not lengthen its compute, which is slowed down anyway.
    None if compute is replayed."""
    fell_behind_s: float = 0.0
    """Change of the host's delay behind its replayed device. Delays that it made up for are in the
    steps; this one is in none."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """Use of each core that this process may use, by all processes."""
    steal_s: dict[str, float] = field(default_factory=dict)
    """Time of each core that other virtual machines took."""
    links_s: float = 0.0
    """CPU time of the program that emulates the links."""
    throttled_s: float = 0.0
    """Time for which a control group's limit stopped all its processes."""


class Gauge:
    """Adds up the pressure of this process in the blocks under `with gauge.block():`.

    Args:
        links_pid: process id of the program that emulates the links, if there is one.
        absorbed_s: returns `Training.absorbed_s`.
    """

    def __init__(
        self,
        links_pid: int | None = None,
        absorbed_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.pressure = Pressure(machine=machine_id())
        self._links_pid, self._absorbed_s = links_pid, absorbed_s

    @contextmanager
    def block(self) -> Iterator[None]:
        """Reads counters before and after; nothing between costs time."""
        absorbed_s, before = self._absorbed_s(), _Reading(self._links_pid)
        yield
        self._add(before, _Reading(self._links_pid))
        if absorbed_s is not None:
            gained_s = self._absorbed_s() - absorbed_s
            self.pressure.absorbed_s = (self.pressure.absorbed_s or 0.0) + gained_s

    def _add(self, before: _Reading, after: _Reading) -> None:
        pressure = self.pressure
        pressure.elapsed_s += after.at_s - before.at_s
        pressure.cpu_s += after.cpu_s - before.cpu_s
        pressure.links_s += after.links_s - before.links_s
        pressure.throttled_s += after.throttled_s - before.throttled_s
        pressure.fell_behind_s += after.late_s - before.late_s
        for core, (busy_s, steal_s) in after.cores.items():
            busy_before_s, steal_before_s = before.cores.get(core, (busy_s, steal_s))
            _add(pressure.busy_s, core, busy_s - busy_before_s)
            _add(pressure.steal_s, core, steal_s - steal_before_s)
        if after.threads is None or before.threads is None:
            pressure.waited_s = None
            return
        # Threads that began meanwhile count as wholes; those that ended left nothing.
        for thread, (ran_s, waited_s) in after.threads.items():
            ran_before_s, waited_before_s = before.threads.get(thread, (0.0, 0.0))
            _add(pressure.ran_s, _name(thread), ran_s - ran_before_s)
            if pressure.waited_s is not None:
                _add(pressure.waited_s, _name(thread), waited_s - waited_before_s)


class _Reading:
    """The kernel's counters at a moment."""

    def __init__(self, links_pid: int | None) -> None:
        self.threads = _threads()
        self.links_s = 0.0 if links_pid is None else _ran_s(links_pid)
        self.cores = {str(core): times for core, times in cores_s().items()}
        self.throttled_s = cgroups.throttled_s()
        self.cpu_s = time.process_time()
        self.late_s = pace.current().late_s()
        self.at_s = time.perf_counter()


def _threads() -> dict[str, tuple[float, float]] | None:
    """Returns by thread id its CPU time and its waits for a core."""
    threads = {}
    for folder in _TASKS.iterdir():
        try:
            ran_ns, waited_ns, _ = (folder / "schedstat").read_text(encoding="utf-8").split()
        except FileNotFoundError:
            if folder.is_dir():  # the thread lives, but this kernel does not count
                return None
            continue
        except OSError:  # it has just ended
            continue
        threads[folder.name] = int(ran_ns) / _NS_PER_S, int(waited_ns) / _NS_PER_S
    return threads


def _ran_s(pid: int) -> float:
    """Returns the CPU time of a process with one thread; 0 if it has ended or is not counted."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[0]) / _NS_PER_S
    except OSError:
        return 0.0


def _name(thread: str) -> str:
    if thread == str(os.getpid()):
        return _MAIN
    try:
        return (_TASKS / thread / "comm").read_text(encoding="utf-8").strip()
    except OSError:
        return "ended"


def _add(sums: dict[str, float], key: str, value: float) -> None:
    sums[key] = sums.get(key, 0.0) + value


def machine_id() -> str:
    """Returns the id of the running kernel, which virtual hosts share, as they share its clock."""
    try:
        return _BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        return os.uname().nodename


def strain_of(ranks: Sequence[Pressure], canary_s: Sequence[float] | None = None) -> Strain:
    """Sums up all ranks; of several machines, the worst counts."""
    machines: dict[str, list[Pressure]] = defaultdict(list)
    for rank in ranks:
        machines[rank.machine].append(rank)
    foreign, steal = zip(*map(_used_by_others, machines.values()), strict=True)
    return Strain(
        late=_largest([_late(rank) for rank in ranks]),
        # A mean: a rank that is ahead waits for the others.
        fell_behind=statistics.fmean(rank.fell_behind_s / rank.elapsed_s for rank in ranks),
        core_wait=_largest([_wait(rank) for rank in ranks]),
        main_wait=_largest([_wait(rank, (_MAIN, _BACKWARD)) for rank in ranks]),
        foreign_cores=max(foreign),
        steal_cores=max(steal),
        throttled_s=max(rank.throttled_s for rank in ranks),
        canary_s=None if canary_s is None else list(canary_s),
    )


def used_cores(ranks: Sequence[Pressure]) -> float:
    """Returns the CPU time of all ranks, and of the links between them, per second."""
    return _used_s(ranks) / max(rank.elapsed_s for rank in ranks)


def _used_s(ranks: Sequence[Pressure]) -> float:
    # Every rank has seen the same links.
    return sum(rank.cpu_s for rank in ranks) + max(max(0.0, rank.links_s) for rank in ranks)


def _used_by_others(ranks: Sequence[Pressure]) -> tuple[float, float]:
    """Returns the cores of one machine that other programs and other virtual machines used."""
    elapsed_s = max(rank.elapsed_s for rank in ranks)
    busy = _by_core([rank.busy_s for rank in ranks])
    steal = _by_core([rank.steal_s for rank in ranks])
    # Counts are in clock ticks, of which one may be too many; that is much of a short block.
    unsure_s = len(busy) / os.sysconf("SC_CLK_TCK")
    foreign_s = max(0.0, sum(busy.values()) - _used_s(ranks) - unsure_s)
    steal_s = max(0.0, sum(steal.values()) - unsure_s)
    return foreign_s / elapsed_s, steal_s / elapsed_s


def _by_core(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the largest reading of each core, at least 0: counters may go backwards."""
    cores = {core for times in ranks for core in times}
    return {core: max(0.0, *(times.get(core, 0.0) for times in ranks)) for core in cores}


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _wait(rank: Pressure, threads: tuple[str, ...] = ("",)) -> float | None:
    """Returns the waits of the threads whose names start so, per second."""
    if rank.waited_s is None:
        return None
    waits = (s for name, s in rank.waited_s.items() if name.startswith(threads))
    return sum(waits) / rank.elapsed_s


def _late(rank: Pressure) -> float | None:
    if rank.waited_s is None or rank.absorbed_s is None:
        return None
    return max(0.0, rank.waited_s.get(_MAIN, 0.0) - rank.absorbed_s) / rank.elapsed_s
