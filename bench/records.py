#!/usr/bin/env python3
"""Makes the records in docs/records, and says which are not of today's definitions.

  python bench/records.py                 # make records: all of them, one after the other
  python bench/records.py quick peer      # make records ONLY="quick peer"
  python bench/records.py --plan          # what would be made, and how long that takes
  python bench/records.py --check         # what is wrong with each, without making any

They are made from a clean commit (texts and records aside) in build/records, and take the place of
what was there when all of a record is done, with `made.json`: commit, machine, commands, digests.
A record that does not get that far leaves the old one where it is; a sweep of the same commit goes
on where it was. A record that has been made is no longer withdrawn, and the texts that quote it are
filled in anew. Where a command has missed a bar the record says so. Exit status: 0 all well, 1 a
record could not be made, or is not of today's definitions and not withdrawn; 2 a mistake in what
was asked, or in a place of a text that a record is to fill.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.harness.experiment import load
from common.harness.trial import Trial
from common.machine import machine_card
from common.paths import ROOT
from common.results import readme, shipped, store
from common.results.records import Record, is_learning
from common.results.shipped import Recipe
from dear.errors import UserError, unknown

_SWEEP_FILES = ("experiment.json", "records.jsonl", "table.md")
_SPENT = "spent.json"
EVIDENCE_BYTES = 300_000
"""Up to which raw measurements stand in a record."""


def main(argv: list[str]) -> int:
    options = _arguments(argv)
    recipes = shipped.recipes()
    for name in options.names:
        if name not in recipes:
            raise unknown("record", name, recipes)
    chosen = {name: recipes[name] for name in options.names or recipes}
    if options.check:
        return _check(chosen)
    _print_plan(chosen)
    if options.plan:
        return 0
    commit = machine_card()["commit"]
    if commit is None or commit.endswith("+dirty"):
        raise UserError(f"records are made from a clean commit, and this is {commit}: commit first")
    failed, wrong = [], None
    for name, recipe in chosen.items():
        if not make(name, recipe, commit):
            failed.append(name)
            continue
        try:
            for path in readme.fill():  # at once: the next one may be stopped
                print(f"filled {path.relative_to(ROOT)}")
        except readme.PlaceError as error:  # the others can be made all the same
            wrong = error
    if wrong is not None:
        raise UserError(f"the texts are not filled in: {wrong}")
    if failed:
        print(f"not made: {', '.join(failed)}; what was there stays")
    return 1 if failed else 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="RECORD", help="default: all")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plan", action="store_true", help="say what would be made, make nothing")
    how.add_argument("--check", action="store_true", help="say what is wrong, make nothing")
    return parser.parse_args(argv)


def _print_plan(chosen: dict[str, Recipe]) -> None:
    for name, recipe in chosen.items():
        what = f"configs/experiments/{recipe.sweep}.yaml" if recipe.sweep else "commands"
        missing = [one for one in recipe.needs if one not in os.environ]
        note = f"; needs {', '.join(missing)}, which is not set" if missing else ""
        known = "took" if _took_minutes(name) else "about"
        print(f"{name:18} {known:5} {_minutes(name, recipe):3.0f} min  {what}{note}")
    whole = sum(_minutes(name, recipe) for name, recipe in chosen.items())
    print(f"{len(chosen)} records, about {whole / 60:.1f} hours on two cores", flush=True)


def _minutes(name: str, recipe: Recipe) -> float:
    return _took_minutes(name) or recipe.minutes


def _took_minutes(name: str) -> float | None:
    """How long the record that is there took; None if nobody has noted that."""
    seconds = (shipped.made(name) or {}).get("duration_s")
    return seconds and seconds / 60


def make(name: str, recipe: Recipe, commit: str, folder: Path = shipped.FOLDER) -> bool:
    """Makes one record and puts it in place; False if that was not possible."""
    missing = [one for one in recipe.needs if one not in os.environ]
    if missing:
        print(f"{name}: set {', '.join(missing)} first", file=sys.stderr)
        return False
    print(f"{name}: begins at {datetime.datetime.now():%H:%M}", flush=True)
    work = ROOT / "build" / "records" / f"{name}-{commit}"
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    missed: list[str] = []
    with _timed(work) as spent:
        if recipe.sweep is not None:
            done = _swept(recipe, work, out)
        else:
            done = all(_ran(command, out, missed) for command in recipe.commands)
    after = machine_card()["commit"]
    if done and after != commit:
        print(f"{name}: begun at {commit}, but now this is {after}", file=sys.stderr)
        done = False
    if not done:
        print(f"{name}: not done, see above", file=sys.stderr)
        return False
    facts = {
        "record": name,
        "commit": commit,
        "machine": machine_card(),
        "made_by": made_by(recipe),
        "definitions": shipped.DEFINITIONS,
        **spent,
        "missed": missed,
        **(_kept_evidence(work, out) if recipe.sweep is not None else {}),
        "files": shipped.digests(out),
    }
    (out / shipped.MADE).write_text(json.dumps(facts, indent=1) + "\n")
    _place(out, folder / name)
    shipped.restore(name, folder)
    shutil.rmtree(work)
    print(f"{name}: made in {facts['duration_s'] / 60:.1f} min", flush=True)
    for command in missed:
        print(f"{name}: MISSED its bar: {command}", flush=True)
    return True


@contextmanager
def _timed(work: Path) -> Iterator[dict[str, Any]]:
    """When and for how long a record is made; with earlier calls, if this one goes on after them.

    The dictionary is filled at the end.
    """
    path, facts = work / _SPENT, {}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    before = {"started": now, "duration_s": 0.0}
    left = {one.name for one in work.iterdir()} - {"out"}
    if _SPENT in left and len(left) > 1:
        before = json.loads(path.read_text())
    began = time.monotonic()
    try:
        yield facts
    finally:
        spent_s = round(before["duration_s"] + time.monotonic() - began, 1)
        facts.update(started=before["started"], duration_s=spent_s)
        path.write_text(json.dumps(facts))


def _kept_evidence(work: Path, out: Path) -> dict[str, str]:
    """Copies the raw measurements of each trial's first repeat into a record, if they are small.

    Else all of them go to a folder outside of the record, which the fact `evidence` names.
    """
    logs = sorted((work / "logs").glob("*/*/evidence*.json.gz"))
    first = [path for path in logs if path.name == "evidence.json.gz"]
    if sum(path.stat().st_size for path in first) <= EVIDENCE_BYTES:
        _copy(first, out)
        return {}
    folder = ROOT / "build" / "evidence" / work.name
    _copy(logs, folder)
    return {"evidence": str(folder.relative_to(ROOT))}


def _copy(paths: Iterable[Path], folder: Path) -> None:
    """Each into a folder of the same name as its own, in `folder`."""
    for path in paths:
        target = folder / path.parent.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def made_by(recipe: Recipe) -> list[str]:
    """What the record is made with, for people and to be compared with what the list says now."""
    if recipe.sweep is None:
        return list(recipe.commands)
    overrides = "".join(f" --set {one}" for one in recipe.set)
    return [f"python benchmarks.py run configs/experiments/{recipe.sweep}.yaml{overrides}"]


def _place(new: Path, target: Path) -> None:
    """Puts a folder in the place of another one, of which nothing remains.

    Stopped at any point, one of both is there, whole.
    """
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
    for one in recipe.set:
        command += ["--set", one]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        return False
    from plots import throughput
    from plots.learning import draw as draw_learning

    folder = logs / load(experiment, recipe.set).name
    for name in _SWEEP_FILES:
        shutil.copy2(folder / name, out / name)
    found = store.Comparison.load(folder).results(folder)
    draw = draw_learning if is_learning(found) else throughput.draw
    shutil.copy2(draw(folder, work / "plots")[0], out)
    return True


def _ran(command: str, out: Path, missed: list[str]) -> bool:
    """Whether a command has done its work; if a bar is missed, it is added to `missed`."""
    text = command.format(out=shlex.quote(str(out)))
    print(f"  {text}", flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    status = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        check=False,
    ).returncode
    if status == shipped.MISSED:
        missed.append(command)
    return status in (0, shipped.MISSED)


def _check(chosen: dict[str, Recipe]) -> int:
    gone = shipped.withdrawn()
    status = 0
    for name, recipe in chosen.items():
        found = problems(name, recipe)
        if name in gone:
            print(f"{name}: withdrawn: {gone[name]}")
        elif found:
            status = 1
        for one in found:
            print(f"{name}: {one}")
        if not found and name in gone:
            print(f"{name}: nothing is wrong with it: take it off {shipped.WITHDRAWN}")
            status = 1
    return status


def problems(name: str, recipe: Recipe, folder: Path = shipped.FOLDER) -> list[str]:
    """Why a record is not of today's definitions; empty if it is."""
    made = shipped.made(name, folder)
    if made is None:
        return ["was not made by `make records`"]
    found = []
    if made["made_by"] != made_by(recipe):
        found.append("is made by other commands now")
    if made.get("definitions") != shipped.DEFINITIONS:
        found.append(
            f"is of definitions {made.get('definitions')}; today's are {shipped.DEFINITIONS}"
        )
    if made["files"] != shipped.digests(folder / name):
        found.append("has files that were not made with it")
    if doubt := commit_doubt(made["commit"]):
        found.append(doubt)
    if recipe.sweep is not None:
        found += _sweep_problems(folder / name, recipe, made["commit"])
    return found


