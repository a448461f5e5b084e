"""What the verbs do."""

from __future__ import annotations

import inspect
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from common.harness.experiment import Experiment
from common.harness.experiment_file import load
from common.harness.trial import Trial
from common.models.registry import MODELS
from common.results import records
from common.results.comparison import Comparison
from dear.errors import UserError
from dear.training.algorithm import algorithm_class, algorithm_names

ROOT = Path(__file__).parents[2]
_ON_VIRTUAL_HOSTS = "(on virtual hosts: they live only while a sweep runs)"


def run(
    *,
    experiment_path: Path,
    overrides: Sequence[str],
    filters: Sequence[str],
    logs: Path,
    dry_run: bool,
    rerun: Any,
    fail_fast: bool,
    plot: bool,
    stream: bool,
    as_json: bool,
    quiet: bool,
    arguments: Sequence[str],
) -> int:
    """Runs an experiment (or prints its plan); the exit status, 1 if a trial that can run did not.

    An experiment on virtual hosts runs in a process of its own: `arguments` are what started this
    one.
    """
    from common.emulation import sandbox
    from common.harness.fabric import check_fit, make_fabric
    from common.harness.sweep import Sweep, to_run

    experiment = load(experiment_path, overrides)
    everything = experiment.trials()
    trials = [trial for trial in everything if _selected(trial, filters)]
    if not trials:
        raise UserError(f"--filter {' '.join(filters)}: no trial of {experiment.name} matches")
    check_fit(trials)
    folder = logs / experiment.name
    if dry_run:
        todo = {trial.hash for trial in to_run(trials, folder / "records.jsonl", rerun)}
        _print_plan(trials, todo, folder, experiment, as_json)
        return 0
    if experiment.cluster is not None and not sandbox.inside():
        reason = sandbox.unable()
        if reason:
            raise UserError(f"virtual hosts: {reason}")
        return sandbox.run([sys.executable, str(ROOT / "benchmarks.py"), *arguments])

    from common.harness import ui
    from common.harness.machine import machine_card

    progress = ui.ProgressLine(quiet=quiet)
    comparison = Comparison(
        compare_to=experiment.base, trials=tuple(trial.hash for trial in everything)
    )
    fabric = make_fabric(experiment, trials)
    sweep = Sweep(experiment, trials, comparison, folder, fabric, machine_card(), progress)
    try:
        sweep.run(rerun, fail_fast)
    finally:
        progress.clear()
    results = comparison.results(folder)
    _write_outputs(folder, results, experiment.base)
    if stream:
        text = "".join(path.read_text() for path in sorted(_rank0_logs(folder, trials)))
        print(text, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(results))
    else:
        _print_results(folder, results, experiment.base)
    if plot and any(result["status"] == "ok" for result in results):
        _plot(folder, results, quiet=as_json or quiet)
    status = {result["hash"]: result["status"] for result in results}
    ended = [status.get(trial.hash) for trial in trials]
    # What cannot run here is no failure; but a sweep of nothing else has measured nothing.
    good = "ok" in ended and all(one in ("ok", "unsupported") for one in ended)
    return 0 if good else 1


def default_experiment() -> Path:
    """The sweep of a bare `python benchmarks.py`: on virtual hosts where they can be made."""
    from common.emulation import sandbox

    reason = None if sandbox.inside() else sandbox.unable()
    if reason:
        print(f"no virtual hosts here ({reason}): quick.yaml instead", file=sys.stderr)
    return ROOT / "configs" / "experiments" / ("quick.yaml" if reason else "emulated-quick.yaml")


def show(logs: Path, name: str | None, as_json: bool, breakdown: bool = False) -> None:
    """Prints the table (or records) of a sweep that has run; without a name, of the newest.

    Args:
        breakdown: print where the time goes instead of the comparison.
    """
    paths = sorted(logs.glob("*/records.jsonl"), key=lambda path: path.stat().st_mtime)
    if name is None and not paths:
        raise UserError(f"no records in {logs}: nothing has run yet")
    folder = paths[-1].parent if name is None else logs / name
    if not (folder / "records.jsonl").exists():
        known = sorted(path.parent.name for path in paths)
        raise UserError(f"no records in {folder}; sweeps there: {', '.join(known) or 'none'}")
    comparison = Comparison.load(folder)
    results = comparison.results(folder)
    if as_json:
        print(json.dumps(results))
        return
    if breakdown:
        _print_breakdown(folder, results, comparison.compare_to)
    else:
        _print_results(folder, results, comparison.compare_to)


def listing() -> dict[str, Any]:
    """Names of everything that an experiment can ask for."""
    algorithms = {}
    for name in algorithm_names():
        cls = algorithm_class(name)
        first = (inspect.getdoc(cls) or "").split("\n")[0]
        missing = cls.unavailable()
        algorithms[name] = first + (f"  [unsupported here: {missing}]" if missing else "")
    experiments = {}
    for path in sorted((ROOT / "configs" / "experiments").glob("*.yaml")):
        experiments[str(path.relative_to(ROOT))] = yaml.safe_load(path.read_text()).get(
            "description", ""
        )
    return {"algorithms": algorithms, "models": sorted(MODELS), "experiments": experiments}


def wrapped(names: Sequence[str]) -> str:
    """Names as an indented paragraph."""
    return textwrap.fill(" ".join(names), 98, initial_indent="  ", subsequent_indent="  ")


