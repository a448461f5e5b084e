"""What a trial has learned, judged after its time is over from the copies that ranks made."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from common.harness import check
from common.harness.snapshots import set_floating
from common.harness.trial import Trial
from common.models.datasets import Split
from common.models.registry import build
from common.models.workload import Workload

_BATCH = 100
Saved = dict[str, Any]
"""What `Snapshots.save` wrote of a rank."""


def result(trial: Trial, saved: Sequence[Saved | None], test: Split | None) -> dict[str, Any]:
    """The result of a repeat, from what its ranks have saved (None: of one that has died).

    Returns:
        Besides what every result has: `samples_per_s`, and `learning`: `evaluations` by mark,
        `ranks` in their order (None for the dead), `to_target` (None if not reached). An evaluation
        has a `staleness` where it is counted: since the one before, of the stalest neighbour.
    """
    assert trial.learn is not None
    alive = [rank for rank in saved if rank is not None]
    first = alive[0]
    evaluations = [_at(mark, trial, saved) for mark in range(len(trial.learn.marks))]
    if test is not None:
        _judge(evaluations, trial, alive, test)
    elapsed_s = max(rank["elapsed_s"] for rank in alive)
    wall_s = max(rank["wall_s"] for rank in alive)
    used_s = sum(rank["cpu_s"] for rank in alive)
    return {
        "iters": [],
        "samples_per_s": sum(rank["samples"] for rank in alive) / elapsed_s,
        "bytes_per_step": first["bytes_sent"] // first["steps"] or None,
        "cpu_s_per_s": used_s / wall_s,
        "foreign_cpu_s_per_s": max(0.0, first["busy_s"] - used_s) / wall_s,
        "breakdown": None,
        "loss": sum(rank["loss"] for rank in alive) / len(alive),
        "check": _check(trial, evaluations, alive),
        "statistics": [rank and rank["statistics"] for rank in saved]
        if any(rank["statistics"] for rank in alive)
        else None,
        "learning": {
            "evaluations": evaluations,
            "ranks": [rank and _pace(rank) for rank in saved],
            "to_target": _to_target(evaluations, trial.learn.target_accuracy),
        },
    }


def _pace(rank: Saved) -> dict[str, Any]:
    return {key: rank[key] for key in ("steps", "samples", "elapsed_s")}


def _at(mark: int, trial: Trial, saved: Sequence[Saved | None]) -> dict[str, Any]:
    """When the copies of a mark were made; `seconds` is when the last rank had its own."""
    assert trial.learn is not None
    taken = [rank and rank["taken"][mark] for rank in saved]
    found = {
        "at_s": trial.learn.marks[mark],
        "seconds": max(one["seconds"] for one in taken if one),
        "steps": [one and one["steps"] for one in taken],
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
    evaluations: list[dict[str, Any]], trial: Trial, alive: Sequence[Saved], test: Split
) -> None:
    """Adds to each evaluation accuracy and loss of the mean model, and those of the ranks' own."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the other ranks have ended
    device = torch.device(trial.device)
    workload = build(trial.model, trial.batch_size, trial.sentence_len, torch.Generator())
    workload = workload.to(device, getattr(torch, trial.dtype))
    workload.model.eval()
    images = test[0].to(device, getattr(torch, trial.dtype))
    judged: dict[tuple[int, ...], dict[str, Any]] = {}  # marks that share copies
    for mark, evaluation in enumerate(evaluations):
        rows = tuple(rank["taken"][mark]["row"] for rank in alive)
        if rows not in judged:
            copies = [rank["values"][row] for rank, row in zip(alive, rows, strict=True)]
            judged[rows] = _verdict(workload, copies, images, test[1].to(device))
        evaluation.update(judged[rows])


def _verdict(
    workload: Workload,
    copies: Sequence[torch.Tensor],
    images: torch.Tensor,
    labels: torch.Tensor,
) -> dict[str, Any]:
    mean = sum(copy.double() for copy in copies) / len(copies)
    equal = all(torch.equal(copy, copies[0]) for copy in copies[1:])
    found = _accuracy_and_loss(workload, copies[0] if equal else mean, images, labels)
    own = [found]
    distance = 0.0
    if not equal:
        own = [_accuracy_and_loss(workload, copy, images, labels) for copy in copies]
        norm = mean.norm().item()
        distance = max((copy.double() - mean).norm().item() for copy in copies) / (norm or 1.0)
    return {
        "accuracy": found[0],
        "accuracy_min": min(accuracy for accuracy, _ in own),
        "accuracy_max": max(accuracy for accuracy, _ in own),
        "loss": found[1],
        "loss_min": min(loss for _, loss in own),
        "loss_max": max(loss for _, loss in own),
        "consensus_distance": distance if math.isfinite(distance) else math.inf,
    }


@torch.inference_mode()
def _accuracy_and_loss(
    workload: Workload, values: torch.Tensor, images: torch.Tensor, labels: torch.Tensor
) -> tuple[float, float]:
    """Share of right answers, and the mean of the criterion, over the test data."""
    set_floating(workload.model, values)
    right = total = 0.0
    for some, wanted in zip(images.split(_BATCH), labels.split(_BATCH), strict=True):
        output = workload.model(some)
        right += (output.argmax(dim=1) == wanted).sum().item()
        total += workload.criterion(output, wanted).item() * len(wanted)
    return right / len(labels), total / len(labels)


def _check(
    trial: Trial, evaluations: Sequence[dict[str, Any]], alive: Sequence[Saved]
) -> dict[str, Any]:
    """Whether replicas agree at the end, in every bit where they are meant to."""
    spread = alive[0].get("replica_spread")
    apart = evaluations[-1].get("consensus_distance")
    agree = None
    if spread is not None:
        agree = spread == 0.0
    elif apart is not None:
        agree = apart <= check.CONSENSUS_LIMIT
    return {"replicas_agree": agree, "replica_spread": spread, "consensus_distance": apart}


def _to_target(
    evaluations: Sequence[dict[str, Any]], target: float | None
) -> dict[str, Any] | None:
    """The first evaluation in which the mean model is as good as wanted."""
    for evaluation in evaluations:
        if target is not None and evaluation.get("accuracy", 0.0) >= target:
            steps = [count for count in evaluation["steps"] if count is not None]
            return {"seconds": evaluation["seconds"], "steps": sum(steps) / len(steps)}
    return None
