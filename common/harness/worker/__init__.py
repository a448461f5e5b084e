"""Worker: the code of one rank in one repeat of a trial."""

from common.harness.worker.rank import main

__all__ = ["main"]
