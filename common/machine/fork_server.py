"""Preloaded by fork servers: such a process ends at once when its last client has ended.

Python would free all modules first, which takes a second of compute with torch. On a busy machine,
the fork server of a program that was killed would stay for long.
"""

from __future__ import annotations

import atexit
import os
import sys

if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    atexit.register(os._exit, 0)
