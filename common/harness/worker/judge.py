"""Copies of a rank's parameters, and what a trial has learned, judged from them afterwards."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from common.harness.trial import Trial
from common.harness.worker.checking.correctness import CONSENSUS_LIMIT
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
Saved = dict[str, Any]
"""What `Snapshots.save` wrote of a rank."""


class Snapshots:
    """Room for a copy per mark, in host memory; two marks that one step passes share a copy.

    Copied are all floating-point tensors of a state dict, of which there may be none.

    Raises:
        UserError: they would take more than `MOST_BYTES`.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], marks: int) -> None:
        floating = _floating(state)
        size = sum(value.nbytes for value in floating.values())
        if size * marks > MOST_BYTES:
            raise UserError(
                f"learn.eval_every_s: {marks} copies of {size / 2**20:.0f} MiB per rank are more "
                f"than {MOST_BYTES >> 20} MiB; judge less often"
            )
        numel = sum(value.numel() for value in floating.values())
        dtype = next((value.dtype for value in floating.values()), torch.float32)
        # Written now: in the middle of training the kernel would still have to clear it.
        self._values = torch.zeros(marks, numel, dtype=dtype)
        self._taken: list[dict[str, Any] | None] = [None] * marks
        self._rows = 0

    def take(
        self,
        marks: Sequence[int],
        state: Mapping[str, torch.Tensor],
        seconds: float,
        steps: int,
        behind: Mapping[str, Sequence[float]],
        train_loss: float | None = None,
    ) -> None:
        """One copy for all of `marks`, numbers of marks.

        Args:
            seconds, steps: of training so far.
            behind: kept with it: of each neighbour, uses and summed staleness so far.
            train_loss: kept with it: the mean of the steps since the last copy.
        """
        row = self._values[self._rows]
        start = 0
        for value in _floating(state).values():
            row[start : start + value.numel()].view_as(value).copy_(value.detach())
            start += value.numel()
        taken = {
            **{"row": self._rows, "seconds": seconds, "steps": steps},
            **{"behind": dict(behind), "train_loss": train_loss},
        }
        for mark in marks:
            self._taken[mark] = taken
        self._rows += 1

    def save(self, path: Path, more: Mapping[str, Any]) -> None:
        """Writes copies and `more` (JSON) to a file, whole or not at all."""
        partial = path.with_suffix(".partial")
        values = self._values[: self._rows].clone()
        torch.save({"values": values, "taken": self._taken, **more}, partial)
        partial.replace(path)


