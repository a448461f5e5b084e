"""What the verbs do."""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from common.emulation import sandbox
from common.harness import ui
from common.harness.experiment import Experiment, load
from common.harness.trial import Trial
from common.models.registry import MODELS
from common.profiling import gpus
from common.results import store
from common.results.faith import doubt, incorrect
from common.results.records import Record, fabric_words, is_learning
from common.results.reference_reports import (
    link_logs,
    load_reports,
    report_lines,
    reports,
    side_by_side,
)
from common.results.store import Comparison
from common.results.table import csv_text
from dear.algorithms.aliases import ALIASES
from dear.errors import UserError, one_of
from dear.training.algorithm import algorithm_class, algorithm_names

ROOT = Path(__file__).parents[2]
_ON_VIRTUAL_HOSTS = "(on virtual hosts: they live only while a sweep runs)"


def run(options: argparse.Namespace, draw: Callable[[Path, bool], list[Path]] | None = None) -> int:
    """Runs an experiment (or prints its plan); the exit status.

    It is 1 if a trial that can run did not, or was not the right training.

    Args:
        options: the flags of the verb, with models and algorithms of the user's as `given`, and as
            `arguments` all that started this process: an experiment on virtual hosts runs in a
            process of its own, which is started with them.
        draw: draws a sweep's figure, given its folder and whether it has learned; None draws none.
    """
    path = find_experiment(options.experiment)
    experiment = load(path, options.set, options.given)
    everything = experiment.trials()
    assumed = options.given.assumed([model.name for model in experiment.models])
    if assumed and not sandbox.inside():  # where it has been said
        print(assumed, file=sys.stderr)
    if experiment.cluster is not None and not options.dry_run and not sandbox.inside():
        return sandbox.run([sys.executable, str(ROOT / "benchmarks.py"), *options.arguments])

    from common.harness.fabric import check_fit, make_fabric
    from common.harness.sweep import Sweep, to_run
    from common.machine import machine_card

    trials = [trial for trial in everything if _selected(trial, options.filter)]
    if not trials:
        wanted = " ".join(options.filter)
        raise UserError(f"--filter {wanted}: no trial of {experiment.name} matches")
    if options.shard:
        trials = shard(trials, options.shard)
    check_fit(trials)
    folder = options.logs / experiment.name
    if options.dry_run:
        records = folder / "records.jsonl"
        todo = {one.hash for one in to_run(trials, records, options.rerun, experiment.base)}
        _print_plan(trials, todo, folder, experiment, options)
        return 0

    progress = ui.ProgressLine(quiet=options.quiet)
    comparison = Comparison(
        compare_to=experiment.base, trials=tuple(trial.hash for trial in everything)
    )
    fabric = make_fabric(experiment, trials)
    command = shlex.join(["python", "benchmarks.py", *options.arguments])
    asked = (command, path.read_text())
    sweep = Sweep(experiment, trials, comparison, folder, fabric, machine_card(), progress, asked)
    try:
        sweep.run(options.rerun, options.fail_fast)
    finally:
        progress.clear()
    results = comparison.results(folder)
    _write_outputs(folder, results, experiment.base)
    if options.stream:
        logs_of_rank_0 = [p for t in trials for p in (folder / t.id).glob("log-*-rank0.txt")]
        text = "".join(path.read_text() for path in sorted(logs_of_rank_0))
        print(text, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps([result.to_json() for result in results]))
    else:
        _print_results(folder, results, experiment.base)
        if experiment.report_lines:
            print("\n".join(report_lines(results)))
            link_logs(folder, results)
    if options.trace is not None and any(result.ok for result in results):
        _write_traces(folder, results, options.trace, quiet=options.json)
    if draw is not None and any(result.ok for result in results):
        paths = draw(folder, is_learning(results))
        if not (options.json or options.quiet):
            kinds = ", ".join(path.suffix[1:] for path in paths[1:])
            print(f"figure: {_short(str(paths[0]))} (and {kinds})")
            print(f"more figures: python -m plots.gallery {_short(str(folder))}")
    known = {result.hash: result for result in results}
    ended = [known.get(trial.hash) for trial in trials]
    # What cannot run here is no failure; but a sweep of nothing else has measured nothing.
    good = any(one is not None and one.ok for one in ended) and all(
        one is not None and one.status in ("ok", "unsupported") and not incorrect(one)
        for one in ended
    )
    return 0 if good else 1


