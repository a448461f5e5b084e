"""Selection of an experiment's trials by filters and shards, and the plan of a dry run."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from common.harness.experiment import Experiment
from common.harness.running import ui
from common.harness.running.fabric import WORKER, launcher_for
from common.harness.running.sweep import to_run
from common.harness.trial import Trial
from common.launch.job import Job
from common.models.registry import is_replay, profile_of
from common.paths import DRIVER, RECORDS, short
from common.results import store
from dear.errors import UserError

_START_S = 2.0
"""Shortest time that a start of the workers takes, in seconds."""
_ON_VIRTUAL_HOSTS = "(on virtual hosts: they live only while a sweep runs)"


def select(
    trials: Sequence[Trial], filters: Sequence[str], part: str | None, name: str
) -> list[Trial]:
    """Returns the trials that match all filters and are in the shard.

    Args:
        filters: each a part of a trial's title, or `key=value`; `A|B` means A or B. After a
            `key=value`, `|` may be followed by a further value alone.
        part: shard, as `i/n`; None: all trials.
        name: name of the experiment, for messages.

    Raises:
        UserError: no trial matches, a part of a filter is empty, or there is no such shard.
    """
    keys = trials[0].to_json()
    wanted = [_parts(text, keys) for text in filters]
    kept = [trial for trial in trials if all(_matches(trial, parts) for parts in wanted)]
    if not kept:
        hint = ""
        for word, equals, _ in (text.partition("=") for text in filters):
            if equals and word.isidentifier() and word not in keys:
                hint = f"; {word!r} is no key, so titles are searched for {word}=..."
        raise UserError(f"--filter {' '.join(filters)}: no trial of {name} matches{hint}")
    return kept if part is None else shard(kept, part)


def _parts(text: str, keys: Container[str]) -> list[tuple[str | None, str]]:
    """Returns the parts of a filter: key and value, or None and a part of a title."""
    parts: list[tuple[str | None, str]] = []
    last = None
    for part in text.split("|"):
        key, equals, value = part.partition("=")
        if equals and key in keys:
            last, part = key, value
        if not part:
            raise UserError(f"--filter {text!r}: a part is empty; write TEXT, key=value or A|B")
        parts.append((last, part))
    return parts


def _matches(trial: Trial, parts: Sequence[tuple[str | None, str]]) -> bool:
    values = trial.to_json()
    return any(
        part in trial.title if key is None else str(values[key]) == part for key, part in parts
    )


def shard(trials: Sequence[Trial], text: str) -> list[Trial]:
    """Returns part i of n of the trials, for `i/n`; a cell is never divided.

    Raises:
        UserError: there is no such part.
    """
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    part, parts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part <= parts:
        raise UserError(f"--shard {text}: must be PART/PARTS, such as 1/3, 2/3 and 3/3")
    cells = list(dict.fromkeys(trial.cell for trial in trials))
    if parts > len(cells):
        most = f"at most {len(cells)} parts, so that compared trials stay together"
        raise UserError(f"--shard {text}: {most}")
    chosen = set(cells[part - 1 :: parts])
    return [trial for trial in trials if trial.cell in chosen]


def show(
    trials: Sequence[Trial], folder: Path, experiment: Experiment, options: argparse.Namespace
) -> None:
    """Prints the trials of a run, the commands that start their ranks, and a script for Slurm."""
    launcher = None if experiment.cluster else launcher_for(experiment, trials)
    records = folder / RECORDS
    todo = {trial.hash for trial in to_run(trials, records, options.rerun, experiment.base)}
    newest = store.latest(store.load(records))
    entries = []
    for trial in trials:
        job = Job(
            folder=folder / trial.id,
            repeat=0,
            world_size=trial.world_size,
            timeout_s=experiment.timeout_s,
            worker_module=WORKER,
        )
        entries.append(
            {
                "id": trial.id,
                "run": trial.hash in todo,
                "last_duration_s": newest[trial.hash].duration_s if trial.hash in newest else None,
                "command": launcher.command(job) if launcher else _ON_VIRTUAL_HOSTS,
                "trial": trial.to_json(),
            }
        )
    if options.json:
        print(json.dumps(entries, indent=2))
        return
    for trial, entry in zip(trials, entries, strict=True):
        print("\n".join(_lines(trial, entry)))
    runs = sum(entry["run"] for entry in entries)
    chosen = zip(trials, entries, strict=True)
    least_s = sum(_least_s(trial, entry, experiment) for trial, entry in chosen if entry["run"])
    about = f" (at least {ui.duration(least_s)})" if runs else ""
    number = f"{len(entries)} trial{'s' * (len(entries) != 1)}"
    print(f"{number}, {runs} to run{about}; results in {short(str(folder))}")
    again = [word for word in map(_without_dry_run, options.arguments) if word]
    command = [*map(short, DRIVER), *again]
    largest = max(trial.world_size for trial in trials)
    script = launcher and launcher.batch_script(command, experiment.name, largest)
    if script:
        print(f"\nTo run all trials in one Slurm allocation, give this file to sbatch:\n\n{script}")


def _without_dry_run(word: str) -> str:
    """Returns an argument without the dry run; `-nq` is `-n -q`, and `-nk TEXT` is `-n -k TEXT`."""
    letters = re.fullmatch(r"-([a-jl-z]+)(k.*)?", word, re.DOTALL)
    if letters is None:
        return "" if word == "--dry-run" else word
    kept = letters[1].replace("n", "") + (letters[2] or "")
    return f"-{kept}" if kept else ""


def _least_s(trial: Trial, entry: dict[str, Any], experiment: Experiment) -> float:
    """Returns the duration of the trial's last run, or else a lower bound, in seconds."""
    if entry["last_duration_s"]:
        return entry["last_duration_s"]
    measure, learn = trial.measure, trial.learn
    timed_s = measure.num_iters * (measure.min_iter_s if measure.steps_per_iter is None else 0.0)
    if learn is not None:
        timed_s = 0.0 if learn.epochs else learn.budget_s
    cluster = experiment.cluster
    scale = trial.time_scale or (cluster.min_time_scale if cluster else 1.0)
    return measure.least_repeats * (scale * timed_s + _START_S)


def _size(trial: Trial) -> str:
    if not is_replay(trial.model):
        return ""
    profile = profile_of(trial.model, trial.batch_size, trial.sentence_len)
    return (
        f"{profile.parameter_bytes / 4e6:.3g} M parameters, forward {profile.forward_s * 1e3:.3g} "
        f"ms, backward {profile.backward_s * 1e3:.3g} ms; "
    )


def _lines(trial: Trial, entry: dict[str, Any]) -> list[str]:
    state = "to run" if entry["run"] else "done"
    if entry["last_duration_s"]:
        state += f", took {ui.duration(entry['last_duration_s'])}"
    chosen = ", ".join(f"{key}={value}" for key, value in entry["trial"]["options"].items())
    return [
        f"{trial.title}  [{state}]",
        f"    {_size(trial)}{trial.measure.plan}, global batch "
        f"{sum(trial.rank_batches)}, {trial.dtype}, {trial.backend}, "
        f"{trial.threads_per_rank} threads per rank"
        + (f", {trial.hosts} virtual hosts on {trial.network}" if trial.hosts else "")
        + (f"; {chosen}" if chosen else ""),
        f"    {short(entry['command'])}",
    ]
