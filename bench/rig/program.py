"""Command line of the scripts of this folder: parser, exit status, and a sandbox where needed."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from common.emulation import sandbox
from dear.errors import UserError


class NeedsSandbox(Exception):  # noqa: N818  (a request, not an error)
    """Request to start the program again in a sandbox; `run` does it."""


def parser(doc: str | None, *, json: bool = True) -> argparse.ArgumentParser:
    """Returns a parser whose help begins with the first line of `doc`. With `json`, there is an
    option `--json`, for `Output`."""
    parser = argparse.ArgumentParser(
        description=(doc or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    if json:
        add_json(parser)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--json`."""
    parser.add_argument("--json", type=Path, help="write all raw numbers to this new file")


def run(main: Callable[[list[str]], int]) -> None:
    """Runs a script's main and ends the process with the returned status. A user error is printed
    as one line; the status is 2. SIGTERM raises an exception, so that ranks are ended and virtual
    hosts removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        try:
            status = main(sys.argv[1:])
        except NeedsSandbox:
            status = sandbox.run([sys.executable, *sys.orig_argv[1:]])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)
