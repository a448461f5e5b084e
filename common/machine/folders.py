"""Temporary folders that are removed even if the process that made them is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# `read` ends when nobody holds the pipe any more. A shell gives what runs in the background another
# standard input.
_REMOVE = 'exec 3<&0; (read -r _ <&3; rm -rf -- "$0") &'


class TemporaryFolder:
    """Context manager with a new folder; a small shell removes it when its users have ended.

    Attributes:
        path: the folder.
        held: descriptor of which each user of the folder has a copy, as far as the user may
            outlive this process: it must be passed to started programs (`pass_fds`).
    """

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self.held = removed_at_last(self.path)

    def __enter__(self) -> TemporaryFolder:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.held)


def removed_at_last(folder: Path) -> int:
    """Returns a descriptor; when all processes that have it have ended, the folder is removed."""
    waits, held = os.pipe()
    try:
        # It must outlive Ctrl-C at the terminal, and is nobody's to wait for.
        command = ["/bin/sh", "-c", _REMOVE, str(folder)]
        how = {"stdin": waits, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, start_new_session=True, check=True, **how)
    finally:
        os.close(waits)
    return held
