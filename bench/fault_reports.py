#!/usr/bin/env python3
"""Reports of ranks if another one is lost or disagrees: the comm core, Gloo and Horovod.

  python bench/fault_reports.py --json build/fault_reports.json

Three ranks call all-reduces in a loop. In the middle, the last one meets a fault. The table shows
how long after that the slowest of the others reports an error, and whether the error names the rank
and the operation. The time limit of an operation is 5 s. Horovod has none; those of its stall check
and of its messages are 5 s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
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
START_S = 60.0
WAIT_S = 25.0
"""Time after the fault for which reports are awaited."""
NUMEL = 3000
_HOROVODS_LIMITS = (
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "HOROVOD_GLOO_TIMEOUT_SECONDS",
)

Call = Callable[[Any], object]


def rank(folder: Path, system: str, kind: str) -> int:
    """Calls all-reduces; writes the error that ends them."""
    import torch

    import dear

    torch.set_num_threads(1)
    os.environ |= dict.fromkeys(_HOROVODS_LIMITS, str(int(LIMIT_S)))
    if system == "comm_core":
        import comm_core  # noqa: F401 - registers the backend
    dear.init(backend="comm_core" if system == "comm_core" else "gloo", timeout_s=LIMIT_S)
    reduce, gather = _calls(system)
    me, text = dear.rank(), None
    try:
        for step in range(10 * STEP):
            tensor, call = torch.ones(NUMEL), reduce
            if me == VICTIM and step == STEP:
                _write(folder / "fault", time.time())
                tensor, call = _meet(kind, tensor), gather if kind == "operation" else reduce
            call(tensor)
            time.sleep(0.01)
    except Exception as error:  # whatever it is, it is what a user sees
        text = f"{type(error).__name__}: {error}"
    _write(folder / f"report-{me}", {"at": time.time(), "text": text})
    os._exit(0)  # a library may wait for the others at its end


def _write(path: Path, value: object) -> None:
    """Writes JSON so that nobody reads a part of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(path)


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


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Reports of the ranks that did not meet a fault.

    Attributes:
        texts: their errors; None for a rank that trained to the end.
        after_s: seconds from the fault to the last report.
        crashed: number of ranks that a signal ended.
    """

    system: str
    kind: str
    texts: tuple[str | None, ...]
    after_s: float | None
    crashed: int

    @property
    def names(self) -> list[str]:
        """Returns which of rank and operation all texts name."""
        # Horovod's "allreduce, allgather or broadcast" is a list of all that there are.
        patterns = {"rank": rf"rank {VICTIM}\b", "operation": "all_?reduce(?!, allgather)"}
        return [
            what
            for what, pattern in patterns.items()
            if all(re.search(pattern, text or "", re.IGNORECASE) for text in self.texts)
        ]

    @property
    def cell(self) -> str:
        """Text for the table."""
        if len(self.texts) < SIZE - 1:
            crashed = f", {self.crashed} crashed" if self.crashed else ""
            return f"{len(self.texts)} of {SIZE - 1} within {WAIT_S:.0f} s{crashed}"
        if None in self.texts:
            return "no error"
        return f"{self.after_s:.1f} s, names {' and '.join(self.names) or 'neither'}"


def observe(system: str, kind: str) -> Observation:
    """Lets a fault happen; raises RuntimeError if it does not."""
    with tempfile.TemporaryDirectory() as name, Ranks() as ranks:
        folder = Path(name)
        logs = [folder / f"log-{number}" for number in range(SIZE)]
        for number, log in enumerate(logs):
            env = rank_env(number, SIZE, store=folder / "store")
            ranks.function(rank, folder, system, kind, env=env, log=log)
        paths = [folder / f"report-{number}" for number in range(SIZE) if number != VICTIM]
        fault = folder / "fault"
        if not _until(fault.exists, START_S):
            ends = [log.read_text(encoding="utf-8")[-300:] for log in logs]
            raise RuntimeError(f"{system}: the fault did not happen: {ends}")
        _until(lambda: all(path.exists() for path in paths), WAIT_S)
        ranks.wait(0.0, matters=lambda _: False)
        codes = [ranks.codes.get(number, 0) for number in range(SIZE) if number != VICTIM]
        began = json.loads(fault.read_bytes())
        reports = [json.loads(path.read_bytes()) for path in paths if path.exists()]
    return Observation(
        system=system,
        kind=kind,
        texts=tuple(report["text"] for report in reports),
        after_s=max((report["at"] - began for report in reports), default=None),
        crashed=sum(code < 0 for code in codes),
    )


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until the condition holds; returns False if time runs out."""
    until = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results, with all texts")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    options = parser.parse_args()
    preload_in_fork_server(["torch", "torch.distributed", "dear.comm.runtime"])
    results = {(k, s): observe(s, k) for k in KINDS for s in options.systems}
    if options.json:
        listed = [dataclasses.asdict(result) for result in results.values()]
        options.json.write_text(json.dumps(listed, indent=1), encoding="utf-8")
    rows = [[KINDS[k], *(results[k, s].cell for s in options.systems)] for k in KINDS]
    print(table.layout(["fault of one rank of three", *options.systems], rows))
    for result in results.values():
        for text in result.texts[:1]:
            print(f"{result.system}, {result.kind}: {(text or 'no error')[:160]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
