#!/usr/bin/env python3
"""Peak memory of a rank while it trains, per algorithm.

  python bench/memory.py
  python bench/memory.py --model resnet50 --algorithms ddp dear:update=replicated --json out.json

Each algorithm trains in new processes. What counts is the highest resident memory since before the
model was built, less what was resident then (interpreter, libraries): parameters, gradients, state
of the optimizer, buffers of the algorithm and of the transport, and activations, which the small
batch keeps small. Ranks talk over TCP, as on hosts of their own: the shared memory of ranks of one
host would be counted by each of them. The largest rank counts; `x ddp` compares with the first
algorithm.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import session, table
from bench.rig.output import Output, note
from bench.rig.trainings import parsed_algorithm, run_ranks
from dear.lazy import torch
from dear.options import Options, at_least

MIB = 2**20
STEPS = 3


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    chosen = [parsed_algorithm(text) for text in args.algorithms]
    setup = {name: getattr(args, name) for name in ("model", "batch_size", "sentence_len")}
    setup |= {"optimizer": args.optimizer, "steps": STEPS}
    rows: list[dict[str, Any]] = []
    with Output(args.json) as output:
        for text, (name, options) in zip(args.algorithms, chosen, strict=True):
            answers = run_ranks(
                _peak, args.ranks, setup, name, options, environment={"COMM_CORE_TRANSPORT": "tcp"}
            )
            rows.append({"algorithm": text, "ranks": answers})
            note(f"{text}: {max(a['peak_bytes'] for a in answers) / MIB:.0f} MiB")
            record = {"schema": 1, "kind": "memory", "setup": setup}
            output.save({**record, "machine": output.card, "rows": rows})
    print(f"# {args.model}, {args.optimizer}, {args.ranks} ranks, batch {args.batch_size}")
    print(render(rows))
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add(
        "--algorithms",
        nargs="+",
        default=["ddp", "ddp:gradient_as_bucket_view=true", "dear:update=replicated", "dear"],
        metavar="NAME[:OPTION=VALUE,...]",
    )
    add("--model", default="bert_base")
    add("--batch-size", type=int, default=1)
    add("--sentence-len", type=int, default=16, help="of models that read text")
    add("--optimizer", choices=["adamw", "sgd"], default="adamw")
    add("--ranks", type=int, default=4)
    add("--json", type=Path, default=None, help="keeps what every rank measured")
    args = parser.parse_args(argv)
    for name in ("batch_size", "sentence_len", "ranks"):
        at_least(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    return args


def _peak(setup: dict[str, Any], name: str, options: Options) -> dict[str, int]:
    """Bytes of this rank: before the model was built, and at most afterwards beyond that."""
    from common.models.registry import build, model_entry
    from dear.comm import runtime
    from dear.training.algorithm import algorithm_class

    communicator = runtime.communicator()
    entry = model_entry(setup["model"])
    importlib.import_module(entry.module)
    communicator.barrier()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    batch = torch.Generator().manual_seed(communicator.rank)
    length = setup["sentence_len"] if entry.sentence_len is not None else None
    workload = build(setup["model"], setup["batch_size"], length, batch)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[setup["optimizer"]](workload.model.parameters(), lr=1e-4)
    workload.model, optimizer = algorithm_class(name)().wrap(
        workload.model, optimizer, communicator, options
    )
    for _ in range(setup["steps"]):
        optimizer.zero_grad()
        workload.loss().backward()
        optimizer.step()
    optimizer.synchronize()
    communicator.barrier()
    return {
        "before_bytes": before,
        "peak_bytes": _status("VmHWM") - before,
        "parameter_bytes": sum(param.nbytes for param in workload.model.parameters()),
    }


def _status(key: str) -> int:
    """A size in /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def render(rows: list[dict[str, Any]]) -> str:
    """A row per algorithm: its largest rank."""
    header = ["algorithm", "peak MiB", "x parameters", f"x {rows[0]['algorithm']}"]
    largest = [max(row["ranks"], key=lambda rank: rank["peak_bytes"]) for row in rows]
    base = largest[0]["peak_bytes"]
    lines = [
        [
            row["algorithm"],
            f"{rank['peak_bytes'] / MIB:.0f}",
            f"{rank['peak_bytes'] / rank['parameter_bytes']:.2f}",
            f"{rank['peak_bytes'] / base:.3f}",
        ]
        for row, rank in zip(rows, largest, strict=True)
    ]
    return table.layout(header, lines)


if __name__ == "__main__":
    session.program(main)
