"""Copies of a rank's parameters during training, and their evaluation afterwards.

A mark is a time or an epoch at which a copy is due.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from common.harness.trial import Trial
from common.harness.worker.checking.deviation import CONSENSUS_LIMIT, Agreement, with_agreement
from common.harness.worker.timing.strain import Pressure, strain_of, used_cores
from common.models.datasets import Parts, Samples
from common.models.registry import build, precision
from common.models.workload import Workload
from common.results.records import Result, typed
from common.results.records.learned import Data, Evaluation, Learning, RankPace
from common.results.records.trust import Check
from dear.errors import UserError

MOST_BYTES = 1 << 30
_BATCH, _FIVE = 100, 5
State = Mapping[str, torch.Tensor]
Scores = dict[str, float | None]
"""Fields of `Evaluation` that need data."""


class Taken(TypedDict):
    """Facts about a copy."""

    row: int
    """Index of the copy; marks that fall into the same step share a copy."""
    seconds: float
    steps: int
    behind: Mapping[str, Sequence[float]]
    """Number of uses of each neighbour's values so far, and sum of the values' ages in steps."""
    train_loss: float | None
    """Mean training loss of the steps since the last copy."""


class Measurements(TypedDict):
    """Measurements of a rank; the first three are the fields of `RankPace`."""

    steps: int
    samples: int
    elapsed_s: float
    bytes_sent: int
    pressure: dict[str, object]
    loss: float
    statistics: dict[str, Any]
    canary_s: list[float]
    network: dict[str, Any]
    agreement: Agreement | None
    """Agreement of the replicas; None if each rank trained at its own pace."""


class Saved(Measurements):
    """Content of the file of `Snapshots.save`."""

    values: torch.Tensor
    taken: list[Taken]


class Snapshots:
    """Memory on the host for copies of a state dict (floating-point tensors), one per mark.

    Raises:
        UserError: the copies would take more than `MOST_BYTES`.
    """

    def __init__(self, state: State, marks: int) -> None:
        floating = _floating(state)
        size = sum(value.nbytes for value in floating.values())
        if size * marks > MOST_BYTES:
            raise UserError(
                f"learn: {marks} copies of {size / 2**20:.0f} MiB per rank are more than "
                f"{MOST_BYTES >> 20} MiB; evaluate less often (eval_every_s or eval_every_epochs)"
            )
        numel = sum(value.numel() for value in floating.values())
        dtype = next((value.dtype for value in floating.values()), torch.float32)
        # The memory is written now; otherwise the kernel would allocate it during training.
        self._values = torch.zeros(marks, numel, dtype=dtype)
        self._taken: list[Taken | None] = [None] * marks
        self._rows = 0

    def take(
        self,
        marks: Sequence[int],
        state: State,
        seconds: float,
        steps: int,
        behind: Mapping[str, Sequence[float]],
        train_loss: float | None = None,
    ) -> None:
        """Copies `state` once, for all `marks`; the other arguments are facts of `Taken`."""
        row = self._values[self._rows]
        start = 0
        for value in _floating(state).values():
            row[start : start + value.numel()].view_as(value).copy_(value.detach())
            start += value.numel()
        taken = Taken(
            row=self._rows, seconds=seconds, steps=steps, behind=behind, train_loss=train_loss
        )
        for mark in marks:
            self._taken[mark] = taken
        self._rows += 1

    def save(self, path: Path, measurements: Mapping[str, object]) -> None:
        """Writes the copies and `measurements` (JSON values) to a file, atomically."""
        partial = path.with_suffix(".partial")
        values = self._values[: self._rows].clone()
        torch.save({"values": values, "taken": self._taken, **measurements}, partial)
        partial.replace(path)


def set_floating(model: torch.nn.Module, values: torch.Tensor) -> None:
    """Writes a copy's `values` into the floating-point tensors of the model's state."""
    start = 0
    for tensor in _floating(model.state_dict()).values():
        tensor.copy_(values[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def _floating(state: State) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if value.is_floating_point()}


def result(
    trial: Trial,
    saved: Sequence[Saved | None],
    data: Parts | None,
    check: Check | None = None,
) -> Result:
    """Returns the result of a repeat.

    Args:
        saved: content of each rank's file; None: the rank died.
        data: training and test data; None for synthetic data.
        check: result of the check before the training.
    """
    alive = [rank for rank in saved if rank is not None]
    first, marks = alive[0], len(trial.learn.marks)
    scores = [{}] * marks if data is None else _scores(trial, alive, data)
    evaluations = [Evaluation(**_at(mark, trial, saved), **scores[mark]) for mark in range(marks)]
    pressure = [typed(Pressure, rank["pressure"]) for rank in alive]
    return Result(
        samples_per_s=sum(rank["samples"] for rank in alive)
        / max(rank["elapsed_s"] for rank in alive),
        bytes_per_step=first["bytes_sent"] // first["steps"] or None,
        cpu_s_per_s=used_cores(pressure),
        strain=strain_of(pressure, _canary_s(alive)),
        loss=sum(rank["loss"] for rank in alive) / len(alive),
        check=_check(check or Check(), evaluations[-1], first.get("agreement")),
        statistics=[rank and rank["statistics"] for rank in saved]
        if any(rank["statistics"] for rank in alive)
        else None,
        learning=Learning(
            evaluations=evaluations,
            ranks=[rank and typed(RankPace, rank) for rank in saved],
            seed=trial.seed,
        ),
        data=data
        and Data(
            name=trial.learn.data, train=len(data.train), test=len(data.test), split=data.split
        ),
    )


def _canary_s(alive: Sequence[Saved]) -> list[float] | None:
    times = [rank["canary_s"] for rank in alive]
    before_s, after_s = (max(moment) for moment in zip(*times, strict=True))
    return [before_s, after_s] if after_s else None


def _at(mark: int, trial: Trial, saved: Sequence[Saved | None]) -> dict[str, Any]:
    taken = [rank and rank["taken"][mark] for rank in saved]
    alive = [copy for copy in taken if copy]
    seconds, at = max(copy["seconds"] for copy in alive), trial.learn.marks[mark]
    by_epochs = trial.learn.epochs is not None
    losses = [copy["train_loss"] for copy in alive if copy["train_loss"] is not None]
    ages = [age for rank in saved if rank for age in _ages(rank["taken"], mark)]
    return {
        "at_s": seconds if by_epochs else at,
        "epoch": at if by_epochs else None,
        "seconds": seconds,
        "steps": [copy and copy["steps"] for copy in taken],
        "train_loss": sum(losses) / len(losses) if losses else None,
        "staleness": max(ages, default=None),
    }


def _ages(taken: Sequence[Taken], mark: int) -> Iterator[float]:
    """Yields, for each neighbour, the mean age of its values since the last mark, in steps."""
    if mark == 0:
        return
    before = taken[mark - 1]["behind"]
    for peer, (uses, total) in taken[mark]["behind"].items():
        uses_before, total_before = before.get(peer, (0, 0))
        if uses > uses_before:
            yield (total - total_before) / (uses - uses_before)


def _scores(trial: Trial, alive: Sequence[Saved], data: Parts) -> list[Scores]:
    """Returns the scores of the mean model at each mark.

    At the last mark, the scores of the ranks' models are added. At each mark, they would take
    several times as long.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the other ranks have ended
    device = torch.device(trial.device)
    workload = build(
        trial.model, trial.batch_size, trial.sentence_len, torch.Generator(), data.classes
    )
    workload = workload.to(device, *precision(trial.dtype))
    workload.model.eval()
    scores: dict[tuple[int, ...], Scores] = {}
    by_mark = []
    for mark in range(len(trial.learn.marks)):
        rows = tuple(rank["taken"][mark]["row"] for rank in alive)
        copies = [rank["values"][row] for rank, row in zip(alive, rows, strict=True)]
        if all(torch.equal(copy, copies[0]) for copy in copies[1:]):
            copies = copies[:1]
        if rows not in scores:
            scores[rows] = _of_mean(workload, copies, data.test)
        by_mark.append(scores[rows])
    by_mark[-1] = by_mark[-1] | _of_ranks(workload, copies, data.test)
    return by_mark


