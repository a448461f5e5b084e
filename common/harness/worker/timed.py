"""A trial whose steps are timed: what surrounds the timed blocks, in its order.

In the first repeat of a trial it is also looked whether it trains rightly, from the first step to
the end of the timed ones; nothing of that is done while steps are timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import dear
from common.harness.running import ui
from common.harness.trial import BASELINE, Briefing, Trial
from common.harness.worker.checking import correctness
from common.harness.worker.checking.inquiry import Inquiry, draw
from common.harness.worker.timing import evidence
from common.harness.worker.timing.canary import canary_s
from common.harness.worker.timing.costs import (
    CostSamples,
    engine_costs,
    fits,
    time_collectives,
    time_sender,
)
from common.harness.worker.timing.measure import (
    block_steps,
    in_two,
    measure_steps,
    untimed_in_block,
)
from common.harness.worker.timing.stopwatch import stopwatch
from common.harness.worker.timing.strain import strain_of, used_cores
from common.harness.worker.training import Training, of_slowest_rank, typical, untimed_steps
from common.models.registry import is_replay, precision
from common.models.workload import Workload
from common.results.records import Breakdown, Group, Plan, Result
from common.results.records.trust import Check
from dear.comm import runtime
from dear.cost.bounds import StepTimes
from dear.cost.measurement import Measurement
from dear.training.algorithm import algorithm_class


def time_steps(
    trial: Trial, briefing: Briefing, workload: Workload, repeat: int, phase: Callable[[str], None]
) -> Result:
    """One repeat; every rank calls it, and the result of rank 0 is the repeat's.

    Args:
        phase: is told what the rank does.
    """
    one = _Repeat(trial, briefing, workload, repeat, phase)
    return one.first() if repeat == 0 else one.later()


class _Repeat:
    """The steps of it. Seconds are of this machine until they stand in the result."""

    def __init__(
        self,
        trial: Trial,
        briefing: Briefing,
        workload: Workload,
        repeat: int,
        phase: Callable[[str], None],
    ) -> None:
        self._trial, self._briefing, self._workload = trial, briefing, workload
        self._repeat, self._phase = repeat, phase
        self._scale = briefing.time_scale
        self._untimed = untimed_in_block(trial.options.staleness())
        self._communicator = runtime.communicator()
        self._gather = self._communicator.gather_objects
        self._result: dict[str, Any] = {}
        """Fields of the result so far."""
        self._facts: dict[str, Any] = {}
        """What goes into the file of evidence."""

    def later(self) -> Result:
        """Timed steps, and whether the replicas agree."""
        training = self._wrapped()
        self._time(training, warmed=0, inquiry=None)
        return self._end(training, Check)

    def first(self) -> Result:
        """The same, what collectives cost, a trace of some more steps, and the inquiry."""
        trial, model, steps = self._trial, self._workload.model, self._trial.measure.check_steps
        samples = self._costs() if trial.world_size > 1 else []
        self._phase("training plainly, to compare with")
        inquiry = Inquiry(trial, self._workload, steps)
        compute = vars(inquiry.compute).items()
        self._result["compute"] = StepTimes(**{name: s / self._scale for name, s in compute})
        training = self._wrapped()
        self._phase("comparing with plain training")
        inquiry.first_steps(training)
        inquiry.look_away()
        self._time(training, warmed=steps, inquiry=inquiry)
        self._phase("tracing some more steps")
        trace = evidence.Trace(training, model, self._communicator)
        self._phase("comparing all steps with a reference")
        check = inquiry.end(training, self._measured.bytes_sent)
        self._facts |= {
            "traces": self._gather(trace.told()),
            "plan": evidence.plan(training, model),
            "host_costs": self._gather(
                evidence.host_costs(
                    trial.optimizer, torch.device(trial.device), precision(trial.dtype)[0]
                )
            ),
        }
        self._result["plan"] = plan = self._plan(self._facts["plan"]["groups"], training)
        say(ui.log_plan(plan))
        if samples:
            self._phase("timing collectives again")
            again = self._time_collectives(samples)
            costs = CostSamples(time_scale=self._scale, first=samples, again=again)
            self._result["cost_check"] = costs.check
            self._facts["collectives"] = costs.to_json()
        sender = training.sender()
        if sender is not None and self._result.get("costs"):
            self._phase(f"timing all-reduces of {sender.name}")
            nbytes = gradient_bytes(model)
            sent = time_sender(self._communicator, sender, nbytes, self._scale)
            self._result["engine_costs"] = engine_costs(sender, sent, self._scale)
            self._facts["engine_collectives"] = [
                {**dataclasses.asdict(one), "time_scale": self._scale, "residuals": one.residuals()}
                for one in sent
            ]
        return self._end(training, lambda: inquiry.confirm(check))

    def _plan(self, groups: list[dict[str, Any]], training: Training) -> Plan | None:
        made = []
        for group in groups:
            names = group["parameters"]
            ends = {"first": names[0], "last": names[-1]} if names else {}
            made.append(Group(bytes=group["bytes"], tensors=len(names), some=group["some"], **ends))
        found = _rescaled(training.findings(), self._scale)
        return Plan(groups=made, found=found) if made or found else None

    def _costs(self) -> list[Measurement]:
        """What collectives cost is known from another trial, or measured now."""
        self._phase("timing collectives")
        # Rank 0's word: a shared file system may show the others something older.
        costs = self._communicator.broadcast_object(self._briefing.costs)
        samples = self._time_collectives() if costs is None else []
        self._result["costs"] = costs or fits(samples, self._scale)
        self._result["local_size"] = dear.local_size()
        return samples

    def _time_collectives(self, first: list[Measurement] | None = None) -> list[Measurement]:
        model = self._workload.model
        device = next(model.parameters()).device
        nbytes = gradient_bytes(model)
        return time_collectives(self._communicator, device, nbytes, first, self._scale)

    def _wrapped(self) -> Training:
        self._phase("wrapping the model")
        return Training(self._trial, self._workload)

    def _time(self, training: Training, warmed: int, inquiry: Inquiry | None) -> None:
        """The timed blocks.

        Args:
            warmed: steps that were trained before.
            inquiry: watches a step between two blocks; None: nobody does.
        """
        trial, communicator = self._trial, self._communicator
        self._phase("warming up")
        step_s = training.warm_up(max(untimed_steps(trial) - warmed, 1))
        self._phase("measuring")
        say(["Running benchmark..."])
        training.forget_parts()
        period = _period(trial)
        measure, watched = trial.measure, 0
        if inquiry is not None and inquiry.remakes:
            measure = in_two(measure)
            watched = draw(range(1, measure.num_iters))

        def between(block: int) -> None:
            if inquiry is not None and block == watched:
                inquiry.watch_a_step(training)

        counted = evidence.network_counters()
        self._measured = measured = measure_steps(
            training.step,
            communicator,
            blocks=measure.num_iters,
            steps=block_steps(measure, period, step_s, communicator),
            untimed=self._untimed,
            between=between,
            watch=stopwatch(trial.device),
            absorbed_s=lambda: training.absorbed_s,
            canary=lambda: self._canary_s(training),
            links_pid=self._briefing.links_pid,
        )
        counters = self._gather(evidence.gained(counted, evidence.network_counters()))
        parts = self._gather(training.parts())
        self._result |= {
            "iters": self._scaled(measured.iters),
            "untimed": self._scaled(measured.untimed),
            "period": period,
            "bytes_per_step": measured.bytes_sent or None,
            "cpu_s_per_s": used_cores(measured.pressure),
            "breakdown": self._breakdown(parts),
        }
        self._facts |= {
            "trial": trial.id,
            "repeat": self._repeat,
            "time_scale": self._scale,
            "period": period,
            **evidence.timing(measured, parts, counters),
        }

    def _canary_s(self, training: Training) -> float:
        training.synchronize()
        return canary_s(self._communicator)

    def _end(self, training: Training, confirmed: Callable[[], Check]) -> Result:
        self._phase("checking that the replicas agree")
        training.synchronize()
        agreement = correctness.agreement(
            self._workload.model, training.consistency, self._communicator
        )
        losses = self._gather(training.loss.item())
        statistics = self._gather(training.statistics())
        say(ui.log_results(self._trial, self._result["iters"]))
        name = evidence.file_name(self._repeat)
        if dear.rank() == 0:
            evidence.write(self._briefing.folder / name, self._facts)
        self._phase("leaving")
        training.close()
        check = confirmed()
        dear.shutdown()
        return Result(
            strain=strain_of(self._measured.pressure, self._measured.canary_s),
            evidence=name,
            loss=float(np.mean(losses)),
            check=dataclasses.replace(check, **agreement),
            statistics=statistics if any(statistics) else None,
            **self._result,
        )

    def _scaled(self, blocks: list[list[float]]) -> list[list[float]]:
        return [[step_s / self._scale for step_s in block] for block in blocks]

    def _breakdown(self, parts: list[list[Breakdown]]) -> Breakdown:
        """Of the timed steps of the slowest rank.

        Args:
            parts: by rank, of all steps since the first block.
        """
        measured, first = self._measured, self._untimed
        block = first + len(measured.iters[0])
        # Who sends past the communicator may wait there, too, as DDP does in code of its own.
        waited = any(step.exposed_comm_s for rank in parts for step in rank)
        # A replayed device is idle whoever waits.
        waits_seen = measured.bytes_sent > 0 or waited or self._trial.world_size == 1
        waits_seen = waits_seen or is_replay(self._trial.model)
        timed = [[s for place, s in enumerate(rank) if place % block >= first] for rank in parts]
        return of_slowest_rank([typical(r, self._scale, waits_seen=waits_seen) for r in timed])


def _period(trial: Trial) -> int:
    if trial.algorithm == BASELINE or trial.world_size == 1:
        return 1
    algorithm = algorithm_class(trial.algorithm)
    return algorithm.period(trial.options, trial.world_size, dear.local_size())


def gradient_bytes(model: torch.nn.Module) -> int:
    """Of all gradients of the model."""
    return sum(param.nbytes for param in model.parameters() if param.requires_grad)


def say(lines: list[str]) -> None:
    """Prints the lines once, for people who read the trial's log."""
    if dear.rank() == 0:
        print("\n".join(lines), flush=True)


def _rescaled(value: Any, scale: float, seconds: bool = False) -> Any:
    """Seconds of this machine as what they stand for: numbers below keys that end in `_s`."""
    if isinstance(value, dict):
        return {
            key: _rescaled(inner, scale, key.endswith("_s") and key != "wall_s")
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_rescaled(inner, scale, seconds) for inner in value]
    return value / scale if seconds and isinstance(value, (int, float)) else value
