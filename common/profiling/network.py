"""Costs of collectives on this network: times by size, and alpha and beta of a robust fit.

  python -m common.profiling.network --ranks 4
  torchrun --nproc-per-node 4 -m common.profiling.network --json network.json

Without a launcher, the program starts `--ranks` processes on this machine; under torchrun, mpirun
or srun it is one rank. The time of a repeat is the slowest rank's. The reported time is the lower
quartile of the repeats. alpha is the start-up time, beta the time per byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

from common.launch.ranks import Ranks, rank_env
from dear.comm.environment import rank_facts
from dear.cost.collectives import measure_collective
from dear.cost.fit import AlphaBeta
from dear.cost.measurement import OPERATIONS, Measurement
from dear.errors import Unavailable, UserError, unknown
from dear.options import at_least

LARGEST = 32 * 2**20
START_S = 180.0


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    args = _parser().parse_args(argv)
    at_least("--repeats", args.repeats, 2)
    at_least("--largest", args.largest, 8192)
    at_least("--ranks", args.ranks, 2)
    for name in args.operations:
        if name not in OPERATIONS:
            raise unknown("operation", name, OPERATIONS)
    if args.json is not None and not args.json.parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder {args.json.parent}")
    facts = rank_facts()
    if facts.launcher == "none":
        return _start_ranks(argv, args.ranks)
    if facts.world_size == 1:
        raise UserError(f"{facts.launcher} started 1 rank; at least 2 are needed")
    _measure(args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m common.profiling.network", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes to start if no launcher did (default 2)")
    add("--backend", default=None, help="comm_core, gloo, mpi, nccl; default as for training")
    add("--operations", nargs="+", default=list(OPERATIONS), help="default: all")
    add("--largest", type=int, default=LARGEST, help="bytes of the largest buffer")
    add("--repeats", type=int, default=7, help="timed calls per size")
    add("--json", type=Path, default=None, help="also write the numbers to this file")
    return parser


def _start_ranks(argv: list[str], ranks: int) -> int:
    with tempfile.TemporaryDirectory() as folder, Ranks() as started:
        for rank in range(ranks):
            env = rank_env(rank, ranks, store=Path(folder, "store"))
            started.command([sys.executable, "-m", "common.profiling.network", *argv], env=env)
        started.wait(grace_s=START_S)  # rank 0 reports errors
        failed = started.first_failure
        return 0 if failed is None else abs(started.codes[failed])


def _measure(args: argparse.Namespace) -> None:
    import torch

    import dear
    from dear.comm import runtime

    torch.set_num_threads(1)
    dear.init(backend=args.backend, timeout_s=START_S)
    communicator = runtime.communicator()
    device = dear.device() if "nccl" in communicator.backend else torch.device("cpu")
    sizes = [2**power for power in range(12, args.largest.bit_length())]
    results = [
        measure_collective(communicator, name, device, sizes=sizes, repeats=args.repeats)
        for name in args.operations
    ]
    if communicator.rank == 0:
        print(f"# {communicator.size} ranks, {communicator.backend}, float32 on {device.type}")
        print("\n".join(table(results)), flush=True)
        if args.json is not None:
            args.json.write_text(
                json.dumps(record(results, communicator.size, communicator.backend)) + "\n",
                encoding="utf-8",
            )
    dear.shutdown()


def table(results: list[Measurement]) -> list[str]:
    """Returns lines with times by size, then the fits and their errors."""
    lines = ["bytes".rjust(12) + "".join(f"{result.operation} us".rjust(20) for result in results)]
    columns = [dict(zip(result.nbytes, result.typical_s, strict=True)) for result in results]
    for nbytes in sorted({size for column in columns for size in column}):
        cells = [f"{column[nbytes] * 1e6:.1f}" if nbytes in column else "-" for column in columns]
        lines.append(str(nbytes).rjust(12) + "".join(cell.rjust(20) for cell in cells))
    for result in results:
        fit = result.fit()
        for part in fit.smaller:
            below = f"{part.name or 'messages'}, below {part.below_bytes:g} bytes"
            lines.append(f"{result.operation}: {below}: {_line(part)}")
        name = fit.name or ("larger ones" if fit.smaller else "all sizes")
        off = result.agreement()
        lines.append(
            f"{result.operation}: {name}: {_line(fit)}; a fit to half of the repeats differs from "
            f"the other half by {off.error:.1%}; the halves differ by {off.noise:.1%}"
        )
    return lines


def _line(line: AlphaBeta) -> str:
    rate = f"{1e-9 / line.beta_s_per_byte:.3f} GB/s" if line.beta_s_per_byte else "no slope"
    return (
        f"alpha {line.alpha_s * 1e6:.1f} us, beta {line.beta_s_per_byte * 1e9:.4f} ns/byte ({rate})"
    )


def record(results: list[Measurement], ranks: int, backend: str) -> dict[str, object]:
    """Returns the content of the JSON file, in seconds and bytes."""
    return {
        "schema": 1,
        "kind": "network",
        "ranks": ranks,
        "backend": backend,
        "collectives": {
            result.operation: {
                **dataclasses.asdict(result.fit()),
                **dataclasses.asdict(result.agreement()),
                "nbytes": result.nbytes,
                "seconds": result.seconds,
            }
            for result in results
        },
    }


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, Unavailable) as error:
        if os.environ.get("RANK", "0") == "0":  # only once
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
