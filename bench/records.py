#!/usr/bin/env python3
"""Makes the records in docs/records, and checks whether they match the present definitions.

  python bench/records.py                 # make records: all of them, one after the other
  python bench/records.py quick peer      # make records ONLY="quick peer"
  python bench/records.py --plan          # list what would be made: minutes, memory of sweeps
  python bench/records.py --check         # list the problems of each record, make nothing
  python bench/records.py --draw quick    # draw the figure of a sweep's record again

A record is a folder with the results of one sweep or of some commands. Records are made in
build/records from a clean commit; only documents and records may be uncommitted. A complete record
replaces the old one; its `made.json` has the commit, the machine, the commands, the digests, and
the commands whose results missed a requirement. `--draw` replaces the figure only, by one that
today's code draws of the same results; `made.json` then has `drawn_at`, its commit. If a record
fails, the old one stays, and its sweep continues the next time, at the same commit. A new record
leaves the list of withdrawn (outdated) ones, and the documents that quote it are written again.
Exit status: 0; 1 if a record could not be made, or does not match the present definitions and is
not withdrawn; 2 for a user error.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import program
from common.harness.experiment_file import load
from common.harness.running.fabric import memory_bytes
from common.harness.trial import Trial, identity
from common.machine import available_bytes, gib, machine_card
from common.paths import ROOT
from common.results import readme, store
from common.results.committed import catalogue
from common.results.committed.catalogue import Recipe
from common.results.records import Record
from dear.errors import UserError, unknown

_SWEEP_FILES = ("experiment.json", "records.jsonl", store.FORESEEN, "table.md")
EVIDENCE_BYTES = 300_000
"""Largest size of the raw measurements in a record."""


def main(argv: list[str]) -> int:
    parser = program.parser(__doc__, json=False)
    parser.add_argument("names", nargs="*", metavar="RECORD", help="records; default: all")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--plan", action="store_true", help="list what would be made, make nothing")
    mode.add_argument("--check", action="store_true", help="list all problems, make nothing")
    mode.add_argument("--draw", action="store_true", help="draw the figures again, make nothing")
    options = parser.parse_args(argv)
    if options.draw and not options.names:
        raise UserError("--draw needs the names of the records")
    recipes = catalogue.recipes()
    for name in options.names:
        if name not in recipes:
            raise unknown("record", name, recipes)
    chosen = {name: recipes[name] for name in options.names or recipes}
    if options.check:
        return _check(chosen)
    if not options.draw:
        _print_plan(chosen)
    if options.plan:
        return 0
    commit = machine_card()["commit"]
    if commit is None or commit.endswith("+dirty"):
        raise UserError(f"records need a clean commit, but this is {commit}: commit first")
    if options.draw:
        for name in chosen:
            draw(name, commit)
        return 0
    failed, wrong = [], None
    for name, recipe in chosen.items():
        if not make(name, recipe, commit):
            failed.append(name)
            continue
        try:
            for path in readme.fill():  # now, because the next record may be stopped
                print(f"filled {path.relative_to(ROOT)}")
        except readme.PlaceError as error:  # the other records can still be made
            wrong = error
    if wrong is not None:
        raise UserError(f"the texts are not filled in: {wrong}")
    if failed:
        print(f"these records were not made, the old ones stay: {', '.join(failed)}")
    return 1 if failed else 0


def _print_plan(chosen: dict[str, Recipe]) -> None:
    whole, withdrawn = 0.0, catalogue.withdrawn()
    for name, recipe in chosen.items():
        what = f"configs/experiments/{recipe.sweep}.yaml" if recipe.sweep else "commands"
        obstacle = _obstacle(recipe)
        note = f"; left out: {obstacle}" if obstacle else ""
        # A withdrawn record may be of a shorter sweep than today's.
        old = {} if name in withdrawn else catalogue.manifest(name) or {}
        took = old.get("duration_s")
        minutes = took / 60 if took else recipe.minutes
        whole += minutes
        memory = gib(_memory_bytes(recipe)) if recipe.sweep else ""
        begin = f"{name:20} {'took' if took else 'about':5} {minutes:3.0f} min {memory:>9}"
        print(f"{begin}  {what}{note}")
    print(f"{len(chosen)} records, about {whole / 60:.1f} hours on two cores", flush=True)


def _obstacle(recipe: Recipe) -> str | None:
    """Returns why the record cannot be made here, or None."""
    if unset := [variable for variable in recipe.needs if variable not in os.environ]:
        return f"set {', '.join(unset)} first"
    needed = _memory_bytes(recipe)
    if needed > (available := available_bytes()):
        return f"it needs {gib(needed)} of memory, and {gib(available)} are available"
    return None


def _memory_bytes(recipe: Recipe) -> int:
    """Returns the bytes of memory of a sweep's largest trial; 0 for commands."""
    return max(map(memory_bytes, todays_trials(recipe, [])), default=0) if recipe.sweep else 0


