"""The command line: verbs, flags, and exit statuses."""

from __future__ import annotations

import argparse
import errno
import json
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dear
from common.harness import commands, own
from dear.errors import UserError, unknown

ROOT = Path(__file__).parents[2]
VERBS = ("run", "list", "show", "merge", "compare", "report", "doctor")
OK, USER_ERROR, INTERRUPTED = 0, 2, 130
_FULL_OR_CLOSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def main(arguments: Sequence[str]) -> int:
    """Runs one command and returns the exit status."""
    # A batch system's SIGTERM deserves the same care as Ctrl-C, and so does a SIGINT that is sent
    # to what a script has started in the background, where a shell has had it ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        options = _parse(list(arguments))
        options.arguments = arguments
        verbs = {"run": _run, "list": _list, "show": commands.show, "merge": commands.merge}
        verbs |= {"compare": commands.compare, "report": _report, "doctor": _doctor}
        return verbs[options.verb](options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        # A disk that is full, or a folder that is not ours: whoever reads this can mend it. All
        # else is a bug, of which the place matters.
        if isinstance(error, BrokenPipeError):  # `| head`
            sys.stderr.close()
            return OK
        if error.errno not in _FULL_OR_CLOSED:
            raise
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("interrupted; finished trials are recorded, run again to go on", file=sys.stderr)
        return INTERRUPTED


_TRACE = "write timelines of each trial there, for Perfetto"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message} (see `python benchmarks.py --help`)")


def _parse(arguments: list[str]) -> argparse.Namespace:
    words = [word for word in arguments if not word.startswith("-")]
    if not words or words[0] not in VERBS:
        first = arguments[0] if arguments else ""
        if words and arguments and not first.startswith("-"):
            raise unknown("verb", first, VERBS)
        if first not in ("-h", "--help", "--version"):
            arguments = ["run", *arguments]
    parser = _Parser(
        prog="benchmarks.py",
        description="Which data-parallel training algorithm is fastest for my model? Without a "
        "verb, runs emulated-quick.yaml where virtual hosts can be made, else quick.yaml (both in "
        "configs/experiments).",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"DeAR Bench {dear.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar=f"{{{','.join(VERBS)}}}")
    _add_run(verbs.add_parser("run", help="run an experiment", allow_abbrev=False))
    listing = verbs.add_parser("list", help="algorithms, models, experiments", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="as JSON on stdout")
    _add_plugin(listing)
    show = verbs.add_parser("show", help="print a sweep's table again", allow_abbrev=False)
    show.add_argument(
        "sweep", nargs="?", help="a folder, or the name of one below --logs (default: the newest)"
    )
    how = show.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="the records as JSON on stdout")
    how.add_argument(
        "--breakdown",
        action="store_true",
        help="where the time of each step goes, and how little it could be, in milliseconds",
    )
    merging = verbs.add_parser("merge", help="one sweep of its shards", allow_abbrev=False)
    merging.add_argument("parts", nargs="+", type=Path, help="folders with records")
    merging.add_argument("--into", type=Path, required=True, help="a new folder for all of them")
    how.add_argument("--trace", type=Path, metavar="FOLDER", help=_TRACE)
    how.add_argument(
        "--plan",
        action="store_true",
        help="what travelled together, what was predicted of it, and what tuners have tried",
    )
    _add_compare(verbs.add_parser("compare", help="two sweeps, or two algorithms of one"))
    _add_report(verbs.add_parser("report", help="a sweep as one HTML file", allow_abbrev=False))
    doctor = verbs.add_parser("doctor", help="can it run here, and what would mend what cannot?")
    doctor.add_argument("--json", action="store_true", help="on stdout")
    for sub in verbs.choices.values():
        sub.add_argument("--logs", type=Path, default=ROOT / "logs", help="folder of results")
    return parser.parse_args(arguments)


