"""Published throughputs beside predicted ones: links are fitted to some rows, others predicted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Literal

from common.machine.processes import started
from common.virtual.costs.parts import Kind
from common.virtual.pool import PRELOAD, begin
from common.virtual.published.links import Line, Lines, Steps, check, fitted, step_s
from common.virtual.published.study import TABLE, Row, Study, declared, read
from dear.errors import UserError

Role = Literal["fitted", "predicted", "apart"]
"""Use of a row: the links are fitted to it, or it is predicted; or it is listed apart."""

INSIDE = "inside the hosts"
"""Name of the links inside hosts."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Published throughput, and the prediction."""

    row: Row
    predicted_s: float
    role: Role

    @property
    def error(self) -> float:
        """Relative error of the predicted throughput."""
        return self.row.step_s / self.predicted_s - 1


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of the predicted rows of a network."""

    network: str
    rows: int
    mean: float
    """Mean of the absolute errors, without the rows listed apart."""
    signed_mean: float
    worst: float
    mean_with_apart: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison with published throughputs."""

    compared: tuple[Compared, ...]
    lines: dict[str, Lines]
    """Fitted links by network."""
    skipped: tuple[str, ...]
    """Rows without a prediction, with the reason."""
    foreign: tuple[str, ...]
    """Networks (and `INSIDE`) whose links are fitted to rows of `TABLE`, because there are fewer
    than two such rows among the given ones."""
    slower_s: dict[str, float]
    """Seconds that a step of a model takes longer on one host than compute and communication, by
    its rows of the method `Study.alone`."""
    slowed: tuple[Compared, ...]
    """The same rows, predicted with that much more compute; those of the method `Study.alone` on
    one host are fitted."""

    def errors(self) -> list[Errors]:
        """Returns the errors by network; networks without a predicted row are left out."""
        return _by_network(self.compared)

    def slowed_errors(self) -> list[Errors]:
        """Returns the errors by network, if models compute slower on a full host."""
        return _by_network(self.slowed)


def _by_network(compared: Sequence[Compared]) -> list[Errors]:
    networks = dict.fromkeys(c.row.network for c in compared if c.role == "predicted")
    return [_errors(name, [c for c in compared if c.row.network == name]) for name in networks]


def _errors(network: str, compared: Sequence[Compared]) -> Errors:
    plain = [c.error for c in compared if c.role == "predicted"]
    every = [c.error for c in compared if c.role != "fitted"]
    return Errors(
        network=network,
        rows=len(plain),
        mean=statistics.fmean(map(abs, plain)),
        signed_mean=statistics.fmean(plain),
        worst=max(plain, key=abs),
        mean_with_apart=statistics.fmean(map(abs, every)),
    )


def compare(rows: Sequence[Row]) -> Comparison:
    """Fits the links of each network, and predicts all rows.

    The rows to fit are those of `rows`; for a network without them, those of `TABLE`.
    """
    study, shipped = declared(), read(TABLE)
    skipped, known = [], []
    for row in rows:
        try:
            check(row, study)
            known.append(row)
        except UserError as error:
            skipped.append(f"{_name(row)}: {error}")
    foreign: list[str] = []
    by_network: dict[str, Lines] = {}
    with started(begin=begin, preload=PRELOAD) as pool:
        steps = _steps(pool, study)
        on_one_host = _to_fit(known, study)
        if len(on_one_host) < 2:
            on_one_host = _to_fit(shipped, study)
            foreign.append(INSIDE)
        inside = fitted(on_one_host, "inside", {}, steps)
        for network in dict.fromkeys(row.network for row in known):
            to_fit = _to_fit(known, study, network)
            if len(to_fit) < 2:
                to_fit = _to_fit(shipped, study, network)
                foreign.append(network)
            try:
                between = fitted(to_fit, "between", {"inside": inside}, steps)
            except UserError as error:
                skipped += [f"{_name(r)}: {error}" for r in known if r.network == network]
                continue
            by_network[network] = {"inside": inside, "between": between}
        known = [row for row in known if row.network in by_network]

        def predicted(rows: Sequence[Row]) -> list[Compared]:
            times = steps([(row, by_network[row.network]) for row in rows])
            return [
                Compared(row=row, predicted_s=seconds, role=_role(row, study))
                for row, seconds in zip(rows, times, strict=True)
            ]

        compared = predicted(known)
        slower_s = _slower_s(compared, study)
        slow = [_slowed(row, slower_s[row.model]) for row in known if row.model in slower_s]
        slowed = [c for c in compared if c.row.model not in slower_s] + predicted(slow)
    slowed = [replace(c, role="fitted") if _is_alone(c.row, study) else c for c in slowed]
    return Comparison(
        slower_s=slower_s,
        slowed=tuple(slowed) if slower_s else (),
        compared=tuple(compared),
        lines=by_network,
        skipped=tuple(skipped),
        foreign=tuple(name for name in foreign if name in (INSIDE, *by_network)),
    )


def _steps(pool: Executor, study: Study) -> Steps:
    """Returns the function that predicts steps, each once: a fit asks again for its best ones."""
    known_s: dict[tuple[Row, frozenset[tuple[Kind, Line]]], float] = {}

    def steps(pairs: Sequence[tuple[Row, Lines]]) -> list[float]:
        keys = [(row, frozenset(lines.items())) for row, lines in pairs]
        new = [key for key in dict.fromkeys(keys) if key not in known_s]
        rows, lines = [row for row, _ in new], [dict(items) for _, items in new]
        known_s.update(zip(new, pool.map(step_s, rows, [study] * len(new), lines), strict=True))
        return [known_s[key] for key in keys]

    return steps


def _to_fit(rows: Sequence[Row], study: Study, network: str | None = None) -> list[Row]:
    """Returns the rows to fit: of several hosts on a network, or (None) of one host anywhere."""
    return [
        row
        for row in rows
        if _role(row, study) == "fitted"
        and network in (None, row.network)
        and row.gpus > 1
        and (row.gpus > study.gpus_per_host) == (network is not None)
    ]


def _is_alone(row: Row, study: Study) -> bool:
    """Returns True for a row of one full host whose step is compute and one all-reduce."""
    return row.method == study.alone and row.gpus == study.gpus_per_host


def _slower_s(compared: Sequence[Compared], study: Study) -> dict[str, float]:
    alone = [c for c in compared if _is_alone(c.row, study) and c.role == "predicted"]
    models = dict.fromkeys(c.row.model for c in alone)
    return {
        model: statistics.fmean(c.row.step_s - c.predicted_s for c in alone if c.row.model == model)
        for model in models
    }


def _slowed(row: Row, slower_s: float) -> Row:
    return replace(row, single_samples_per_s=row.batch / (row.single_step_s + slower_s))


def _role(row: Row, study: Study) -> Role:
    if row.model == study.fit.model and row.method in study.fit.methods:
        return "fitted"
    apart = (row.model, row.method) == (study.apart.model, study.apart.method)
    return "apart" if apart else "predicted"


def _name(row: Row) -> str:
    return f"{row.model}, {row.network}, {row.method}, {row.gpus} GPUs"
