"""Makes a fork server end at once. A fork server imports this module last of all that it preloads.

Otherwise Python first frees all imported modules, such as torch. On a busy machine, this takes
seconds, so the server is still there when the command that started it has ended.
"""

from __future__ import annotations

import atexit
import os


def _end(server: int) -> None:
    if os.getpid() == server:  # its children inherit the function
        os._exit(0)


atexit.register(_end, os.getpid())