def find_experiment(given: str | Path) -> Path:
    """A file, or one of configs/experiments by name, with or without `.yaml`.

    Raises:
        UserError: there is neither.
    """
    path = Path(given)
    if path.exists() or path.parent != Path():
        return path
    folder = ROOT / "configs" / "experiments"
    known = {path.stem: path for path in folder.glob("*.yaml")}
    return one_of("experiment", path.name.removesuffix(".yaml"), known)


def shard(trials: Sequence[Trial], text: str) -> list[Trial]:
    """Part i of n, `i/n`. What is compared with each other, and shares a time scale, stays
    together.

    Raises:
        UserError: no such part.
    """
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    part, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part <= parts:
        raise UserError(f"--shard {text}: must be PART/PARTS, such as 1/3, 2/3 and 3/3")
    cells = list(dict.fromkeys(trial.cell for trial in trials))
    if parts > len(cells):
        raise UserError(f"--shard {text}: there are only {len(cells)} parts that stand alone")
    own = set(cells[part - 1 :: parts])
    return [trial for trial in trials if trial.cell in own]


def merge(options: argparse.Namespace) -> int:
    """Makes one sweep of several parts, whose records stay where they are."""
    folders = [part if part.exists() else options.logs / part for part in options.parts]
    comparison = store.merge(folders, options.into)
    results = comparison.results(options.into)
    _write_outputs(options.into, results, comparison.compare_to)
    _print_results(options.into, results, comparison.compare_to)
    return 0


def compare(options: argparse.Namespace) -> int:
    """Prints how the trials of two sweeps compare; 3 if one is slower than `--fail-on` allows."""
    operands = [options.first, options.second, *options.more]
    if any(operand.endswith(".json") for operand in operands):
        return _compare_reports(operands, options)
    if options.more:
        raise UserError("compare: two sweeps; only reports.json of several stand side by side")
    from common.results import compare as comparing

    limit = _regression(options.fail_on)
    before, after = (_operand(text, options.logs) for text in (options.first, options.second))
    if not options.force:
        comparing.refuse_mixed(before, after)
    found = comparing.rows(comparing.pairs(before, after))
    table, differs = comparing.table(found), comparing.environment(before, after)
    if options.json:
        print(json.dumps({"pairs": [vars(one) for one in found], "environment": differs}))
    elif options.markdown:
        print(table.markdown(), end="")
    else:
        table.print(f"{options.first} -> {options.second}: {fabric_words([*before, *after])}")
    if not options.json:
        lines = [f"environment: {line}" for line in differs]
        mean = comparing.geometric_mean(found)
        if mean is not None:
            lines.insert(0, f"geometric mean of {mean[1]} trials: {mean[0]:.3f}x")
        unmatched = len(before) + len(after) - 2 * len(found)
        if unmatched:
            lines.append(f"{unmatched} trials have no counterpart")
        print("\n".join([""] * options.markdown + lines))
    slower = comparing.regressions(found, limit) if limit is not None else []
    for one in slower:
        print(f"regression: {one.model} {one.algorithm}: {one.ratio:.3f}x", file=sys.stderr)
    return 3 if slower else 0


def _compare_reports(operands: Sequence[str], options: argparse.Namespace) -> int:
    """Prints what reports of the reference suites' kind say, or sweeps as they would say it."""
    if options.fail_on:
        raise UserError("compare: --fail-on needs the steps of two sweeps; reports have only means")
    found = {
        name: load_reports(Path(name))
        if name.endswith(".json")
        else reports(_operand(name, options.logs))
        for name in operands
    }
    table = side_by_side(found)
    if options.json:
        print(json.dumps([vars(row) for row in table.rows]))
    elif options.markdown:
        print(table.markdown(), end="")
    else:
        table.print("samples/s of all workers, as reports tell them: means without an interval")
    return 0


def _regression(text: str | None) -> float | None:
    """The share in `regression:5%`."""
    if text is None:
        return None
    found = re.fullmatch(r"regression:([0-9.]+)%", text)
    if found is None:
        raise UserError(f"--fail-on {text}: must be regression:N%, such as regression:5%")
    return float(found[1]) / 100


def _operand(text: str, logs: Path) -> list[Record]:
    """The records of `SWEEP`, or those of `SWEEP@TEXT` whose title or `key=value` has the text."""
    name, _, chosen = text.partition("@")
    folder = next((one for one in (Path(name), logs / name) if (one / _RECORDS).exists()), None)
    if folder is None:
        raise UserError(f"compare: no records in {name}, nor in {logs / name}")
    records = Comparison.load(folder).results(folder)
    if is_learning(records):
        raise UserError(f"compare: {name} has timed no single steps, but learned")
    kept = [one for one in records if not chosen or _holds(one, chosen)]
    if not kept:
        known = ", ".join(dict.fromkeys(one.label for one in records))
        raise UserError(f"compare: {text}: no trial is of that kind; there are {known}")
    return kept


