"""What machine this is, and whether it has memory for the ranks of a trial.

Facts that explain a number, and none that identify a person.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dear.errors import UserError

_PACKAGES = ("torch", "torchvision", "timm", "transformers", "horovod", "numpy")
# Variables that change what the libraries do; never the whole environment, which holds secrets.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_VARIABLES += ("NCCL_IB_DISABLE", "CUDA_VISIBLE_DEVICES")

# Measured with smaps_rollup on trials of 4 and 16 ranks, torch 2.13 for CPUs.
_SHARED = 350 << 20
"""Interpreter and torch, of which forked ranks have one copy together."""
_PER_RANK = 100 << 20
"""What a rank has for itself, whatever the model."""
_PER_PEER = 1 << 20
"""Buffers of sockets, on both sides."""
# Parameters, gradients, an algorithm's buffers, and while the first repeat is compared with plain
# training its start and its end. Copying out a large gradient takes the rest.
_COPIES = 6
# v1 and v2 of control groups; both may be mounted.
_GROUP_ROOTS = {"memory": Path("/sys/fs/cgroup/memory"), "": Path("/sys/fs/cgroup")}


def machine_card() -> dict[str, Any]:
    """Hardware, system, versions and commit; JSON values only, no torch import."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "gpus": _gpus(),
        "kernel": platform.release(),
        "os": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "commit": _commit(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().split("\n")[0]
    except OSError:  # virtual machines have no such file
        return None


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no NVIDIA driver here
        return []
    return listing.stdout.strip().splitlines()


def version(package: str) -> str | None:
    """That is installed, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checked-out commit, with `+dirty` if files differ from it; None outside a checkout."""
    root = Path(__file__).parents[1]

    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def required_bytes(parameter_bytes: int, world_size: int, optimizer_copies: int = 0) -> int:
    """Memory that one rank needs for itself.

    The state of the optimizer is so many tensors per parameter: 0 of plain SGD, 2 of AdamW.
    """
    copies = _COPIES + optimizer_copies
    return _PER_RANK + copies * parameter_bytes + _PER_PEER * (world_size - 1)


def check_memory(
    parameter_bytes: int,
    *,
    hosts: int,
    ranks_per_host: int,
    optimizer_copies: int = 0,
    available: int | None = None,
) -> None:
    """Refuses a cluster whose ranks do not fit into this machine's memory.

    Args:
        available: bytes; None asks this machine.

    Raises:
        UserError: with what is needed, what there is, and how many hosts would fit.
    """
    if available is None:
        available = available_bytes()

    def needed(count: int) -> int:
        world = count * ranks_per_host
        return _SHARED + world * required_bytes(parameter_bytes, world, optimizer_copies)

    if needed(hosts) <= available:
        return
    fitting = next((n for n in range(hosts - 1, 0, -1) if needed(n) <= available), 0)
    advice = f"{fitting} would fit" if fitting else "not even 1 would fit"
    rank = required_bytes(parameter_bytes, hosts * ranks_per_host, optimizer_copies)
    raise UserError(
        f"cluster.hosts: {hosts} hosts of {ranks_per_host} x {_gib(rank)} (ranks x memory) need "
        f"{_gib(needed(hosts))} of memory, and {_gib(available)} are available; {advice}"
    )


def available_bytes() -> int:
    """What this process and its children may still use: the machine's rest or its group's."""
    import psutil  # only here: the check of a GPU machine has the standard library alone

    return min([psutil.virtual_memory().available, *_group_rests()])


def _group_rests() -> Iterator[int]:
    """For each control group that this process is in, and those above, what its limit leaves."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in _GROUP_ROOTS:
            continue
        root = _GROUP_ROOTS[controllers]
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder == root.parent:
                break
            rest = group_rest(folder, "limit_in_bytes" if controllers else "max")
            if rest is not None:
                yield rest


def group_rest(folder: Path, limit_name: str) -> int | None:
    """What the control group's limit leaves, in bytes; None if it has none.

    Args:
        limit_name: `max` in version 2, `limit_in_bytes` in version 1.
    """
    used_name = "current" if limit_name == "max" else "usage_in_bytes"
    try:
        limit = (folder / f"memory.{limit_name}").read_text().strip()
        used = int((folder / f"memory.{used_name}").read_text())
        statistics = (folder / "memory.stat").read_text()
    except OSError:  # the root group, or a group whose files are not visible from in here
        return None
    if limit == "max":
        return None
    values = dict(line.split() for line in statistics.splitlines())
    # v1 counts the groups below only in the `total_` values.
    cached = int(values.get("total_inactive_file", values.get("inactive_file", 0)))
    return max(0, int(limit) - used + cached)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
