"""`benchmarks.py` for which nobody else is on the machine, so that tests may run side by side.

What others do to a number is tested with numbers that are made up, in tests/unit.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

if __name__ == "__main__":
    try:
        from common.harness.cli import main
        from common.harness.running import notes

        notes.FOREIGN_CORES = notes.STEAL_CORES = notes.THROTTLED_S = math.inf
        sys.exit(main(sys.argv[1:]))
    except (KeyboardInterrupt, RuntimeError) as error:  # as benchmarks.py does
        if not any(isinstance(e, KeyboardInterrupt) for e in (error, error.__cause__)):
            raise
        sys.exit(130)
