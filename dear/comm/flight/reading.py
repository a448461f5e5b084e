"""Reading of what the ranks recorded, merged into `hang.json`.

A rank's record has the keys of torch's flight recorder, with four more per operation: `bucket`,
`peer`, `failed` and `library`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dear.comm.flight.divergence import P2P, first_divergence
from dear.comm.flight.recorder import SLOT, current, log, path_of

MERGED = "hang.json"
_VERSION = "2.10"
"""Version of torch's format."""
Dump = dict[str, Any]
Fact = Mapping[str, Any]
_LAST, _REACHED = "last_{}_collective", ("enqueued", "started", "completed")
_STATES = ("scheduled", "started", "completed")


def merge(folder: Path) -> str | None:
    """Merges the ranks' files in a folder into `hang.json` there.

    Returns:
        The first divergence, in one line; None if the ranks agree in what was recorded, or if
        nothing was.
    """
    dumps = read(folder)
    if not dumps:
        return None
    sentence = first_divergence(dumps)
    partial = folder / f".{MERGED}.partial"
    merged = {"version": _VERSION, "divergence": sentence, "ranks": dumps}
    partial.write_text(json.dumps(merged), encoding="utf-8")
    partial.replace(folder / MERGED)
    return sentence


def clear(folder: Path) -> None:
    """Removes the ranks' files; `hang.json` stays."""
    for path in folder.glob("flight-rank*"):
        path.unlink(missing_ok=True)


def read(folder: Path) -> dict[int, Dump]:
    """Returns the record of each rank that has one."""
    ranks = [int(path.stem.rpartition("rank")[2]) for path in folder.glob("flight-rank*.jsonl")]
    return {rank: dump for rank in sorted(ranks) if (dump := _dump(folder, rank))}


def _dump(folder: Path, rank: int) -> Dump | None:
    lines = path_of(folder, rank, "jsonl").read_text(encoding="utf-8").splitlines()
    if not lines:
        return None  # the disk was full
    about, *facts = map(json.loads, lines)
    groups = {(f["library"] == "comm_core", f["group"]): f for f in facts if "group" in f}
    buckets = [fact for fact in facts if "bucket" in fact]

    @functools.cache
    def bucket_at(address: int) -> str | None:
        for fact in reversed(buckets):  # memory of an earlier bucket may be used again
            if fact["at"] <= address < fact["at"] + max(1, fact["nbytes"]):
                name: str = fact["bucket"]
                return name
        return None

    entries = [
        _entry(values, group, about, bucket_at)
        for ring in ("core", "torch")
        for values in _slots(path_of(folder, rank, ring))
        if (group := groups.get((ring == "core", values[1])))  # missing if the disk was full
    ]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for record, entry in enumerate(entries):
        entry["record_id"] = entry["op_id"] = record
    config = {
        fact["name"]: {
            "name": fact["name"],
            "desc": _description(fact, about),
            "ranks": str(fact["ranks"]),
        }
        for fact in groups.values()
    }
    return {
        "version": _VERSION,
        "rank": rank,
        "size": about["size"],
        "host": about["host"],
        "pg_config": config,
        "pg_status": _status(entries),
        "entries": entries,
    }


def explain() -> None:
    """Merges what the ranks recorded, after an error has ended this script, and logs a line."""
    flight = current()
    if flight is None:
        return
    try:
        sentence = merge(flight.folder)
    except OSError as error:
        log.warning("no %s: %s", MERGED, error)
        return
    log.error("%s (%s)", sentence or "the ranks were alike", flight.folder / MERGED)


def _slots(path: Path) -> Iterator[tuple[Any, ...]]:
    if path.exists():
        content = path.read_bytes()
        whole = len(content) - len(content) % SLOT.size
        yield from (values for values in SLOT.iter_unpack(content[:whole]) if values[0])


def _entry(
    values: tuple[Any, ...], group: Fact, about: Fact, bucket_at: Callable[[int], str | None]
) -> Dump:
    _, number, sequence, given, output, given_at, output_at, *times, peer, failed, kind, dtype = (
        values
    )
    kind, dtype = (text.rstrip(b"\0").decode() for text in (kind, dtype))
    width = max(1, int((re.search(r"\d+", dtype) or ["8"])[0]) // 8)
    created, started, finished = (
        int(second * 1e9) + about["offset_ns"] if second else None for second in times
    )
    ended = finished is not None and not failed
    # An operation in place has one tensor, which torch shows as input and as output.
    sizes = [[(size or other) // width] for size, other in ((given, output), (output, given))]
    return {
        "frames": [],
        "pg_id": number,
        "process_group": [group["name"], _description(group, about)],
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": f"{group['library']}:{kind}",
        "time_created_ns": created,
        "input_sizes": sizes[:1],
        "output_sizes": sizes[1:],
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
        "state": "completed" if ended else "started" if started else "scheduled",
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": finished if ended else None,
        "retired": ended,
        "is_p2p": kind in P2P,
        "bucket": bucket_at(given_at) or bucket_at(output_at),
        "peer": peer,
        "failed": bool(failed),
        "library": group["library"],
    }


def _description(group: Fact, about: Fact) -> str:
    return "default_pg" if len(group["ranks"]) == about["size"] else "undefined"


def _status(entries: list[Dump]) -> Dump:
    status: dict[str, dict[str, int]] = {}
    for entry in entries:
        if not entry["collective_seq_id"]:
            continue
        last = status.setdefault(
            str(entry["pg_id"]), dict.fromkeys(map(_LAST.format, _REACHED), -1)
        )
        for reached in _REACHED[: _STATES.index(entry["state"]) + 1]:
            last[_LAST.format(reached)] = entry["collective_seq_id"]
    return status
