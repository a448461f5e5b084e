"""Rank: one process in one repeat of a trial.

Every launcher starts it in the same way: `python -m common.harness.worker TRIAL_DIR REPEAT`. It
reads `trial.json` and `briefing.json` from `TRIAL_DIR`. Rank 0 writes `repeat-R.json`, and a rank
that fails writes `error-R-rankK.json`. No program reads its output on stdout.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dear
from common.harness.running import ui
from common.harness.trial import Briefing, Trial
from common.harness.worker.checking.checker import check_training
from common.harness.worker.learning import learn, load_data
from common.harness.worker.throughput import Phase, gradient_bytes, say, time_steps
from common.harness.worker.timing.priority import hurry_helpers
from common.launch.job import DONE
from common.models.registry import build, precision
from common.models.replay.pace import set_pace
from common.models.workload import Workload
from common.results.records import Result
from common.results.records.trust import Check
from dear.comm import runtime
from dear.comm.environment import rank_facts
from dear.errors import Unavailable, UserError

MESSAGE = 2000
"""Most characters of an error's message; where ranks pass on an error, its cause stands last."""
Body = Callable[[Trial, Briefing, int, Phase], Any]
"""Function that runs a repeat on a rank; rank 0 returns the result, a dataclass."""


def main(folder: Path, repeat: int, body: Body | None = None) -> int:
    """Runs the repeat; returns the exit status of the process.

    Args:
        body: None: measures the trial.
    """
    rank, current = 0, "start"

    def phase(name: str) -> None:
        """Writes the present phase of the rank into a file, for the launcher."""
        nonlocal current
        current = name
        (folder / f"phase-{repeat}-rank{rank}").write_text(
            f"{os.getpid()} {name}", encoding="utf-8"
        )

    try:
        rank = rank_facts().rank
        phase("start")
        faulthandler.enable()  # the stack of a rank that a library's mistake kills
        faulthandler.register(signal.SIGUSR1)  # launchers ask for the stack after a time-out
        trial = Trial.load(folder).of_repeat(repeat)
        result = (body or _run)(trial, Briefing.load(folder), repeat, phase)
        if rank == 0:
            _write(folder / f"repeat-{repeat}.json", dataclasses.asdict(result))
        phase(DONE)
    except BaseException as error:
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())[:MESSAGE]
        failure = {"kind": _kind(error), "message": message, "rank": rank, "where": current}
        _write(folder / f"error-{repeat}-rank{rank}.json", failure)
        sys.stdout.flush()
        sys.stderr.flush()
        # Collectives with other ranks may never end, so the process exits at once.
        os._exit(1)
    return 0


def _run(trial: Trial, briefing: Briefing, repeat: int, phase: Phase) -> Result | None:
    phase("joining the other ranks")
    join(trial, briefing)
    launcher = runtime.facts().launcher
    phase("building the model")
    device = torch.device("cpu")
    if trial.device == "cuda":
        # Ranks may share a GPU, except with the backend NCCL.
        device = dear.device()
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = trial.cuda.tf32
        torch.backends.cudnn.benchmark = trial.cuda.cudnn_benchmark
    data = load_data(trial)
    classes = data and data.classes
    workload = make_workload(trial, device, classes)
    parameters = sum(param.numel() for param in workload.model.parameters())
    nbytes = gradient_bytes(workload.model)
    command = f"python -m common.harness.worker {briefing.folder} {repeat}"
    say(ui.log_header(trial, parameters, command, datetime.datetime.now()))
    result: Result | None
    if trial.learn is None:
        result = time_steps(trial, briefing, workload, repeat, phase)
    else:
        check = Check()
        if repeat == 0:
            phase("comparing with plain training")
            check = check_training(trial, workload)
            # A new workload restores weights, batch and random state, and frees memory.
            workload = None
            workload = make_workload(trial, device, classes)
        result = learn(trial, briefing, workload, data, check, repeat, phase)
    return result and dataclasses.replace(
        result, parameters=parameters, gradient_bytes=nbytes, started_by=launcher
    )


def join(trial: Trial, briefing: Briefing) -> None:
    """Joins the trial's job as a rank, and sets the pace of its host."""
    torch.set_num_threads(trial.threads_per_rank)
    os.environ["COMM_CORE_TIME_SCALE"] = str(briefing.time_scale)  # read by `dear.init`
    dear.init(backend=trial.backend, timeout_s=trial.collective_timeout_s)
    if dear.size() != trial.world_size:
        raise UserError(
            f"the trial needs {trial.world_size} workers, but this worker sees {dear.size()}; was "
            "it started by an unknown launcher, such as the mpirun of another MPI?"
        )
    hurry_helpers(trial, briefing)
    communicator = runtime.communicator()
    communicator.burst_bytes = briefing.burst_bytes
    communicator.wire_bytes_per_s = briefing.wire_bytes_per_s
    communicator.time_scale = briefing.time_scale
    pace = briefing.pace(dear.rank())
    pace.held_up_s = lambda: communicator.held_up_until_s
    if trial.backend == "comm_core":
        import comm_core  # may not be built where trials use another backend

        # On Linux, time.monotonic and time.perf_counter are the same clock.
        pace.awaited_s = comm_core.last_awaited_s
        pace.lulls_s = comm_core.lulls_s
    set_pace(pace)


def make_workload(trial: Trial, device: torch.device, classes: int | None = None) -> Workload:
    """Returns the trial's model, equal on all ranks, with this rank's samples."""
    torch.manual_seed(trial.seed)
    np.random.seed(trial.seed)
    random.seed(trial.seed)
    batch = torch.Generator().manual_seed(trial.seed * 1000 + dear.rank())
    workload = build(
        trial.model, trial.rank_batches[dear.rank()], trial.sentence_len, batch, classes
    )
    workload = workload.to(device, *precision(trial.dtype))
    dear.broadcast_parameters(workload.model.state_dict(), root_rank=0)
    workload.model.train()
    return workload


def _kind(error: BaseException) -> str:
    if isinstance(error, Unavailable):
        return "unsupported"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "oom"
    # Torch has no class for a lack of the CPU's memory.
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate" in str(error):
        return "oom"
    return "failed"


def _write(path: Path, value: Mapping[str, object]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(path)
