"""Priority of the threads that work beside a rank's training thread, on virtual hosts.

A host of its own has free cores for them. On virtual hosts, which share the cores of one machine,
they would wait for threads that compute for other hosts, and messages would be late.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Literal

from common.harness.trial import Briefing

Priority = Literal["real-time", "ordinary"]
_LEVEL = 1
"""Level lower than that of the program that emulates the links, so that packets are not late."""


def hurry_helpers(briefing: Briefing, backend: str) -> Priority:
    """Gives real-time priority to all threads of this process but the calling one.

    Call it again when a library may have started threads. Only threads on virtual hosts get the
    priority, and none with the backend MPI, whose threads never sleep and so would stop all others.

    Returns:
        `real-time`, or `ordinary` if the threads do not get the priority: also if the system does
        not permit it.
    """
    if not briefing.hosts or backend == "mpi":
        return "ordinary"
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) == threading.get_native_id():
            continue
        try:
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(_LEVEL))
        except ProcessLookupError:  # it has ended
            continue
        except PermissionError:
            return "ordinary"
    return "real-time"
