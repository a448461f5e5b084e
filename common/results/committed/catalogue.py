"""What docs/records holds: how each record is made, what it was made of, and which are withdrawn.

A record is a folder there, and an entry of `records.yaml` in it. `bench/records.py` makes records
and says which are not of today's definitions; those are withdrawn in `withdrawn.yaml`, with the
reason, until they are made again, and no text quotes one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.paths import ROOT
from dear.options import build_options

FOLDER = ROOT / "docs" / "records"
LIST, WITHDRAWN = "records.yaml", "withdrawn.yaml"
MADE = "made.json"
DEFINITIONS = 1
"""Of a step, an interval, a word, of what is faithful and what is correct. Whoever changes what one
of them means raises this number: no earlier record is of today's definitions then."""
MISSED = 3
"""Exit status of a program that has measured everything, and a bar is missed."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one record is made."""

    minutes: float
    """About how long that takes on two cores."""
    sweep: str | None = None
    """The experiment file whose sweep it is; None: what `commands` write."""
    set: tuple[str, ...] = ()
    """Keys of the experiment that differ, as `--set` takes them."""
    commands: tuple[str, ...] = ()
    """For bash, in the repository; `{out}` is a new folder, all of whose files are the record. One
    that ends with `MISSED` has done its work; any other status but 0 makes no record."""
    needs: tuple[str, ...] = ()
    """Environment variables that must be set: folders of what does not come with the repository."""

    def __post_init__(self) -> None:
        if (self.sweep is None) == (not self.commands):
            raise ValueError("a record is a sweep or made by commands")


def recipes(folder: Path = FOLDER) -> dict[str, Recipe]:
    """All records by name, in the order in which `make records` makes them."""
    listed = yaml.safe_load((folder / LIST).read_text())
    return {name: build_options(Recipe, values, "key") for name, values in listed.items()}


def withdrawn(folder: Path = FOLDER) -> dict[str, str]:
    """Reasons, by record."""
    path = folder / WITHDRAWN
    return (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}


def restore(name: str, folder: Path = FOLDER) -> None:
    """Removes a record from the list of withdrawn ones. The comment above the list stays."""
    path, reasons = folder / WITHDRAWN, withdrawn(folder)
    if reasons.pop(name, None) is None:
        return
    lines = path.read_text().splitlines(keepends=True)
    header = "".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    # Written anew, not cut: another entry may share the reason by a YAML alias.
    entries = yaml.safe_dump(reasons, sort_keys=False, width=100) if reasons else ""
    path.write_text(header + entries)


def made(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Commit, machine, commands, files, when and for how long, as `make records` wrote it; None: it
    did not.
    """
    path = folder / name / MADE
    return json.loads(path.read_text()) if path.exists() else None


def digests(folder: Path) -> dict[str, str]:
    """Of every file of a record but the one that holds these."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MADE)
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in files
    }