def _add_compare(compare: argparse.ArgumentParser) -> None:
    text = "a folder of records, SWEEP@LABEL or SWEEP@key=value for a part of it, or a reports.json"
    compare.add_argument("first", help=text)
    compare.add_argument("second", help="the same; how much faster is it?")
    compare.add_argument("more", nargs="*", help="further ones, if one is a reports.json")
    compare.add_argument("--force", action="store_true", help="also of different machines")
    how = compare.add_mutually_exclusive_group()
    how.add_argument("--markdown", action="store_true", help="for a pull request")
    how.add_argument("--json", action="store_true", help="on stdout")
    compare.add_argument(
        "--fail-on",
        metavar="regression:N%",
        help="exit with status 3 if a trial is SLOWER by more than N percent",
    )


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument(
        "sweep", nargs="?", help="a folder, or the name of one below --logs (default: the newest)"
    )
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="(default: report.html in the sweep's folder)"
    )


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "experiment",
        nargs="?",
        type=Path,
        help="an experiment file, or the name of one of configs/experiments (default: "
        "emulated-quick, or quick where nothing can be emulated)",
    )
    run.add_argument("-n", "--dry-run", action="store_true", help="print the trials, run nothing")
    run.add_argument(
        "-k",
        "--filter",
        action="append",
        default=[],
        metavar="TEXT",
        help="only trials whose title contains TEXT, or key=value of the trial; A|B is either, and "
        "all that are given must hold",
    )
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key of the experiment, e.g. measure.repeats=5 or models.0.batch_size=8",
    )
    run.add_argument(
        "--shard",
        metavar="I/N",
        help="only part I of N, for as many machines; `merge` puts their records together",
    )
    cluster = run.add_argument_group("virtual hosts (change the experiment's `cluster`)")
    for flag, text in (
        ("--hosts", "number of virtual hosts; all ranks of them take part"),
        ("--ranks-per-host", "ranks on each of them"),
        ("--network", "their links: a profile of configs/networks, or a bandwidth as 2.5gbit"),
        ("--time-scale", "how many times slower than real they run (default: chosen)"),
    ):
        cluster.add_argument(flag, help=text)
    brought = run.add_argument_group(
        "your own (docs/bring_your_own.md)",
        "Without an experiment: that of configs/experiments/own.yaml, on virtual hosts.",
    )
    brought.add_argument(
        "--model-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file with functions model() and batch(batch_size); in place of the "
        "experiment's models",
    )
    brought.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="a model of `list`, or one of transformers or timm, as hf:gpt2 and timm:resnet50d; "
        "likewise",
    )
    brought.add_argument("--batch", type=int, metavar="N", help="its samples per rank")
    brought.add_argument(
        "--gpu",
        metavar="NAME",
        help="replay the times that the model takes on this GPU, modelled from its operations and "
        "bytes; `here`: measured on this machine's (default on virtual hosts: here where there is "
        "one, else rtx2080ti)",
    )
    _add_plugin(brought)
    run.add_argument(
        "--rerun",
        choices=("failed", "all"),
        default="failed",
        help="what to run again: trials without a good record (default), or all",
    )
    run.add_argument("--trace", type=Path, metavar="FOLDER", help=_TRACE)
    run.add_argument("--fail-fast", action="store_true", help="stop at the first failed trial")
    run.add_argument("--no-plot", action="store_true", help="draw no figures")
    run.add_argument("--stream", action="store_true", help="print rank 0's output at the end")
    run.add_argument("--json", action="store_true", help="records (or the plan) as JSON on stdout")
    run.add_argument("-q", "--quiet", action="store_true", help="no progress line")


def _add_plugin(to: argparse._ActionsContainer) -> None:
    to.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file with an algorithm, which joins the others",
    )


def _run(options: argparse.Namespace) -> int:
    options.given = own.Given.of(options)
    if options.experiment is None and options.given.models:
        options.experiment = commands.OWN_MODELS
    options.experiment = options.experiment or commands.default_experiment()
    options.set = [*_cluster_overrides(options), *options.set]
    return commands.run(options, draw=None if options.no_plot else _draw)


def _draw(folder: Path, learned: bool) -> list[Path]:
    # Only here: matplotlib takes a second to load. And only the main figure: all that fit take 3 to
    # 20 s, which the end of a sweep should not.
    from plots import learning, throughput

    draw = learning.draw if learned else throughput.draw
    return draw(folder, ROOT / "plots" / "out" / folder.name)


def _report(options: argparse.Namespace) -> int:
    from common.harness import reporting

    return reporting.report(options, _figures)


def _figures(folder: Path) -> Sequence[Any]:
    # Only here, as above.
    from plots import embedded

    return embedded.figures(folder)


def _doctor(options: argparse.Namespace) -> int:
    from common.harness import doctor

    return doctor.report(options.logs, options.json)


def _cluster_overrides(options: argparse.Namespace) -> list[str]:
    """The flags about virtual hosts as `--set` would say them; those given by it come later."""
    keys = ("hosts", "ranks_per_host", "network", "time_scale")
    given = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    overrides = [f"cluster.{key}={value}" for key, value in given.items()]
    if "network" in given:
        overrides.append("networks=[]")
    if {"hosts", "ranks_per_host"} & set(given):
        overrides.append("world_sizes=null")
    return overrides


def _list(options: argparse.Namespace) -> int:
    own.load_plugins(options.plugin, Path())
    listing = commands.listing()
    if options.json:
        print(json.dumps(listing, indent=2))
        return OK
    for heading, entries in listing.items():
        print(f"{heading}:")
        if isinstance(entries, dict):
            width = max(map(len, entries))
            for name, text in entries.items():
                print(f"  {name:{width}}  {text}")
        else:
            print(textwrap.fill(" ".join(entries), 98, initial_indent="  ", subsequent_indent="  "))
    return OK
