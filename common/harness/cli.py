"""The command line: verbs, flags, and exit statuses."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import dear
from common.harness import commands
from dear.errors import UserError, unknown

ROOT = Path(__file__).parents[2]
VERBS = ("run", "list", "show", "merge", "compare", "doctor")
OK, USER_ERROR, INTERRUPTED = 0, 2, 130


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
        verbs |= {"compare": commands.compare, "doctor": _doctor}
        return verbs[options.verb](options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("interrupted; finished trials are recorded, run again to go on", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return OK


_TRACE = "write a timeline of each trial there, for Perfetto or chrome://tracing"


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
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="{run,list,show,merge,compare,doctor}"
    )
    _add_run(verbs.add_parser("run", help="run an experiment", allow_abbrev=False))
    listing = verbs.add_parser("list", help="algorithms, models, experiments", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="as JSON on stdout")
    show = verbs.add_parser("show", help="print a sweep's table again", allow_abbrev=False)
    show.add_argument("sweep", nargs="?", help="a folder below --logs (default: the newest)")
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
    doctor = verbs.add_parser("doctor", help="can it run here, and what would mend what cannot?")
    doctor.add_argument("--json", action="store_true", help="on stdout")
    for sub in verbs.choices.values():
        sub.add_argument("--logs", type=Path, default=ROOT / "logs", help="folder of results")
    return parser.parse_args(arguments)


def _add_compare(compare: argparse.ArgumentParser) -> None:
    text = "a folder of records, or SWEEP@LABEL or SWEEP@key=value for a part of it"
    compare.add_argument("first", help=text)
    compare.add_argument("second", help="the same; how much faster is it?")
    compare.add_argument("--force", action="store_true", help="also of different machines")
    how = compare.add_mutually_exclusive_group()
    how.add_argument("--markdown", action="store_true", help="for a pull request")
    how.add_argument("--json", action="store_true", help="on stdout")
    compare.add_argument(
        "--fail-on",
        metavar="regression:N%",
        help="exit with status 3 if a trial is SLOWER by more than N percent",
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


def _run(options: argparse.Namespace) -> int:
    options.experiment = options.experiment or commands.default_experiment()
    options.set = [*_cluster_overrides(options), *options.set]
    return commands.run(options, draw=None if options.no_plot else _draw)


def _draw(folder: Path, learned: bool) -> list[Path]:
    # Only here: matplotlib takes a second to load. And only the main figure: all that fit take 3 to
    # 20 s, which the end of a sweep should not.
    from plots import learning, throughput

    draw = learning.draw if learned else throughput.draw
    return draw(folder, ROOT / "plots" / "out" / folder.name)


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
