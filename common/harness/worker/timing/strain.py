"""Whether the ranks had the cores that they needed while steps were timed, and who else had some.

What matters is whether a rank's threads wait for a core, not how busy the machine is: foreign load
that leaves them enough changes nothing, and a burst of their own that fills all cores for a part of
the step does not show in a mean. So the kernel is asked for the wait itself (schedstat), and for
the rest, which says whose doing it was.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common import cgroups
from common.emulation.flow import cores_s
from common.models.replay import pace
from common.results.records.trust import Strain

_TASKS = Path("/proc/self/task")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NS_PER_S = 1e9
_MAIN, _BACKWARD = "main", "pt_autograd"
"""On a GPU torch runs the backward pass, hooks included, in a thread of its own."""


@dataclass(kw_only=True)
class Pressure:
    """What one rank has seen during its timed steps."""

    machine: str
    """Virtual hosts of one machine have the same."""
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    """That this process has used."""
    ran_s: dict[str, float] = field(default_factory=dict)
    """By thread; threads of one name together."""
    waited_s: dict[str, float] | None = field(default_factory=dict)
    """By thread, for a core; None where the kernel does not tell."""
    absorbed_s: float | None = None
    """Of what the training thread has waited: without computing longer by it, as its compute is
    slowed down anyway. None where compute is replayed."""
    fell_behind_s: float = 0.0
    """By how much more its host was behind the replayed device in the end than in the beginning:
    what it has not made up for is in no step."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """By core that this process may use: of all processes."""
    steal_s: dict[str, float] = field(default_factory=dict)
    """By core: taken by other virtual machines."""
    links_s: float = 0.0
    """CPU seconds of the program that is the links between virtual hosts."""
    throttled_s: float = 0.0
    """That a control group's limit has kept all its processes from running."""


class Gauge:
    """Adds up the pressure of this process in the blocks under `with gauge.block():`.

    Args:
        links_pid: of the program that is the links between virtual hosts, if there is one.
    """

    def __init__(self, links_pid: int | None = None) -> None:
        self.found = Pressure(machine=machine_id())
        self._links_pid = links_pid

    @contextmanager
    def block(self) -> Iterator[None]:
        """Reads before and after; what happens in between costs nothing."""
        before = _Reading(self._links_pid)
        yield
        self._add(before, _Reading(self._links_pid))

    def _add(self, before: _Reading, after: _Reading) -> None:
        found = self.found
        found.elapsed_s += after.at_s - before.at_s
        found.cpu_s += after.cpu_s - before.cpu_s
        found.links_s += after.links_s - before.links_s
        found.throttled_s += after.throttled_s - before.throttled_s
        found.fell_behind_s += after.late_s - before.late_s
        for core, (busy_s, steal_s) in after.cores.items():
            busy_before_s, steal_before_s = before.cores.get(core, (busy_s, steal_s))
            _add(found.busy_s, core, busy_s - busy_before_s)
            _add(found.steal_s, core, steal_s - steal_before_s)
        if after.threads is None or before.threads is None:
            found.waited_s = None
            return
        # Threads that began meanwhile count as a whole; of those that have ended nothing is left.
        for thread, (ran_s, waited_s) in after.threads.items():
            ran_before_s, waited_before_s = before.threads.get(thread, (0.0, 0.0))
            _add(found.ran_s, _name(thread), ran_s - ran_before_s)
            if found.waited_s is not None:
                _add(found.waited_s, _name(thread), waited_s - waited_before_s)


class _Reading:
    """What the kernel has counted until now."""

    def __init__(self, links_pid: int | None) -> None:
        self.threads = _threads()
        self.links_s = 0.0 if links_pid is None else _ran_s(links_pid)
        self.cores = {str(core): times for core, times in cores_s().items()}
        self.throttled_s = cgroups.throttled_s()
        self.cpu_s = time.process_time()
        self.late_s = pace.current().late_s()
        self.at_s = time.perf_counter()


