"""Choice of the time scale: how many times slower than real time an emulated cluster runs.

A host has an emulated device (GPU) whose compute is replayed. A cell is the trials that are
compared; its first round launches each trial once.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from common.emulation.flow import OnHost, cores_s, transfer_cost
from common.emulation.links.profile import NetworkProfile
from common.machine.cgroups import usable_cores
from dear.errors import UserError

BUSY_TARGET = 0.6
"""Share of all cores that a step may keep busy. Above it, ranks wait for cores, not for links."""
WAIT_TARGET = 0.6
"""Limit in a cell's first round: share of the time for which the threads of a rank, added up, may
wait for a core. Later rounds use `UNFAITHFUL_WAIT`."""
UNFAITHFUL_WAIT = 0.7
"""Limit of such waits above which a record is flagged as unfaithful. It is high, because queues of
links and the deadlines of replayed compute hide most waits (measured in docs/methodology.md)."""
BEHIND_TARGET, FELL_BEHIND = 0.015, 0.04
"""Shares of the time by which hosts may fall behind their devices or catch up with them: in a
cell's first round, and in any launch of a valid record. This time is missing in the measured steps,
or is added to them. (Launches of one trial differ by 2 % while other programs run.)"""
FOREIGN_CORES = 0.25
"""Smallest use of cores by other processes that is not ignored."""
SERIAL_TARGET = 0.1
"""Largest share of a step for real work of this machine (update and Python). Replayed compute is
shortened by most of this work."""

# Passes over the memory of all parameters, per rank and step. Replay writes each gradient.
# Algorithms copy gradients into a buffer and averages out of it (two reads, two writes), and add
# received values (two reads, one write).
_GRADIENT_PASSES, _COMMUNICATION_PASSES = 1, 4 + 3
# Python time of the model's modules, hooks and collectives, per rank and step.
_OVERHEAD_S = 0.02
_SMALL, _DECADE = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), (10, 12, 16, 20, 30, 40, 50, 60, 80)
# Larger than the caches of a server.
_MEMORY = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Load:
    """Work per step of a trial, which decides the time scale."""

    world_size: int
    hosts: int
    parameter_bytes: int
    update_passes: int
    """Passes of the optimizer over the parameters' memory (`OptimizerConfig.update_passes`)."""
    step_s: float
    """Replayed compute per step, in emulated seconds."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """CPU and memory costs of one machine."""

    cpu_s_per_byte: float
    """CPU seconds per byte moved over a link, at both ends and in the kernel between them."""
    memory_bytes_per_s: float
    """Bytes per second that one core reads and writes, in memory that is already mapped, while all
    cores do the same."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Time scale with a one-line reason."""

    time_scale: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Resource use that was measured in a trial's timed steps at some time scale."""

    time_scale: float
    step_s: float
    """Measured step time in emulated seconds; too long if ranks waited for cores."""
    cpu_s_per_s: float
    """CPU seconds of all ranks per second of real time."""
    core_wait: float | None
    """Share of the time for which the threads of a rank, added up, waited for a core, for the rank
    that waited longest; None: unknown."""
    fell_behind: float = 0.0
    """Share of the time by which hosts fell behind their devices; negative: they caught up."""
    foreign_cores: float = 0.0
    """Cores that other processes used at the same time."""

    @property
    def cpu_s_per_step(self) -> float:
        """CPU seconds of all ranks per step; the same at every time scale."""
        return self.cpu_s_per_s * self.step_s * self.time_scale