def _holds(record: Record, wanted: str) -> bool:
    key, equals, value = wanted.partition("=")
    if equals:
        return str(record.trial.get(key)) == value
    return wanted == record.label


_RECORDS = "records.jsonl"
OWN_MODELS = ROOT / "configs" / "experiments" / "own.yaml"
"""What is run of models that the command line names, where it names no experiment."""


def default_experiment() -> Path:
    """The sweep of a bare `python benchmarks.py`: on virtual hosts where they can be made."""
    reason = None if sandbox.inside() else sandbox.unable()
    if reason:
        print(f"no virtual hosts here ({reason}): quick.yaml instead", file=sys.stderr)
    return ROOT / "configs" / "experiments" / ("quick.yaml" if reason else "emulated-quick.yaml")


def sweep_folder(name: str | None, logs: Path, *, begun: bool = False) -> Path:
    """The folder of a sweep, which is a path or the name of one below `logs`; without one, of the
    newest there.

    Args:
        begun: whether a sweep that has no record yet will do.

    Raises:
        UserError: none is there.
    """
    files = (_RECORDS, "experiment.json") if begun else (_RECORDS,)
    paths = [path for file in files for path in logs.glob(f"*/{file}")]
    paths.sort(key=lambda path: path.stat().st_mtime)
    if name is None and not paths:
        raise UserError(f"no records in {logs}: nothing has run yet")
    if name is None:
        return paths[-1].parent
    for folder in (logs / name, Path(name)):
        if any((folder / file).exists() for file in files):
            return folder
    known = dict.fromkeys(sorted(path.parent.name for path in paths))
    raise UserError(f"no records in {logs / name}; sweeps there: {', '.join(known) or 'none'}")


def show(options: argparse.Namespace) -> int:
    """Prints the table (or records) of a sweep that has run; without a name, of the newest."""
    folder = sweep_folder(options.sweep, options.logs)
    comparison = Comparison.load(folder)
    with store.no_collector():
        results = comparison.results(folder)
        gc.freeze()  # nor later: this process ends with the command
    if options.json:
        print(json.dumps([result.to_json() for result in results]))
    elif options.breakdown:
        _print_breakdown(folder, results, comparison.compare_to)
    elif options.trace is not None:
        _write_traces(folder, results, options.trace)
    elif options.plan:
        _print_plans(folder, results)
    else:
        _print_results(folder, results, comparison.compare_to)
    return 0


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
    aliases = {}
    for name, (algorithm, given) in ALIASES.items():
        shown = ", ".join(f"{key}={value}" for key, value in given.items())
        aliases[name] = algorithm + (f" with {shown}" if shown else "")
    return {
        "algorithms": algorithms,
        "other names": aliases,
        "models": sorted(MODELS),
        "GPUs": {
            name: f"{one.name}: {one.fp32_tflops:g} TFLOP/s, {one.memory_gb_per_s:g} GB/s"
            for name, one in gpus.table().items()
        },
        "experiments": experiments,
    }


def _selected(trial: Trial, filters: Sequence[str]) -> bool:
    values = trial.to_json()
    for text in filters:
        key, equals, wanted = text.partition("=")
        if equals and key in values:
            if str(values[key]) not in wanted.split("|"):
                return False
        elif not any(part in trial.title for part in text.split("|")):
            return False
    return True


