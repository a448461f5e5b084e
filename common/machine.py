"""What machine this is, and whether it has memory for the ranks of a trial.

Facts that explain a number, and none that identify a person.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from common import cgroups
from dear.errors import UserError

_PACKAGES = ("torch", "torchvision", "timm", "transformers", "horovod", "numpy")
# Variables that change what the libraries do; never the whole environment, which holds secrets.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
_VARIABLES += ("CUDA_DEVICE_MAX_CONNECTIONS", "LD_PRELOAD", "GLIBC_TUNABLES")
_FAMILIES = ("HOROVOD_", "NCCL_", "OMP_", "KMP_", "MALLOC_", "COMM_CORE_", "DEAR_", "TORCH_NUM_")
"""What all such names begin with."""
_SYSCTLS = (
    *("net/ipv4/tcp_congestion_control", "net/ipv4/tcp_rmem", "net/ipv4/tcp_wmem"),
    *(
        "net/ipv4/tcp_slow_start_after_idle",
        "net/ipv4/tcp_notsent_lowat",
        "net/ipv4/tcp_autocorking",
    ),
    *("net/core/rmem_max", "net/core/wmem_max"),
    *("vm/overcommit_memory", "vm/swappiness", "kernel/sched_autogroup_enabled"),
)
_PRESSURES = ("cpu", "memory", "io")
_CPU = Path("/sys/devices/system/cpu")
_COMM_CORE = Path(__file__).parent / "comm_core"
_ROOT = Path(__file__).parents[1]

_DATA = ("*.md", "docs/records", "tests/mutants/judged.yaml")
"""What people and programs have found, which changes no number."""
_CODE = ("--", ".", *(f":(exclude){path}" for path in _DATA))

# Measured with smaps_rollup on trials of 4 and 16 ranks, torch 2.13 for CPUs.
_SHARED = 350 << 20
"""Interpreter and torch, of which forked ranks have one copy together."""
_PER_RANK = 100 << 20
"""What a rank has for itself, whatever the model."""
_PER_PEER = 1 << 20
"""Buffers of sockets, on both sides."""
# Parameters, gradients, an algorithm's buffers, and while the first repeat is compared with plain
# training its end. Copying out a large gradient takes the rest. (While it is trained plainly there
# is its start, too, but no algorithm yet.)
_COPIES = 5


def machine_card() -> dict[str, Any]:
    """Hardware, system, versions and commit; JSON values only, no torch import."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cpus": sorted(os.sched_getaffinity(0)),
        "cores_online": os.cpu_count(),
        "core_limit": cgroups.cpu_limit(),
        "mhz": _mhz(),
        "governor": _first_line(_CPU / "cpu0/cpufreq/scaling_governor"),
        "turbo": _turbo(),
        "smt": _first_line(_CPU / "smt/active"),
        "huge_pages": _first_line(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "load": list(os.getloadavg()),
        "pressure": {what: _first_line(Path("/proc/pressure") / what) for what in _PRESSURES},
        "gpus": _gpus(),
        "kernel": platform.release(),
        "sysctl": {name: _first_line(Path("/proc/sys") / name) for name in _SYSCTLS},
        "os": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "comm_core": _comm_core(),
        "commit": _commit(),
        "diff": _diff(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_FAMILIES)
        },
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().split("\n")[0]
    except OSError:  # virtual machines have no such file
        return None


def _mhz() -> list[float] | None:
    """Of each core at this moment, where it is visible."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return found or None


def _turbo() -> bool | None:
    """Whether the clock may rise above its nominal frequency; None where it is not visible."""
    boost = _first_line(_CPU / "cpufreq/boost")
    if boost is not None:
        return boost == "1"
    none = _first_line(_CPU / "intel_pstate/no_turbo")
    return None if none is None else none == "0"


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


def _comm_core() -> dict[str, Any] | None:
    """What the compiled part was built for, and a digest of it; None if it is not built."""
    facts, built = _COMM_CORE / "_built_for.json", sorted(_COMM_CORE.glob("_core*.so"))
    if not facts.exists() or not built:
        return None
    digest = hashlib.sha256(built[0].read_bytes()).hexdigest()[:12]
    return {**json.loads(facts.read_text()), "library": built[0].name, "digest": digest}


def _commit() -> str | None:
    """The checked-out commit, with `+dirty` if files differ from it; None outside a checkout.

    Texts and records do not count: they change no number, and making one record changes both.
    """
    commit = _git("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+dirty" if _git("status", "--porcelain", *_CODE) else "")


def _diff() -> str | None:
    """A digest of how the files differ from the commit, new ones too; None if they do not."""
    changed = _git("status", "--porcelain", *_CODE)
    if not changed:
        return None
    digest = hashlib.sha256((_git("diff", "HEAD", "--binary", *_CODE) or "").encode())
    for name in (_git("ls-files", "--others", "--exclude-standard", *_CODE) or "").splitlines():
        with contextlib.suppress(OSError):  # a link to nowhere
            digest.update(name.encode() + (_ROOT / name).read_bytes())
    return digest.hexdigest()[:12]


def _git(*args: str) -> str | None:
    """What git says of this checkout; None if there is none."""
    command = ["git", "-C", str(_ROOT), *args]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def required_bytes(parameter_bytes: int, world_size: int, optimizer_copies: int = 0) -> int:
    """Memory that one rank needs for itself.

    The state of the optimizer is so many tensors per parameter: 0 of plain SGD, 2 of AdamW.
    """
    copies = _COPIES + optimizer_copies
    return _PER_RANK + copies * parameter_bytes + _PER_PEER * (world_size - 1)


def ranks_bytes(parameter_bytes: int, ranks: int, optimizer_copies: int = 0) -> int:
    """Memory that all ranks of a job on this machine need, together."""
    return _SHARED + ranks * required_bytes(parameter_bytes, ranks, optimizer_copies)


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
        return ranks_bytes(parameter_bytes, count * ranks_per_host, optimizer_copies)

    if needed(hosts) <= available:
        return
    fitting = next((n for n in range(hosts - 1, 0, -1) if needed(n) <= available), 0)
    advice = f"{fitting} would fit" if fitting else "not even 1 would fit"
    rank = required_bytes(parameter_bytes, hosts * ranks_per_host, optimizer_copies)
    raise UserError(
        f"cluster.hosts: {hosts} hosts of {ranks_per_host} x {gib(rank)} (ranks x memory) need "
        f"{gib(needed(hosts))} of memory, and {gib(available)} are available; {advice}"
    )


def available_bytes() -> int:
    """What this process and its children may still use: the machine's rest or its group's."""
    import psutil  # only here: the check of a GPU machine has the standard library alone

    return min([psutil.virtual_memory().available, *cgroups.memory_rests()])


def gib(size: int) -> str:
    """For people."""
    return f"{size / 2**30:.1f} GiB"