def make(name: str, recipe: Recipe, commit: str, folder: Path = catalogue.FOLDER) -> bool:
    """Makes a record and puts it in place; returns False after a failure."""
    if obstacle := _obstacle(recipe):
        print(f"{name}: left out: {obstacle}", file=sys.stderr)
        return False
    print(f"{name}: begins", flush=True)
    work = ROOT / "build" / "records" / f"{name}-{commit}"
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    missed: list[str] = []
    started, began = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    if recipe.sweep is not None:
        done = _swept(recipe, work, out)
    else:
        done = all(_ran(command, out, missed) for command in recipe.commands)
    after = machine_card()["commit"]
    if done and after != commit:
        print(f"{name}: the commit changed from {commit} to {after} meanwhile", file=sys.stderr)
        done = False
    if not done:
        print(f"{name}: failed, see above", file=sys.stderr)
        return False
    facts = {
        "record": name,
        "commit": commit,
        "machine": machine_card(),
        "made_by": made_by(recipe),
        "definitions": catalogue.DEFINITIONS,
        "started": started.isoformat(timespec="seconds"),
        "duration_s": round(time.monotonic() - began, 1),
        "missed": missed,
        "computed": recipe.computed,
        **(_kept_evidence(work, out) if recipe.sweep is not None else {}),
        "files": catalogue.digests(out),
    }
    _write_manifest(out, facts)
    _place(out, folder / name)
    catalogue.restore(name, folder)
    shutil.rmtree(work)
    print(f"{name}: made in {facts['duration_s'] / 60:.1f} min", flush=True)
    for command in missed:
        print(f"{name}: MISSED its bar: {command}", flush=True)
    return True


def draw(name: str, commit: str, folder: Path = catalogue.FOLDER) -> None:
    """Draws the figure of a sweep's record again, from the results of the record. Raises
    `UserError` if there is no such record, or its files are not those that were made."""
    facts = catalogue.manifest(name, folder)
    if facts is None or not (folder / name / "experiment.json").exists():
        raise UserError(f"{name} is no record of a sweep, so no figure is drawn of it")
    if facts["files"] != catalogue.digests(folder / name):
        raise UserError(f"{name} has files that were not made with it: make it again")
    with tempfile.TemporaryDirectory() as plots:
        path = _drawn(folder / name, Path(plots))
        shutil.copy2(path, folder / name)
    facts |= {"drawn_at": commit, "files": catalogue.digests(folder / name)}
    _write_manifest(folder / name, facts)
    print(f"{name}: drawn", flush=True)


def _write_manifest(folder: Path, facts: dict[str, object]) -> None:
    text = json.dumps(facts, indent=1) + "\n"
    (folder / catalogue.MANIFEST).write_text(text, encoding="utf-8")


def _drawn(sweep: Path, plots: Path) -> Path:
    from plots import gallery

    records = store.Comparison.load(sweep).results(sweep)
    return gallery.main_figure(records).draw(sweep, plots)[0]


def _kept_evidence(work: Path, out: Path) -> dict[str, str]:
    """Copies the raw measurements of each trial's first repeat into the record, if they are small.
    Otherwise all raw measurements go to a folder outside the record, and the fact `evidence` names
    it."""
    logs = sorted((work / "logs").glob("*/*/evidence*.json.gz"))
    first = [path for path in logs if path.name == "evidence.json.gz"]
    if sum(path.stat().st_size for path in first) <= EVIDENCE_BYTES:
        _copy(first, out)
        return {}
    folder = ROOT / "build" / "evidence" / work.name
    _copy(logs, folder)
    return {"evidence": str(folder.relative_to(ROOT))}


