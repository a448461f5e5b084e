"""Fills README.md and docs with numbers of records: `python -m common.results.readme`.

A place is a comment in the Markdown that says what follows, for a record NAME (docs/records/NAME):

    <!-- standing of NAME -->      commit, machine and folder of the record
    <!-- table of NAME -->         the table of its sweep, and the sentences below it
    <!-- table of NAME: speedup, of_bound -->     these fields by cell and algorithm,
                                              with the 95 % interval of those that have one
    <!-- output of NAME: FILE -->  a file of the record, unchanged
    <!-- figure of NAME: FILE | WHAT IT SHOWS -->     with a caption
    <!-- withdrawn records -->     the withdrawn (outdated) records, with the reasons
    <!-- claims of SYSTEM -->      the table of a system of claims.yaml; of `all`: counts of words
    <!-- findings of records -->   the sentences of findings.yaml

The generated text ends at `<!-- end -->`. A number in a sentence is followed by its source, as in
`1.84<!-- delayed: speedup of dadt, bert -->`: the record, the field, and words that choose the row;
`as .0%` at the end changes the format. Every section that quotes a record must have its standing.
The places of a withdrawn record are left empty; a number from one, or a link to one, is an error.
Numbers of flagged rows are crossed out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.paths import ROOT
from common.results.committed import catalogue, claims, findings
from common.results.committed.captions import caption
from common.results.committed.pages import with_block
from common.results.learning.summary import LearnRow
from common.results.records import Record, grouped
from common.results.report.overview import overview
from common.results.store import Comparison
from common.results.tables.cells import significant
from common.results.tables.table import markdown
from common.results.timed import bounds
from common.results.timed.rows import Row
from dear.errors import UserError

_BLOCK = re.compile(
    r"(?P<head><!-- (?P<kind>standing|table|output|figure|claims|findings) of (?P<name>[\w-]+)"
    r"(?:: (?P<what>[^>]+?))? -->\n)(?P<body>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?:~~)?(?P<value>[-+0-9.,e]+%?)(?:~~)?(?P<from><!-- (?P<name>[\w-]+): (?P<what>[^>]+?) -->)"
)
_SOURCE = re.compile(r"<!-- [\w-]+: \w+ of [^>]+? -->")
_MANY = ("claims", "findings")
"""Kinds of places with several records, whose origins they name themselves."""
_LIST = "withdrawn records"
_LINK = re.compile(r"\]\([^)]*?records/(?P<name>[\w-]+)")
_QUERY = re.compile(r"(?P<field>\w+) of (?P<words>.+?)(?: as (?P<form>\S+))?$")


@dataclass(frozen=True)
class Place:
    """Place in a document, and what it shows of which record."""

    kind: str
    """standing, table, output, figure or number."""
    record: str
    what: str | None


class PlaceError(UserError):
    """Error of a place that needs something which its record does not have."""


def documents() -> list[Path]:
    """Returns every Markdown file of the repository except those in records."""
    command = ["git", "-C", str(ROOT), "ls-files", "*.md"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        names = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    return [ROOT / name for name in names if not name.startswith("docs/records/")]


def filled(text: str, place: Path, folder: Path = catalogue.FOLDER) -> str:
    """Returns `text`, a document of the folder `place`, with all marked places filled. Raises
    `PlaceError` if a place needs something that its record does not have."""
    withdrawn = catalogue.withdrawn(folder)

    def block(match: re.Match[str]) -> str:
        kind, name = match["kind"], match["name"]
        if kind == "claims":
            body = claims.section(name, place, folder)
        elif kind == "findings":
            body = findings.section(findings.findings(), place, folder)
        elif name in withdrawn:
            body = ""
        elif kind == "standing":
            body = standing(name, place, folder)
        else:
            body = _BLOCKS[kind](_existing(folder, name), match["what"], place)
        return f"{match['head']}{body}{match['end']}"

    def number(match: re.Match[str]) -> str:
        name = match["name"]
        if name in withdrawn:
            raise PlaceError(f"a number needs {name}, which is withdrawn: drop the sentence")
        value = value_of(_existing(folder, name), match["what"])
        return (f"~~{match['value']}~~" if value is None else value) + match["from"]

    links = {match["name"] for match in _LINK.finditer(without_blocks(text))}
    if refused := withdrawn.keys() & links:
        raise PlaceError(f"a link leads to {min(refused)}, which is withdrawn: drop the sentence")
    if f"<!-- {_LIST} -->\n" in text:
        text = with_block(text, _LIST, _withdrawn(withdrawn))
    _refuse_unread(text)
    return _NUMBER.sub(number, _BLOCK.sub(block, text))


def _refuse_unread(text: str) -> None:
    """Raises `PlaceError` for a source of a number that does not stand behind a number."""
    read = {match.end() for match in _NUMBER.finditer(text)}
    for source in _SOURCE.finditer(text):
        if source.end() not in read:
            raise PlaceError(f"before {source[0]} there is no number, or a space or unit after it")


def _existing(folder: Path, name: str) -> Path:
    if not (folder / name).is_dir():
        raise PlaceError(f"there is no record {name}")
    return folder / name


def without_blocks(text: str) -> str:
    """Returns a text without the generated blocks."""
    return _BLOCK.sub("", text)


def _withdrawn(reasons: Mapping[str, str]) -> str:
    lines = [f"| `{name}` | {reason} |" for name, reason in reasons.items()]
    return "\n".join(["| record | why |", "|---|---|", *lines]) if lines else "None."


def standing(name: str, place: Path, folder: Path = catalogue.FOLDER) -> str:
    """Describes the origin of a record that is not withdrawn."""
    manifest = catalogue.manifest(name, folder)
    if manifest is None:
        raise PlaceError(f"{name} was not made by `make records`, and is not withdrawn")
    machine = manifest["machine"]
    missed = "".join(
        f"`{text.replace('{out}', 'FOLDER')}` did not meet its requirement (see the record).\n"
        for text in manifest.get("missed", ())
    )
    done, does = ("Computed", "computes") if manifest.get("computed") else ("Measured", "measures")
    return (
        f"*{done} {manifest['started'][:10]} at commit {manifest['commit']} on "
        f"{machine['cores']} cores ({machine['cpu']}). `make records ONLY={name}` {does} "
        f"this [record]({catalogue.way(folder / name, place)}) again.*\n{missed}"
    )


def places(text: str) -> list[Place]:
    """Returns all places of a text that show one record, numbers included."""
    blocks = [Place(match["kind"], match["name"], match["what"]) for match in _BLOCK.finditer(text)]
    return [block for block in blocks if block.kind not in _MANY] + [
        Place("number", match["name"], match["what"]) for match in _NUMBER.finditer(text)
    ]


def quoted(text: str) -> list[tuple[str, set[str], set[str]]]:
    """Returns, for each section with a record, its heading, quoted records, and shown standings. A
    link to a record's folder or file counts as a quotation."""
    sections = []
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        marked = places(section)
        shown = {place.record for place in marked if place.kind == "standing"}
        used = {place.record for place in marked if place.kind != "standing"}
        used |= {match["name"] for match in _LINK.finditer(without_blocks(section))}
        if shown or used:
            sections.append((section.partition("\n")[0], used, shown))
    return sections


