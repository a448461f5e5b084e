"""`python -m tests.mutants`: draws mutants, lets the tests that see them try to catch them.

First all tests run once in a copy of the checkout while coverage.py notes which lines each
executes. Then every mutant of the sample lives for a while in a copy, and meets the
fastest tests that execute its line, one case of each test before the second of any, until one
fails or the bounds are reached. Results are kept as they come: a run that was ended goes on where
it was, as long as the checkout is the same.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.emulation.hosts.namespaces import die_with_parent
from common.machine import machine_card
from common.results.committed.catalogue import MISSED
from tests.mutants import report, seen
from tests.mutants.mutations import Mutant, candidates, sample
from tests.mutants.trees import Tree, adopt, end_descendants, tracked

ROOT = Path(__file__).parents[2]
MOST_TESTS = 150
MOST_S = 45.0
"""Bounds of what one mutant meets: tests, and seconds that they took when nothing was changed."""
_MUTATED = ("dear/", "common/harness/", "common/results/")
_MUTATED += ("common/emulation/", "common/models/", "common/virtual/")
"""What is changed; `coverage.ini` names the same folders."""
_NO_MATTER = ("docs/", "tests/mutants/judged.yaml")
"""Files besides texts whose change changes no mutant and no test."""


def main() -> int:
    """0 if tests have caught enough, 1 if not, 2 for a mistake in what was asked."""
    options = _arguments()
    if "+dirty" in (machine_card()["commit"] or "+dirty") and not options.dirty:
        print("the checkout differs from its commit: commit first, or --dirty", file=sys.stderr)
        return 2
    adopt()
    options.scratch.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    finally:
        end_descendants()


def _run(options: argparse.Namespace) -> int:
    state = _state()
    sources = {
        path: (ROOT / path).read_text()
        for path in tracked(ROOT)
        if path.startswith(_MUTATED) and path.endswith(".py")
    }
    every = {path: candidates(path, text) for path, text in sources.items()}
    if stale := stale_judgements(every, sources):
        print(f"judged.yaml: {', '.join(stale)}: no such change today", file=sys.stderr)
        return 2
    drawn = sample(sources, options.count, options.seed)
    drawn = [mutant for mutant in drawn if (options.only or "") in mutant.path]
    if not drawn:
        print(f"--only {options.only}: no mutant of such a file was drawn", file=sys.stderr)
        return 2
    # Mixed, so that the share of the first ones says something of all.
    random.Random(options.seed).shuffle(drawn)
    known = Results(options.scratch / "results.jsonl", f"{state} {options.seed} {options.count}")
    if not options.as_seen:
        _look(options.scratch, state)
    watched = seen.Seen(options.scratch / "seen")
    jobs = []
    for mutant in drawn:
        lines = None if mutant.at_import else range(mutant.line, mutant.end_line + 1)
        tests = ordered(watched.tests(mutant.path, lines), watched)
        jobs.append((mutant, sources[mutant.path], tests))
    names = [identity(mutant, source) for mutant, source, _ in jobs]
    todo = [job for name, job in zip(names, jobs, strict=True) if name not in known.by_id]
    total = sum(sum(seconds for _, seconds in tests) for _, _, tests in todo)
    print(
        f"{len(jobs)} mutants of {sum(map(len, every.values()))}, {len(todo)} to try, "
        f"on {options.workers} workers: at most "
        f"{(total + 10 * len(todo)) / options.workers / 60:.0f} minutes if all survived"
    )
    _try_all(todo, known, names, options)
    results = sorted(
        (known.by_id[name] for name in names), key=lambda trial: (trial["path"], trial["line"])
    )
    card = machine_card()
    facts = {
        "commit": card["commit"],
        "machine": card,
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seed": options.seed,
        "count": len(results),
        "candidates": sum(map(len, every.values())),
        "files": sum(map(bool, every.values())),
        "tests": len(watched.seconds),
        "seconds": round(sum(trial["seconds"] for trial in results), 1),
    }
    text = report.write(options.out, facts, results)
    print(text.partition("## Survivors")[0])
    print(f"{options.out}/mutants.md, mutants.json")
    return 0 if report.share(results) >= report.BAR else MISSED


def _try_all(
    todo: list[_Job], known: Results, names: list[str], options: argparse.Namespace
) -> None:
    """Tries mutants, notes each result in `known`, and prints how far it has come."""
    began = time.monotonic()
    for number, result in enumerate(_tried(todo, options.workers, options.scratch), start=1):
        known.add(result)
        spent = time.monotonic() - began
        tried = [known.by_id[name] for name in names if name in known.by_id]
        print(
            f"[{number}/{len(todo)}, {spent / 60:.0f} min, about "
            f"{spent / number * (len(todo) - number) / 60:.0f} more, caught so far "
            f"{report.share(tried):.0%} of {len(tried)}] {result['outcome']}: "
            f"{result['path']}:{result['line']} {result['operator']}",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=160, help="mutants to draw (160)")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing (1)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", help="only mutants of files with this in their path")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants" / "report")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--dirty", action="store_true", help="also of a tree that is not committed")
    parser.add_argument(
        "--as-seen", action="store_true", help="take what was noted of tests, if by another commit"
    )
    return parser.parse_args()


def _state() -> str:
    """A digest of all that can change what becomes of a mutant."""
    digest = hashlib.sha256()
    for path in tracked(ROOT):
        if not path.startswith(_NO_MATTER) and not path.endswith(".md"):
            digest.update(path.encode() + b"\0" + (ROOT / path).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def identity(mutant: Mutant, source: str) -> str:
    """The mutant's name: what changes with its surroundings, wherever in the file that stands.

    Lines that come or go elsewhere in the file change no name, so that judgements stay with it.
    """
    lines = source.splitlines()
    same = lines[: mutant.line - 1].count(lines[mutant.line - 1])  # equal lines before it
    change = [line for line in mutant.diff(source).split("\n") if not line.startswith("@@")]
    text = "\n".join([mutant.path, f"{same} {mutant.column}", *change])
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def stale_judgements(
    every: Mapping[str, Sequence[Mutant]], sources: Mapping[str, str]
) -> list[str]:
    """Judgements of changes that today's files do not have, as `PATH ID`."""
    stale = []
    for path, judged in report.judgements().items():
        there = (
            candidate
            for candidate in every.get(path, ())
            if candidate.means_something(sources[path])
        )
        names = {identity(candidate, sources[path]) for candidate in there}
        stale += [f"{path} {name}" for name in judged if name not in names]
    return stale


