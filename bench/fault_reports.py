#!/usr/bin/env python3
"""Reports of ranks if another one is lost or disagrees: the comm core, Gloo and Horovod.

  python bench/fault_reports.py --json build/fault_reports.json

Three ranks call all-reduces in a loop. In the middle, the last one meets a fault. The table shows
how long after that the slowest of the others reports an error, and whether the error names the rank
and the operation. The time limit of an operation is 5 s; Horovod's is that of its stall check.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from bench.rig import table
from common.launch.ranks import Ranks, rank_env
from common.machine.processes import preload_in_fork_server

SYSTEMS = ("comm_core", "gloo", "horovod")
SIZE, VICTIM = 3, 2
STEP = 20
LIMIT_S = 5.0
WAIT_S = 25.0
"""Time after the fault for which reports are awaited."""
NUMEL = 3000

Call = Callable[[Any], object]


def rank(folder: Path, system: str, kind: str) -> int:
    """Calls all-reduces; writes the error that ends them."""
    import torch

    import dear

    torch.set_num_threads(1)
    os.environ |= {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(int(LIMIT_S)),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(int(LIMIT_S)),
    }
    if system == "comm_core":
        import comm_core  # noqa: F401 - registers the backend
    dear.init(backend="comm_core" if system == "comm_core" else "gloo", timeout_s=LIMIT_S)
    reduce, gather = _calls(system)
    me = dear.rank()
    try:
        for step in range(10 * STEP):
            tensor = torch.ones(NUMEL)
            if me == VICTIM and step == STEP:
                (folder / "fault").write_text(str(time.time()), encoding="utf-8")
                tensor = _meet(kind, tensor)
            (gather if me == VICTIM and step == STEP and kind == "operation" else reduce)(tensor)
            time.sleep(0.01)
        text = "no error"
    except Exception as error:  # whatever it is, it is what a user sees
        text = f"{type(error).__name__}: {error}"
    partial = folder / f"partial-{me}"
    partial.write_text(json.dumps({"at": time.time(), "text": text}), encoding="utf-8")
    partial.replace(folder / f"report-{me}")
    os._exit(0)  # a library may wait for the others at its end


def _calls(system: str) -> tuple[Call, Call]:
    """Returns all-reduce and all-gather of a system."""
    import torch
    import torch.distributed as dist

    if system == "horovod":
        import horovod.torch as hvd

        from dear.algorithms.synchronous import horovod
        from dear.comm import runtime

        horovod.start(runtime.communicator(), horovod.Horovod.Options())
        return (
            lambda tensor: hvd.allreduce(tensor, name="x", op=hvd.Sum),
            lambda tensor: hvd.allgather(tensor, name="x"),
        )
    return (
        dist.all_reduce,
        lambda tensor: dist.all_gather_into_tensor(torch.empty(SIZE * tensor.numel()), tensor),
    )


def _meet(kind: str, tensor: Any) -> Any:
    """Lets the fault happen; returns the tensor that the rank sends, if it still does."""
    if kind in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
    if kind == "leaves":
        os._exit(0)
    if kind == "shape":
        return tensor.new_ones(2 * NUMEL)
    return tensor.double() if kind == "dtype" else tensor


KINDS = {
    "killed": "kill -9",
    "leaves": "it ends with status 0",
    "stopped": "SIGSTOP",
    "shape": "another shape",
    "dtype": "another dtype",
    "operation": "another operation",
}


def observe(system: str, kind: str) -> dict[str, Any]:
    """Returns when the ranks that did not meet the fault report, and what."""
    with tempfile.TemporaryDirectory() as name, Ranks() as ranks:
        folder = Path(name)
        for number in range(SIZE):
            env = rank_env(number, SIZE, store=folder / "store")
            log = folder / f"log-{number}"
            ranks.function(rank, folder, system, kind, env=env, log=log)
        others = [folder / f"report-{number}" for number in range(SIZE) if number != VICTIM]
        fault, until = folder / "fault", time.monotonic() + 60.0
        while not all(path.exists() for path in others) and time.monotonic() < until:
            if (
                fault.exists()
                and time.time() - float(fault.read_text(encoding="utf-8") or 0) > WAIT_S
            ):
                break
            time.sleep(0.05)
        if not fault.exists():
            logs = [
                (folder / f"log-{number}").read_text(encoding="utf-8")[-300:]
                for number in range(SIZE)
            ]
            raise SystemExit(f"{system}: the fault did not happen: {logs}")
        began = float(fault.read_text(encoding="utf-8"))
        ranks.wait(0.0, matters=lambda _: False)
        killed = [n for n in range(SIZE) if n != VICTIM and ranks.codes.get(n, 0) < 0]
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in others if path.exists()]
    texts = [report["text"] for report in reports]
    return {
        "system": system,
        "kind": kind,
        "reported": len(reports),
        "ended_by_signal": len(killed),
        "after_s": max((report["at"] - began for report in reports), default=None),
        "names_rank": bool(texts) and all(re.search(rf"rank {VICTIM}\b", text) for text in texts),
        "names_operation": bool(texts)
        and all(re.search(r"all_?reduce|all_?gather", text, re.IGNORECASE) for text in texts),
        "texts": texts,
    }


def _cell(result: dict[str, Any]) -> str:
    if result["reported"] < SIZE - 1:
        crashed = f", {result['ended_by_signal']} crashed" if result["ended_by_signal"] else ""
        return f"{result['reported']} of {SIZE - 1} within {WAIT_S:.0f} s{crashed}"
    if "no error" in result["texts"]:
        return "no error"
    names = [what for what in ("rank", "operation") if result[f"names_{what}"]]
    return f"{result['after_s']:.1f} s, names {' and '.join(names) or 'neither'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results, with all texts")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    options = parser.parse_args()
    preload_in_fork_server(["torch", "torch.distributed", "dear.comm.runtime"])
    results = {(k, s): observe(s, k) for k in KINDS for s in options.systems}
    if options.json:
        options.json.write_text(json.dumps(list(results.values()), indent=1), encoding="utf-8")
    rows = [[KINDS[k], *(_cell(results[k, s]) for s in options.systems)] for k in KINDS]
    print(table.layout(["fault of one rank of three", *options.systems], rows))
    for result in results.values():
        for text in result["texts"][:1]:
            print(f"{result['system']}, {result['kind']}: {text[:160]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
