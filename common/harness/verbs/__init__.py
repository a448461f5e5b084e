"""Verbs (subcommands) of the command line; each file of this folder is a verb.

A verb has `HELP` (a phrase), `add(parser)` (its flags), and `main(options) -> int` (exit status).
Slow imports are inside `main`, so that `--help` and error messages appear at once.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import pkgutil
from typing import Protocol, cast


class Status(enum.IntEnum):
    """Exit status of the command line."""

    OK = 0
    FAILED = 1
    USER_ERROR = 2
    REGRESSION = 3
    NO_ANSWER = 4
    INTERRUPTED = 130


MEANINGS = {
    Status.OK: "no trial failed or trained incorrectly, and at least one ran; "
    "unsupported, unchecked and flagged trials do not change the status",
    Status.FAILED: "a trial failed or trained incorrectly, or no trial could run; "
    "predict: no trial has a prediction; doctor: the default sweep cannot run",
    Status.USER_ERROR: "an error in the command or the experiment; one line names it",
    Status.REGRESSION: "compare --fail-on: some trials were compared, and one is slower, missing, "
    "or no longer valid",
    Status.NO_ANSWER: "compare, validate: nothing was compared; "
    "report: trials have ended, but none has a valid result",
    Status.INTERRUPTED: "interrupted; "
    "run, calibrate, merge: also by the end of the program that reads the output",
}
"""Meanings of the exit statuses, for `--help`."""


class Verb(Protocol):
    """Module of a verb."""

    HELP: str

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Adds the flags of the verb."""

    def main(self, options: argparse.Namespace) -> int:
        """Runs the verb and returns the exit status."""


def names() -> list[str]:
    """Returns the names of all verbs."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Verb:
    """Imports the verb `name`."""
    return cast(Verb, importlib.import_module(f"{__name__}.{name}"))