def _copy(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        target = folder / path.parent.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def made_by(recipe: Recipe) -> list[str]:
    """Returns the commands whose output is the record."""
    if recipe.sweep is None:
        return list(recipe.commands)
    overrides = "".join(f" --set {override}" for override in recipe.set)
    return [f"python benchmarks.py run configs/experiments/{recipe.sweep}.yaml{overrides}"]


def _place(new: Path, target: Path) -> None:
    """Replaces a folder by a new one; if this is interrupted, one of them is there, complete."""
    fresh, old = (target.with_name(f".{target.name}.{state}") for state in ("new", "old"))
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(new, fresh)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _swept(recipe: Recipe, work: Path, out: Path) -> bool:
    experiment = ROOT / "configs" / "experiments" / f"{recipe.sweep}.yaml"
    logs = work / "logs"
    command = [sys.executable, str(ROOT / "benchmarks.py"), "run", str(experiment), "--quiet"]
    command += ["--no-plot", "--logs", str(logs)]
    for override in recipe.set:
        command += ["--set", override]
    if _status(command) != 0:
        return False
    folder = logs / load(experiment, recipe.set).name
    for name in _SWEEP_FILES:
        if name != store.FORESEEN or (folder / name).exists():  # only emulated sweeps have it
            shutil.copy2(folder / name, out / name)
    shutil.copy2(_drawn(folder, work / "plots"), out)
    return True


def _ran(command: str, out: Path, missed: list[str]) -> bool:
    """Runs a command; returns False if it fails. Adds it to `missed` if it misses a requirement."""
    text = command.format(out=shlex.quote(str(out)))
    print(f"  {text}", flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    status = _status(["bash", "-euo", "pipefail", "-c", text], {"PATH": path})
    if status == catalogue.MISSED:
        missed.append(command)
    return status in (0, catalogue.MISSED)


def _status(argv: list[str], environment: Mapping[str, str] | None = None) -> int:
    """Runs a command, and returns its exit status. If this process is asked to end meanwhile, all
    processes of the command get SIGTERM; they would disturb the next record."""
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise


def _check(chosen: dict[str, Recipe]) -> int:
    reasons = catalogue.withdrawn()
    status = 0
    for name, recipe in chosen.items():
        wrong = problems(name, recipe)
        if name in reasons:
            print(f"{name}: withdrawn: {reasons[name]}")
        for problem in wrong:
            print(f"{name}: {problem}")
        if name in reasons and not wrong:
            print(f"{name}: has no problem: remove it from {catalogue.WITHDRAWN}")
        if (name in reasons) != bool(wrong):
            status = 1
    return status


def problems(name: str, recipe: Recipe, folder: Path = catalogue.FOLDER) -> list[str]:
    """Returns the reasons why a record does not match today's definitions."""
    facts = catalogue.manifest(name, folder)
    if facts is None:
        return ["was not made by `make records`"]
    wrong = []
    if facts["made_by"] != made_by(recipe):
        wrong.append("is made by other commands now")
    if facts.get("definitions") != catalogue.DEFINITIONS:
        wrong.append(f"has definitions {facts.get('definitions')}; now: {catalogue.DEFINITIONS}")
    if facts["files"] != catalogue.digests(folder / name):
        wrong.append("has files that were not made with it")
    if problem := commit_problem(facts["commit"]):
        wrong.append(problem)
    if recipe.sweep is not None:
        wrong += _sweep_problems(folder / name, recipe, facts["commit"])
    return wrong


def _sweep_problems(folder: Path, recipe: Recipe, commit: str) -> list[str]:
    records = store.Comparison.load(folder).results(folder)
    wrong = []
    if commits := {record.machine["commit"] for record in records} - {commit}:
        wrong.append(f"has trials of other commits: {', '.join(map(str, sorted(commits)))}")
    today = {trial.hash for trial in todays_trials(recipe, records)}
    recorded = {identity(record.trial): record.id for record in records}
    if strange := [name for trial, name in recorded.items() if trial not in today]:
        wrong.append(f"has trials that are not today's: {strange[0]} and {len(strange) - 1} more")
    if lacking := today - recorded.keys():
        wrong.append(f"lacks {len(lacking)} of today's {len(today)} trials")
    return wrong


def todays_trials(recipe: Recipe, records: list[Record]) -> list[Trial]:
    """Returns the trials of the present experiment, for the machine and data of the records. The
    threads per rank depend on the machine, and the digest of the data on files that may be missing
    here. So both are taken from the records."""
    overrides = list(recipe.set)
    threads = {record.trial["threads_per_rank"] for record in records}
    data = {record.trial.get("data_digest") for record in records} - {None}
    if len(threads) == 1:
        overrides.append(f"threads_per_rank={threads.pop()}")
    experiment = load(ROOT / "configs" / "experiments" / f"{recipe.sweep}.yaml", overrides)
    return experiment.trials(data.pop() if len(data) == 1 else "unknown")


def commit_problem(commit: str | None) -> str | None:
    """Returns why a commit does not identify the code; None if git knows the commit, or cannot tell
    (in an unpacked archive, which has no history, or in a shallow clone)."""
    if commit is None or commit.endswith("+dirty"):
        return f"was made from {commit}, which does not identify the code"
    if _git("rev-parse", "--is-shallow-repository").strip() != "false":
        return None
    if _git("cat-file", "-t", commit).strip() != "commit":
        return f"was made from commit {commit}, which is not in git's history"
    return None


def _git(*arguments: str) -> str:
    command: list[Any] = ["git", "-C", ROOT, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:  # no git
        return ""


if __name__ == "__main__":
    program.run(main)
