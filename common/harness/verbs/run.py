"""Verb `run`: measures the trials of an experiment, or prints which trials it would measure."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.emulation import sandbox
from common.emulation.config import EMULATED_ONLY
from common.harness import variables, verbs
from common.harness.experiment import Experiment
from common.harness.experiment_file import (
    NOTHING_RUNS,
    CommandLine,
    default_experiment,
    find_experiment,
    load,
)
from common.harness.trial import BASELINE, Trial
from common.harness.verbs import Status
from common.paths import COMMAND, DRIVER, EXPERIMENTS, MODULE, short
from common.profiling import gpus
from common.results.records import Record
from dear.errors import UserError

HELP = "run an experiment"
TRACE = "write timelines of each trial there, for Perfetto"
CUSTOM_MODELS = EXPERIMENTS / "custom.yaml"
"""Experiment for models of the command line, if the user names no experiment."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    add_experiment(parser, "emulated-quick, or quick if virtual hosts are not possible")
    parser.add_argument(
        "--predict", action="store_true", help="measure nothing: `predict` the same experiment"
    )
    _add_selection(parser)
    group = parser.add_argument_group("virtual hosts (change the experiment's `cluster`)")
    add_cluster(group)
    group.add_argument("--time-scale", help="real seconds per emulated second (default: automatic)")
    add_custom(
        parser.add_argument_group(
            "custom models and algorithms (docs/bring_your_own.md)",
            "Without an experiment, they run in configs/experiments/custom.yaml, on virtual hosts.",
        )
    )
    _add_output(parser)


