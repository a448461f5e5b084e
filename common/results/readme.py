"""Fills README.md and docs with what the records give: `python -m common.results.readme`.

Comments in the Markdown say what stands where. Of a record NAME (docs/records/NAME):

    <!-- standing of NAME -->      which commit and machine it is of, and where it lies
    <!-- table of NAME -->         the comparison of its sweep, and what follows from it in words
    <!-- table of NAME: speedup, of_bound -->     these, a row per cell and a column per algorithm
    <!-- output of NAME: FILE -->  a file of it, as it is
    <!-- figure of NAME: FILE | WHAT IT SHOWS -->

each followed by the text and `<!-- end -->`. `<!-- withdrawn records -->` lists those with their
reasons. A number in a sentence is followed by its source: `1.84<!-- delayed: speedup of dadt, bert
-->`, a field of the row that these words choose, with `as .0%` to show it in another way. In every
section that quotes a record its standing is told. Of a withdrawn record nothing is seen: its places
are empty, and a number or a link that leans on it is refused. Numbers of single rows that may not
be believed are crossed out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.paths import ROOT
from common.results.committed import catalogue
from common.results.records import Record
from common.results.report.overview import overview
from common.results.store import Comparison
from common.results.tables.table import significant
from common.results.timed.bounds import percent
from dear.errors import UserError

_BLOCK = re.compile(
    r"(?P<head><!-- (?P<kind>standing|table|output|figure) of (?P<name>[\w-]+)"
    r"(?:: (?P<what>[^>]+?))? -->\n)(?P<body>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?:~~)?(?P<value>[-+0-9.,e]+%?)(?:~~)?(?P<from><!-- (?P<name>[\w-]+): (?P<what>[^>]+?) -->)"
)
_LIST = re.compile(
    r"(?P<head><!-- withdrawn records -->\n)(?P<body>.*?)(?P<end><!-- end -->)", re.DOTALL
)
_LINK = re.compile(r"\]\([^)]*?records/(?P<name>[\w-]+)")
_QUERY = re.compile(r"(?P<field>\w+) of (?P<words>.+?)(?: as (?P<form>\S+))?$")


@dataclass(frozen=True)
class Place:
    """A marked place: what it asks for of which record."""

    kind: str
    """standing, table, output, figure or number."""
    record: str
    what: str | None


class PlaceError(UserError):
    """A marked place asks for what its record does not have."""


def documents() -> list[Path]:
    """Every Markdown file of the repository but those in records."""
    command = ["git", "-C", str(ROOT), "ls-files", "*.md"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        names = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    return [ROOT / name for name in names if not name.startswith("docs/records/")]


def filled(text: str, place: Path, folder: Path = catalogue.FOLDER) -> str:
    """`text`, which stands in the folder `place`, with every marked place as the records say.

    Raises:
        PlaceError: a place asks for what is not there.
    """
    gone = catalogue.withdrawn(folder)

    def block(found: re.Match[str]) -> str:
        kind, name = found["kind"], found["name"]
        if name in gone:
            body = ""
        elif kind == "standing":
            body = standing(name, place, folder)
        elif not (folder / name).is_dir():
            raise PlaceError(f"there is no record {name}")
        else:
            body = _BLOCKS[kind](folder / name, found["what"], place)
        return f"{found['head']}{body}{found['end']}"

    def number(found: re.Match[str]) -> str:
        name = found["name"]
        if name in gone:
            raise PlaceError(f"a number leans on {name}, which is withdrawn: drop the sentence")
        if not (folder / name).is_dir():
            raise PlaceError(f"there is no record {name}")
        value = value_of(folder / name, found["what"])
        return (f"~~{found['value']}~~" if value is None else value) + found["from"]

    if leaning := gone.keys() & {found["name"] for found in _LINK.finditer(_without_blocks(text))}:
        raise PlaceError(f"a link leads to {min(leaning)}, which is withdrawn: drop the sentence")
    listed = _LIST.sub(lambda found: found["head"] + _withdrawn(gone) + found["end"], text)
    return _NUMBER.sub(number, _BLOCK.sub(block, listed))


def _without_blocks(text: str) -> str:
    return _BLOCK.sub("", text)


def _withdrawn(reasons: Mapping[str, str]) -> str:
    lines = [f"| `{name}` | {reason} |\n" for name, reason in reasons.items()]
    return "".join(["| record | why |\n", "|---|---|\n", *lines]) if lines else "None.\n"


def standing(name: str, place: Path, folder: Path = catalogue.FOLDER) -> str:
    """What a reader must know of a record before its numbers; of one that is not withdrawn."""
    made = catalogue.made(name, folder)
    if made is None:
        raise PlaceError(f"{name} was not made by `make records`, and is not withdrawn")
    machine = made["machine"]
    missed = "".join(f"Missed its bar: `{one}`.\n" for one in made.get("missed", ()))
    return (
        f"*Measured {made['started'][:10]} at commit {made['commit']} on {machine['cores']} x "
        f"{machine['cpu']} ([record]({_way(folder / name, place)}), `make records ONLY={name}`).*\n"
        + missed
    )


def places(text: str) -> list[Place]:
    """All marked places of a text."""
    blocks = [Place(one["kind"], one["name"], one["what"]) for one in _BLOCK.finditer(text)]
    return blocks + [Place("number", one["name"], one["what"]) for one in _NUMBER.finditer(text)]


def quoted(text: str) -> list[tuple[str, set[str], set[str]]]:
    """Of each section with a record: heading, records that are quoted, records whose standing is.

    A link to a record's folder or files quotes it, too.
    """
    found = []
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        blocks = list(_BLOCK.finditer(section))
        told = {one["name"] for one in blocks if one["kind"] == "standing"}
        used = {one["name"] for one in blocks if one["kind"] != "standing"}
        used |= {one["name"] for one in _NUMBER.finditer(section)}
        used |= {one["name"] for one in _LINK.finditer(_without_blocks(section))}
        if told or used:
            found.append((section.partition("\n")[0], used, told))
    return found


def bare_figures(text: str) -> list[str]:
    """Images of records that stand outside of a marked place."""
    return re.findall(r"!\[[^]]*\]\(([^)]*records/[^)]*)\)", _without_blocks(text))


def value_of(folder: Path, query: str) -> str | None:
    """The text of one number of a sweep (see the module's words); None of a row that is doubted."""
    row, asked = chosen_row(folder, query)
    value = getattr(row, asked["field"])
    if getattr(row, "flag", None):
        return None
    if value is None:
        raise PlaceError(f"{folder.name}: {asked['words']} has no {asked['field']}")
    return format(value, asked["form"]) if asked["form"] else significant(value)


def chosen_row(folder: Path, query: str) -> tuple[Any, re.Match[str]]:
    """The row that a number is asked of, and the parts of the query.

    Raises:
        PlaceError: there is not one such row, or it has no such field.
    """
    asked = _QUERY.fullmatch(query)
    if asked is None:
        raise PlaceError(f"{query!r} is not `FIELD of WORDS` or `FIELD of WORDS as FORM`")
    words = asked["words"].split(", ")
    chosen = [row for row in _rows(folder) if all(_is_of(row, word) for word in words)]
    if len(chosen) != 1:
        raise PlaceError(f"{len(chosen)} rows of {folder.name} are {asked['words']!r}, not one")
    _check_fields(chosen[0], [asked["field"]], folder)
    return chosen[0], asked


def _check_fields(row: Any, fields: Iterable[str], folder: Path) -> None:
    for field in fields:
        if not hasattr(row, field):
            raise PlaceError(f"rows of {folder.name} have no {field}")


def _is_of(row: Any, word: str) -> bool:
    """An algorithm by its label; a model, network or fault by its beginning."""
    parts = [row.model, row.network or "", row.fault or "no fault"]
    return row.algorithm == word or any(part.startswith(word) for part in parts)


def _sweep(folder: Path) -> tuple[list[Record], str]:
    comparison = Comparison.load(folder)
    return comparison.results(folder), comparison.compare_to


def _rows(folder: Path) -> Sequence[Any]:
    return overview(*_sweep(folder)).rows


def _table(folder: Path, what: str | None, _: Path) -> str:
    if what is not None:
        found, fields = _rows(folder), what.split(", ")
        _check_fields(found[0], fields, folder)
        return _crossed(found, fields)
    told = overview(*_sweep(folder))
    lines = "".join(f"- {line}\n" for line in told.lines)
    return told.table.markdown() + (f"\n{lines}" if lines else "")


def _crossed(found: Sequence[Any], fields: list[str]) -> str:
    """A line per model and network, and of each algorithm the fields."""
    cells = list(dict.fromkeys((row.model, row.network) for row in found))
    names = list(dict.fromkeys(row.algorithm for row in found))
    by_place = {(row.model, row.network, row.algorithm): row for row in found}
    titles = [f"{name} {field.replace('_', ' ')}" for name in names for field in fields]
    lines = [["model", "network", *titles], ["---", "---", *["---:"] * len(titles)]]
    for model, network in cells:
        values = [
            _short(by_place.get((model, network, name)), field)
            for name in names
            for field in fields
        ]
        lines.append([model, network or "", *values])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _short(row: Any, field: str) -> str:
    value = getattr(row, field, None)
    if value is None:
        return ""
    text = percent(value, row.reach) if field == "of_bound" else f"{value:.2f}"
    return f"({text})" if getattr(row, "flag", None) else text


def _output(folder: Path, what: str | None, _: Path) -> str:
    path = folder / (what or "")
    if not path.is_file():
        raise PlaceError(f"there is no file {what} in {folder.name}")
    return f"```\n{path.read_text().rstrip()}\n```\n"


def _figure(folder: Path, what: str | None, place: Path) -> str:
    name, _, shows = (what or "").partition(" | ")
    path = (folder / name).resolve()
    if not path.is_file():
        raise PlaceError(f"there is no figure {name} in {folder.name}")
    return f"![{shows}]({_way(path, place)})\n"


def _way(path: Path, place: Path) -> str:
    """From a text in the folder `place`, as links have it."""
    return Path(os.path.relpath(path.resolve(), place.resolve())).as_posix()


_BLOCKS: dict[str, Callable[[Path, str | None, Path], str]] = {
    "table": _table,
    "output": _output,
    "figure": _figure,
}


def fill() -> list[Path]:
    """Writes every document anew; returns those that changed.

    Raises:
        PlaceError: as `filled`; then nothing is written.
    """
    texts = {path: path.read_text() for path in documents()}
    new = {path: _filled_file(path, text) for path, text in texts.items()}
    changed = [path for path in texts if new[path] != texts[path]]
    for path in changed:
        path.write_text(new[path])
    return changed


def _filled_file(path: Path, text: str) -> str:
    try:
        return filled(text, path.parent)
    except PlaceError as error:
        raise PlaceError(f"{path.relative_to(ROOT)}: {error}") from None


if __name__ == "__main__":
    try:
        for path in fill():
            print(f"filled {path.relative_to(ROOT)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