def _print_plan(
    trials: Sequence[Trial],
    todo: set[str],
    folder: Path,
    experiment: Experiment,
    options: argparse.Namespace,
) -> None:
    from common.harness.fabric import WORKER, launcher_for
    from common.launch.job import Job

    launcher = None if experiment.cluster else launcher_for(experiment, trials)
    known = store.latest(store.load(folder / "records.jsonl"))
    plan = []
    for trial in trials:
        job = Job(
            folder=folder / trial.id,
            repeat=0,
            world_size=trial.world_size,
            timeout_s=experiment.timeout_s,
            worker_module=WORKER,
        )
        entry = {"id": trial.id, "run": trial.hash in todo}
        entry["last_duration_s"] = known[trial.hash].duration_s if trial.hash in known else None
        entry["command"] = launcher.command(job) if launcher else _ON_VIRTUAL_HOSTS
        plan.append(entry | {"trial": trial.to_json()})
    if options.json:
        print(json.dumps(plan, indent=2))
        return
    for trial, entry in zip(trials, plan, strict=True):
        state = "to run" if entry["run"] else "done"
        if entry["last_duration_s"]:
            state += f", took {ui.duration(entry['last_duration_s'])}"
        print(f"{trial.title}  [{state}]")
        chosen = ", ".join(f"{k}={value}" for k, value in entry["trial"]["options"].items())
        print(
            f"    {trial.measure.plan}, global batch "
            f"{sum(trial.rank_batches)}, {trial.dtype}, {trial.backend}, "
            f"{trial.threads_per_rank} threads per rank"
            + (f", {trial.hosts} virtual hosts on {trial.network}" if trial.hosts else "")
            + (f"; {chosen}" if chosen else "")
        )
        print(f"    {_short(entry['command'])}")
    runs = sum(entry["run"] for entry in plan)
    print(f"{len(plan)} trials, {runs} to run; results in {_short(str(folder))}")
    again = [one for one in options.arguments if one not in ("-n", "--dry-run")]
    command = [_short(sys.executable), "benchmarks.py", *again]
    largest = max(trial.world_size for trial in trials)
    script = launcher and launcher.batch_script(command, experiment.name, largest)
    if script:
        print(f"\nAll of it in one allocation, as a file for sbatch:\n\n{script}")


def _short(text: str) -> str:
    here = f"{Path.cwd()}{os.sep}"
    return text.replace(here, "")


def _write_outputs(folder: Path, results: list[Record], compare_to: str) -> None:
    from common.results import rows
    from common.results.overview import overview

    told = overview(results, compare_to)
    (folder / "table.md").write_text(told.table.markdown())
    (folder / "table.tex").write_text(told.table.latex())
    (folder / "table.csv").write_text(csv_text(told.kind, told.rows))
    if told.kind is rows.Row:
        (folder / "reports.json").write_text(json.dumps(reports(results), indent=2))


def _print_results(folder: Path, results: list[Record], compare_to: str) -> None:
    from common.results.overview import overview

    told = overview(results, compare_to)
    told.table.print(_title(folder, results))
    for line in told.lines:
        print(line)
    for result in filter(incorrect, results):
        print(f"not the right training: {result.id} ({doubt(result)})")
    for result in results:
        if result.status not in ("ok", "unsupported"):
            logs = sorted((folder / result.id).glob(f"log-*-rank{result.error.rank or 0}.txt"))
            print(f"{result.status}: {result.id}: {result.error.message}")
            print(f"    log: {_short(str(logs[-1]))}" if logs else "    no log: it never started")
    print(f"records, table.md, table.csv: {_short(str(folder))}")
    here = "" if folder.parent == ROOT / "logs" else f" --logs {_short(str(folder.parent))}"
    print(f"all of it in one HTML file: python benchmarks.py report {folder.name}{here}")
    if any(result.bound for result in results):
        print(f"where the time goes: python benchmarks.py show {folder.name} --breakdown{here}")


def _print_breakdown(folder: Path, results: list[Record], compare_to: str) -> None:
    from common.results import rows

    if is_learning(results):
        raise UserError(f"--breakdown: {folder.name} has timed no single steps, but learned")
    table = rows.breakdown(rows.make_rows(results, compare_to))
    if not table.rows:
        print(f"{folder.name}: no trial has a result")
        return
    table.print(_title(folder, results))
    print(rows.LEGEND)


def _write_traces(folder: Path, results: list[Record], into: Path, quiet: bool = False) -> None:
    from common.results import traces

    paths = traces.write(folder, results, into)
    if not quiet:
        here = _short(str(into))
        print(f"timelines of {len(paths)} trials in {here}: open merged.json in ui.perfetto.dev")


def _print_plans(folder: Path, results: list[Record]) -> None:
    from common.results import plans

    print(_title(folder, results))
    for result in results:
        print("\n".join(plans.lines(result)))


def _title(folder: Path, results: list[Record]) -> str:
    machine = results[0].machine
    if not machine:  # logs of other programs do not tell
        return f"{folder.name}: {fabric_words(results)}"
    return (
        f"{folder.name}: {fabric_words(results)} on {machine['cores']} x {machine['cpu']}, "
        f"torch {machine['packages']['torch']}, commit {machine['commit']}"
    )
