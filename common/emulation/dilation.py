"""How much slower than real time an emulated cluster runs, so that this machine can keep up."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from common.cgroups import usable_cores
from common.emulation.config import NetworkProfile
from common.emulation.flow import OnHost, cores_s, transfer_cost
from dear.errors import UserError

BUSY_TARGET = 0.6
"""Share of all cores that a step may keep busy; above it ranks wait for cores, not for links."""
WAIT_TARGET = 0.6
"""Seconds that a rank's threads, all together, may wait for a core per second in a cell's first
round; later rounds must stay below the next."""
UNFAITHFUL_WAIT = 0.7
"""More makes a record unfaithful. Far from nothing, for queues of links and the deadlines of
replayed compute absorb most waits: see docs/methodology.md for the runs that it was chosen by."""
BEHIND_TARGET, FELL_BEHIND = 0.015, 0.04
"""Share of the time that hosts may fall behind their devices, or catch up with them: in a cell's
first round, and in any launch of a record that is not unfaithful (launches of one trial differ by
2 % beside other programs). It is missing in a launch's steps, or in them without being theirs."""
FOREIGN_CORES = 0.25
"""Cores; other processes that use less are nobody."""
SERIAL_TARGET = 0.1
"""Share of a step that may pass in work that runs at this machine's speed; replayed compute makes
up for most of it."""

