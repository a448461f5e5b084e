"""The lines that the reference suites print, for people and parsers that know them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from common.harness.trial import Trial
from common.models.registry import model_entry

_LONG_UNITS = {"img": "img", "sen": "sentences"}


def header(trial: Trial, parameters: int) -> list[str]:
    """Printed before the warm-up."""
    device = _device(trial)
    first = f"Model: {trial.model}"
    if model_entry(trial.model).sample_unit == "sen":
        size = {"bert": "Large ", "bert_base": "Base "}.get(trial.model, "")
        first = f"BERT {size}Pretraining, Sentence len: {trial.sentence_len}"
    return [
        first,
        f"Batch size: {trial.batch}",
        f"Number of {device}s: {trial.world_size}",
        f"# of parameters:  {parameters}",
        "Running warmup...",
    ]


def results(trial: Trial, iters: Sequence[Sequence[float]]) -> list[str]:
    """Printed after the measurement; `iters` are step times in seconds, a list per iteration.

    As there: rates are per worker, `+-` is 1.96 population standard deviations of the iterations,
    and the total is the mean times the number of workers.
    """
    device = _device(trial)
    unit = model_entry(trial.model).sample_unit
    rates = [trial.batch_size * len(steps) / sum(steps) for steps in iters]
    lines = [
        f"Iter #{index}: {rate:.1f} {_LONG_UNITS[unit]}/sec per {device}"
        for index, rate in enumerate(rates)
    ]
    per_step = [sum(steps) / len(steps) for steps in iters]
    lines.append(
        f"Iteraction time: {statistics.fmean(per_step):.3f} "
        f"+-{1.96 * statistics.pstdev(per_step):.3f}"
    )
    return lines + rate_lines(rates, trial.world_size, unit, device)


def rate_lines(rates: Sequence[float], world_size: int, unit: str, device: str) -> list[str]:
    """The two closing lines; `rates` in samples per second and worker, one per iteration."""
    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    return [
        f"{unit.capitalize()}/sec per {device}: {mean:.1f} +-{spread:.1f}",
        f"Total {unit}/sec on {world_size} {device}(s): "
        f"{world_size * mean:.1f} +-{world_size * spread:.1f}",
    ]


def _device(trial: Trial) -> str:
    return {"cpu": "CPU", "cuda": "GPU"}[trial.device]
