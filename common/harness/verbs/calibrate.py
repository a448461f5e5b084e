"""Verb `calibrate`: measures what collectives cost on a cluster, and writes a network file.

    python benchmarks.py calibrate --ranks 4 -o configs/networks/here.yaml
    torchrun --nproc-per-node 8 benchmarks.py calibrate -o configs/networks/here.yaml
    python benchmarks.py calibrate --from-nccl-tests all.log -o configs/networks/here.yaml

Under a launcher (torchrun, mpirun, srun) each process is one rank of the measurement; without a
launcher, processes are started on this machine, or on virtual hosts. Logs may be of any version of
nccl-tests, with or without header lines. The cost is fitted by regime: a start-up (alpha) and a
time per byte of the full buffer (us per MB, 1e6 bytes) for each range of sizes. `off by` is the
root of the mean square of the relative residuals, `at most` the largest one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common.emulation import sandbox
from common.emulation.config import ClusterConfig
from common.emulation.links.profile import FOLDER
from common.harness.verbs import Status
from common.paths import DRIVER
from dear.comm.environment import launcher_facts
from dear.cost.calibrated import NetworkCosts
from dear.errors import UserError
from dear.options import at_least, build_options, positive

_PLAN = ("backend", "largest", "seconds")
_CLUSTER = ("hosts", "ranks_per_host", "network", "time_scale")
HELP = "measure what collectives cost here, or read it from logs of nccl-tests"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.description = (__doc__ or "").partition(": ")[2]
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="network file to write (NAME.yaml)")
    add(
        "--from-nccl-tests",
        nargs="+",
        metavar="FILE",
        help="logs, or JSON files of -J; NAME=FILE if a file does not name its collective",
    )
    add("--ranks", type=int, help="ranks to start here (default 2), or number of ranks of the logs")
    add("--backend", help="comm_core, gloo, mpi or nccl; default as for training")
    add("--largest", type=int, metavar="BYTES", help="largest buffer (default 256 MiB)")
    add("--seconds", type=float, help="longest time of the measurements (default 50 s)")
    add = parser.add_argument_group("virtual hosts on this machine").add_argument
    add("--hosts", type=int, help="number of virtual hosts (default 4)")
    add("--ranks-per-host", type=int, help="ranks on each virtual host (default 1)")
    add("--network", help="a profile of configs/networks, or a bandwidth (default 10gbe)")
    add("--time-scale", type=float, help="real seconds per second of the network (default 10)")


def main(options: argparse.Namespace) -> int:
    """Measures or reads the costs, prints them, and writes the file; the exit status is 0."""
    try:
        return _calibrate(options)
    except UserError:
        facts = launcher_facts()
        if facts is None or facts.rank == 0:
            raise
        return Status.USER_ERROR  # rank 0 prints the line


def _calibrate(options: argparse.Namespace) -> int:
    from common.profiling import calibration, network

    given = _given(options)
    if options.output is not None:
        calibration.check_output(options.output)
    plan = build_options(network.Plan, {k: given[k] for k in _PLAN if k in given}, "flag")
    hosts = {key: given[key] for key in _CLUSTER if key in given}
    costs: NetworkCosts | None
    if options.from_nccl_tests:
        costs = calibration.from_nccl_tests(options.from_nccl_tests, options.ranks)
    elif network.in_job():
        costs = network.measure(plan, options.ranks)
        if costs is None:
            return Status.OK
    elif not hosts:
        costs = network.measure_here(plan, options.ranks or 2)
    elif sandbox.inside():
        costs = network.measure_emulated(plan, build_options(ClusterConfig, hosts, "flag"))
    else:
        return sandbox.run([*DRIVER, *options.arguments])
    print("\n".join(calibration.table(costs)))
    if options.output is not None:
        calibration.write(options.output, costs)
        print(f"wrote {options.output}")
        print(_how_to_use(options.output))
    return Status.OK


def _how_to_use(written: Path) -> str:
    """Returns how the commands find a network file."""
    if written.resolve().parent == FOLDER.resolve():
        return f"use it: --network {written.stem}"
    return f"to use it by --network {written.stem}, put it into {FOLDER}"


def _given(options: argparse.Namespace) -> dict[str, object]:
    """Returns the given flags of a measurement; refuses wrong ones and ones without effect."""
    given = {key: getattr(options, key) for key in (*_PLAN, *_CLUSTER)}
    given = {key: value for key, value in given.items() if value is not None}
    at_least("--ranks", options.ranks, 2)
    at_least("--largest", options.largest, 16 << 10)
    positive("--seconds", options.seconds)
    flags = [f"--{key.replace('_', '-')}" for key in given]
    if options.from_nccl_tests and flags:
        raise UserError(f"{flags[0]}: no effect with --from-nccl-tests, which measures nothing")
    virtual = any(key in given for key in _CLUSTER)
    if virtual and (options.ranks is not None or launcher_facts() is not None):
        raise UserError("--ranks, launcher: virtual hosts have --hosts x --ranks-per-host ranks")
    return given
