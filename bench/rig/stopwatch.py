"""A plain training script on a trial's hosts, with one look at the clock before and after.

Every rank is started as those of the harness are; but steps are trained, and timed, without it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

import dear
from common.harness.trial import Briefing, Trial
from common.harness.worker import join, make_workload
from common.harness.worker.training import make_optimizer
from dear.comm import runtime

STEPS = "steps.json"
"""In the trial's folder: how many steps are made before the clock is read, and in between."""


def main(folder: Path, repeat: int) -> int:
    """One rank; the first writes in how many seconds of this machine all ranks made the steps."""
    trial, briefing = Trial.load(folder), Briefing.load(folder)
    untimed, timed = json.loads((folder / STEPS).read_text())
    join(trial, briefing)
    workload = make_workload(trial, torch.device("cpu"))
    optimizer = dear.DistributedOptimizer(
        make_optimizer(trial.optimizer, workload.model),
        workload.model,
        trial.algorithm,
        **vars(trial.options),
    )

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            workload.loss().backward()
            optimizer.step()

    train(untimed)
    began = time.perf_counter()
    train(timed)
    ended = time.perf_counter()
    # On virtual hosts all ranks read one clock.
    clocks = runtime.communicator().gather_objects((began, ended))
    optimizer.synchronize()
    elapsed_s = max(end for _, end in clocks) - max(begin for begin, _ in clocks)
    if dear.rank() == 0:
        (folder / f"repeat-{repeat}.json").write_text(json.dumps({"elapsed_s": elapsed_s}))
    optimizer.close()
    dear.shutdown()
    return 0