def value_of(folder: Path, query: str) -> str | None:
    """Returns the text of a number of a sweep; None for a flagged row. `query` is the source of the
    number, as in the module's docstring."""
    row, match = chosen_row(folder, query)
    if row.flag:
        return None
    value = getattr(row, match["field"])
    if value is None:
        raise PlaceError(f"{folder.name}: {match['words']} has no {match['field']}")
    return format(value, match["form"]) if match["form"] else significant(value)


def chosen_row(folder: Path, query: str) -> tuple[Row | LearnRow, re.Match[str]]:
    """Returns the row that a query chooses, and the parts of the query. Raises `PlaceError` if
    there is not exactly one such row, or it has no such field."""
    match = _QUERY.fullmatch(query)
    if match is None:
        raise PlaceError(f"{query!r} is not `FIELD of WORDS` or `FIELD of WORDS as FORM`")
    words = match["words"].split(", ")
    chosen = [
        row for row in overview(*_sweep(folder)).rows if all(_is_of(row, word) for word in words)
    ]
    if len(chosen) != 1:
        raise PlaceError(f"{len(chosen)} rows of {folder.name} are {match['words']!r}, not one")
    _check_fields(chosen[0], [match["field"]], folder)
    return chosen[0], match


def _check_fields(row: Row | LearnRow, fields: Iterable[str], folder: Path) -> None:
    for field in fields:
        if not hasattr(row, field):
            raise PlaceError(f"rows of {folder.name} have no {field}")