# Passes over the memory of all parameters, per rank and step. Replay writes each gradient;
# algorithms copy it into a buffer and the average out again (two reads, two writes) and add what
# arrives (two reads, a write).
_GRADIENT_PASSES, _COMMUNICATION_PASSES = 1, 4 + 3
# Python of the model's modules, hooks and collectives, per rank and step.
_OVERHEAD_S = 0.02
_SMALL, _DECADE = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), (10, 12, 16, 20, 30, 40, 50, 60, 80)
# More than the caches of a server hold.
_MEMORY = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a trial asks of the machine in each step."""

    world_size: int
    hosts: int
    parameter_bytes: int
    update_passes: int
    """Of the optimizer over the memory of the parameters (`OptimizerConfig.update_passes`)."""
    step_s: float
    """Replayed compute, in emulated seconds."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """CPU costs of one machine."""

    cpu_s_per_byte: float
    """CPU seconds, of both ends and of the kernel between them, per byte moved over a link."""
    memory_bytes_per_s: float
    """Bytes that one core reads and writes per second, in memory that it has used before, while all
    cores do."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A time scale, and one line that says why."""

    time_scale: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a trial took of the machine in its timed steps at some time scale."""

    time_scale: float
    step_s: float
    """Emulated, as it was measured: too long where ranks waited for cores."""
    cpu_s_per_s: float
    """CPU seconds of all ranks per second of this machine."""
    core_wait: float | None
    """Of the rank that waited longest: seconds of its threads per second; None: not known."""
    fell_behind: float = 0.0
    """By how much hosts fell behind their devices, seconds per second; below 0: caught up."""
    foreign_cores: float = 0.0
    """That others had meanwhile."""

    @property
    def cpu_s_per_step(self) -> float:
        """It is the same at every time scale."""
        return self.cpu_s_per_s * self.step_s * self.time_scale


def calibrate(hosts: Sequence[OnHost]) -> Calibration:
    """Measures, in about two seconds, one transfer between the first two hosts, and the memory.

    With one host there is nothing to transfer, and a byte costs nothing.

    Raises:
        RuntimeError: the hosts cannot talk to each other.
    """
    per_byte = transfer_cost(hosts[0], hosts[1]) if len(hosts) > 1 else 0.0
    cores = usable_cores()
    with ThreadPoolExecutor(cores) as pool:
        times = list(pool.map(_copy_s, [_MEMORY // cores] * cores))
    rate = 2 * (_MEMORY // cores) / max(times)
    return Calibration(cpu_s_per_byte=per_byte, memory_bytes_per_s=rate)


def _copy_s(nbytes: int) -> float:
    """CPU seconds of this thread to copy so much from one place to another."""
    import numpy as np  # only here: a dry run must not pay for it

    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    best = math.inf
    for _ in range(4):
        began = time.thread_time()  # not elapsed time: whatever else runs here does not count
        np.copyto(target, source)  # others copy meanwhile: it holds no lock
        best = min(best, time.thread_time() - began)
    return best


def foreign_cores(seconds: float = 1.0) -> float:
    """Cores that other processes use now, and other virtual machines, looked at for so long."""
    began, (own_s, busy_s) = time.monotonic(), _own_and_busy_s()
    time.sleep(seconds)
    elapsed_s, (own_after_s, busy_after_s) = time.monotonic() - began, _own_and_busy_s()
    return max(0.0, (busy_after_s - busy_s) - (own_after_s - own_s)) / elapsed_s


def _own_and_busy_s() -> tuple[float, float]:
    """CPU seconds of this process, and of all on its cores, stolen ones included."""
    return time.process_time(), sum(busy + stolen for busy, stolen in cores_s().values())


def at_hand(cores: int, foreign: float, ranks: int) -> float:
    """How many of the cores ranks have beside others, at least a fair share: a thread like each
    core that others use."""
    return (
        cores
        if foreign <= FOREIGN_CORES
        else max(cores - foreign, cores * ranks / (ranks + foreign))
    )


def choose_time_scale(
    load: Load, network: NetworkProfile, calibration: Calibration, cores: float
) -> Choice:
    """The smallest readable scale at which `cores` cores keep up with the emulated cluster.

    An emulated step takes at least T = max(compute, wire), where wire is the time in which every
    host sends and receives 2 (H-1)/H of the parameters. It costs C = communication + memory CPU
    seconds, whatever the scale k; k stretches the time in which they may be spent. So

        k >= C / (0.6 cores T)                      the whole step leaves cores idle
        k >= communication / (0.6 cores near)       also while all links are busy
        k >= serial / (0.1 T)                       update and overhead hardly lengthen the step
        k >= serial / (compute + 0.015 T)           replayed compute makes up for all but 1.5 %

    near is what wire would be without the slower lines between sites: hosts of one site send each
    other bursts at the rate of their own links, however long the others take.
    """
    world, hosts, size = load.world_size, load.hosts, load.parameter_bytes
    link_bytes = 2 * (hosts - 1) * size
    wire_s, near_s = _wire_s(load, network.narrowest_gbps), _wire_s(load, network.gbps)
    step_s = max(load.step_s, wire_s)
    touched_s = world * size / calibration.memory_bytes_per_s
    links_cpu = link_bytes * calibration.cpu_s_per_byte
    communication_cpu = links_cpu + (touched_s * _COMMUNICATION_PASSES if world > 1 else 0.0)
    overhead_cpu = touched_s * load.update_passes + world * _OVERHEAD_S
    cpu = communication_cpu + overhead_cpu + touched_s * _GRADIENT_PASSES
    serial_s = overhead_cpu / min(cores, world)
    share = f"{BUSY_TARGET:.0%} of {cores:.2g} cores"
    why = f"{cpu:.2g} CPU seconds a step must fit into {share} in {step_s:.2g} s"
    bounds = [(cpu / (BUSY_TARGET * cores * step_s), why)]
    why = f"{serial_s:.2g} s of update and Python must stay within {SERIAL_TARGET:.0%} of "
    bounds.append((serial_s / (SERIAL_TARGET * step_s), f"{why}{step_s:.2g} s"))
    why = (
        f"{load.step_s:.2g} s of replayed compute must make up for {serial_s:.2g} s of update and "
        f"Python, but for {BEHIND_TARGET:.1%} of {step_s:.2g} s"
    )
    bounds.append((serial_s / (load.step_s + BEHIND_TARGET * step_s), why))
    if near_s:
        why = f"{communication_cpu:.2g} CPU seconds of communication must fit into {share} in "
        needed = communication_cpu / (BUSY_TARGET * cores * near_s)
        bounds.append((needed, f"{why}{near_s:.2g} s of busy links"))
    needed, why = max(bounds)
    scale = next(scale for scale in readable_scales() if scale >= needed)
    reason = f"{why}, on this machine: at least {needed:.1f} times slower than real time"
    if scale == 1:
        reason = f"{cpu:.2g} CPU seconds a step fit into {step_s:.2g} s of {cores:.2g} cores"
    return Choice(time_scale=scale, reason=reason)


def needed_scale(
    seen: Seen, load: Load, network: NetworkProfile, cores: int, most: float = math.inf
) -> Choice:
    """The smallest readable scale at which a trial would have had the cores that it needs.

    It has them where its ranks' threads waited at most 0.6 seconds per second for one, however busy
    they were (some only look whether there is something to do), and where its hosts kept step with
    their devices to 1.5 % of the time. Threads that waited longer need the scale at which the CPU
    seconds per step fit into 60 % of the cores that others leave, where a step that lacked cores
    was too long: of it no more counts than computing and sending one after the other. And a trial
    needs a scale that is as much larger as the waits were too long or hosts off, but no more than
    twice at once, for both may shrink faster. Where the kernel does not tell of waits, the CPU
    seconds alone count.

    Args:
        most: the largest there may be; it is enough where it meets what a record must.
    """
    waited = seen.core_wait is None or seen.core_wait > WAIT_TARGET
    # What a first round must have, what a record must, and why.
    bounds = [(seen.time_scale, 0.0, "its ranks had the cores that they needed")]
    if waited:
        left = at_hand(cores, seen.foreign_cores, load.world_size)
        step_s = min(seen.step_s, load.step_s + _wire_s(load, network.narrowest_gbps))
        why = (
            f"{seen.cpu_s_per_step:.2g} CPU seconds a step must fit into {BUSY_TARGET:.0%} of "
            f"{left:.2g} cores in {step_s:.2g} s"
        )
        busy = seen.cpu_s_per_step / (BUSY_TARGET * left * step_s)
        bounds.append((busy, busy, why))
    if waited and seen.core_wait is not None:
        longer = min(2.0, seen.core_wait / WAIT_TARGET)
        why = (
            f"at {seen.time_scale:g} a rank's threads waited {seen.core_wait:.2f} s per second for "
            f"a core, of which {WAIT_TARGET:g} are allowed"
        )
        least = seen.time_scale * seen.core_wait / UNFAITHFUL_WAIT
        bounds.append((seen.time_scale * longer, least, why))
    off = abs(seen.fell_behind)
    if off > BEHIND_TARGET:
        how = "fell behind" if seen.fell_behind > 0 else "caught up with"
        why = (
            f"at {seen.time_scale:g} hosts {how} their devices by {off:.1%} of the time, of which "
            f"{BEHIND_TARGET:.1%} are allowed"
        )
        least = seen.time_scale * off / FELL_BEHIND
        bounds.append((seen.time_scale * min(2.0, off / BEHIND_TARGET), least, why))
    needed, _, why = max(bounds)
    if needed <= seen.time_scale:
        return Choice(time_scale=seen.time_scale, reason=why)
    scale = next(scale for scale in readable_scales() if scale >= needed)
    if scale > most >= max(least for _, least, _ in bounds):
        scale = most
    return Choice(time_scale=scale, reason=why)


def _wire_s(load: Load, gbps: float) -> float:
    """The time in which every host sends and receives 2 (H-1)/H of the parameters, as in a ring:
    the line between two sites then carries no more than a host's own does."""
    link_bytes = 2 * (load.hosts - 1) / load.hosts * load.parameter_bytes
    return link_bytes * 8 / (gbps * 1e9)


def readable_scales() -> Iterator[float]:
    """1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30, ... without end."""
    yield from _SMALL
    for power in itertools.count():
        yield from (float(number * 10**power) for number in _DECADE)


def check_scale(model_is_replayed: bool, learns: bool, time_scale: float | None) -> None:
    """Raises `UserError` for a scale that a model which really computes cannot have.

    Args:
        learns: whether the trial trains for a time; then the model is slowed down (`Brake`).
        time_scale: None: it is to be chosen.
    """
    if time_scale is None or time_scale == 1 or model_is_replayed:
        return
    if not learns:
        raise UserError(
            f"time_scale: {time_scale:g} would slow the links but not a model that really "
            "computes; allowed: 1, `learn:`, or a replayed model (MODEL@DEVICE)"
        )
    if time_scale < 1:
        raise UserError(
            f"time_scale: a model that really computes cannot be made faster, got {time_scale:g}"
        )
