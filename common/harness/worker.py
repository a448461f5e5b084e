"""One rank of one repeat of one trial: puts model, optimizer, algorithm and communicator together.

Started by every launcher in the same way: `python -m common.harness.worker TRIAL_DIR REPEAT`. The
trial is read from `TRIAL_DIR/trial.json`, what it must know of an emulated cluster from
`TRIAL_DIR/emulation.json`, and what collectives cost, if that is known, from
`TRIAL_DIR/costs.json`; rank 0 writes `repeat-R.json`, and a rank that fails writes
`error-R-rankK.json`. What is printed is for people.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it anyway; the fork server does so only once

import dear
from common.harness import check, collective_costs, learning, text_log
from common.harness.settings import EmulationSettings
from common.harness.step_parts import StepParts, breakdown, typical
from common.harness.timing import Measured, measure
from common.harness.training import Reference, Training, untimed_steps
from common.harness.trial import Trial
from common.models.pace import set_pace
from common.models.registry import build
from common.models.workload import Workload
from dear.comm import runtime
from dear.comm.environment import rank_facts
from dear.cost.bounds import StepTimes
from dear.errors import Unavailable, UserError


def main(folder: Path, repeat: int) -> int:
    """Runs the repeat; returns the exit status of the process."""
    rank = 0
    phase = Phase(folder, repeat)
    try:
        rank = rank_facts().rank
        phase.enter(rank, "start")
        faulthandler.register(signal.SIGUSR1)  # a launcher that loses patience asks for the stack
        trial = Trial.from_json(json.loads((folder / "trial.json").read_text()))
        settings = EmulationSettings.load(folder)
        result = _run(trial, settings, repeat, phase)
        if rank == 0:
            _write(folder / f"repeat-{repeat}.json", result)
    except BaseException as error:
        traceback.print_exc()
        _write(
            folder / f"error-{repeat}-rank{rank}.json",
            {
                "kind": _kind(error),
                "message": " ".join(f"{type(error).__name__}: {error}".split())[:500],
                "rank": rank,
                "where": phase.name,
            },
        )
        sys.stdout.flush()
        sys.stderr.flush()
        # Peers may hold this process's collectives open for ever: leave without farewell.
        os._exit(1)
    return 0


class Phase:
    """Tells the launcher, in a file per rank, what the rank is doing."""

    def __init__(self, folder: Path, repeat: int) -> None:
        self._folder = folder
        self._repeat = repeat
        self._rank = 0
        self.name = "start"

    def enter(self, rank: int, name: str) -> None:
        self._rank, self.name = rank, name
        (self._folder / f"phase-{self._repeat}-rank{rank}").write_text(f"{os.getpid()} {name}")

    def __call__(self, name: str) -> None:
        self.enter(self._rank, name)


def _run(trial: Trial, settings: EmulationSettings, repeat: int, phase: Phase) -> dict[str, Any]:
    torch.set_num_threads(trial.threads_per_rank)
    phase("joining the other ranks")
    dear.init(backend=trial.backend, timeout_s=trial.collective_timeout_s)
    _check_world(trial)
    set_pace(settings.pace(dear.rank()))
    communicator, launcher = runtime.communicator(), runtime.facts().launcher
    phase("building the model")
    device = torch.device("cpu")
    if trial.device == "cuda":
        # Ranks may share GPUs where another backend than NCCL moves the bytes.
        device = torch.device("cuda", dear.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    workload = _workload(trial, device)
    parameters = sum(param.numel() for param in workload.model.parameters())
    gradient_bytes = sum(p.nbytes for p in workload.model.parameters() if p.requires_grad)
    _say(text_log.header(trial, parameters))
    facts = {
        "parameters": parameters,
        "gradient_bytes": gradient_bytes,
        "started_by": launcher,
    }
    if trial.learn is not None:
        return learning.learn(trial, settings, workload, repeat, phase) | facts

    steps = trial.measure.check_steps if repeat == 0 else 0
    limits: dict[str, Any] = {}
    if steps:
        if trial.world_size > 1:
            phase("timing collectives")
            limits["costs"] = _costs(settings, device, gradient_bytes)
            limits["local_size"] = dear.local_size()
        phase("training plainly, to compare with")
        reference = Reference(trial, workload, steps)
        limits["compute"] = _emulated(reference.compute, settings)
    phase("wrapping the model")
    training = Training(trial, workload)
    verdict: dict[str, Any] = {}
    if steps:
        phase("comparing with plain training")
        verdict = reference.compare(training)
        del reference
    phase("warming up")
    training.warm_up(max(untimed_steps(trial) - steps, 0 if steps else 1))
    phase("measuring")
    _say(["Running benchmark..."])
    training.parts.clear()
    measured = measure(training.step, trial.measure, communicator, training.last_step_s)
    phase("checking that the replicas agree")
    training.synchronize()
    spread = check.replica_spread(workload.model, communicator)
    verdict |= {"replica_spread": spread, "replicas_agree": spread == 0.0}
    if training.consistency in check.MEAN_TOLERANCE:
        apart = check.consensus_distance(workload.model, communicator)
        agree = apart <= check.CONSENSUS_LIMIT
        verdict |= {"consensus_distance": apart, "replicas_agree": agree}
    losses = communicator.gather_objects(training.loss.item())
    statistics = communicator.gather_objects(training.statistics())
    iters = settings.emulated(measured.iters)
    _say(text_log.results(trial, iters))
    phase("leaving")
    training.close()
    dear.shutdown()
    return {
        "iters": iters,
        "bytes_per_step": measured.bytes_sent or None,
        "cpu_s_per_s": measured.cpu_s,
        "foreign_cpu_s_per_s": measured.foreign_cpu_s,
        "breakdown": _breakdown(trial, settings, measured, training.parts),
        "loss": float(np.mean(losses)),
        "check": verdict,
        "statistics": statistics if any(statistics) else None,
        **facts,
        **limits,
    }


def _check_world(trial: Trial) -> None:
    if dear.size() != trial.world_size:
        raise UserError(
            f"the trial wants {trial.world_size} workers, but this one is in a world of "
            f"{dear.size()}: it was started by a launcher that the others do not know (a different "
            "MPI's mpirun?)"
        )


def _workload(trial: Trial, device: torch.device) -> Workload:
    torch.manual_seed(trial.seed)
    np.random.seed(trial.seed)
    random.seed(trial.seed)
    batch = torch.Generator().manual_seed(trial.seed * 1000 + dear.rank())
    workload = build(trial.model, trial.batch_size, trial.sentence_len, batch)
    workload = workload.to(device, getattr(torch, trial.dtype))
    dear.broadcast_parameters(workload.model.state_dict(), root_rank=0)
    workload.model.train()
    return workload


def _costs(
    settings: EmulationSettings, device: torch.device, gradient_bytes: int
) -> dict[str, dict[str, float]]:
    """What another trial has measured, else measured now."""
    communicator = runtime.communicator()
    # Rank 0's word: a shared file system may show the others something older.
    costs = communicator.broadcast_object(collective_costs.load(settings.folder))
    if costs is None:
        costs = collective_costs.measure(communicator, device, gradient_bytes, settings.time_scale)
    return collective_costs.to_json(costs)


def _emulated(compute: StepTimes, settings: EmulationSettings) -> dict[str, float]:
    return {name: seconds / settings.time_scale for name, seconds in vars(compute).items()}


def _breakdown(
    trial: Trial, settings: EmulationSettings, measured: Measured, parts: list[StepParts]
) -> dict[str, float | None] | None:
    """Of rank 0, or None on a GPU, where the host runs ahead."""
    if trial.device != "cpu":
        return None
    block = len(measured.iters[0]) + 1  # the first step of each is not timed
    timed = [step for place, step in enumerate(parts) if place % block]
    # DDP and Horovod communicate and wait in code of their own.
    waits_seen = measured.bytes_sent > 0 or trial.world_size == 1
    return breakdown(typical(timed), settings.time_scale, waits_seen=waits_seen)


def _kind(error: BaseException) -> str:
    if isinstance(error, Unavailable):
        return "unsupported"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "oom"
    return "failed"


def _say(lines: list[str]) -> None:
    if dear.rank() == 0:
        print("\n".join(lines), flush=True)


def _write(path: Path, value: dict[str, Any]) -> None:
    """Writes JSON so that a reader sees all of it or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
