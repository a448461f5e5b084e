"""One rank of one repeat of one trial: puts model, optimizer, algorithm and communicator together.

Started by every launcher in the same way: `python -m common.harness.worker TRIAL_DIR REPEAT`. The
trial is read from `TRIAL_DIR/trial.json`, and what it must know of an emulated cluster from
`TRIAL_DIR/emulation.json`; rank 0 writes `repeat-R.json`, and a rank that fails
writes `error-R-rankK.json`. What is printed is for people.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it anyway; the fork server does so only once

import dear
from common.harness import check, text_log
from common.harness.settings import EmulationSettings
from common.harness.timing import Measured, Phases, measure
from common.harness.trial import BASELINE, OptimizerConfig, Trial
from common.models.pace import set_pace
from common.models.registry import build
from common.models.workload import Workload
from dear import runtime
from dear.algorithm import algorithm_class, algorithm_options
from dear.environment import rank_facts
from dear.errors import Unavailable, UserError

SHORT_STEP_S = 0.5
EXTRA_WARMUP_STEPS = 3


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
    _say(text_log.header(trial, parameters))

    steps = trial.measure.check_steps if repeat == 0 else 0
    if steps:
        phase("training plainly, to compare with")
        reference = _Reference(trial, workload, steps)
    phase("wrapping the model")
    training = _Training(trial, workload)
    verdict: dict[str, Any] = {}
    if steps:
        phase("comparing with plain training")
        verdict = reference.compare(training)
        del reference
    phase("warming up")
    training.warm_up(max(trial.measure.warmup_steps - steps, 0 if steps else 1))
    phase("measuring")
    _say(["Running benchmark..."])
    training.phases = Phases()
    measured = measure(training.step, trial.measure, communicator, training.last_step_s)
    phase("checking that the replicas agree")
    training.synchronize()
    spread = check.replica_spread(workload.model, communicator)
    verdict |= {"replica_spread": spread, "replicas_agree": spread == 0.0}
    losses = communicator.gather_objects(training.loss.item())
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
        "breakdown": _breakdown(trial, settings, measured, training.phases),
        "loss": float(np.mean(losses)),
        "check": verdict,
        "parameters": parameters,
        "started_by": launcher,
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


def _optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    if config.name == "adamw":
        return torch.optim.AdamW(model.parameters(), config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        model.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay
    )


class _Reference:
    """Where plain training leads from the same start with the same data."""

    def __init__(self, trial: Trial, workload: Workload, steps: int) -> None:
        self._trial, self._workload, self._steps = trial, workload, steps
        self._start = check.snapshot(workload.model)
        optimizer = _optimizer(trial.optimizer, workload.model)
        self._seed()
        self._wanted = check.plain_steps(workload, optimizer, runtime.communicator(), steps)
        workload.model.load_state_dict(self._start)

    def compare(self, training: _Training) -> dict[str, Any]:
        """Trains the same steps with the algorithm and says how far it ended from there."""
        self._seed()
        training.run(self._steps)
        training.synchronize()
        names = [name for name, _ in self._workload.model.named_parameters()]
        # Not a copy: the memory check counts on it.
        reached = self._workload.model.state_dict()
        off = check.distance(reached, self._wanted, self._start, names)
        matches = off <= check.TOLERANCE[self._trial.dtype]
        return {"reference_error": off, "matches_reference": matches}

    def _seed(self) -> None:
        # Dropout then draws the same masks in both trainings; each rank has its own.
        torch.manual_seed(self._trial.seed * 1000 + dear.rank())


class _Training:
    """The ordinary training loop with the trial's algorithm, timed in parts."""

    def __init__(self, trial: Trial, workload: Workload) -> None:
        self._workload = workload
        self._cuda = trial.device == "cuda"
        self._communicator = runtime.communicator()
        self._optimizer = _optimizer(trial.optimizer, workload.model)
        self._distributed = trial.algorithm != BASELINE
        if self._distributed:
            algorithm = algorithm_class(trial.algorithm)()
            options = algorithm_options(trial.algorithm, trial.options)
            workload.model, self._optimizer = algorithm.wrap(
                workload.model, self._optimizer, self._communicator, options
            )
        self.loss = torch.zeros(())
        self.last_step_s = 0.0
        self.phases = Phases()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def warm_up(self, steps: int) -> None:
        """At least `steps`; more if they are short, since the first few tell little of the rest."""
        self.run(steps)
        more = self._communicator.broadcast_object(self.last_step_s < SHORT_STEP_S)
        self.run(EXTRA_WARMUP_STEPS if more else 0)

    def step(self) -> None:
        clock = time.perf_counter
        blocked = self._communicator.blocked_s
        began = clock()
        self._optimizer.zero_grad()
        self.loss = self._workload.loss()
        forward = clock()
        self.loss.backward()
        backward = clock()
        self._optimizer.step()
        if self._cuda:
            torch.cuda.synchronize()
        end = clock()
        self.last_step_s = end - began
        self.phases.forward_s.append(forward - began)
        self.phases.backward_s.append(backward - forward)
        self.phases.update_s.append(end - backward)
        self.phases.exposed_comm_s.append(self._communicator.blocked_s - blocked)

    def synchronize(self) -> None:
        if self._distributed:
            self._optimizer.synchronize()

    def close(self) -> None:
        if self._distributed:
            self._optimizer.close()


def _breakdown(
    trial: Trial, settings: EmulationSettings, measured: Measured, phases: Phases
) -> dict[str, float | None] | None:
    """Medians of rank 0's parts of a step, or None on a GPU, where the host runs ahead."""
    if trial.device != "cpu":
        return None
    parts = {
        name: float(np.median(times)) / settings.time_scale for name, times in vars(phases).items()
    }
    if not measured.bytes_sent:  # DDP and Horovod communicate and wait in code of their own
        parts["exposed_comm_s"] = 0.0 if trial.world_size == 1 else None
    return parts


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