def _selected(trial: Trial, filters: Sequence[str]) -> bool:
    values = trial.to_json()
    for text in filters:
        key, equals, wanted = text.partition("=")
        if equals and key in values:
            if str(values[key]) != wanted:
                return False
        elif text not in trial.title:
            return False
    return True


def _print_plan(
    trials: Sequence[Trial],
    todo: set[str],
    folder: Path,
    experiment: Experiment,
    as_json: bool,
) -> None:
    from common.harness.fabric import WORKER, launcher_for
    from common.harness.ui import duration
    from common.launch.job import Job

    launcher = None if experiment.cluster else launcher_for(experiment, trials)
    known = records.latest(records.load(folder / "records.jsonl"))
    plan = []
    for trial in trials:
        job = Job(
            folder=folder / trial.id,
            repeat=0,
            world_size=trial.world_size,
            timeout_s=experiment.timeout_s,
            worker_module=WORKER,
        )
        plan.append(
            {
                "id": trial.id,
                "run": trial.hash in todo,
                "last_duration_s": known.get(trial.hash, {}).get("duration_s"),
                "command": launcher.command(job) if launcher else _ON_VIRTUAL_HOSTS,
                "trial": trial.to_json(),
            }
        )
    if as_json:
        print(json.dumps(plan, indent=2))
        return
    for trial, entry in zip(trials, plan, strict=True):
        state = "to run" if entry["run"] else "done"
        if entry["last_duration_s"]:
            state += f", took {duration(entry['last_duration_s'])}"
        print(f"{trial.title}  [{state}]")
        options = ", ".join(f"{key}={value}" for key, value in trial.options.items())
        print(
            f"    {trial.measure.repeats} repeats, global batch "
            f"{sum(trial.rank_batches)}, {trial.dtype}, {trial.backend}, "
            f"{trial.threads_per_rank} threads per rank"
            + (f", {trial.hosts} virtual hosts on {trial.network}" if trial.hosts else "")
            + (f"; {options}" if options else "")
        )
        print(f"    {_short(entry['command'])}")
    runs = sum(entry["run"] for entry in plan)
    print(f"{len(plan)} trials, {runs} to run; results in {_short(str(folder))}")


def _short(text: str) -> str:
    here = f"{Path.cwd()}{os.sep}"
    return text.replace(here, "")


def _write_outputs(folder: Path, results: list[records.Record], compare_to: str) -> None:
    from common.results import learning, learning_table, tables

    if learning.is_learning(results):
        learned = learning.rows(results)
        (folder / "table.md").write_text(learning_table.markdown(learned))
        (folder / "table.csv").write_text(learning_table.csv_text(learned))
        return
    table = tables.rows(results, compare_to)
    (folder / "table.md").write_text(tables.markdown(table, compare_to))
    (folder / "table.csv").write_text(tables.csv_text(table))
    (folder / "reports.json").write_text(json.dumps(tables.reference_reports(results), indent=2))


def _print_results(folder: Path, results: list[records.Record], compare_to: str) -> None:
    from common.results import learning, learning_table, tables
    from common.results.terminal import print_learning, print_table

    if learning.is_learning(results):
        learned = learning.rows(results)
        print_learning(learned, _title(folder, results))
        lines = learning_table.summary(learned)
    else:
        table = tables.rows(results, compare_to)
        print_table(table, _title(folder, results), compare_to)
        lines = tables.summary(table, compare_to)
    for line in [*lines, *tables.remarks(results)]:
        print(line)
    for result in results:
        if result["status"] not in ("ok", "unsupported"):
            rank = (result["error"] or {}).get("rank") or 0
            logs = sorted((folder / result["id"]).glob(f"log-*-rank{rank}.txt"))
            print(f"{result['status']}: {result['id']}: {result['error']['message']}")
            print(f"    log: {_short(str(logs[-1]))}" if logs else "    no log: it never started")
    print(f"records, table.md, table.csv: {_short(str(folder))}")
    if any(result.get("bound") for result in results):
        here = "" if folder.parent == ROOT / "logs" else f" --logs {_short(str(folder.parent))}"
        print(f"where the time goes: python benchmarks.py show {folder.name} --breakdown{here}")


def _print_breakdown(folder: Path, results: list[records.Record], compare_to: str) -> None:
    from common.results import learning, tables
    from common.results.breakdown import LEGEND
    from common.results.terminal import print_breakdown

    if learning.is_learning(results):
        raise UserError(f"--breakdown: {folder.name} has timed no single steps, but learned")
    good = [row for row in tables.rows(results, compare_to) if row.status == "ok"]
    if not good:
        print(f"{folder.name}: no trial has a result")
        return
    print_breakdown(good, _title(folder, results))
    print(LEGEND)


def _title(folder: Path, results: list[records.Record]) -> str:
    from common.results import tables

    machine = results[0]["machine"]
    return (
        f"{folder.name}: {tables.fabric_words(results)} on {machine['cores']} x {machine['cpu']}, "
        f"torch {machine['packages']['torch']}, commit {machine['commit']}"
    )


def _rank0_logs(folder: Path, trials: Sequence[Trial]) -> list[Path]:
    return [path for trial in trials for path in (folder / trial.id).glob("log-*-rank0.txt")]


def _plot(folder: Path, results: list[records.Record], quiet: bool) -> None:
    from common.results import learning

    if learning.is_learning(results):
        from plots.learning import draw
    else:
        from plots.throughput import draw

    paths = draw(folder, ROOT / "plots" / "out" / folder.name)
    if not quiet:
        print(f"figure: {_short(str(paths[0]))} (and {', '.join(p.suffix[1:] for p in paths[1:])})")