def set_floating(model: torch.nn.Module, values: torch.Tensor) -> None:
    """Writes a copy's `values` into the floating-point tensors of the model's state."""
    start = 0
    for tensor in _floating(model.state_dict()).values():
        tensor.copy_(values[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def _floating(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if value.is_floating_point()}


def result(
    trial: Trial,
    saved: Sequence[Saved | None],
    data: Parts | None,
    check: Check | None = None,
) -> Result:
    """The result of a repeat, from what its ranks have saved (None: of one that has died).

    Args:
        data: what was learned, and what it is judged by; None where nothing was learned.
        check: what was found before the training.
    """
    alive = [rank for rank in saved if rank is not None]
    first = alive[0]
    found = [_at(mark, trial, saved) for mark in range(len(trial.learn.marks))]
    if data is not None:
        _judge(found, trial, alive, data)
    evaluations = [Evaluation(**evaluation) for evaluation in found]
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
    """Of the slowest machine, before and after; None if those who should do the work have died."""
    found = [rank["canary_s"] for rank in alive]
    before_s, after_s = (max(times) for times in zip(*found, strict=True))
    return [before_s, after_s] if after_s else None


def _at(mark: int, trial: Trial, saved: Sequence[Saved | None]) -> dict[str, Any]:
    """When the copies of a mark were made; `seconds` is when the last rank had its own."""
    taken = [rank and rank["taken"][mark] for rank in saved]
    seconds, at = max(one["seconds"] for one in taken if one), trial.learn.marks[mark]
    by_epochs = trial.learn.epochs is not None
    losses = [one["train_loss"] for one in taken if one and one["train_loss"] is not None]
    found = {
        "at_s": seconds if by_epochs else at,
        "epoch": at if by_epochs else None,
        "seconds": seconds,
        "steps": [one and one["steps"] for one in taken],
        "train_loss": sum(losses) / len(losses) if losses else None,
    }
    ages = [age for rank in saved if rank for age in _ages(rank["taken"], mark)]
    return found | ({"staleness": max(ages)} if ages else {})


def _ages(taken: Sequence[dict[str, Any]], mark: int) -> Iterator[float]:
    """Of each neighbour: by how many steps its values were behind since the mark before, on
    average; nothing of one whose values were not used, and nothing of what was before the start."""
    if mark == 0:
        return
    before = taken[mark - 1]["behind"]
    for peer, (uses, total) in taken[mark]["behind"].items():
        uses_before, total_before = before.get(peer, (0, 0))
        if uses > uses_before:
            yield (total - total_before) / (uses - uses_before)


def _judge(
    evaluations: list[dict[str, Any]], trial: Trial, alive: Sequence[Saved], data: Parts
) -> None:
    """Adds to each evaluation what the mean model is worth, to the last also the ranks' own.

    Judging those as well every time would take several times as long.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the other ranks have ended
    device = torch.device(trial.device)
    workload = build(
        trial.model, trial.batch_size, trial.sentence_len, torch.Generator(), data.classes
    )
    workload = workload.to(device, *precision(trial.dtype))
    workload.model.eval()
    judged: dict[tuple[int, ...], dict[str, Any]] = {}  # marks that share copies
    for mark, evaluation in enumerate(evaluations):
        rows = tuple(rank["taken"][mark]["row"] for rank in alive)
        copies = [rank["values"][row] for rank, row in zip(alive, rows, strict=True)]
        if rows not in judged:
            judged[rows] = _verdict(workload, copies, data.test)
        evaluation.update(judged[rows])
    evaluations[-1].update(_of_ranks(workload, copies, data.test))


def _verdict(workload: Workload, copies: Sequence[torch.Tensor], test: Samples) -> dict[str, Any]:
    mean = sum(copy.double() for copy in copies) / len(copies)
    equal = all(torch.equal(copy, copies[0]) for copy in copies[1:])
    found = _worth(workload, copies[0] if equal else mean, test)
    distance = 0.0
    if not equal:
        norm = mean.norm().item()
        distance = max((copy.double() - mean).norm().item() for copy in copies) / (norm or 1.0)
    distance = distance if math.isfinite(distance) else math.inf
    return {**found, "consensus_distance": distance}


def _of_ranks(
    workload: Workload, copies: Sequence[torch.Tensor], test: Samples
) -> dict[str, float]:
    """The least and the most of the ranks' own models."""
    equal = all(torch.equal(copy, copies[0]) for copy in copies[1:])
    own = [_worth(workload, copy, test) for copy in (copies[:1] if equal else copies)]
    ends = (("min", min), ("max", max))
    return {
        f"{name}_{end}": pick(one[name] for one in own)
        for name in ("accuracy", "loss")
        for end, pick in ends
    }


@torch.inference_mode()
def _worth(workload: Workload, values: torch.Tensor, test: Samples) -> dict[str, Any]:
    """Shares of answers that are right, and where the right one is among the best five; the mean of
    the criterion. All over the test data; of a text each word is an answer."""
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
    classes = output.shape[-1]
    return {
        "accuracy": right / answers,
        "accuracy_top5": among / answers if classes > _FIVE else None,
        "loss": lost / answers,
    }


def _check(before: Check, last: Evaluation, agreement: dict[str, Any] | None) -> Check:
    """With how far replicas agree at the end, as far as that is known."""
    if agreement is None and last.consensus_distance is not None:
        near = last.consensus_distance <= CONSENSUS_LIMIT
        agreement = {"replicas_agree": near, "consensus_distance": last.consensus_distance}
    if agreement is None:
        return before
    agree = agreement["replicas_agree"] and before.replicas_agree is not False
    return dataclasses.replace(before, **{**agreement, "replicas_agree": agree})
