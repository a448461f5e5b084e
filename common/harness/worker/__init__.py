"""One rank of one repeat of one trial: puts model, optimizer, algorithm and communicator together.

Started by every launcher in the same way: `python -m common.harness.worker TRIAL_DIR REPEAT`. The
trial is read from `TRIAL_DIR/trial.json`, and what must be known besides from
`TRIAL_DIR/briefing.json`; rank 0 writes `repeat-R.json`, and a rank that fails writes
`error-R-rankK.json`. What is printed is for people.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import math
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

import comm_core
import dear
from common.harness import ui
from common.harness.record import Result
from common.harness.trial import BASELINE, Briefing, Trial
from common.harness.worker import correctness, evidence
from common.harness.worker.canary import canary_s
from common.harness.worker.costs import CostSamples, fits, time_collectives
from common.harness.worker.inquiry import Inquiry
from common.harness.worker.learning import learn
from common.harness.worker.measure import (
    Measured,
    block_steps,
    measure_steps,
    untimed_in_block,
)
from common.harness.worker.stopwatch import stopwatch
from common.harness.worker.strain import strain_of, used_cores
from common.harness.worker.training import Training, of_slowest_rank, typical, untimed_steps
from common.models.pace import set_pace
from common.models.registry import build
from common.models.workload import Workload
from common.results.records import Breakdown, Check
from dear.comm import runtime
from dear.comm.environment import rank_facts
from dear.cost.bounds import StepTimes
from dear.cost.collectives import Measurement
from dear.errors import Unavailable, UserError
from dear.training.algorithm import algorithm_class


def main(folder: Path, repeat: int) -> int:
    """Runs the repeat; returns the exit status of the process."""
    phase = Phase(folder, repeat)
    try:
        phase.rank = rank_facts().rank
        phase("start")
        faulthandler.register(signal.SIGUSR1)  # a launcher that loses patience asks for the stack
        trial = Trial.load(folder).of_repeat(repeat)
        result = _run(trial, Briefing.load(folder), repeat, phase)
        if phase.rank == 0:
            _write(folder / f"repeat-{repeat}.json", dataclasses.asdict(result))
    except BaseException as error:
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        said = {"kind": _kind(error), "message": message, "rank": phase.rank, "where": phase.name}
        _write(folder / f"error-{repeat}-rank{phase.rank}.json", said)
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
        self.rank = 0
        self.name = "start"

    def __call__(self, name: str) -> None:
        self.name = name
        path = self._folder / f"phase-{self._repeat}-rank{self.rank}"
        path.write_text(f"{os.getpid()} {name}")


def _run(trial: Trial, briefing: Briefing, repeat: int, phase: Phase) -> Result | None:
    """The result, which rank 0 writes; others may have none."""
    torch.set_num_threads(trial.threads_per_rank)
    phase("joining the other ranks")
    dear.init(backend=trial.backend, timeout_s=trial.collective_timeout_s)
    _check_world(trial)
    runtime.communicator().burst_bytes = briefing.burst_bytes
    pace = briefing.pace(dear.rank())
    if trial.backend == "comm_core":
        pace.ended_s = _last_ended_s
    set_pace(pace)
    launcher = runtime.facts().launcher
    phase("building the model")
    device = torch.device("cpu")
    if trial.device == "cuda":
        # Ranks may share GPUs where another backend than NCCL moves the bytes.
        device = torch.device("cuda", dear.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    workload = _workload(trial, device)
    facts = {
        "parameters": sum(param.numel() for param in workload.model.parameters()),
        "gradient_bytes": _gradient_bytes(workload.model),
        "started_by": launcher,
    }
    _say(ui.log_header(trial, facts["parameters"]))
    one = _timed if trial.learn is None else learn
    result = one(trial, briefing, workload, repeat, phase)
    return result and dataclasses.replace(result, **facts)


def _timed(
    trial: Trial, briefing: Briefing, workload: Workload, repeat: int, phase: Phase
) -> Result:
    """Times steps; in the first repeat also looks whether they train rightly."""
    communicator, scale = runtime.communicator(), briefing.time_scale
    steps = trial.measure.check_steps if repeat == 0 else 0
    limits: dict[str, Any] = {}
    samples: list[Measurement] = []
    """Of collectives, where this trial is the one that measures them."""
    if steps:
        if trial.world_size > 1:
            phase("timing collectives")
            # Rank 0's word: a shared file system may show the others something older.
            limits["costs"] = communicator.broadcast_object(briefing.costs)
            if limits["costs"] is None:
                samples = _time_collectives(workload.model)
                limits["costs"] = fits(samples, scale)
            limits["local_size"] = dear.local_size()
        phase("training plainly, to compare with")
        inquiry = Inquiry(trial, workload, steps)
        compute = vars(inquiry.compute)
        limits["compute"] = StepTimes(**{name: s / scale for name, s in compute.items()})
    phase("wrapping the model")
    training = Training(trial, workload)
    if steps:
        phase("comparing with plain training")
        inquiry.first_steps(training)
    phase("warming up")
    step_s = training.warm_up(max(untimed_steps(trial) - steps, 1))
    phase("measuring")
    _say(["Running benchmark..."])
    training.parts.clear()
    if steps:
        inquiry.look_away()
    period = _period(trial)
    before_s = canary_s(communicator)
    untimed = untimed_in_block(trial.options.staleness())
    counted = evidence.network_counters()
    measured = measure_steps(
        training.step,
        communicator,
        blocks=trial.measure.num_iters,
        steps=block_steps(trial.measure, period, step_s, communicator),
        untimed=untimed,
        watch=stopwatch(trial.device),
    )
    parts = list(training.parts)
    counted = evidence.gained(counted, evidence.network_counters())
    trace: evidence.Trace | None = None
    if repeat == 0:
        phase("tracing some more steps")
        trace = evidence.Trace(training, workload.model, communicator)
    check = Check()
    if steps:
        phase("comparing all steps with a reference")
        check = inquiry.end(training)
    phase("checking that the replicas agree")
    training.synchronize()
    after_s = canary_s(communicator)
    facts: dict[str, Any] = {}
    if trace is not None:
        facts = {
            "traces": communicator.gather_objects(trace.told()),
            "plan": evidence.plan(training, workload.model),
            "host_costs": communicator.gather_objects(evidence.host_costs(trial.optimizer)),
        }
    spread = correctness.replica_spread(workload.model, communicator)
    agree, apart = spread == 0.0, None
    if training.consistency in correctness.APART:
        apart = correctness.consensus_distance(workload.model, communicator)
        agree = apart <= correctness.CONSENSUS_LIMIT
    losses = communicator.gather_objects(training.loss.item())
    statistics = communicator.gather_objects(training.statistics())
    parts_of_all = communicator.gather_objects(parts)
    iters = _scaled(measured.iters, scale)
    _say(ui.log_results(trial, iters))
    if samples:
        phase("timing collectives again")
        again = _time_collectives(workload.model, largest=True)
        costs = CostSamples(time_scale=scale, first=samples, again=again)
        limits["cost_check"] = costs.check
        facts["collectives"] = costs.to_json()
    counters = communicator.gather_objects(counted)
    if dear.rank() == 0:
        facts |= {"trial": trial.id, "repeat": repeat, "time_scale": scale, "period": period}
        facts |= evidence.timing(measured, parts_of_all, counters)
        evidence.write(briefing.folder / evidence.file_name(repeat), facts)
    phase("leaving")
    training.close()
    dear.shutdown()
    return Result(
        iters=iters,
        untimed=_scaled(measured.untimed, scale),
        period=period,
        evidence=evidence.file_name(repeat),
        bytes_per_step=measured.bytes_sent or None,
        cpu_s_per_s=used_cores(measured.pressure),
        strain=strain_of(measured.pressure, [before_s, after_s]),
        breakdown=_breakdown(trial, scale, measured, parts_of_all, untimed),
        loss=float(np.mean(losses)),
        check=dataclasses.replace(
            check, replicas_agree=agree, replica_spread=spread, consensus_distance=apart
        ),
        statistics=statistics if any(statistics) else None,
        **limits,
    )


def _last_ended_s() -> float:
    """When the core's last collective ended; Linux's monotonic clock is the performance counter."""
    ended = comm_core.events()[-1:]
    return ended[0]["finished_s"] if ended else -math.inf


def _period(trial: Trial) -> int:
    if trial.algorithm == BASELINE or trial.world_size == 1:
        return 1
    algorithm = algorithm_class(trial.algorithm)
    return algorithm.period(trial.options, trial.world_size, dear.local_size())


def _scaled(blocks: list[list[float]], time_scale: float) -> list[list[float]]:
    return [[step_s / time_scale for step_s in block] for block in blocks]


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


def _gradient_bytes(model: torch.nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters() if param.requires_grad)


def _time_collectives(model: torch.nn.Module, *, largest: bool = False) -> list[Measurement]:
    device = next(model.parameters()).device
    communicator = runtime.communicator()
    return time_collectives(communicator, device, _gradient_bytes(model), largest=largest)


def _breakdown(
    trial: Trial,
    time_scale: float,
    measured: Measured,
    parts: list[list[Breakdown]],
    untimed: int,
) -> Breakdown | None:
    """Of the timed steps of the slowest rank, or None on a GPU, where the host runs ahead.

    Args:
        parts: by rank, of all steps since the first block.
        untimed: steps before each block.
    """
    if trial.device != "cpu":
        return None
    block = untimed + len(measured.iters[0])
    # DDP and Horovod communicate and wait in code of their own.
    waits_seen = measured.bytes_sent > 0 or trial.world_size == 1
    timed = [[s for place, s in enumerate(rank) if place % block >= untimed] for rank in parts]
    return of_slowest_rank([typical(rank, time_scale, waits_seen=waits_seen) for rank in timed])


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
