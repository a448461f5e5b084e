"""Verb `doctor`: checks this machine and suggests a fix for each problem.

If it takes less than a second, a check does what a sweep will do (creates a namespace, opens a
port). No check imports torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from common import machine
from common.emulation import links, sandbox
from common.harness.experiment import Experiment
from common.harness.experiment_file import load, unable_to_emulate
from common.harness.running.fabric import misfit
from common.harness.verbs import Status
from common.launch.mpirun import find_mpirun
from common.machine.cgroups import usable_cores
from common.paths import BUILD, COMMAND, EXPERIMENTS, HOROVOD, INSTALLED, ROOT
from dear.comm.backends import missing_comm_core
from dear.comm.runtime import address_of, interface_towards
from dear.errors import UserError
from dear.training.algorithm import algorithm_class

_LEAST_DISK, _LEAST_PORTS = 1 << 30, 64
_BUSY = 0.5
"""Smallest load per core that `doctor` reports as load by other programs."""
_REAL_TIME = """import os
try:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
except PermissionError:
    raise SystemExit(1)
"""
_SOMEWHERE = "192.0.2.1"  # an address for documentation: nothing is sent


HELP = "check this machine and suggest a fix for each problem"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def main(options: argparse.Namespace) -> int:
    """Prints all findings; the exit status is 1 if the default sweep cannot run here."""
    findings = list(examine(options.logs))
    bad = [finding.what for finding in findings if finding.level == "FAIL"]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return Status.FAILED if bad else Status.OK
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.level:7}  {finding.what:{width}}  {finding.state}")
        if finding.fix is not None:
            print(f"{'':7}  {'':{width}}  -> {finding.fix}")
    if bad:
        print(f"the default sweep cannot run: {', '.join(bad)}")
        return Status.FAILED
    print(f"the default sweep can run: {COMMAND}")
    return 0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    level: Literal["ok", "note", "missing", "FAIL"]
    """Severity. `note`: results may be worse; `missing`: something optional cannot run; `FAIL`: the
    default sweep cannot run."""
    what: str
    state: str
    fix: str | None = None


def examine(logs: Path) -> Iterator[Finding]:
    """Yields the findings of all checks.

    Args:
        logs: folder of results.
    """
    card = machine.machine_card()
    yield _python()
    yield _torch(card["packages"]["torch"])
    yield _core()
    yield _compiler()
    why = unable_to_emulate()
    experiment = load(EXPERIMENTS / f"{'quick' if why else 'emulated-quick'}.yaml")
    yield from _emulation(why)
    yield _memory(experiment)
    yield from _cores(card)
    yield from _network()
    yield _disk(logs)
    yield from _optional(card)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    python = ROOT / ".venv/bin/python"
    if python.exists() and Path(sys.prefix).resolve() != python.parents[1].resolve():
        return Finding(
            level="note",
            what="Python",
            state=f"{version} of {sys.prefix}, not the project's",
            fix=f"use {python}",
        )
    return Finding(level="ok", what="Python", state=f"{version} ({sys.prefix})")


def _torch(version: str | None) -> Finding:
    if version is None:
        return Finding(
            level="FAIL",
            what="torch",
            state="not installed",
            fix="pip install torch" if INSTALLED else "scripts/setup.sh .venv",
        )
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers < (2, 11):
        return Finding(level="FAIL", what="torch", state=version, fix="install 2.11 or newer")
    return Finding(level="ok", what="torch", state=version)


def _core() -> Finding:
    reason = missing_comm_core()
    if reason is not None:
        fix = f"{BUILD}; until then trials run over Gloo, and their records say so"
        return Finding(level="missing", what="comm core", state=reason, fix=fix)
    return Finding(level="ok", what="comm core", state="built for this torch")


def _compiler() -> Finding:
    name = os.environ.get("CXX", "c++")
    path = shutil.which(name)
    if path is None:
        fix = "only to build the comm core again: apt-get install g++"
        return Finding(level="missing", what="compiler", state=f"no {name}", fix=fix)
    return Finding(level="ok", what="compiler", state=path)


def _emulation(why: str | None) -> Iterator[Finding]:
    if why:
        fix = "the default sweep runs on local processes then"
        yield Finding(level="missing", what="virtual hosts", state=why, fix=fix)
        return
    yield Finding(level="ok", what="virtual hosts", state="namespaces and tc are there")
    if sandbox.run([sys.executable, "-I", "-S", "-c", _REAL_TIME]) == 0:
        yield Finding(level="ok", what="priority", state="real-time, for threads that send")
    else:
        state = "ordinary, so steps of virtual hosts may be a little too long"
        fix = "run as root, or let the administrator permit `ulimit -r 10` (limits.conf: rtprio)"
        yield Finding(level="note", what="priority", state=state, fix=fix)
    if links.has_netem():
        state = "by the kernel (netem, tbf), with sites by the switch"
        yield Finding(level="ok", what="links' latency", state=state)
    else:
        state = "by the switch in user space; this kernel has no netem"
        yield Finding(level="ok", what="links' latency", state=state)


def _memory(experiment: Experiment) -> Finding:
    reasons = [reason for reason in map(misfit, experiment.trials()) if reason]
    there = machine.gib(machine.available_bytes())
    if reasons:
        fix = "end other programs, or use fewer hosts (--hosts 2)"
        return Finding(level="FAIL", what="memory", state=reasons[0], fix=fix)
    return Finding(level="ok", what="memory", state=f"{there} are available")


def _cores(card: dict) -> Iterator[Finding]:
    cores = usable_cores()
    if cores < 2:
        fix = "emulated clusters run slower then, and real ranks share the core"
        yield Finding(level="note", what="cores", state=f"{cores}", fix=fix)
    else:
        yield Finding(level="ok", what="cores", state=f"{cores} x {card['cpu']}")
    load = os.getloadavg()[0] / cores
    if load > _BUSY:
        state, fix = f"{load:.2f} per core", "end other programs: numbers suffer, and are flagged"
        yield Finding(level="note", what="load", state=state, fix=fix)
    else:
        yield Finding(level="ok", what="load", state=f"{load:.2f} per core")
    governor = card["governor"]
    if governor not in (None, "performance"):
        fix = "cpupower frequency-set -g performance"
        yield Finding(level="note", what="governor", state=governor, fix=fix)
    clock = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = clock.read_text(encoding="utf-8").strip() if clock.exists() else "unknown"
    if source in ("hpet", "acpi_pm", "jiffies"):
        fix = "a slow clock: boot with clocksource=tsc if the machine allows"
        yield Finding(level="note", what="clock", state=source, fix=fix)
    else:
        yield Finding(level="ok", what="clock", state=source)


def _network() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        fix = "only ranks on several hosts need it: /etc/hosts, or ETH_INTERFACE in envs.conf"
        yield Finding(level="note", what="host name", state=f"{name} does not resolve", fix=fix)
    else:
        yield Finding(level="ok", what="host name", state=f"{name} is {address}")
    chosen = interface_towards(_SOMEWHERE)
    if chosen is None:
        state, fix = "no way to other hosts", "only trials on several hosts need one"
        yield Finding(level="missing", what="interface", state=state, fix=fix)
    else:
        state = f"{chosen} ({address_of(chosen)}) towards other hosts, lo on this one"
        yield Finding(level="ok", what="interface", state=state)
    low, high = map(
        int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()
    )
    free = 0
    for _ in range(_LEAST_PORTS):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 0))
            except OSError:
                break
            free += 1
    if free < _LEAST_PORTS:
        fix = "something holds all ports; see ss -tan"
        yield Finding(level="FAIL", what="ports", state="none is free", fix=fix)
    else:
        yield Finding(level="ok", what="ports", state=f"{low} to {high} for what ranks open")


def _disk(logs: Path) -> Finding:
    place = next(path for path in (logs, *logs.resolve().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if not place.is_dir() or not os.access(place, os.W_OK):
        fix = "use --logs FOLDER"
        return Finding(level="FAIL", what="results", state=f"cannot write to {place}", fix=fix)
    if free < _LEAST_DISK:
        state, fix = f"{machine.gib(free)} free in {place}", "make room, or use --logs FOLDER"
        return Finding(level="FAIL", what="results", state=state, fix=fix)
    return Finding(level="ok", what="results", state=f"{machine.gib(free)} free in {place}")


def _optional(card: dict) -> Iterator[Finding]:
    reason = algorithm_class("horovod").unavailable()
    if reason:
        yield Finding(level="missing", what="Horovod", state=reason, fix=HOROVOD)
    else:
        yield Finding(level="ok", what="Horovod", state=importlib.metadata.version("horovod"))
    try:
        mpirun = find_mpirun()
    except UserError as error:
        state = str(error).removeprefix("launcher mpirun: ").partition(";")[0]
        fix = f"apt-get install openmpi-bin libopenmpi-dev, then {BUILD}"
        yield Finding(level="missing", what="MPI", state=state, fix=fix)
    else:
        yield Finding(level="ok", what="MPI", state=f"Open MPI {mpirun.major}: {mpirun.path}")
    if not card["gpus"]:
        state, fix = "none: CPUs, and GPUs' recorded compute", "only `device: cuda` needs one"
        yield Finding(level="missing", what="GPUs", state=state, fix=fix)
    elif "+cpu" in (card["packages"]["torch"] or ""):
        state, fix = f"{len(card['gpus'])}, but torch is for CPUs", "install a torch with CUDA"
        yield Finding(level="note", what="GPUs", state=state, fix=fix)
    else:
        yield Finding(level="ok", what="GPUs", state="; ".join(card["gpus"]))
