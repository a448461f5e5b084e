"""Priority of the threads that work beside a rank's training thread, on virtual hosts.

A host of its own has free cores for them. On virtual hosts, which share the cores of one machine,
they would wait for threads that compute for other hosts, and messages would be late.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from common.harness.trial import Briefing, Trial

_LEVEL = 9
"""Level just below that of the program that emulates the links (10), which must never wait."""


def hurry_helpers(trial: Trial, briefing: Briefing) -> bool | None:
    """Gives real-time priority to all threads of this process but the calling one.

    Call it again when a library may have started threads.

    Returns:
        False if the system does not permit it. None if the threads need no priority, because the
        host is not virtual, or must not have it. Threads of MPI never sleep, and would stop all
        others; any library of a rank that `mpirun` has started may use MPI. Of several threads per
        rank, all but one compute in a pool of torch.
    """
    polling = trial.backend == "mpi" or trial.launcher == "mpirun"
    if not briefing.hosts or polling or trial.threads_per_rank > 1:
        return None
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) == threading.get_native_id():
            continue
        try:
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(_LEVEL))
        except ProcessLookupError:  # it has ended
            continue
        except PermissionError:
            return False
    return True
