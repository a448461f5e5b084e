"""Verb `calibrate`: measures what collectives cost on a cluster, and writes a network file.

    python benchmarks.py calibrate --ranks 4 -o configs/networks/here.yaml
    torchrun --nproc-per-node 8 benchmarks.py calibrate -o configs/networks/here.yaml
    python benchmarks.py calibrate --from-nccl-tests all_reduce.log gather.json -o here.yaml

Under a launcher (torchrun, mpirun, srun) each process is one rank of the measurement; without one,
processes are started on this machine. Logs may be of any version of nccl-tests, with or without
header lines. The cost is fitted by regime: a start-up (alpha) and a time per byte of the full
buffer (us per MB, 1e6 bytes) for each range of sizes. `off by` is the root of the mean square of
the relative residuals, `at most` the largest one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common.harness.verbs import Status
from common.paths import DRIVER
from dear.comm.environment import launcher_facts
from dear.cost.calibrated import NetworkCosts
from dear.errors import UserError
from dear.options import at_least, positive

HELP = "measure what collectives cost here, or read it from logs of nccl-tests"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.description = __doc__
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="network file to write (NAME.yaml)")
    add(
        "--from-nccl-tests",
        nargs="+",
        metavar="FILE",
        help="logs, or JSON of the option -J; NAME=FILE if a file does not name its collective",
    )
    add("--ranks", type=int, help="ranks to start here (default 2), or of logs without that number")
    add("--backend", help="comm_core, gloo, mpi or nccl; default as for training")
    add("--largest", type=int, metavar="BYTES", help="largest buffer (default 256 MiB)")
    add("--seconds", type=float, help="longest time of the measurements (default 50)")


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

    _check(options)
    if options.output is not None:
        calibration.check_output(options.output)
    costs: NetworkCosts | None
    if options.from_nccl_tests:
        costs = calibration.from_nccl_tests(options.from_nccl_tests, options.ranks)
    elif not network.in_job():
        return network.start_ranks([*DRIVER, *options.arguments], options.ranks or 2)
    else:
        costs = network.measure(
            options.backend,
            ranks=options.ranks,
            largest=options.largest or network.LARGEST,
            seconds=options.seconds or network.SECONDS,
        )
        if costs is None:
            return Status.OK
    print("\n".join(calibration.table(costs)))
    if options.output is not None:
        calibration.write(options.output, costs)
        print(f"wrote {options.output}")
    return Status.OK


def _check(options: argparse.Namespace) -> None:
    at_least("--ranks", options.ranks, 2)
    at_least("--largest", options.largest, 16 << 10)
    positive("--seconds", options.seconds)
    for flag in ("backend", "largest", "seconds"):
        if options.from_nccl_tests and getattr(options, flag) is not None:
            raise UserError(f"--{flag} is of a measurement, and --from-nccl-tests measures nothing")
