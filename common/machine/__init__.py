"""Description of this machine, and a check that its memory suffices for the ranks of a trial.

The description has facts that explain a measurement, and none that identify a person.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import dear
from common.machine import cgroups
from common.paths import INSTALLED, ROOT
from dear.comm.backends import comm_core_folder
from dear.errors import UserError

_PACKAGES = ("torch", "torchvision", "timm", "transformers", "horovod", "numpy")
# Variables that change the behaviour of libraries. The whole environment may hold secrets.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
_VARIABLES += ("CUDA_DEVICE_MAX_CONNECTIONS", "LD_PRELOAD", "GLIBC_TUNABLES")
_FAMILIES = ("HOROVOD_", "NCCL_", "OMP_", "KMP_", "MALLOC_", "COMM_CORE_", "DEAR_", "TORCH_NUM_")
"""Prefixes of further variables that are recorded."""
_OURS = ("DEAR_SANDBOX", "DEAR_VIRTUAL_HOSTS")
"""Variables of a sandbox, which differ between two sandboxes and change no measurement."""
_SECRET = re.compile("SECRET(?!_FILE)|TOKEN|PASSW|_KEY", re.IGNORECASE)
"""Words of variables that are not recorded although they belong to a family. The name of a file
that holds a secret is none (COMM_CORE_SECRET_FILE)."""
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

_DATA = ("*.md", "docs/records", "tests/mutants/judged.yaml")
"""Texts and records: changing them changes no measurement."""
_CODE = ("--", ".", *(f":(exclude){path}" for path in _DATA))

# Measured with smaps_rollup on trials of 4 and 16 ranks, torch 2.13 for CPUs.
_SHARED = 350 << 20
"""Bytes of the interpreter and torch; forked ranks share one copy."""
_PER_RANK = 100 << 20
"""Bytes that a rank needs for itself, independent of the model."""
_PER_PEER = 1 << 20
"""Bytes of the socket buffers of a connection to another rank, on both sides."""
# The copies are parameters, gradients, the algorithm's buffers, the final state of plain training
# (kept while the first repeat is checked against it), and a copy of a large gradient. Plain
# training also keeps its initial state, but no algorithm has buffers at that time.
_COPIES = 5


def machine_card() -> dict[str, Any]:
    """Returns hardware, system, versions and commit as JSON values, without importing torch."""
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
        "pressure": {kind: _first_line(Path("/proc/pressure") / kind) for kind in _PRESSURES},
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
        "environment": library_variables(),
    }


def library_variables() -> dict[str, str]:
    """Returns the variables of the environment that change the behaviour of libraries."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES
        or (name.startswith(_FAMILIES) and name not in _OURS and not _SECRET.search(name))
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").split("\n")[0]
    except OSError:  # virtual machines lack some of these files
        return None


def _mhz() -> list[float] | None:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return clocks or None


def _turbo() -> bool | None:
    boost = _first_line(_CPU / "cpufreq/boost")
    if boost is not None:
        return boost == "1"
    no_turbo = _first_line(_CPU / "intel_pstate/no_turbo")
    return None if no_turbo is None else no_turbo == "0"


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no NVIDIA driver
        return []
    return listing.stdout.strip().splitlines()


def version(package: str) -> str | None:
    """Returns the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _comm_core() -> dict[str, Any] | None:
    """Returns the build facts of the comm core and a digest of its library; None if not built."""
    folder = comm_core_folder()
    built = sorted(folder.glob("_core*.so")) if folder else []
    if not built:
        return None
    facts = built[0].with_name("_built_for.json")
    digest = hashlib.sha256(built[0].read_bytes()).hexdigest()[:12]
    return {**json.loads(facts.read_bytes()), "library": built[0].name, "digest": digest}


def _commit() -> str | None:
    """Returns the checked-out commit, with `+dirty` if files differ, or the installed version.

    Returns None for a copy of the files without git.
    Texts and records are ignored: they change no measurement, and making a record changes both.
    """
    if INSTALLED:  # a repository around the virtual environment is another project's
        return f"v{dear.__version__}"
    commit = _git("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+dirty" if _git("status", "--porcelain", *_CODE) else "")


def _diff() -> str | None:
    """Returns a digest of the changes since the commit, new files included; None if none."""
    changed = None if INSTALLED else _git("status", "--porcelain", *_CODE)
    if not changed:
        return None
    digest = hashlib.sha256((_git("diff", "HEAD", "--binary", *_CODE) or "").encode())
    for name in (_git("ls-files", "--others", "--exclude-standard", *_CODE) or "").splitlines():
        with contextlib.suppress(OSError):  # a broken symbolic link
            digest.update(name.encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()[:12]


def _git(*args: str) -> str | None:
    command = ["git", "-C", str(ROOT), *args]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def required_bytes(parameter_bytes: int, world_size: int, optimizer_copies: int = 0) -> int:
    """Returns the bytes of memory that one rank needs for itself.

    Args:
        optimizer_copies: state tensors of the optimizer per parameter: 0 for plain SGD, 2 for
            AdamW.
    """
    copies = _COPIES + optimizer_copies
    return _PER_RANK + copies * parameter_bytes + _PER_PEER * (world_size - 1)


def ranks_bytes(parameter_bytes: int, ranks: int, optimizer_copies: int = 0) -> int:
    """Returns the bytes of memory that all ranks of a job on this machine need together."""
    return _SHARED + ranks * required_bytes(parameter_bytes, ranks, optimizer_copies)


def check_memory(
    parameter_bytes: int,
    *,
    hosts: int,
    ranks_per_host: int,
    optimizer_copies: int = 0,
    available: int | None = None,
) -> None:
    """Checks that the ranks of an emulated cluster fit into this machine's memory.

    Args:
        available: bytes of free memory; None measures them.

    Raises:
        UserError: they do not fit. The message has the bytes needed, the bytes available and the
            number of hosts that would fit.
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
    """Returns the bytes that this process and its children may still allocate: the least of the
    machine's free memory and the limits of the process's control groups."""
    import psutil  # not at the top: the GPU check may use the standard library only

    return min([psutil.virtual_memory().available, *cgroups.memory_rests()])


def gib(size: int) -> str:
    """Formats bytes as GiB with one decimal."""
    return f"{size / 2**30:.1f} GiB"