def _threads() -> dict[str, tuple[float, float]] | None:
    """By id: seconds that the thread has run, and has waited for a core."""
    found = {}
    for folder in _TASKS.iterdir():
        try:
            ran_ns, waited_ns, _ = (folder / "schedstat").read_text().split()
        except FileNotFoundError:
            if folder.is_dir():  # the thread lives, but this kernel does not count
                return None
            continue
        except OSError:  # it has just ended
            continue
        found[folder.name] = int(ran_ns) / _NS_PER_S, int(waited_ns) / _NS_PER_S
    return found


def _ran_s(pid: int) -> float:
    """CPU seconds of a process with one thread; 0 once it has ended, or if the kernel does not
    count."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / _NS_PER_S
    except OSError:
        return 0.0


def _name(thread: str) -> str:
    if thread == str(os.getpid()):
        return _MAIN
    try:
        return (_TASKS / thread / "comm").read_text().strip()
    except OSError:
        return "ended"


def _add(sums: dict[str, float], key: str, value: float) -> None:
    sums[key] = sums.get(key, 0.0) + value


def machine_id() -> str:
    """Of the running kernel: all virtual hosts of a machine have the same, and one clock."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename


def strain_of(ranks: Sequence[Pressure], canary_s: Sequence[float] | None = None) -> Strain:
    """All ranks together; of several machines the worst."""
    machines: dict[str, list[Pressure]] = defaultdict(list)
    for rank in ranks:
        machines[rank.machine].append(rank)
    found = [_of_machine(here) for here in machines.values()]
    waits = [_wait(rank) for rank in ranks]
    trained = [_training_wait(rank) for rank in ranks]
    late = [_late(rank) for rank in ranks]
    return Strain(
        late=None if None in late else max(late),
        # Of all ranks: one that is ahead waits for the others.
        fell_behind=statistics.fmean(rank.fell_behind_s / rank.elapsed_s for rank in ranks),
        core_wait=None if None in waits else max(waits),
        main_wait=None if None in trained else max(trained),
        foreign_cores=max(foreign for foreign, _ in found),
        steal_cores=max(steal for _, steal in found),
        throttled_s=max(rank.throttled_s for rank in ranks),
        canary_s=None if canary_s is None else list(canary_s),
    )


def used_cores(ranks: Sequence[Pressure]) -> float:
    """CPU seconds of all ranks, and of the links between them, per second."""
    return _own_s(ranks) / max(rank.elapsed_s for rank in ranks)


def _own_s(ranks: Sequence[Pressure]) -> float:
    # Every rank has seen the same links.
    return sum(rank.cpu_s for rank in ranks) + max(max(0.0, rank.links_s) for rank in ranks)


def _of_machine(ranks: Sequence[Pressure]) -> tuple[float, float]:
    """Cores in use by others than the ranks and their links, and stolen; of those that a rank may
    use."""
    elapsed_s = max(rank.elapsed_s for rank in ranks)
    busy: dict[str, float] = {}
    steal: dict[str, float] = {}
    for rank in ranks:
        for core in rank.busy_s:
            busy[core] = max(busy.get(core, 0.0), rank.busy_s[core])
            steal[core] = max(steal.get(core, 0.0), rank.steal_s[core])
    own_s = _own_s(ranks)
    busy_s = sum(busy.values())
    # Cores are counted in clock ticks, of which one may be too many; in a short block that is much.
    unsure_s = len(busy) / os.sysconf("SC_CLK_TCK")
    foreign_s = max(0.0, busy_s - own_s - unsure_s)
    steal_s = max(0.0, sum(steal.values()) - unsure_s)
    return foreign_s / elapsed_s, steal_s / elapsed_s


def _wait(rank: Pressure) -> float | None:
    if rank.waited_s is None:
        return None
    return sum(rank.waited_s.values()) / rank.elapsed_s


def _training_wait(rank: Pressure) -> float | None:
    if rank.waited_s is None:
        return None
    own = (s for name, s in rank.waited_s.items() if name.startswith((_MAIN, _BACKWARD)))
    return sum(own) / rank.elapsed_s


def _late(rank: Pressure) -> float | None:
    if rank.waited_s is None or rank.absorbed_s is None:
        return None
    return max(0.0, rank.waited_s.get(_MAIN, 0.0) - rank.absorbed_s) / rank.elapsed_s
