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
from common.emulation.flow import OnHost, transfer_cost
from dear.errors import UserError

BUSY_TARGET = 0.6
"""Share of all cores that a step may keep busy; above it ranks wait for cores, not for links."""
WAIT_TARGET = 0.6
"""Seconds that a rank's threads, all together, may wait for a core per second in a cell's first
round; later rounds must stay below the 0.7 from which a record is unfaithful."""
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


def choose_time_scale(
    load: Load, network: NetworkProfile, calibration: Calibration, cores: int
) -> Choice:
    """The smallest readable scale at which `cores` cores keep up with the emulated cluster.

    An emulated step takes at least T = max(compute, wire), where wire is the time in which every
    host sends and receives 2 (H-1)/H of the parameters. It costs C = communication + memory CPU
    seconds, whatever the scale k; k stretches the time in which they may be spent. So

        k >= C / (0.6 cores T)                      the whole step leaves cores idle
        k >= communication / (0.6 cores near)       also while all links are busy
        k >= serial / (0.1 T)                       update and overhead hardly lengthen the step

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
    share = f"{BUSY_TARGET:.0%} of {cores} cores"
    why = f"{cpu:.2g} CPU seconds a step must fit into {share} in {step_s:.2g} s"
    bounds = [(cpu / (BUSY_TARGET * cores * step_s), why)]
    why = f"{serial_s:.2g} s of update and Python must stay within {SERIAL_TARGET:.0%} of "
    bounds.append((serial_s / (SERIAL_TARGET * step_s), f"{why}{step_s:.2g} s"))
    if near_s:
        why = f"{communication_cpu:.2g} CPU seconds of communication must fit into {share} in "
        needed = communication_cpu / (BUSY_TARGET * cores * near_s)
        bounds.append((needed, f"{why}{near_s:.2g} s of busy links"))
    needed, why = max(bounds)
    scale = next(scale for scale in readable_scales() if scale >= needed)
    reason = f"{why}, on this machine: at least {needed:.1f} times slower than real time"
    if scale == 1:
        reason = f"{cpu:.2g} CPU seconds a step fit into {step_s:.2g} s of {cores} cores"
    return Choice(time_scale=scale, reason=reason)


def needed_scale(seen: Seen, load: Load, network: NetworkProfile, cores: int) -> Choice:
    """The smallest readable scale at which a trial would have had the cores that it needs.

    It has them where its ranks' threads waited at most 0.6 seconds per second for one, however busy
    they were: some only look whether there is something to do. Otherwise it needs the scale at
    which its CPU seconds per step fit into 60 % of the cores, where a step that lacked cores was
    too long: of it no more counts than computing and sending one after the other. And it needs a
    scale that is as much larger as the waits were too long, but no more than twice at once, for
    they shrink faster. Where the kernel does not tell of waits, the CPU seconds alone count.
    """
    if seen.core_wait is not None and seen.core_wait <= WAIT_TARGET:
        return Choice(time_scale=seen.time_scale, reason="no rank waited long for a core")
    step_s = min(seen.step_s, load.step_s + _wire_s(load, network.narrowest_gbps))
    busy = seen.cpu_s_per_step / (BUSY_TARGET * cores * step_s)
    why = (
        f"{seen.cpu_s_per_step:.2g} CPU seconds a step must fit into {BUSY_TARGET:.0%} of {cores} "
        f"cores in {step_s:.2g} s"
    )
    bounds = [(busy, why)]
    if seen.core_wait is not None:
        longer = min(2.0, seen.core_wait / WAIT_TARGET)
        why = (
            f"at {seen.time_scale:g} a rank's threads waited {seen.core_wait:.2f} s per second for "
            f"a core, of which {WAIT_TARGET:g} are allowed"
        )
        bounds.append((seen.time_scale * longer, why))
    needed, why = max(bounds)
    scale = next(scale for scale in readable_scales() if scale >= needed)
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
