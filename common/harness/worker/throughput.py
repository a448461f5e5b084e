"""Trial whose steps are timed: the timed blocks, and the measurements before and after them.

The first repeat also checks that the trial trains correctly, from the first step to the end of the
timed steps. The check computes nothing while steps are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import dear
from common.harness.running import ui
from common.harness.trial import BASELINE, Briefing, Trial
from common.harness.worker.checking import deviation
from common.harness.worker.checking.checker import Checker, draw
from common.harness.worker.timing import costs, device_use, evidence, measure
from common.harness.worker.timing.canary import canary_s
from common.harness.worker.timing.priority import hurry_helpers
from common.harness.worker.timing.stopwatch import stopwatch
from common.harness.worker.timing.strain import Gauge, strain_of, used_cores
from common.harness.worker.training import Training, of_slowest_rank, typical, untimed_steps
from common.models.registry import is_replay, precision
from common.models.workload import Workload
from common.results.records import Breakdown, Group, Plan, Result
from common.results.records.trust import Check
from dear.comm import runtime
from dear.cost.bounds import StepTimes
from dear.cost.measurement import Measurement
from dear.training.algorithm import algorithm_class

Phase = Callable[[str], None]
"""Function that reports the present phase of the rank."""


def time_steps(
    trial: Trial, briefing: Briefing, workload: Workload, repeat: int, phase: Phase
) -> Result:
    """Runs one repeat on all ranks; rank 0's result is the result of the repeat."""
    current = _Repeat(trial, briefing, workload, repeat, phase)
    return current.first() if repeat == 0 else current.later()


