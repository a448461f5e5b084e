"""`python -m tests.faults`: draws faults, lets them happen side by side, prints a table by kind."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.emulation import sandbox
from tests.faults import report
from tests.faults.drawing import Fault, draw
from tests.faults.kinds import KINDS
from tests.faults.traces import TOKEN
from tests.system.processes import ROOT

HANGS_S = 240.0
"""Longest time for one fault; a lane that needs longer is replaced."""


def main() -> int:
    """Returns 0 if every fault met the bars, else 3."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    options = _arguments()
    fixed = {key: value for key, value in vars(options).items() if key in _FIXED and value}
    if options.only:
        seed, _, index = options.only.partition(":")
        faults = [draw(int(seed), int(index), options.kinds, **fixed)]
    else:
        numbers = range(options.faults)
        faults = [draw(options.seed, index, options.kinds, **fixed) for index in numbers]
    began, load = time.monotonic(), os.getloadavg()
    results = run(faults, options.lanes, options.scratch)
    facts = {
        "seed": options.seed,
        "flags": _flags(options, fixed),
        "seconds": round(time.monotonic() - began, 1),
        "lanes": options.lanes,
        "load": [load[0], os.getloadavg()[0]],
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**facts, "results": results}, indent=1))
    print(report.text(facts, results))
    return 3 if any(result["missed"] for result in results) else 0


def run(faults: Sequence[Fault], lanes: int, scratch: Path) -> list[dict[str, Any]]:
    """Lets faults happen on several lanes; prints a line for each. Ctrl-C ends it early."""
    waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in faults:
        waiting.put(fault)
    results: list[dict[str, Any]] = []
    stopped = threading.Event()

    def work(number: int) -> None:
        lane = Lane(scratch / f"lane-{number}")
        while not stopped.is_set():
            try:
                fault = waiting.get_nowait()
            except queue.Empty:
                break
            result = lane.answer(fault)
            results.append(result)
            print(report.line(result, len(results), len(faults)), file=sys.stderr, flush=True)
        lane.close()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(min(lanes, len(faults)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        print("stopped; the last faults come to their end", file=sys.stderr, flush=True)
        stopped.set()
        for thread in threads:
            thread.join()
    return sorted(results, key=lambda result: result["fault"]["index"])


class Lane:
    """Process that runs faults one after another."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._process: subprocess.Popen[str] | None = None

    def answer(self, fault: Fault) -> dict[str, Any]:
        """Lets a fault happen."""
        process = self._process = self._process or self._start()
        timer = threading.Timer(HANGS_S, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(fault)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        timer.cancel()
        if line:
            return json.loads(line)
        self.close()
        return {"fault": dataclasses.asdict(fault), "missed": ["the campaign's lane ended"]}

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.faults.lane", str(self._scratch)]
        if sandbox.unable() is None:
            command = [sys.executable, "-m", "common.emulation.sandbox", "--", *command]
        self._scratch.mkdir(parents=True, exist_ok=True)
        with (self._scratch / "log.txt").open("a") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env={
                    **os.environ,
                    TOKEN: str(self._scratch),
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'common'}",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )


def _flags(options: argparse.Namespace, fixed: Mapping[str, str]) -> str:
    """Flags that decide, with seed and number, what is drawn."""
    words = [word for key, value in fixed.items() for word in (f"--{key}", value)]
    words += ["--kinds", ",".join(options.kinds)] if options.kinds else []
    return "".join(f" {shlex.quote(word)}" for word in words)


_FIXED = ("backend", "program", "launcher", "fabric")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=300, help="faults to draw (300)")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing (1)")
    parser.add_argument("--only", metavar="SEED:INDEX", help="exactly this fault")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=(), help="of these")
    for name in _FIXED:
        parser.add_argument(f"--{name}", help="the same for all faults, in place of drawn ones")
    parser.add_argument("--lanes", type=int, default=4, help="faults side by side (4)")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir(), "faults"))
    options = parser.parse_args()
    if unknown := [kind for kind in options.kinds if kind not in KINDS]:
        parser.error(f"--kinds: unknown {', '.join(unknown)}; allowed: {', '.join(KINDS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
