"""Runs faults one after another, in a sandbox if it can: a line of JSON in, a line out for each."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.faults import jobs, judge, sweeps
from tests.faults.drawing import Fault
from tests.faults.traces import Traces


def main(scratch: Path) -> int:
    """Answers until its input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print is no answer
    _warm_up(scratch)
    for line in sys.stdin:
        replies.write(json.dumps(answer(Fault(**json.loads(line)), scratch)) + "\n")
    return 0


def answer(fault: Fault, scratch: Path) -> dict[str, Any]:
    """Lets a fault happen; returns what the report needs."""
    folder = scratch / f"{fault.seed}-{fault.index}"
    shutil.rmtree(folder, ignore_errors=True)
    began, before = time.monotonic(), Traces()
    try:
        if fault.how.fate == "swept":
            missed, report_s = sweeps.run(fault, folder).misses, None
        else:
            seen = jobs.run(fault, folder)
            missed = list(judge.misses(fault, seen))
            report_s = judge.slowest_report_s(fault, seen)
    except Exception:
        return {"fault": dataclasses.asdict(fault), "missed": [traceback.format_exc()[-1500:]]}
    missed += [f"left behind: {trace}" for trace in before.left()]
    if not missed:
        shutil.rmtree(folder)
    return {
        "fault": dataclasses.asdict(fault),
        "missed": missed,
        "report_s": report_s,
        "seconds": time.monotonic() - began,
    }


def _warm_up(scratch: Path) -> None:
    """Starts the fork server, which lasts."""
    from tests.faults.drawing import draw

    shutil.rmtree(scratch / "warm", ignore_errors=True)
    fault = dataclasses.replace(draw(0, 0), launcher="bare", fabric="local", kind="killed", world=2)
    jobs.run(dataclasses.replace(fault, victim=0, program="collectives"), scratch / "warm")
    shutil.rmtree(scratch / "warm")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # torch's, and it lasts
    sys.exit(main(folder))
