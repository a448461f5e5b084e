"""Command line: calls the verb (subcommand), and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import dear
from common.harness import variables, verbs
from common.harness.verbs import MEANINGS, Status
from common.paths import COMMAND, LOGS
from common.results import store
from dear.errors import UserError, unknown

_MAKES = ("run", "calibrate", "merge")
"""Verbs that do more than print: the end of their reader interrupts them."""
_EXTRAS = {
    **dict.fromkeys(("jinja2", "matplotlib", "pandas"), "plots"),
    **dict.fromkeys(("timm", "transformers"), "models"),
}
"""Extras of the installation by their packages, which are not always there."""
_OF_THE_USER = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
)


def main(arguments: Sequence[str]) -> int:
    """Runs one command and returns the exit status."""
    # A batch system sends SIGTERM. A shell makes a script's background jobs ignore SIGINT. Both
    # signals must end a sweep as Ctrl-C does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names that the locale cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    makes = False
    try:
        options = parse(list(arguments))
        makes = options.verb in _MAKES and not getattr(options, "dry_run", False)
        for flag in ("logs", "trace"):
            _check_folder(flag, getattr(options, flag, None))
        options.arguments = arguments
        return verbs.load(options.verb).main(options)
    except UserError as error:
        _tell(f"error: {error}")
        return Status.USER_ERROR
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        _tell(f"error: {error.name} is missing: pip install 'dear-bench[{_EXTRAS[error.name]}]'")
        return Status.USER_ERROR
    except BrokenPipeError:  # `| head`
        return _without_reader(makes)
    except SystemExit as error:  # rich ends the program at a BrokenPipeError
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return _without_reader(makes)
    except OSError as error:
        # A full disk, a closed folder or a wrong path is the user's to correct. All other errors
        # are bugs and keep their traceback.
        if error.errno not in _OF_THE_USER:
            raise
        # Errors of `write` do not contain the name of the file.
        place = error.filename or _full(options.logs, Path(tempfile.gettempdir()))
        advice = "; make room and run the command again: finished trials are kept"
        advice = advice if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        _tell(f"error: {place}: {error.strerror}{advice}")
        return Status.USER_ERROR
    except KeyboardInterrupt:
        _tell("interrupted; finished trials are recorded, run again to go on")
        return Status.INTERRUPTED


def _tell(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # `2>&1 | head`
        print(text, file=sys.stderr)


def _without_reader(makes: bool) -> int:
    if makes:
        _tell("interrupted: nobody reads the output; finished trials are recorded")
    sys.stderr.close()
    with contextlib.suppress(OSError):  # else Python's flush at exit would change the status
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Status.INTERRUPTED if makes else Status.OK


def run_variables(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the trial that environment variables describe (see `common.harness.variables`).

    Args:
        arguments: further arguments of `benchmarks.py run`.

    Returns:
        The exit status.
    """
    planned = any(re.match("-([a-jl-z]*n|-dry-run$)", word) for word in arguments)
    try:
        flags, words = variables.trial_flags(environ, planned)
    except UserError as error:
        _tell(f"error: {error}")
        return Status.USER_ERROR
    print(words, file=sys.stderr)
    if environ.get("cluster") == variables.PREDICTED:
        return main(["predict", variables.EXPERIMENT, *flags, *arguments])
    how = ("--rerun", "all", "--stream", "--no-plot")
    return main(["run", variables.EXPERIMENT, *flags, *how, *arguments])


def _full(*folders: Path) -> Path | str:
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            try:
                store.check_room(folder, 1 << 16)
            except OSError:
                return folder
    return "output"


def _check_folder(flag: str, folder: Path | None) -> None:
    """Raises `UserError` if the path, or a part of it, is a file instead of a folder."""
    if folder is not None:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise UserError(f"--{flag} {folder}: {there} is not a folder")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line; the verb is `run` if none is given.

    Raises:
        UserError: an unknown verb or flag.
    """
    empty = [word for word in arguments if word == "" or re.fullmatch("--[a-z-]+=", word)]
    if empty:
        raise UserError(f"an argument is empty: {shlex.join(arguments)}")
    known = verbs.names()
    words = [word for word in arguments if not word.startswith("-")]
    if not words or words[0] not in known:
        first = arguments[0] if arguments else ""
        if words and arguments and not first.startswith("-"):
            raise unknown("verb", first, known)
        if first not in ("-h", "--help", "--version"):
            arguments = ["run", *arguments]
    statuses = [f"  {status:>3}  {text}" for status, text in MEANINGS.items()]
    look = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "epilog": "\n".join(["exit status:", *statuses]),
        "allow_abbrev": False,
    }
    parser = _Parser(
        prog=COMMAND,
        description="Which data-parallel training algorithm is fastest for my model?\nWithout a "
        "verb, runs the experiment emulated-quick, or quick if virtual hosts are not possible.",
        **look,
    )
    parser.add_argument("--version", action="version", version=f"DeAR Bench {dear.__version__}")
    every = parser.add_subparsers(dest="verb", required=True, metavar=f"{{{','.join(known)}}}")
    for name in known:
        verb = verbs.load(name)
        sub = every.add_parser(name, help=verb.HELP, **look)
        verb.add(sub)
        sub.add_argument("--logs", type=Path, default=LOGS, help="folder of all sweeps")
    options, extra = parser.parse_known_args(arguments)
    if extra:
        flag = extra[0].partition("=")[0]
        shown = f"see `{COMMAND} {options.verb} --help`"
        if not flag.startswith("-"):
            raise UserError(f"{options.verb}: unexpected argument {flag!r} ({shown})")
        raise unknown(f"flag of {options.verb}", flag, _flags(every.choices[options.verb]), shown)
    return options


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]
