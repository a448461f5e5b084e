"""Runs a drawn job's launcher in a process that gets the signals: `driver.py FOLDER TIMEOUT_S`."""

from __future__ import annotations

import dataclasses
import json
import pickle
import signal
import sys
from pathlib import Path

from common.harness.trial import Trial
from common.launch.job import Job
from tests.faults import jobs
from tests.faults.drawing import Fault

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as benchmarks.py does
    folder = Path(sys.argv[1])
    fault, trial = Fault.load(folder), Trial.load(folder)
    hosts = pickle.loads((folder / "hosts").read_bytes())
    job = Job(
        folder=folder,
        repeat=0,
        world_size=fault.world,
        timeout_s=float(sys.argv[2]),
        worker_module=jobs.MODULE,
        env={"COMM_CORE_TRANSPORT": fault.transport},
        may_lose_ranks=trial.own_pace,
    )
    outcome = jobs.launcher_of(fault, folder, hosts).run(job)
    print(json.dumps(dataclasses.asdict(outcome)))
