"""Load on the machine while steps were timed: waits of the ranks for cores, and use by others.

A measurement is disturbed if threads wait for a core, not by load alone: other programs may leave
enough cores. So the waits of threads are read from the kernel (schedstat), and also the use of each
core, which shows who caused the waits. Pressure is the load as a rank sees it; strain summarizes
all ranks.
"""

from __future__ import annotations

import multiprocessing
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
"""Names of training threads. With a GPU, torch runs backward passes (and hooks) in the second."""


@dataclass(kw_only=True)
class Pressure:
    """Load as one rank sees it during its timed steps, in real seconds."""

    machine: str
    """Id of the rank's machine; virtual hosts on one machine have the same."""
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of this process."""
    ran_s: dict[str, float] = field(default_factory=dict)
    """CPU time by name of thread; threads with the same name are added up."""
    waited_s: dict[str, float] | None = field(default_factory=dict)
    """Time for which threads waited for a core, by name; None if the kernel does not report it."""
    absorbed_s: float | None = None
    """Waits of the training thread that did not lengthen its compute, because the time scale slows
    compute down anyway. None if compute is replayed."""
    fell_behind_s: float = 0.0
    """Change of the host's delay behind its replayed device. Step times do not contain it. They
    contain delays that the host caught up."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """Busy time of each core that this process may use, by all processes."""
    steal_s: dict[str, float] = field(default_factory=dict)
    """Time of each core that other virtual machines took."""
    links_s: float = 0.0
    """CPU time of the program that emulates the links."""
    throttled_s: float = 0.0
    """Time for which the CPU limit of a control group stopped the rank."""
    helpers_hurried: bool | None = None
    """Result of `hurry_helpers`."""


class Gauge:
    """Gauge of the pressure on this process, added up over all `with gauge.block():`.

    Args:
        links_pid: PID of the program that emulates the links, if there is one.
        absorbed_s: returns `Training.absorbed_s`.
        helpers_hurried: result of `hurry_helpers`.
    """

    def __init__(
        self,
        links_pid: int | None = None,
        absorbed_s: Callable[[], float | None] = lambda: None,
        helpers_hurried: bool | None = None,
    ) -> None:
        self.pressure = Pressure(machine=machine_id(), helpers_hurried=helpers_hurried)
        self._links_pid, self._absorbed_s = links_pid, absorbed_s

    @contextmanager
    def block(self) -> Iterator[None]:
        """Context that reads counters at its start and end; it costs no time in between."""
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
        # New threads are counted completely; threads that have ended are missing.
        for thread, (ran_s, waited_s) in after.threads.items():
            ran_before_s, waited_before_s = before.threads.get(thread, (0.0, 0.0))
            _add(pressure.ran_s, _name(thread), ran_s - ran_before_s)
            if pressure.waited_s is not None:
                _add(pressure.waited_s, _name(thread), waited_s - waited_before_s)


class _Reading:
    def __init__(self, links_pid: int | None) -> None:
        self.threads = _threads()
        self.links_s = 0.0 if links_pid is None else _ran_s(links_pid)
        self.cores = {str(core): times for core, times in cores_s().items()}
        self.throttled_s = cgroups.throttled_s()
        # Processes that read data in advance are this rank's, too.
        helpers = multiprocessing.active_children()
        self.cpu_s = time.process_time() + sum(_ran_s(child.pid) for child in helpers)
        self.late_s = pace.current().late_s()
        self.at_s = time.perf_counter()


def _threads() -> dict[str, tuple[float, float]] | None:
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
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[0]) / _NS_PER_S
    except OSError:
        return 0.0


def _name(thread: str) -> str:
    # Not os.getpid(): a sandbox that cannot mount its own /proc shows the PIDs outside of it.
    if thread == Path("/proc/self").readlink().name:
        return _MAIN
    try:
        return (_TASKS / thread / "comm").read_text(encoding="utf-8").strip()
    except OSError:
        return "ended"


def _add(sums: dict[str, float], key: str, value: float) -> None:
    sums[key] = sums.get(key, 0.0) + value


def machine_id() -> str:
    """Returns the id of the running kernel. Virtual hosts on a machine share it, and the clock."""
    try:
        return _BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        return os.uname().nodename


def strain_of(ranks: Sequence[Pressure], canary_s: Sequence[float] | None = None) -> Strain:
    """Returns the load on the machine from all ranks' pressure; of several machines, the worst."""
    machines: dict[str, list[Pressure]] = defaultdict(list)
    for rank in ranks:
        machines[rank.machine].append(rank)
    foreign, steal = zip(*map(_used_by_others, machines.values()), strict=True)
    hurried = [rank.helpers_hurried for rank in ranks if rank.helpers_hurried is not None]
    return Strain(
        late=_largest([_late(rank) for rank in ranks]),
        # The mean is used, because ranks that are ahead wait for the others.
        fell_behind=statistics.fmean(rank.fell_behind_s / rank.elapsed_s for rank in ranks),
        core_wait=_largest([_wait(rank) for rank in ranks]),
        main_wait=_largest([_wait(rank, (_MAIN, _BACKWARD)) for rank in ranks]),
        foreign_cores=max(foreign),
        steal_cores=max(steal),
        throttled_s=max(rank.throttled_s for rank in ranks),
        canary_s=None if canary_s is None else list(canary_s),
        helpers_hurried=all(hurried) if hurried else None,
    )


def used_cores(ranks: Sequence[Pressure]) -> float:
    """Returns the mean number of cores that the ranks and the links between them used."""
    return _used_s(ranks) / max(rank.elapsed_s for rank in ranks)


def _used_s(ranks: Sequence[Pressure]) -> float:
    # Every rank reports the same links.
    return sum(rank.cpu_s for rank in ranks) + max(max(0.0, rank.links_s) for rank in ranks)


def _used_by_others(ranks: Sequence[Pressure]) -> tuple[float, float]:
    """Returns the mean numbers of cores that other programs, and other virtual machines, used."""
    elapsed_s = max(rank.elapsed_s for rank in ranks)
    busy = _by_core([rank.busy_s for rank in ranks])
    steal = _by_core([rank.steal_s for rank in ranks])
    # Counts are in clock ticks and may be one too high, which matters in a short block.
    unsure_s = len(busy) / os.sysconf("SC_CLK_TCK")
    foreign_s = max(0.0, sum(busy.values()) - _used_s(ranks) - unsure_s)
    steal_s = max(0.0, sum(steal.values()) - unsure_s)
    return foreign_s / elapsed_s, steal_s / elapsed_s


def _by_core(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the largest reading of each core; at least 0, because counters may go backwards."""
    cores = {core for times in ranks for core in times}
    return {core: max(0.0, *(times.get(core, 0.0) for times in ranks)) for core in cores}


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _wait(rank: Pressure, threads: tuple[str, ...] = ("",)) -> float | None:
    """Returns the shares of time for which threads with these prefixes waited, added up."""
    if rank.waited_s is None:
        return None
    waits = (s for name, s in rank.waited_s.items() if name.startswith(threads))
    return sum(waits) / rank.elapsed_s


def _late(rank: Pressure) -> float | None:
    if rank.waited_s is None or rank.absorbed_s is None:
        return None
    return max(0.0, rank.waited_s.get(_MAIN, 0.0) - rank.absorbed_s) / rank.elapsed_s