class _Repeat:
    """Repeat of a trial. Times are real seconds, except in the result."""

    def __init__(
        self, trial: Trial, briefing: Briefing, workload: Workload, repeat: int, phase: Phase
    ) -> None:
        self._trial, self._briefing, self._workload = trial, briefing, workload
        self._repeat, self._phase = repeat, phase
        self._scale = briefing.time_scale
        self._untimed = measure.untimed_in_block(trial.options.staleness())
        self._communicator = runtime.communicator()
        self._gather = self._communicator.gather_objects
        self._nbytes = gradient_bytes(workload.model)
        self._result: dict[str, Any] = {}
        """Fields of the result so far."""
        self._evidence: dict[str, Any] = {}

    def later(self) -> Result:
        """Runs a repeat after the first: times steps, and compares the replicas."""
        training = self._wrapped()
        self._time(training, warmed=0, checker=None)
        return self._end(training, Check)

    def first(self) -> Result:
        """Runs the first repeat: also times collectives, traces steps, and checks the training."""
        trial, model, steps = self._trial, self._workload.model, self._trial.measure.check_steps
        samples = self._costs() if trial.world_size > 1 else []
        self._phase("training plainly, to compare with")
        checker = Checker(trial, self._workload, steps)
        compute = vars(checker.compute).items()
        self._result["compute"] = StepTimes(**{name: s / self._scale for name, s in compute})
        training = self._wrapped()
        self._phase("comparing with plain training")
        checker.train_first_steps(training)
        self._time(training, warmed=steps, checker=checker)
        self._phase("tracing some more steps")
        trace = evidence.Trace(training, model, self._communicator)
        self._phase("comparing all steps with a reference")
        check = checker.finish(training, self._measured.bytes_sent)
        device, dtype = torch.device(trial.device), precision(trial.dtype)[0]
        self._evidence |= {
            "traces": self._gather(trace.to_json()),
            "plan": evidence.plan(training, model),
            "host_costs": self._gather(evidence.host_costs(trial.optimizer, device, dtype)),
        }
        plan = self._plan(self._evidence["plan"]["groups"], training)
        self._result["plan"] = plan
        say(ui.log_plan(plan))
        # A fault may still be in effect: its costs would be no check of the first ones.
        if samples and trial.fault is None:
            self._phase("timing collectives again")
            again = self._time_collectives(samples)
            self._result["cost_check"] = costs.check(samples, again)
            self._evidence["collectives"] = [
                *costs.to_json(samples, self._scale, when="begin"),
                *costs.to_json(again, self._scale, when="end"),
            ]
        if trial.fault is None:
            self._engine_costs(training)
        self._phase("counting operations")
        self._result["use"] = device_use.arithmetic(trial, self._gather)
        return self._end(training, lambda: checker.recompute(check))

    def _plan(self, groups: list[dict[str, Any]], training: Training) -> Plan | None:
        plan = Plan(
            groups=[_group(**group) for group in groups],
            found=_rescaled(training.engine.findings(), self._scale),
        )
        return plan if plan.groups or plan.found else None

    def _costs(self) -> list[Measurement]:
        self._phase("timing collectives")
        # Rank 0 decides, because a shared file system may show other ranks an older file.
        known = self._communicator.broadcast_object(self._briefing.costs)
        samples = self._time_collectives() if known is None else []
        self._result["costs"] = known or costs.fits(samples, self._scale)
        self._result["local_size"] = dear.local_size()
        return samples

    def _time_collectives(self, first: list[Measurement] | None = None) -> list[Measurement]:
        device = next(self._workload.model.parameters()).device
        return costs.time_collectives(self._communicator, device, self._nbytes, first)

    def _engine_costs(self, training: Training) -> None:
        sender = training.engine.sender()
        if sender is None or not self._result.get("costs"):
            return
        self._phase(f"timing all-reduces of {sender.name}")
        samples = costs.time_sender(self._communicator, sender, self._nbytes)
        self._result["engine_costs"] = costs.engine_costs(sender, samples, self._scale)
        self._evidence["engine_collectives"] = costs.to_json(samples, self._scale)

    def _wrapped(self) -> Training:
        self._phase("wrapping the model")
        return Training(self._trial, self._workload)

    def _gauge(self, training: Training) -> Gauge:
        # Some algorithms have started threads since the rank joined the others.
        hurried = hurry_helpers(self._trial, self._briefing)
        return Gauge(self._briefing.links_pid, lambda: training.absorbed_s, hurried)

    def _time(self, training: Training, warmed: int, checker: Checker | None) -> None:
        """Runs the timed blocks.

        Args:
            warmed: number of steps that were trained before.
            checker: watches a step between two blocks; None: no check.
        """
        trial, communicator = self._trial, self._communicator
        self._phase("warming up")
        step_s = training.warm_up(max(untimed_steps(trial) - warmed, 1))
        self._phase("measuring")
        say(["Running benchmark..."])
        training.forget_parts()
        period = _period(trial)
        config, watched = trial.measure, 0
        watches = checker is not None and checker.recomputes
        if watches:
            config = measure.in_two(config)
            watched = draw(range(1, config.num_iters))

        def between(block: int) -> None:
            if checker is not None and block == watched:
                checker.train_watched_step(training)

        def canary() -> float:
            training.synchronize()
            return canary_s(communicator)

        counters = evidence.network_counters()
        memory = device_use.PeakMemory(torch.device(trial.device))
        self._measured = measured = measure.measure_steps(
            training.step,
            communicator,
            blocks=config.num_iters,
            steps=measure.block_steps(config, period, step_s, communicator),
            untimed=self._untimed,
            between=between,
            watch=stopwatch(trial.device),
            gauge=self._gauge(training),
            canary=canary,
        )
        if checker is None:  # the check's copies would count as memory of the algorithm
            self._result["use"] = device_use.memory(trial, self._gather(memory.read()))
        counted = self._gather(evidence.gained(counters, evidence.network_counters()))
        parts = self._gather(training.parts())
        self._result |= {
            "iters": self._scaled(measured.iters),
            "untimed": self._scaled(measured.untimed),
            "period": period,
            "bytes_per_step": measured.bytes_sent or None,
            "cpu_s_per_s": used_cores(measured.pressure),
            "breakdown": self._breakdown(parts),
        }
        self._evidence |= {
            "trial": trial.id,
            "repeat": self._repeat,
            "time_scale": self._scale,
            "period": period,
            **evidence.timing(measured, parts, counted, watched=int(watches)),
        }

    def _end(self, training: Training, confirmed: Callable[[], Check]) -> Result:
        self._phase("checking that the replicas agree")
        training.synchronize()
        agreement = deviation.agreement(
            self._workload.model, training.consistency, self._communicator
        )
        losses = self._gather(training.loss.item())
        statistics = self._gather(training.engine.statistics())
        say(ui.log_results(self._trial, self._result["iters"]))
        name = evidence.file_name(self._repeat)
        if dear.rank() == 0:
            evidence.write(self._briefing.folder / name, self._evidence)
        self._phase("leaving")
        training.close()
        check = confirmed()
        dear.shutdown()
        return Result(
            strain=strain_of(self._measured.pressure, self._measured.canary_s),
            evidence=name,
            loss=float(np.mean(losses)),
            check=deviation.with_agreement(check, agreement),
            statistics=statistics if any(statistics) else None,
            **self._result,
        )

    def _scaled(self, blocks: list[list[float]]) -> list[list[float]]:
        return [[step_s / self._scale for step_s in block] for block in blocks]

    def _breakdown(self, parts: list[list[Breakdown]]) -> Breakdown:
        """Returns the breakdown of the timed steps of the slowest rank.

        Args:
            parts: parts of all steps since the first block, by rank.
        """
        measured, first = self._measured, self._untimed
        block = first + len(measured.iters[0])
        # Algorithms that send without the communicator (DDP) may wait in the passes, too.
        waited = any(step.exposed_comm_s for rank in parts for step in rank)
        waits_seen = measured.bytes_sent > 0 or waited or self._trial.world_size == 1
        # A replayed device is idle during every wait.
        waits_seen = waits_seen or is_replay(self._trial.model)
        timed = [[s for place, s in enumerate(rank) if place % block >= first] for rank in parts]
        return of_slowest_rank([typical(r, self._scale, waits_seen=waits_seen) for r in timed])


def _group(bytes: int, parameters: list[str], some: bool | None) -> Group:
    ends = {"first": parameters[0], "last": parameters[-1]} if parameters else {}
    return Group(bytes=bytes, tensors=len(parameters), some=some, **ends)


def _period(trial: Trial) -> int:
    if trial.algorithm == BASELINE or trial.world_size == 1:
        return 1
    algorithm = algorithm_class(trial.algorithm)
    return algorithm.period(trial.options, trial.world_size, dear.local_size())


def gradient_bytes(model: torch.nn.Module) -> int:
    """Returns the size of all gradients of the model."""
    return sum(param.nbytes for param in model.parameters() if param.requires_grad)


def say(lines: list[str]) -> None:
    """Prints lines into the trial's log, once."""
    if dear.rank() == 0:
        print("\n".join(lines), flush=True)


def _rescaled(value: Any, scale: float, seconds: bool = False) -> Any:
    """Divides numbers below keys that end in `_s`, except `wall_s`, by the time scale."""
    if isinstance(value, dict):
        return {
            key: _rescaled(inner, scale, key.endswith("_s") and key != "wall_s")
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_rescaled(inner, scale, seconds) for inner in value]
    return value / scale if seconds and isinstance(value, (int, float)) else value
