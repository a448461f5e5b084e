"""`python -m common.harness.worker TRIAL_DIR REPEAT`: one rank of one repeat of one trial."""

import sys
from pathlib import Path

from common.harness.worker.rank import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
