"""Command that shows what the ranks did last: python -m dear.comm.flight FOLDER [--torch OUT]

Merges the ranks' files in FOLDER into `hang.json` there, if they are still there, and prints the
first divergence. With --torch, writes a file per rank into OUT, for `torchfrtrace OUT`.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dear.comm.flight.reading import MERGED, merge


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dear.comm.flight",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", type=Path, metavar="OUT")
    args = parser.parse_args(argv)
    merge(args.folder)
    path = args.folder / MERGED
    if not path.exists():
        print(f"{args.folder}: no record of a flight recorder", file=sys.stderr)
        return 2
    merged = json.loads(path.read_bytes())
    print(merged["divergence"] or "the ranks were alike")
    if args.torch is not None:
        write_for_torch(merged["ranks"], args.torch)
    return 0


def write_for_torch(ranks: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Writes `out/rank_R` for each rank, as torch's analyser reads it.

    It accepts only the names of torch's libraries, and matches collectives by their order. So all
    operations get the prefix `gloo`, and what some ranks' rings have forgotten is left out.
    """
    out.mkdir(parents=True, exist_ok=True)
    first: dict[str, int] = {}
    for dump in ranks.values():
        oldest: dict[str, int] = {}
        for entry in filter(lambda entry: entry["collective_seq_id"], dump["entries"]):
            oldest.setdefault(entry["process_group"][0], entry["collective_seq_id"])
        for group, number in oldest.items():
            first[group] = max(first.get(group, 0), number)
    for rank, dump in ranks.items():
        entries = [
            {
                **entry,
                "process_group": tuple(entry["process_group"]),
                "profiling_name": f"gloo:{entry['profiling_name'].partition(':')[2]}",
            }
            for entry in dump["entries"]
            if entry["collective_seq_id"] >= first.get(entry["process_group"][0], 1)
        ]
        for record, entry in enumerate(entries):
            entry["record_id"] = record
        (out / f"rank_{rank}").write_bytes(pickle.dumps({**dump, "entries": entries}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
