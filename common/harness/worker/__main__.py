"""Entry point of a worker: `python -m common.harness.worker TRIAL_DIR REPEAT`."""

import sys
from pathlib import Path

from common.harness.worker.rank import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
