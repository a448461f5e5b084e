"""The ranks of one host, for launchers that start one command per host.

    python -m common.launch.node [--tied] FOLDER REPEAT FIRST COUNT WORLD_SIZE -- COMMAND...

COMMAND is the same for all of them. Where the ranks meet (MASTER_ADDR, MASTER_PORT) stands in the
environment.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from common.launch.job import GRACE_S, Job
from common.launch.tether import Tether


def main(argv: Sequence[str]) -> int:
    """Runs the ranks to their end; 0 if all succeeded."""
    given = _parser().parse_args(argv)
    folder: Path = given.folder
    if not (folder / "trial.json").exists():
        print(f"{socket.gethostname()} does not see {folder}: all hosts must share it")
        return 2
    job = Job(folder=folder, repeat=given.repeat, world_size=given.world_size, timeout_s=0.0)
    tether = Tether(tied=given.tied)
    for place in range(given.count):
        env = {
            **os.environ,
            "RANK": str(given.first + place),
            "WORLD_SIZE": str(given.world_size),
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(given.count),
        }
        tether.start(given.command, env, job.log_path(given.first + place))

    def ended(place: int, code: int) -> None:
        job.exit_path(given.first + place).write_text(str(code))

    return 0 if tether.wait(GRACE_S, ended) == 0 else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m common.launch.node")
    parser.add_argument("--tied", action="store_true", help="end when standard input closes")
    parser.add_argument("folder", type=Path)
    for name in ("repeat", "first", "count", "world_size"):
        parser.add_argument(name, type=int)
    parser.add_argument("command", nargs="+")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
