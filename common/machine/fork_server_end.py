"""Import by a fork server, after all else that it preloads: it then ends at once.

Otherwise it first takes down what it has imported, such as torch. On a busy machine, this lasts for
seconds, in which the command that started it is over already.
"""

from __future__ import annotations

import atexit
import os


def _end(server: int) -> None:
    if os.getpid() == server:  # its children inherit the function
        os._exit(0)


atexit.register(_end, os.getpid())
