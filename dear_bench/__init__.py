"""Console command `dear-bench`.

The wheel has the harness's packages `common` and `plots` in this folder. Only this command and the
workers that it starts have the folder on their path, so that a user's modules of the same names
stay importable.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path


def main() -> int:
    """Runs the command line of the harness and returns the exit status."""
    folder = Path(__file__).parent
    if not (folder / "common").exists():  # an editable installation: both are at the top
        folder = folder.parent
    sys.path.insert(0, str(folder))
    with interruptible():
        from common.harness.cli import main as run

        return run(sys.argv[1:])


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ends the process with a line and status 130 on Ctrl-C, also while modules are imported."""
    try:
        yield
    except (KeyboardInterrupt, RuntimeError) as error:
        # If Ctrl-C comes while a class is defined, Python 3.11 raises a RuntimeError from it.
        if not any(isinstance(each, KeyboardInterrupt) for each in (error, error.__cause__)):
            raise
        print("interrupted; run again to go on", file=sys.stderr)
        sys.exit(130)
