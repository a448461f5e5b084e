"""BlueFog's commands: `bfrun -np 4 python train.py`, and `ibfrun start -np 4` for a notebook.

torchrun starts ranks on this machine; Open MPI's mpirun starts ranks on several machines. For a
notebook, ipyparallel starts engines, and `dear.comm.environment.assign_ranks` makes these the
ranks of one job.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import dear
from dear.errors import UserError
from dear.options import at_least

_INFINIBAND = ["--mca", "pml", "ucx"]
_ETHERNET = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self,vader"]
_OURS = ("BLUEFOG_", "COMM_CORE_", "DEAR_", "MASTER_")
_PASSED_ON = (*_OURS, "NCCL_", "OMP_", "CUDA_", "PYTHONPATH")
"""Prefixes of the environment variables that ranks on other hosts get as well."""


def words(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the command that `bfrun` runs, and the variables that it sets.

    Raises:
        UserError: no command, no such program or hostfile, or hosts are given without an mpirun.
    """
    options = _parser().parse_args(arguments)
    if not options.command:
        raise UserError("bfrun: no command given; for example: bfrun -np 2 python train.py")
    at_least("bfrun: -np", options.np, 1)
    env = {}
    if options.timeline_filename:
        env["BLUEFOG_TIMELINE"] = options.timeline_filename
    if options.host and options.hostfile:
        raise UserError("bfrun: give hosts by -H or by -hostfile, not both")
    if options.host or options.hostfile:
        return [*_mpirun(options, env), *options.command], env
    for name in ("ssh_port", "network_interface", "extra_mpi_flags", "prefix"):
        if getattr(options, name):
            raise UserError(f"bfrun: --{name.replace('_', '-')} needs -H or -hostfile")
    if options.use_infiniband:
        raise UserError("bfrun: --use-infiniband needs -H or -hostfile")
    if shutil.which(options.command[0]) is None:
        raise UserError(f"bfrun: {options.command[0]}: no such program")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    return [*torchrun, "--nproc-per-node", str(options.np), *options.command], env


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bfrun", description="Starts the ranks of a job.")
    parser.add_argument("-v", "--version", action="version", version=dear.__version__)
    parser.add_argument("-np", "--num-proc", dest="np", type=int, default=1, help="ranks")
    parser.add_argument("-p", "--ssh-port", type=int, help="port of ssh on the other hosts")
    parser.add_argument("-H", "--host", help="hosts with their slots: h1:4,h2:4")
    parser.add_argument("-hostfile", "--hostfile", help="the same in a file of Open MPI's form")
    parser.add_argument("--network-interface", help="interfaces for TCP, such as eth0,eth1")
    parser.add_argument("--use-infiniband", action="store_true", help="UCX moves MPI's messages")
    parser.add_argument(
        "--extra-mpi-flags", default="", help="extra flags for mpirun, as one argument"
    )
    parser.add_argument("--prefix", help="folder of Open MPI on the other hosts")
    parser.add_argument("--timeline-filename", help="prefix of a timeline of each rank")
    parser.add_argument("--verbose", action="store_true", help="print the command")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def _mpirun(options: argparse.Namespace, env: dict[str, str]) -> list[str]:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise UserError("bfrun: other hosts need Open MPI's mpirun, which is not on the PATH")
    if options.hostfile and not Path(options.hostfile).is_file():
        raise UserError(f"bfrun: hostfile {options.hostfile}: no such file")
    command = [mpirun, "-np", str(options.np), "--bind-to", "none"]
    command += ["-H", options.host] if options.host else ["--hostfile", options.hostfile]
    command += _INFINIBAND if options.use_infiniband else _ETHERNET
    if options.network_interface:
        for name in ("btl_tcp_if_include", "oob_tcp_if_include"):
            command += ["--mca", name, options.network_interface]
    if options.ssh_port:
        command += ["--mca", "plm_rsh_args", f"-p {options.ssh_port}"]
    if options.prefix:
        command += ["--prefix", options.prefix]
    for name in sorted({*env, *(name for name in os.environ if name.startswith(_PASSED_ON))}):
        command += ["-x", name]
    try:
        return [*command, *shlex.split(options.extra_mpi_flags)]
    except ValueError as error:
        raise UserError(f"bfrun: --extra-mpi-flags: {error}") from None


def notebook_words(arguments: Sequence[str]) -> list[str]:
    """Returns the command that `ibfrun` runs.

    Raises:
        UserError: no engines, or ipyparallel is not installed.
    """
    parser = argparse.ArgumentParser(prog="ibfrun", description="Engines for a notebook's ranks.")
    parser.add_argument("-v", "--version", action="version", version=dear.__version__)
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("-np", "--num-proc", dest="np", type=int, default=1, help="ranks")
    parser.add_argument("--ipython-profile", default="bluefog")
    options = parser.parse_args(arguments)
    at_least("ibfrun: -np", options.np, 1)
    if importlib.util.find_spec("ipyparallel") is None:
        raise UserError(
            "ibfrun: ipyparallel is not installed: pip install 'dear-bench[notebook]', or in the "
            "project's folder pip install '.[notebook]'"
        )
    command = [sys.executable, "-m", "ipyparallel.cluster", options.action]
    command += ["--profile", options.ipython_profile]
    if options.action == "start":
        command += ["-n", str(options.np), "--daemonize"]
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Replaces this process by the program on all ranks. On an error, prints it and returns 2."""
    given = sys.argv[1:] if arguments is None else arguments
    return _become(lambda: words(given), loud="--verbose" in given)


def interactive(arguments: Sequence[str] | None = None) -> int:
    """Replaces this process by the command; if that fails, prints one line and returns 2."""
    given = sys.argv[1:] if arguments is None else arguments
    return _become(lambda: (notebook_words(given), {}))


def _become(make: Callable[[], tuple[list[str], dict[str, str]]], loud: bool = False) -> int:
    try:
        command, env = make()
        if loud:
            print(shlex.join(command), flush=True)
        os.execvpe(command[0], command, {**os.environ, **env})
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {Path(command[0]).name}: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
