"""First divergence: the first collective that the ranks did not do alike, as a sentence."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

P2P = ("send", "recv", "exchange", "put", "get", "accumulate", "lock", "unlock")
"""Operations of two ranks, which have no place in the order of the collectives."""
Entry = Mapping[str, Any]
Dumps = Mapping[int, Entry]
"""Record of each rank: `size`, `pg_config` and `entries`."""
_UNEVEN = {"broadcast": "output_sizes", "scatter": "output_sizes", "all_to_all": None}
"""Key of the sizes that all ranks share, where these are not the sizes of the input."""


def first_divergence(dumps: Dumps) -> str | None:
    """Returns where the ranks differ first, or which collective has not ended on all of them.

    Of several groups it takes one whose ranks disagree, then one in which a rank lags behind, then
    one with an operation under way; of equals the earliest operation.

    Returns:
        None if every recorded collective has ended on all ranks.
    """
    groups: dict[str, list[int]] = {}
    for dump in dumps.values():
        for name, config in dump["pg_config"].items():
            groups[name] = ast.literal_eval(config["ranks"])
    places = [_in_group(name, ranks, dumps) for name, ranks in groups.items()]
    first = min((place for place in places if place), key=lambda place: place[:2], default=None)
    if first is None:
        return None
    absent = [rank for rank in range(_size(dumps)) if rank not in dumps]
    return first[2] + (f"; {_ranks(absent)} left no record" if absent else "")


def _in_group(name: str, members: Sequence[int], dumps: Dumps) -> tuple[int, int, str] | None:
    """Returns the kind of the first divergence, its time in ns, and the sentence."""
    by_rank: dict[int, dict[int, Entry]] = {
        rank: {
            entry["collective_seq_id"]: entry
            for entry in dumps[rank]["entries"]
            if entry["process_group"][0] == name and entry["collective_seq_id"]
        }
        for rank in members
        if rank in dumps
    }
    # A ring forgets the oldest operations.
    kept_from = max((min(entries) for entries in by_rank.values() if entries), default=0)
    last = max((max(entries) for entries in by_rank.values() if entries), default=-1)
    for number in range(kept_from, last + 1):
        there = {rank: entries[number] for rank, entries in by_rank.items() if number in entries}
        if not there:
            continue
        pending = [rank for rank, entry in there.items() if entry["state"] != "completed"]
        # A ring may have forgotten all operations of a group that is seldom used.
        behind = [r for r, entries in by_rank.items() if r not in there and (entries or pending)]
        since_ns = min(entry["time_created_ns"] for entry in there.values())
        where = "" if len(members) == _size(dumps) else f" of group {name} ({_ranks(members)})"
        if len({_signature(entry) for entry in there.values()}) > 1:
            return 0, since_ns, _apart(there) + where
        if behind:
            return 1, since_ns, _lagging(behind, by_rank, there, number) + where
        if pending:
            ended = [rank for rank in there if rank not in pending]
            state = f"it ended on {_ranks(ended)} only" if ended else "it ended on none"
            text = f"{_ranks(list(there))} {_verb(list(there))} at {_words(there[pending[0]])}"
            return 2, since_ns, f"{text}{where}; {state}"
    return None


def _size(dumps: Dumps) -> int:
    """Returns the number of the job's ranks."""
    return max(int(dump["size"]) for dump in dumps.values())


def _signature(entry: Entry) -> tuple[str, str, str]:
    kind = _kind(entry)
    key = _UNEVEN.get(kind, "input_sizes")
    return kind, entry["input_dtypes"][0], str(entry[key]) if key else ""


def _apart(there: Mapping[int, Entry]) -> str:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, entry in there.items():
        groups.setdefault(_signature(entry), []).append(rank)
    fewest = sorted(groups.values(), key=lambda ranks: (len(ranks), ranks))
    parts = [f"{_ranks(r)} {{}}at {_words(there[r[0]], sizes=True)}" for r in fewest]
    verbs = [f"{_verb(fewest[0])} ", *[""] * (len(parts) - 1)]
    return ", ".join(map(str.format, parts, verbs))


def _lagging(
    behind: Sequence[int],
    by_rank: Mapping[int, Mapping[int, Entry]],
    there: Mapping[int, Entry],
    number: int,
) -> str:
    last = by_rank[behind[0]].get(number - 1)
    before = "" if last is None else f" after {_words(last)}"
    has = "has" if len(behind) == 1 else "have"
    others, entry = sorted(there), next(iter(there.values()))
    return (
        f"{_ranks(behind)} {has} not come to #{number}{before}, "
        f"{_ranks(others)} {_verb(others)} at {_words(entry)}"
    )


def _verb(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _kind(entry: Entry) -> str:
    return str(entry["profiling_name"].partition(":")[2])


def _words(entry: Entry, sizes: bool = False) -> str:
    text = f"{_kind(entry)} #{entry['collective_seq_id']}"
    if entry["bucket"]:
        text += f" of bucket {entry['bucket']}"
    if entry["input_sizes"][0][0] and (sizes or not entry["bucket"]):
        text += f" ({entry['input_sizes'][0][0]} x {entry['input_dtypes'][0]})"
    return text


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