def _sweep_problems(folder: Path, recipe: Recipe, commit: str) -> list[str]:
    comparison = store.Comparison.load(folder)
    found = comparison.results(folder)
    wrong = []
    if commits := {one.machine["commit"] for one in found} - {commit}:
        wrong.append(f"has trials of other commits: {', '.join(map(str, sorted(commits)))}")
    today = {trial.hash for trial in todays_trials(recipe, found)}
    if strange := [one.id for one in found if one.hash not in today]:
        wrong.append(f"has trials that are not today's: {strange[0]} and {len(strange) - 1} more")
    if lacking := today - {one.hash for one in found}:
        wrong.append(f"lacks {len(lacking)} of today's {len(today)} trials")
    return wrong


def todays_trials(recipe: Recipe, found: list[Record]) -> list[Trial]:
    """The trials of the experiment as it is now, on a machine and with data as on record.

    Threads per rank follow from the machine's cores, and the digest of the data from files that
    need not be here: both are the recorded ones.
    """
    overrides = list(recipe.set)
    threads = {one.trial["threads_per_rank"] for one in found}
    data = {one.trial.get("data_digest") for one in found} - {None}
    if len(threads) == 1:
        overrides.append(f"threads_per_rank={threads.pop()}")
    experiment = load(ROOT / "configs" / "experiments" / f"{recipe.sweep}.yaml", overrides)
    return experiment.trials(data.pop() if len(data) == 1 else "unknown")


def commit_doubt(commit: str | None) -> str | None:
    """Why a commit does not say which code ran; None where git has it, or cannot be asked.

    An unpacked archive has no history, and a shallow clone only its end.
    """
    if commit is None or commit.endswith("+dirty"):
        return f"was made from {commit}, which says not which code ran"
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
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; records that were finished are in place", file=sys.stderr)
        sys.exit(130)
