"""A sweep's curves for TensorBoard, a run per trial; needs the package `tensorboard` and torch.

| tag | value | step |
|---|---|---|
| `step_s/repeat K` | seconds of each timed step | its number in the repeat, from 0 |
| `throughput` | samples per second of all workers | the repeat, from 0; 0 of trials that learn |
| `accuracy`, `loss`, `train_loss`, `consensus_distance`, each `/run K` | of the mean model | steps of a rank, in the mean |

Repeats and runs are counted from 0. Text `trial` says what may not be believed, and why.
"""  # noqa: E501  (a table)

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.results.faith import doubt
from common.results.records import Record
from common.results.records.trust import elapsed_per_step_s
from dear.errors import UserError

_LEARNED = ("accuracy", "loss", "train_loss", "consensus_distance")


def write(folder: Path, records: Sequence[Record], into: Path) -> int:
    """Writes files of events, a folder for each trial that has a result; how many there are.

    Args:
        folder: of the sweep.
        into: made if it is not there. Trials that are in it already would be mixed with these, so
            they are refused.

    Raises:
        UserError: the package is not installed, no trial has a result, or `into` is not fit.
    """
    good = [one for one in records if one.ok]
    if not good:
        raise UserError(f"--tensorboard: no trial of {folder.name} has a result")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "--tensorboard: the package tensorboard is not installed: pip install tensorboard"
        ) from None
    there = [one.id for one in good if (into / one.id).exists()]
    if there:
        raise UserError(f"--tensorboard: {into / there[0]} exists; name a new folder")
    try:
        for one in good:
            with SummaryWriter(str(into / one.id)) as writer:
                _write_trial(writer, one)
    except OSError as error:
        raise UserError(f"cannot write to {into}: {error.strerror}") from None
    return len(good)


def _write_trial(writer: Any, record: Record) -> None:
    """The curves of one trial."""
    said = doubt(record)
    writer.add_text("trial", record.id if said is None else f"{record.id}: not believed: {said}")
    samples = record.trial["batch_size"] * record.trial["world_size"]
    for number, steps in enumerate(record.repeats):
        for step, seconds in enumerate(steps):
            writer.add_scalar(f"step_s/repeat {number}", seconds, step)
        writer.add_scalar("throughput", samples / elapsed_per_step_s(steps), number)
    if record.learning:  # of the whole trial, all runs together
        writer.add_scalar("throughput", record.throughput.value, 0)
    for number, run in enumerate(record.learning or ()):
        for one in run.evaluations:
            for name in _LEARNED:
                value = getattr(one, name)
                if value is not None:
                    writer.add_scalar(f"{name}/run {number}", value, round(one.mean_steps))