def _is_of(row: Row | LearnRow, word: str) -> bool:
    """Returns True if the word is the row's label, or the start of its model, network or fault."""
    parts = [row.model, row.network or "", row.fault or "no fault"]
    return row.algorithm == word or any(part.startswith(word) for part in parts)


def _sweep(folder: Path) -> tuple[list[Record], str]:
    comparison = Comparison.load(folder)
    return comparison.results(folder), comparison.compare_to


def _table(folder: Path, what: str | None, _: Path) -> str:
    summary = overview(*_sweep(folder))
    if what is not None:
        fields = what.split(", ")
        _check_fields(summary.rows[0], fields, folder)
        return _crossed(summary.rows, fields)
    lines = "".join(f"- {line}\n" for line in summary.lines)
    return summary.table.markdown() + (f"\n{lines}" if lines else "")


def _crossed(rows: Sequence[Row | LearnRow], fields: Sequence[str]) -> str:
    """Returns a table with a line per model and network, and the fields of each algorithm."""
    names = dict.fromkeys(row.algorithm for row in rows)
    titles = [f"{name} {field.replace('_', ' ')}" for name in names for field in fields]
    lines = [["model", "network", *titles]]
    for (model, network), here in grouped(rows, lambda row: (row.model, row.network)).items():
        by_name = {row.algorithm: row for row in here}
        if len(by_name) < len(here):
            raise PlaceError(
                f"{model} has several batch sizes, numbers of workers or faults on {network}: this "
                "table has one line for all of them"
            )
        texts = [_short(by_name.get(name), field) for name in names for field in fields]
        lines.append([model, network or "", *texts])
    return markdown(lines, [False, False, *[True] * len(titles)], padded=False)


def _short(row: Row | LearnRow | None, field: str) -> str:
    value = getattr(row, field, None)
    if row is None or value is None:
        return ""
    text = f"{value:.2f}"
    low, high = (getattr(row, f"{field}_{end}", None) for end in ("low", "high"))
    if low is not None and high is not None:
        text += f" ({low:.2f}-{high:.2f})"
    if field == "of_bound" and isinstance(row, Row):
        text = bounds.share(value, row.bound_note)
    return f"({text})" if row.flag else text


def _output(folder: Path, what: str | None, _: Path) -> str:
    path = folder / (what or "")
    if not path.is_file():
        raise PlaceError(f"there is no file {what} in {folder.name}")
    return f"```\n{path.read_text(encoding='utf-8').rstrip()}\n```\n"


def _figure(folder: Path, what: str | None, place: Path) -> str:
    name, _, shows = (what or "").partition(" | ")
    path = (folder / name).resolve()
    if not path.is_file():
        raise PlaceError(f"there is no figure {name} in {folder.name}")
    try:
        text = caption(path)
    except UserError as error:
        raise PlaceError(f"figure {name}: {error}") from None
    return f"![{shows}]({catalogue.way(path, place)})\n\n*{shows}. {text}*\n"


_BLOCKS: dict[str, Callable[[Path, str | None, Path], str]] = {
    "table": _table,
    "output": _output,
    "figure": _figure,
}


def fill() -> list[Path]:
    """Fills every document and returns those that changed. Raises `PlaceError` if a place cannot be
    filled (see `filled`); then no document is written."""
    texts = {path: path.read_text(encoding="utf-8") for path in documents()}
    new = {}
    for path, text in texts.items():
        try:
            new[path] = filled(text, path.parent)
        except PlaceError as error:
            raise PlaceError(f"{path.relative_to(ROOT)}: {error}") from None
    changed = [path for path in texts if new[path] != texts[path]]
    for path in changed:
        path.write_text(new[path], encoding="utf-8")
    return changed


if __name__ == "__main__":
    try:
        for path in fill():
            print(f"filled {path.relative_to(ROOT)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
