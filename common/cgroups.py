"""The control groups that this process is in, and what they allow it: memory, cores, throttling."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

# v1 and v2 of control groups; both may be mounted.
_ROOT = Path("/sys/fs/cgroup")
_NS_PER_S, _US_PER_S = 1e9, 1e6


def memory_rests() -> Iterator[int]:
    """For each group and those above, what its limit of memory leaves, in bytes."""
    for folder, version in _groups("memory"):
        rest = group_rest(folder, "max" if version == 2 else "limit_in_bytes")
        if rest is not None:
            yield rest


def group_rest(folder: Path, limit_name: str) -> int | None:
    """What the control group's limit leaves, in bytes; None if it has none.

    Args:
        limit_name: `max` in version 2, `limit_in_bytes` in version 1.
    """
    used_name = "current" if limit_name == "max" else "usage_in_bytes"
    limit = _text(folder / f"memory.{limit_name}")
    used, statistics = _text(folder / f"memory.{used_name}"), _values(folder / "memory.stat")
    if limit is None or used is None or limit == "max":
        return None
    # v1 counts the groups below only in the `total_` values.
    cached = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return max(0, int(limit) - int(used) + cached)


def cpu_limit() -> float | None:
    """Cores that this process and all others of its groups may use together; None: all."""
    found = [_cores(folder) for folder, _ in _groups("cpu")]
    return min((cores for cores in found if cores is not None), default=None)


def usable_cores() -> int:
    """Cores that this process may use, at least one: its affinity mask, and what a limit leaves."""
    limit = cpu_limit()
    mask = len(os.sched_getaffinity(0))
    return mask if limit is None else max(1, min(mask, math.ceil(limit)))


def throttled_s() -> float:
    """Seconds for which a limit has kept this process's groups from running, since they exist."""
    total = 0.0
    for folder, _ in _groups("cpu"):
        values = _values(folder / "cpu.stat")
        total += values.get("throttled_time", 0) / _NS_PER_S
        total += values.get("throttled_usec", 0) / _US_PER_S
    return total


def _cores(folder: Path) -> float | None:
    both = _text(folder / "cpu.max")
    if both is None:
        quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    else:
        quota, _, period = both.partition(" ")
    if not quota or not period or quota == "max" or int(quota) < 0:
        return None
    return int(quota) / int(period)


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of this process's groups that the controller counts by, with their version."""
    for line in (_text(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = next((place for place in _mounts(controllers) if place.is_dir()), None)
        if root is None:
            continue
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder == root.parent:
                break
            yield folder, 1 if controllers else 2


def _mounts(controllers: str) -> list[Path]:
    """Where a hierarchy may be mounted; that of version 2 has no controllers in its name."""
    if not controllers:
        return [_ROOT / "unified", _ROOT]
    return [_ROOT / name for name in (controllers, *controllers.split(","))]


def _values(path: Path) -> dict[str, int]:
    lines = (line.split() for line in (_text(path) or "").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # the root group, or one whose files are not visible from in here
        return None
