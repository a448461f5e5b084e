"""Records as a sweep makes them, of trials that nobody ran."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from common.harness.running.record import make_record
from common.launch.job import Outcome
from common.results.records import REAL, Record, Result, typed
from common.results.records.trust import Note
from common.results.store import Comparison, append
from tests.system.made import make_trial


def record(
    algorithm="ddp",
    step_s=0.1,
    world=2,
    *,
    status="ok",
    correct=True,
    run="A",
    fabric=REAL,
    facts=None,
    **trial,
) -> Record:
    """Makes the record as a sweep does: three repeats of four steps. `facts` are the first's."""
    steps = [step_s * factor for factor in (0.999, 1.001, 1.0, 1.0)]
    result = {
        "iters": [steps[:2], steps[2:]],
        "loss": 1.0,
        "check": {"replicas_agree": True, "matches_reference": correct, "reference_error": 0.0},
        "cpu_s_per_s": 1.0,
    }
    later = {k: v for k, v in (facts or {}).items() if k not in ("compute", "costs")}
    repeats = [typed(Result, result | more) for more in (facts or {}, later, later)]
    error = None if status == "ok" else {"message": f"it was a {status} | and\nmore, much more"}
    outcome = Outcome(status=status, error=error)
    built = make_trial(algorithm, world, **trial)
    given = repeats if status == "ok" else []
    return make_record(built, given, outcome, {"cores": 64}, "now", 1.0, fabric, run=run)


def with_first(made: Record, **facts) -> Record:
    """Returns a copy whose first repeat has these values."""
    first, *others = made.results
    return dataclasses.replace(made, results=[dataclasses.replace(first, **facts), *others])


def with_iters(made: Record, iters: list[list[list[float]]]) -> Record:
    """Returns a copy with these step times, by repeat and block."""
    first = made.results[0]
    results = [dataclasses.replace(first, iters=blocks) for blocks in iters]
    return dataclasses.replace(made, results=results)


def with_notes(made: Record, *texts: str) -> Record:
    """Returns a copy with these notes; the kind is the text before the colon."""
    notes = [Note(kind=text.partition(":")[0], text=text) for text in texts]
    return dataclasses.replace(made, notes=notes)


def varied(algorithm: str, factors, step_s=0.1, **more) -> Record:
    """Makes a record of one block of two steps for each factor."""
    iters = [[[step_s * factor] * 2] for factor in factors]
    return with_iters(record(algorithm, step_s, **more), iters)


def sweep(folder: Path, records: list[Record], compare_to="ddp", also=()) -> Path:
    """Makes the folder of a sweep that holds the records; of trials `also` there is none."""
    folder.mkdir(exist_ok=True)
    for item in records:
        append(folder / "records.jsonl", item)
    Comparison(compare_to=compare_to, trials=(*(item.hash for item in records), *also)).save(folder)
    return folder