def calibrate(hosts: Sequence[OnHost], links_s: Callable[[], float]) -> Calibration:
    """Measures one transfer between the first two hosts, and the memory, in about two seconds. With
    a single host there is no transfer, and a byte costs nothing. `links_s` is that of
    `transfer_cost`. Raises `RuntimeError` if the hosts cannot reach each other."""
    per_byte = transfer_cost(hosts[0], hosts[1], links_s) if len(hosts) > 1 else 0.0
    cores = usable_cores()
    with ThreadPoolExecutor(cores) as pool:
        times = list(pool.map(_copy_s, [_MEMORY // cores] * cores))
    rate = 2 * (_MEMORY // cores) / max(times)
    return Calibration(cpu_s_per_byte=per_byte, memory_bytes_per_s=rate)


def _copy_s(nbytes: int) -> float:
    """Returns the CPU seconds that this thread needs to copy `nbytes` bytes (best of four)."""
    import numpy as np  # imported here to keep dry runs fast

    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    best = math.inf
    for _ in range(4):
        began = time.thread_time()  # CPU time, so that other programs do not count
        np.copyto(target, source)  # without the GIL: the other threads copy at the same time
        best = min(best, time.thread_time() - began)
    return best


def foreign_cores(seconds: float = 1.0) -> float:
    """Returns the number of cores that other processes and virtual machines use, over `seconds`."""
    began, (own_s, busy_s) = time.monotonic(), _own_and_busy_s()
    time.sleep(seconds)
    elapsed_s, (own_after_s, busy_after_s) = time.monotonic() - began, _own_and_busy_s()
    return max(0.0, (busy_after_s - busy_s) - (own_after_s - own_s)) / elapsed_s


def _own_and_busy_s() -> tuple[float, float]:
    """Returns the CPU seconds of this process, and all busy or stolen seconds of its cores."""
    return time.process_time(), sum(busy + stolen for busy, stolen in cores_s().values())


def at_hand(cores: int, foreign: float, ranks: int) -> float:
    """Returns how many cores `ranks` can use while other processes use `foreign` cores. The result
    is at least a fair share: each rank and each foreign core count as one thread."""
    fair = cores * ranks / (ranks + foreign)
    return cores if foreign <= FOREIGN_CORES else max(cores - foreign, fair)


def choose_time_scale(
    load: Load, network: NetworkProfile, calibration: Calibration, cores: float
) -> Choice:
    """Returns the smallest readable scale at which `cores` cores keep up with the cluster.

    An emulated step takes at least T = max(compute, wire), where wire is the time in which every
    host sends and receives 2 (H-1)/H of the parameters. The step costs C = communication + memory
    CPU seconds at every scale k; k stretches the time in which they may be spent. So

        k >= C / (0.6 cores T)                      the whole step leaves cores idle
        k >= communication / (0.6 cores near)       so does the time in which all links are busy
        k >= serial / (0.1 T)                       update and overhead hardly lengthen the step
        k >= serial / (compute + 0.015 T)           replayed compute makes up for all but 1.5 %

    near is wire without the slower lines between sites: hosts of one site send each other bursts
    at the rate of their own links.
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
    """Returns the smallest readable scale at which a trial would have had enough cores.

    A trial has enough cores if the threads of each rank waited at most 0.6 s per second for a core,
    and the hosts kept step with their devices to within 1.5 % of the time. How busy the threads
    were does not matter, because some of them poll.

    If the threads waited longer, the CPU seconds per step must fit into 60 % of the cores that
    other processes leave. The step time for this is at most compute plus wire time, because a step
    that lacked cores was too long. The scale also grows by the ratio of wait (or deviation) to its
    limit, but at most twofold at once, since both may shrink faster than that. If the kernel does
    not report waits, only the CPU seconds count.

    Args:
        most: largest allowed scale. It is returned instead of a larger scale if that satisfies the
            (weaker) limits of a valid record.
    """
    waited = seen.core_wait is None or seen.core_wait > WAIT_TARGET
    # Each bound: scale for the limits of a first round, scale for those of a record, and reason.
    bounds = [(seen.time_scale, 0.0, "its ranks had the cores that they needed")]
    if waited:
        available_cores = at_hand(cores, seen.foreign_cores, load.world_size)
        step_s = min(seen.step_s, load.step_s + _wire_s(load, network.narrowest_gbps))
        why = (
            f"{seen.cpu_s_per_step:.2g} CPU seconds a step must fit into {BUSY_TARGET:.0%} of "
            f"{available_cores:.2g} cores in {step_s:.2g} s"
        )
        busy = seen.cpu_s_per_step / (BUSY_TARGET * available_cores * step_s)
        bounds.append((busy, busy, why))
    if waited and seen.core_wait is not None:
        longer = min(2.0, seen.core_wait / WAIT_TARGET)
        why = (
            f"at {seen.time_scale:g} a rank's threads waited {seen.core_wait:.2f} s per second for "
            f"a core; at most {WAIT_TARGET:g} s are allowed"
        )
        least = seen.time_scale * seen.core_wait / UNFAITHFUL_WAIT
        bounds.append((seen.time_scale * longer, least, why))
    off = abs(seen.fell_behind)
    if off > BEHIND_TARGET:
        verb = "fell behind" if seen.fell_behind > 0 else "caught up with"
        why = (
            f"at {seen.time_scale:g} hosts {verb} their devices by {off:.1%} of the time; at most "
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
    """Time in which every host sends and receives 2 (H-1)/H of the parameters, as in a ring. In a
    ring, a line between two sites carries no more bytes than a host's own link does."""
    link_bytes = 2 * (load.hosts - 1) / load.hosts * load.parameter_bytes
    return link_bytes * 8 / (gbps * 1e9)


def readable_scales() -> Iterator[float]:
    """Yields 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30, ... without end."""
    yield from _SMALL
    for power in itertools.count():
        yield from (float(number * 10**power) for number in _DECADE)


def check_scale(model_is_replayed: bool, learns: bool, time_scale: float | None) -> None:
    """Raises `UserError` if a model that is not replayed cannot run at this time scale. `learns` is
    True if the trial trains for a fixed time; then `Brake` slows the model down. If `time_scale` is
    None, it is chosen later."""
    if time_scale is None or time_scale == 1 or model_is_replayed:
        return
    if not learns:
        raise UserError(
            f"time_scale: {time_scale:g} slows the links, but not a model that computes for real; "
            "use 1, a training trial (`learn:`), or a replayed model (MODEL@DEVICE)"
        )
    if time_scale < 1:
        raise UserError(
            f"time_scale: must be at least 1 for models that compute for real, got {time_scale:g}"
        )
