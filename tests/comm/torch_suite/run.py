"""Runs torch's own backend tests on comm_core.

    tests/comm/torch_suite/run.py --world-size 4 [-k PATTERN]

Not part of the default collection: it is long, and leans on internals of torch. See suite.py for
how the tests are chosen. Exit status 1 if a test failed for a reason not listed in `EXPLAINED`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from collections import defaultdict
from pathlib import Path
from typing import Any, TextIO

FOLDER = Path(__file__).parent

# The names under which the tests are offered, in this order: a test that is skipped because of
# the backend's name is offered again under the next.
GATES = ("comm_core", "gloo", "mpi")
OUTCOMES = ("passed", "failed", "explained", "skipped")

SMALL_WORLD = "Skipped due to small world size."

# Failures that are understood: what the log must then say, and why.
EXPLAINED: dict[str, tuple[str, str]] = {
    "test_sparse_all_reduce_sum": (
        "TypeError: all_reduce: comm_core needs dense tensors, not Sparse",
        "comm_core has no sparse tensors and says so; of torch's CPU backends only gloo has them",
    ),
    "test_ddp_logging_data_cpu": (
        "String comparison failed: 'custom' != 'comm_core'",
        "torch's DDP logger calls every backend from outside torch 'custom'; the test expects "
        "the name",
    ),
}


class Outcomes(unittest.TestResult):
    def __init__(self, progress: TextIO) -> None:
        super().__init__()
        self._progress = progress
        self.by_test: dict[str, dict[str, Any]] = {}
        self._started = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 (unittest's name)
        super().startTest(test)
        self._started = time.monotonic()

    def _add(self, test: unittest.TestCase, outcome: str, reason: str = "", log: str = "") -> None:
        name = test.id().rsplit(".", 1)[-1]
        seconds = round(time.monotonic() - self._started, 1)
        self.by_test[name] = {"outcome": outcome, "reason": reason, "seconds": seconds, "log": log}
        print(f"{outcome:9} {seconds:6.1f} s  {name}  {reason}", file=self._progress, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._add(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._add(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        log = self._exc_info_to_string(err, test)
        self._add(test, "failed", reason_of(log), log)

    addError = addFailure  # noqa: N815


def reason_of(log: str) -> str:
    """The first rank's exception: a line that starts with its type, without torch's stack."""
    lines = [line for line in log.splitlines() if re.match(r"[\w.]+(Error|Exception)\b.*: ", line)]
    # The first is that of the harness, which quotes the ranks'.
    causes = [line for line in lines if not re.search(r"Process \d+ exited with error code", line)]
    return (causes or lines or log.strip().splitlines()[-1:])[0][:200]


def run_here(names: list[str] | None, pattern: str, out: Path) -> None:
    """One pass in this process, under the name that the environment gives."""
    sys.path.insert(0, str(FOLDER))
    import suite

    every = unittest.defaultTestLoader.getTestCaseNames(suite.TorchSuite)
    if names is None:
        names = [name for name in every if fnmatch.fnmatchcase(name, f"*{pattern}*")]
    # The ranks' chatter goes to a file, the progress to where standard output was.
    progress = os.fdopen(os.dup(1), "w")
    log = os.open(os.environ["TORCH_SUITE_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    result = Outcomes(progress)
    unittest.TestSuite(suite.TorchSuite(name) for name in names).run(result)
    out.write_text(json.dumps(result.by_test))


def run_pass(gates: str, names: list[str] | None, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, chosen = Path(folder, "out.json"), Path(folder, "names.json")
        chosen.write_text(json.dumps(names))
        environment = {
            **os.environ,
            "TORCH_SUITE_GATES": gates,
            "WORLD_SIZE": str(args.world_size),
            "BACKEND": "comm_core",
            "TORCH_SUITE_LOG": str(args.logs or Path(folder, "log")),
            # A test of time-outs is for this kind of rendezvous; setUp gives it the file.
            "INIT_METHOD": "file://",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(args.timeout),
        }
        command = [sys.executable, __file__, "--pass-names", chosen, "--json", out, "-k", args.k]
        subprocess.run(list(map(str, command)), env=environment, check=True)
        return json.loads(out.read_text())


def about_the_name(reason: str) -> bool:
    """Returns whether a test was skipped for the backend's name or torch's wish for 8 ranks."""
    if re.search(r"Need at least|CUDA is not available", reason):
        return False
    named = re.search(r"backend|gloo|mpi\b|nccl", reason, re.IGNORECASE)
    return named is not None or reason == SMALL_WORLD


def merge(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    outcomes: dict[str, dict[str, Any]] = {}
    names: list[str] | None = None
    for gates in GATES:
        for name, outcome in run_pass(gates, names, args).items():
            # Of a test skipped under every name, the reason under its own is what matters, unless
            # another got further: to the GPUs or ranks that are missing.
            before = outcomes.get(name)
            again = outcome["outcome"] == "skipped" and about_the_name(outcome["reason"])
            if before and again and outcome["reason"] != SMALL_WORLD:
                continue
            outcomes[name] = {**outcome, "gates": gates}
        names = [
            name
            for name, outcome in outcomes.items()
            if outcome["outcome"] == "skipped" and about_the_name(outcome["reason"])
        ]
        if not names:
            break
    for name, outcome in outcomes.items():
        if outcome["outcome"] == "failed" and name in EXPLAINED:
            words, reason = EXPLAINED[name]
            if words in outcome["log"]:
                outcome.update(outcome="explained", reason=reason)
    return outcomes


def summary(outcomes: dict[str, dict[str, Any]], world_size: int) -> dict[str, Any]:
    import platform

    import torch

    counts = dict.fromkeys(OUTCOMES, 0)
    reasons: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in OUTCOMES}
    passed: dict[str, list[str]] = defaultdict(list)
    for name, outcome in sorted(outcomes.items()):
        counts[outcome["outcome"]] += 1
        if outcome["outcome"] == "passed":
            passed[outcome["gates"]].append(name)
        else:
            reasons[outcome["outcome"]][outcome["reason"]].append(name)
    return {
        "backend": "comm_core",
        "world_size": world_size,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "counts": {"ran": sum(counts.values()) - counts["skipped"], **counts},
        "passed_as": dict(passed),
        **{kind: dict(reasons[kind]) for kind in OUTCOMES[1:]},
    }


def show(report: dict[str, Any]) -> None:
    for kind in ("skipped", "explained", "failed"):
        groups = sorted(report[kind].items(), key=lambda item: -len(item[1]))
        for reason, names in groups:
            print(f"{kind:9} {len(names):3}  {reason}")
            if kind != "skipped":
                print("".join(f"               {name}\n" for name in names), end="")
    for gates, names in report["passed_as"].items():
        print(f"passed    {len(names):3}  offered as to {gates}")
    counts = "  ".join(f"{kind} {number}" for kind, number in report["counts"].items())
    print(f"comm_core, {report['world_size']} ranks, torch {report['torch']}: {counts}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("-k", default="", metavar="PATTERN", help="only tests like *PATTERN*")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--timeout", type=int, default=100, help="seconds for one test")
    parser.add_argument("--logs", type=Path, metavar="FILE", help="append what the ranks print")
    parser.add_argument("--pass-names", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pass_names:
        run_here(json.loads(args.pass_names.read_text()), args.k, args.json)
        return 0
    outcomes = merge(args)
    report = summary(outcomes, args.world_size)
    if args.logs:
        with args.logs.open("a") as log:
            for name, outcome in outcomes.items():
                if outcome["log"]:
                    log.write(f"\n==== {name}\n{outcome['log']}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
