"""Control groups of this process: their limits on memory and cores, and the time throttled."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

# Versions 1 and 2 of control groups; both may be mounted here.
_ROOT = Path("/sys/fs/cgroup")
_NS_PER_S, _US_PER_S = 1e9, 1e6


def memory_rests() -> Iterator[int]:
    """Yields the bytes left under the memory limit of each group and of the groups above it."""
    for folder, version in _groups("memory"):
        rest = group_rest(folder, "max" if version == 2 else "limit_in_bytes")
        if rest is not None:
            yield rest


def group_rest(folder: Path, limit_name: str) -> int | None:
    """Returns the bytes left under a control group's memory limit; None if it has no limit.

    File cache that the kernel can reclaim counts as free.

    Args:
        limit_name: `max` in version 2, `limit_in_bytes` in version 1.
    """
    used_name = "current" if limit_name == "max" else "usage_in_bytes"
    limit = _text(folder / f"memory.{limit_name}")
    used, statistics = _text(folder / f"memory.{used_name}"), _values(folder / "memory.stat")
    if limit is None or used is None or limit == "max":
        return None
    # Version 1 includes child groups only in the `total_` values.
    cached = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return max(0, int(limit) - int(used) + cached)


def cpu_limit() -> float | None:
    """Returns the cores that all processes of this process's groups may use together; None: all."""
    limits = [_cores(folder) for folder, _ in _groups("cpu")]
    return min((cores for cores in limits if cores is not None), default=None)


def usable_cores() -> int:
    """Returns how many cores this process may use: the lesser of its affinity mask and the limit
    of its groups, at least 1."""
    limit = cpu_limit()
    mask = len(os.sched_getaffinity(0))
    return mask if limit is None else max(1, min(mask, math.ceil(limit)))


def throttled_s() -> float:
    """Returns the seconds that CPU limits have throttled this process's groups since creation."""
    total = 0.0
    for folder, _ in _groups("cpu"):
        values = _values(folder / "cpu.stat")
        total += values.get("throttled_time", 0) / _NS_PER_S
        total += values.get("throttled_usec", 0) / _US_PER_S
    return total


def _cores(folder: Path) -> float | None:
    cpu_max = _text(folder / "cpu.max")
    if cpu_max is None:
        quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    else:
        quota, _, period = cpu_max.partition(" ")
    if not quota or not period or quota == "max" or int(quota) < 0:
        return None
    return int(quota) / int(period)


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yields the folders of this process's groups, and of the groups above them, in which
    `controller` may be enabled, each with its version of control groups."""
    for line in (_text(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = next((mount for mount in _mounts(controllers) if mount.is_dir()), None)
        if root is None:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == root.parent:
                break
            yield folder, 1 if controllers else 2


def _mounts(controllers: str) -> list[Path]:
    """Returns the possible mount points of a hierarchy. Version 2 names no controllers."""
    if not controllers:
        return [_ROOT / "unified", _ROOT]
    return [_ROOT / name for name in (controllers, *controllers.split(","))]


def _values(path: Path) -> dict[str, int]:
    lines = (line.split() for line in (_text(path) or "").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # the root group lacks the file, or this container cannot see it
        return None
