"""Worker of a trial: one rank of one repeat; launchers run this module or call its `main`."""

from common.harness.worker.rank import main

__all__ = ["main"]