def ordered(names: Sequence[str], watched: seen.Seen) -> list[tuple[str, float]]:
    """The tests that a mutant meets, with their seconds.

    The fastest case of each test comes first, then the second fastest of each: hundreds of quick
    cases of one test shall not hide another one.
    """
    turns: dict[str, int] = {}
    ranked = []
    for name in sorted(names, key=watched.seconds.__getitem__):
        function = name.partition("[")[0]
        turns[function] = turns.get(function, 0) + 1
        ranked.append((turns[function], watched.seconds[name], name))
    chosen: list[tuple[str, float]] = []
    spent = 0.0
    for _, seconds, name in sorted(ranked):
        if len(chosen) == MOST_TESTS or spent + seconds > MOST_S:
            continue
        chosen.append((name, seconds))
        spent += seconds
    return chosen


class Results:
    """Results that are known already, a line of JSON each; of another state they are forgotten."""

    def __init__(self, path: Path, state: str) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        if not lines or json.loads(lines[0]) != state:
            path.write_text(json.dumps(state) + "\n")
            lines = []
        self.by_id = {trial["id"]: trial for trial in map(json.loads, lines[1:])}

    def add(self, result: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(result) + "\n")
        self.by_id[result["id"]] = result


def _look(scratch: Path, state: str) -> None:
    """Runs all tests once with coverage, unless that has been done for this state."""
    folder, mark = scratch / "seen", scratch / "seen" / "state"
    if mark.exists() and mark.read_text() == state:
        return
    print("which test executes which line: all tests once, about 40 minutes", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    tree = Tree(ROOT, scratch / "tree")
    command = [sys.executable, "-m", "pytest", "-q", "tests"]
    command += ["-p", "no:cacheprovider", "-p", "tests.mutants.seen"]
    env = {**os.environ, **seen.environment(tree.folder, folder)}
    with (scratch / "seen.log").open("w") as log:
        subprocess.run(command, cwd=tree.folder, env=env, stdout=log, stderr=log, check=False)
    end_descendants()
    if not seen.Seen(folder).seconds:
        raise SystemExit(f"no test has passed: see {scratch / 'seen.log'}")
    mark.write_text(state)


_Job = tuple[Mutant, str, list[tuple[str, float]]]
_tree: Tree  # of a worker process


def _tried(jobs: list[_Job], workers: int, scratch: Path) -> Iterator[dict[str, Any]]:
    if not jobs:
        return
    numbers = multiprocessing.SimpleQueue()
    for number in range(workers):
        numbers.put(number)
    with multiprocessing.Pool(workers, _begin, (numbers, scratch)) as pool:
        yield from pool.imap_unordered(_try, jobs)


def _begin(numbers: Any, scratch: Path) -> None:
    """A worker process gets a copy of the checkout and what it needs to leave nothing behind."""
    global _tree
    adopt()
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    os.nice(5)
    _tree = Tree(ROOT, scratch / f"tree-{numbers.get()}")


def _leave(*_: object) -> None:
    end_descendants()
    os._exit(143)


def _try(job: _Job) -> dict[str, Any]:
    mutant, source, tests = job
    trial = _tree.try_out(mutant.path, mutant.apply(source), tests) if tests else None
    return {
        "id": identity(mutant, source),
        "path": mutant.path,
        "line": mutant.line,
        "operator": mutant.operator,
        "outcome": trial.outcome if trial else "survived",
        "by": trial.by if trial else None,
        "message": trial.message if trial else None,
        "asked": len(tests),
        "seconds": trial.seconds if trial else 0.0,
        "diff": mutant.diff(source),
    }


if __name__ == "__main__":
    sys.exit(main())
