"""Links of a study: two parameters per kind of link, fitted to some rows; steps on them.

A ring all-reduce of P GPUs has 2 (P - 1) steps. Each takes the start-up, plus the time of a block
of n / P bytes, on the slowest link of the ring (`common.virtual.costs.steps.ring`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from common.models.profile import Profile
from common.models.registry import profile_of
from common.virtual.costs.engines import costs_of
from common.virtual.costs.parts import Kind, Medium, Platform, Shape, Wire
from common.virtual.passes import update_s_of
from common.virtual.published.study import Row, Study
from common.virtual.setting import Setting
from common.virtual.training.run import predicted
from dear.errors import UserError, one_of
from dear.training.algorithm import algorithm_options

START = (10e-6, 2e9)
"""First guess of a fit."""
SMALLEST_S = 1e-7
"""Smallest start-up; rows that do not depend on it would make it ever smaller."""
ROUNDS = 12
"""Largest number of improvements of a fit."""
SAME = 1e-3
"""Relative change of both parameters below which a fit has ended."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Parameters of a kind of link."""

    start_up_s: float
    """Seconds per step of a ring."""
    bytes_per_s: float

    def wire(self, kind: Kind, medium: Medium) -> Wire:
        """Returns the wire with these parameters."""
        return Wire(
            kind=kind,
            latency_s=0.0,
            overhead_s=self.start_up_s,
            bytes_per_s=self.bytes_per_s,
            medium=medium,
        )


Lines = Mapping[Kind, Line]
"""Parameters of the links inside a host, and between hosts."""


Steps = Callable[[Sequence[tuple[Row, Lines]]], list[float]]
"""Function that predicts the seconds of several steps."""


def shape_of(row: Row, study: Study) -> Shape:
    """Returns the hosts and GPUs per host of a row; raises `UserError` if its hosts are uneven."""
    local = min(row.gpus, study.gpus_per_host)
    if row.gpus % local:
        raise UserError(f"{row.gpus} GPUs do not fill hosts of {local}")
    return Shape(hosts=row.gpus // local, ranks_per_host=local)


def scaled(row: Row, study: Study) -> Profile:
    """Returns the profile, scaled so that a whole step on one GPU takes the published time."""
    profile = profile_of(f"{one_of('model', row.model, study.models)}@{study.device}", row.batch)
    return profile.slowed((row.single_step_s - update_s_of(profile)) / profile.step_s)


def check(row: Row, study: Study) -> None:
    """Raises `UserError` if the row cannot be predicted."""
    shape_of(row, study)
    scaled(row, study)
    one_of("method", row.method, study.methods)


def step_s(row: Row, study: Study, lines: Lines) -> float:
    """Returns the predicted seconds of a step: the file of the algorithm runs."""
    method = study.methods[row.method]
    media: Mapping[Kind, Medium] = {"inside": "pcie", "between": "tcp"}
    wires = {kind: line.wire(kind, media[kind]) for kind, line in lines.items()}
    platform = Platform(wires=wires)
    setting = Setting(
        profile=scaled(row, study),
        algorithm=method.algorithm,
        options=algorithm_options(method.algorithm, method.options),
        shape=shape_of(row, study),
        costs=lambda hosts, local: costs_of(
            "ring", platform, Shape(hosts=hosts, ranks_per_host=local)
        ),
        engine="nccl",
    )
    return predicted(setting).step_s


def fitted(rows: Sequence[Row], kind: Kind, known: Lines, steps: Steps) -> Line:
    """Returns the parameters with the least squares of the logarithms of predicted / published.

    The method is that of Levenberg and Marquardt, in the logarithms of both parameters.

    Args:
        kind: kind of the links that are fitted; `known` has the others.

    Raises:
        UserError: there are fewer than two rows.
    """
    if len(rows) < 2:
        raise UserError(f"two parameters need two rows or more, but there are {len(rows)}")

    def errors(*points: torch.Tensor) -> torch.Tensor:
        lines = [{**known, kind: _line(point)} for point in points]
        predicted_s = steps([(row, line) for line in lines for row in rows])
        times = torch.tensor(predicted_s, dtype=torch.float64).reshape(len(points), len(rows))
        return (times / torch.tensor([row.step_s for row in rows])).log()

    best = torch.tensor(START, dtype=torch.float64).log()
    damping, aside = 0.01, 0.02
    for _ in range(ROUNDS):
        here, *beside = errors(best, *(best + aside * torch.eye(2, dtype=torch.float64)))
        slopes = torch.stack([(there - here) / aside for there in beside], dim=1)
        square = slopes.T @ slopes
        while damping < 1e6:
            damped = square + damping * square.diagonal().clamp(min=1e-9).diag()
            change = torch.linalg.solve(damped, -slopes.T @ here).clamp(-1, 1)
            (there,) = errors(best + change)
            if there.norm() < here.norm():
                break
            damping *= 10
        else:
            break
        best, damping = best + change, damping / 10
        best[0] = max(float(best[0]), math.log(SMALLEST_S))
        if float(change.abs().max()) < SAME:
            break
    return _line(best)


def _line(point: torch.Tensor) -> Line:
    start_up_s, bytes_per_s = point.exp().tolist()
    return Line(start_up_s=max(start_up_s, SMALLEST_S), bytes_per_s=bytes_per_s)