def _of_mean(workload: Workload, copies: Sequence[torch.Tensor], test: Samples) -> Scores:
    if len(copies) == 1:
        return {**_score(workload, copies[0], test), "consensus_distance": 0.0}
    mean = sum(copy.double() for copy in copies) / len(copies)
    norm = mean.norm().item()
    distance = max((copy.double() - mean).norm().item() for copy in copies) / (norm or 1.0)
    distance = distance if math.isfinite(distance) else math.inf
    return {**_score(workload, mean, test), "consensus_distance": distance}


def _of_ranks(workload: Workload, copies: Sequence[torch.Tensor], test: Samples) -> Scores:
    scores = [_score(workload, copy, test) for copy in copies]
    return {
        f"{name}_{end}": pick(score[name] for score in scores)
        for name in ("accuracy", "loss")
        for end, pick in (("min", min), ("max", max))
    }


@torch.inference_mode()
def _score(workload: Workload, values: torch.Tensor, test: Samples) -> Scores:
    """Returns accuracy and loss on the test data; each token of a text is one prediction."""
    set_floating(workload.model, values)
    right = among = lost = answers = 0.0
    for start in range(0, len(test), _BATCH):
        places = range(start, min(start + _BATCH, len(test)))
        workload.feed(*test.batch(places, None))
        (wanted,) = workload.targets
        output = workload.model(*workload.inputs)
        best = output.topk(min(_FIVE, output.shape[-1]), dim=-1).indices == wanted.unsqueeze(-1)
        right += best[..., 0].sum().item()
        among += best.sum().item()
        lost += workload.criterion(output, wanted).item() * wanted.numel()
        answers += wanted.numel()
    return {
        "accuracy": right / answers,
        "accuracy_top5": among / answers if output.shape[-1] > _FIVE else None,
        "loss": lost / answers,
    }


def _check(before: Check, last: Evaluation, agreement: Agreement | None) -> Check:
    if agreement is None and last.consensus_distance is not None:
        near = last.consensus_distance <= CONSENSUS_LIMIT
        distance = last.consensus_distance
        agreement = {"replicas_agree": near, "consensus_distance": distance, "finding": None}
    if agreement is None:
        return before
    agree = agreement["replicas_agree"] and before.replicas_agree is not False
    return with_agreement(before, {**agreement, "replicas_agree": agree})
