#!/usr/bin/env python3
"""Which data-parallel training algorithm is fastest for my model on my cluster, by how much, why?

python benchmarks.py                      the default sweep
python benchmarks.py run X                an experiment: a file, or a name from `list`
python benchmarks.py list                 algorithms, models, experiments
python benchmarks.py show [SWEEP]         a finished sweep's table
python benchmarks.py merge A B --into C   one sweep of its shards
"""

import sys

from common.harness.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
