"""Console command `dear-bench`.

The wheel has the harness's packages `common` and `plots` in this folder. Only this command and the
workers that it starts have the folder on their path, so that a user's modules of the same names
stay importable.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line of the harness and returns the exit status."""
    folder = Path(__file__).parent
    if not (folder / "common").exists():  # an editable installation: both are at the top
        folder = folder.parent
    sys.path.insert(0, str(folder))
    try:
        from common.harness.cli import main as run

        return run(sys.argv[1:])
    # While modules are imported, or once more while a run ends.
    except (KeyboardInterrupt, RuntimeError) as error:
        # Amid the definition of a class, Python 3.11 makes a RuntimeError of it.
        if not any(isinstance(e, KeyboardInterrupt) for e in (error, error.__cause__)):
            raise
        print("interrupted; run again to go on", file=sys.stderr)
        return 130
