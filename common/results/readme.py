"""Puts the table of a committed record into README.md: `python -m common.results.readme`."""

from __future__ import annotations

import re
from pathlib import Path

from common.results import rows
from common.results.records import Comparison

ROOT = Path(__file__).parents[2]
_PLACE = re.compile(r"(<!-- table of (\S+), .*-->\n).*?(<!-- end of table -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """`text` with every marked place filled from the records it names."""

    def fill(place: re.Match[str]) -> str:
        folder = ROOT / place[2]
        comparison = Comparison.load(folder)
        found = rows.make_rows(comparison.results(folder), comparison.compare_to)
        return place[1] + rows.comparison(found, comparison.compare_to).markdown() + place[3]

    return _PLACE.sub(fill, text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text()))