def add_experiment(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the argument that names an experiment, and the flags that change it."""
    parser.add_argument(
        "experiment",
        nargs="?",
        type=Path,
        help=f"an experiment file, or the name of one of configs/experiments (default: {default})",
    )
    parser.add_argument(
        "-k",
        "--filter",
        action="append",
        default=[],
        metavar="TEXT",
        help="only trials whose title contains TEXT, or with key=value; A|B: A or B; if given "
        "several times, all must hold",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key of the experiment, e.g. measure.repeats=5 or models.0.batch_size=8",
    )


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--dry-run", action="store_true", help="print the trials, run nothing"
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="run shard I of N (one per machine); combine the results with `merge`",
    )
    parser.add_argument(
        "--rerun",
        choices=("failed", "all"),
        default="failed",
        help="trials to run again: those without a valid record (default), or all",
    )
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first failed trial")


def add_cluster(group: argparse._ArgumentGroup) -> None:
    """Adds the flags that describe the hosts of a cluster."""
    for flag, text in (
        ("--hosts", "number of virtual hosts; every trial uses all of them"),
        ("--ranks-per-host", "ranks on each virtual host"),
        ("--network", "links: a profile of configs/networks, or a bandwidth such as 2.5gbit"),
    ):
        group.add_argument(flag, help=text)


def add_custom(group: argparse._ArgumentGroup) -> None:
    """Adds the flags for models and algorithms of the user."""
    group.add_argument(
        "--model-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file with functions model() and batch(batch_size); replaces the models of "
        "the experiment",
    )
    group.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="a model of `list`, of transformers (hf:gpt2) or of timm (timm:resnet50d); replaces "
        "the models of the experiment",
    )
    group.add_argument("--batch", type=int, metavar="N", help="samples per rank of these models")
    group.add_argument(
        "--gpu",
        metavar="NAME",
        help="GPU whose compute times are replayed: a name (times are modelled from operations "
        "and bytes), or `here` (measured on this machine's GPU). Default on virtual hosts: here if "
        "there is a GPU, else rtx2080ti",
    )
    add_plugin(group)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help=TRACE)
    parser.add_argument("--no-plot", action="store_true", help="draw no figures")
    parser.add_argument("--stream", action="store_true", help="print rank 0's output at the end")
    parser.add_argument(
        "--json", action="store_true", help="records (or the plan) as JSON on stdout"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress line")


def add_plugin(to: argparse._ActionsContainer) -> None:
    """Adds the flag for plugins (files with algorithms)."""
    to.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file with an algorithm, added to the others",
    )


def main(options: argparse.Namespace) -> int:
    """Runs the experiment; the exit status is 1 if a trial failed or trained incorrectly.

    An experiment on virtual hosts runs in a separate process (a sandbox), with the same arguments.
    """
    if options.predict:
        return _predict(options)
    command_line = CommandLine.of(options)
    unnamed = options.experiment is None and not command_line.models
    if options.experiment is None:
        options.experiment = CUSTOM_MODELS if command_line.models else default_experiment()
    path = find_experiment(options.experiment)
    with contextlib.redirect_stdout(sys.stderr):  # for what the user's files print
        experiment = load(path, [*cluster_overrides(options), *options.set], command_line)
        everything = experiment.trials()
    assumption = command_line.assumption([model.name for model in experiment.models])
    for line in filter(None, (assumption, experiment.fallback)):
        if not sandbox.inside():  # the process outside has printed it
            print(line, file=sys.stderr)
    predicted = experiment.cluster is not None and experiment.cluster.kind == "predicted"
    if predicted and not options.dry_run:
        return _predict(options)
    if experiment.cluster is not None and not options.dry_run and not sandbox.inside():
        return sandbox.run([*DRIVER, *options.arguments])

    from common.harness.running import plan
    from common.harness.running.fabric import launcher_for

    trials = plan.select(everything, options.filter, options.shard, experiment.name)
    _check_fit(trials, options)
    if unnamed:
        print(_axes(experiment, everything), file=sys.stderr)
    folder = options.logs / experiment.name
    if options.dry_run:
        plan.show(trials, folder, experiment, options)
        return 0
    if experiment.launcher_options.get("node_rank"):  # only with the launcher `nodes`
        return launcher_for(experiment, trials).follow()
    from common.harness import output  # loads numpy, which a dry run must not pay for

    records = _measure(experiment, path, everything, trials, folder, options)
    output.write(folder, records, experiment.base)
    _print(folder, records, trials, experiment, options)
    ok = any(record.ok for record in records)
    if options.trace is not None and ok:
        output.write_traces(folder, records, options.trace, quiet=options.json)
    if not options.no_plot and ok:
        _draw(folder, records, quiet=options.json or options.quiet)
    return _status(trials, records)


_OF_RUNS = ("dry_run", "shard", "rerun", "fail_fast", "time_scale", "trace", "stream")
"""Options of a run that mean nothing for a prediction."""
_SHARED = ("experiment", "filter", "set", "hosts", "ranks_per_host", "network")
_SHARED += ("model_file", "model", "batch", "gpu", "plugin")
"""Options that `predict` has, too."""


def _predict(options: argparse.Namespace) -> int:
    """Does what the verb `predict` does with the same arguments."""
    usual = _defaults("run")
    for key in _OF_RUNS:
        if getattr(options, key) != usual[key]:
            raise UserError(f"--{key.replace('_', '-')}: has no meaning on a predicted cluster")
    return verbs.load("predict").main(
        argparse.Namespace(**{**_defaults("predict"), **vars(options)})
    )


def _defaults(verb: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    verbs.load(verb).add(parser)
    return vars(parser.parse_args([]))


def _check_fit(trials: Sequence[Trial], options: argparse.Namespace) -> None:
    """Raises `UserError` if none of the trials fits into memory, with the way on."""
    from common.harness.running.fabric import check_fit

    try:
        check_fit(trials)
    except UserError as error:
        raise UserError(f"{error}; without so much memory: `{_prediction(options)}`") from None


def _prediction(options: argparse.Namespace) -> str:
    """Returns the command that predicts the same trials."""
    refused = [f"cluster.{name}" for name in EMULATED_ONLY]
    refused += [override.partition("=")[0] for override in NOTHING_RUNS]
    words = []
    for key in _SHARED:
        value = getattr(options, key)
        for text in value if isinstance(value, list) else [] if value is None else [value]:
            if key != "set" or not str(text).startswith(tuple(refused)):
                words += [] if key == "experiment" else [f"--{key.replace('_', '-')}"]
                words.append(short(str(text)))
    return f"{COMMAND} predict {shlex.join(words)}"


def _axes(experiment: Experiment, trials: Sequence[Trial]) -> str:
    """Returns a line per axis of the default sweep, each with a `--set` that widens it."""

    def now(key: str) -> str:
        values = dict.fromkeys(getattr(t, key) for t in trials if t.algorithm != BASELINE)
        return ", ".join(map(str, values))

    virtual = experiment.cluster is not None
    device = f"@{gpus.find(gpus.DEFAULT).folder_name}" if virtual else ""
    more_hosts = " --hosts 4" if virtual else ""
    network = "'networks=[1gbe,10gbe]'" if virtual else None
    axes = (
        ("models", now("model"), f"'models=[resnet50{device},vgg16{device}]'"),
        ("batch sizes", now("batch_size"), f"models.0.batch_size={32 if virtual else 8}"),
        ("workers", now("world_size"), f"'world_sizes=[1,2,4]'{more_hosts}"),
        ("networks", now("network") if virtual else "this machine", network),
        ("algorithms", now("label"), "'algorithms=[ddp,dear,fsdp]'"),
    )
    lines = [f"{experiment.name} sweeps these axes (each with a flag that changes it):"]
    for axis, values, text in axes:
        flag = f"--set {text}" if text else "needs virtual hosts"
        lines.append(f"  {axis + ':':12} {values} ({flag})")
    lines.append(
        "  `run scaling` sweeps 1 to 8 workers, `run batches` four batch sizes, `run suite` models "
        "and networks; `list --keys` explains every key"
    )
    return "\n".join(lines)


def cluster_overrides(options: argparse.Namespace) -> list[str]:
    """Returns the flags about virtual hosts as overrides (`key=value`)."""
    keys = ("hosts", "ranks_per_host", "network", "time_scale")
    given = {key: getattr(options, key, None) for key in keys}
    given = {key: value for key, value in given.items() if value is not None}
    overrides = [f"cluster.{key}={value}" for key, value in given.items()]
    if "network" in given:
        overrides.append("networks=[]")
    if {"hosts", "ranks_per_host"} & set(given):
        overrides.append("world_sizes=null")
    return overrides


def _measure(
    experiment: Experiment,
    path: Path,
    everything: Sequence[Trial],
    trials: list[Trial],
    folder: Path,
    options: argparse.Namespace,
) -> list[Record]:
    """Runs the trials; returns the newest records of all trials of the experiment.

    Ctrl-C prints what has been measured so far.
    """
    from common.harness import output
    from common.harness.running import ui
    from common.harness.running.fabric import make_fabric
    from common.harness.running.sweep import Sweep
    from common.machine import machine_card
    from common.results.store import Comparison

    progress = ui.ProgressLine(quiet=options.quiet)
    comparison = Comparison(
        compare_to=experiment.base,
        trials=tuple(trial.hash for trial in everything),
        labels=tuple(trial.label for trial in everything),
        worlds=tuple(sorted(set(experiment.worlds))),
    )
    fabric = make_fabric(experiment, trials)
    command = f"{COMMAND} {shlex.join(options.arguments)}"
    asked = (command, path.read_text(encoding="utf-8"))
    sweep = Sweep(experiment, trials, comparison, folder, fabric, machine_card(), progress, asked)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            sweep.run(options.rerun, options.fail_fast)
    except KeyboardInterrupt:
        progress.clear()
        records = comparison.results(folder)
        if any(record.results for record in records) and not options.json:
            output.show(folder, records, experiment.base)
        raise
    finally:
        progress.clear()
    records = comparison.results(folder)
    if experiment.cluster is None:
        return records
    from common.harness.verbs.validate import keep_predictions

    return keep_predictions(folder, records)


def _print(
    folder: Path,
    records: Sequence[Record],
    trials: Sequence[Trial],
    experiment: Experiment,
    options: argparse.Namespace,
) -> None:
    from common.harness import output
    from common.results.exports.reference_reports import link_logs, report_lines
    from common.results.store import logs_of

    if options.stream:
        logs = [log for trial in trials for log in logs_of(folder / trial.id, 0)]
        text = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
        print(text, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps([record.to_json() for record in records]))
        return
    output.show(folder, records, experiment.base)
    if experiment.report_lines:
        print("\n".join(report_lines(records, experiment.worlds)))
        link_logs(folder, records, functools.partial(_command, experiment))


def _command(experiment: Experiment, record: Record) -> str:
    try:
        return variables.command(experiment, Trial.from_json(record.trial))
    except UserError as error:
        return f"# {error}"


def _draw(folder: Path, records: Sequence[Record], *, quiet: bool) -> None:
    """Draws only the main figure, because all figures take 3 to 20 s."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is missing: pip install 'dear-bench[plots]'", file=sys.stderr)
        return
    from plots import gallery

    paths = gallery.main_figure(records).draw(folder, folder / "figures")
    if not quiet:
        kinds = ", ".join(path.suffix[1:] for path in paths[1:])
        print(f"figure: {short(str(paths[0]))} (and {kinds})")
        print(f"more figures: {MODULE} plots.gallery {short(str(folder))}")


def _status(trials: Sequence[Trial], records: Sequence[Record]) -> int:
    """Returns OK if at least one trial is ok, and every trial is ok and correct or unsupported."""
    from common.results.validity import incorrect

    newest = {record.hash: record for record in records}
    ended = [newest.get(trial.hash) for trial in trials]
    good = any(record is not None and record.ok for record in ended) and all(
        record is not None and record.status in ("ok", "unsupported") and not incorrect(record)
        for record in ended
    )
    return Status.OK if good else Status.FAILED
