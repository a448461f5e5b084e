"""Catalogue of docs/records: how each record is made, its manifest, and whether it is withdrawn.

A record is a folder there, and an entry of `records.yaml`. `bench/records.py` makes records and
lists those that do not match the present definitions. Such records are outdated: `withdrawn.yaml`
lists them with the reason until they are made again. No text quotes a withdrawn record.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import yaml

from common.paths import ROOT
from dear.errors import UserError
from dear.options import build_options

FOLDER = ROOT / "docs" / "records"
LIST, WITHDRAWN = "records.yaml", "withdrawn.yaml"
MANIFEST = "made.json"
DEFINITIONS = 1
"""Version of the definitions of a step, an interval, a verdict, a flag and a correct training. Each
change of a definition increases it; then all earlier records are withdrawn."""
MISSED = 3
"""Exit status of a program that has measured everything, but a result misses a requirement."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Instructions to make a record."""

    minutes: float
    """Approximate duration on two cores."""
    sweep: str | None = None
    """Experiment file of the record's sweep; None: `commands` write the record."""
    set: tuple[str, ...] = ()
    """Changed keys of the experiment, in the form of `--set`."""
    commands: tuple[str, ...] = ()
    """Commands for bash, run in the repository. They write the record's files into the new folder
    `{out}`. A command has failed if its exit status is neither 0 nor `MISSED`."""
    computed: bool = False
    """True if the commands measure nothing."""
    needs: tuple[str, ...] = ()
    """Environment variables that must be set; each names a folder outside the repository."""

    def __post_init__(self) -> None:
        if (self.sweep is None) == (not self.commands):
            raise ValueError("a record needs either a sweep or commands")


def recipes(folder: Path = FOLDER) -> dict[str, Recipe]:
    """Returns all recipes by name, in the order of `make records`."""
    listed = yaml.safe_load((folder / LIST).read_bytes())
    return {name: build_options(Recipe, values, "key") for name, values in listed.items()}


def withdrawn(folder: Path = FOLDER) -> dict[str, str]:
    """Returns the withdrawn records with their reasons."""
    path = folder / WITHDRAWN
    return (yaml.safe_load(path.read_bytes()) or {}) if path.exists() else {}


def restore(name: str, folder: Path = FOLDER) -> None:
    """Removes a record from the list of withdrawn ones, and keeps the comment above the list."""
    path, reasons = folder / WITHDRAWN, withdrawn(folder)
    if reasons.pop(name, None) is None:
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    header = "".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    # The list is written anew, because another entry may refer to the reason by a YAML alias.
    entries = yaml.safe_dump(reasons, sort_keys=False, width=100) if reasons else ""
    path.write_text(header + entries, encoding="utf-8")


class Machine(TypedDict):
    """Machine of a record."""

    cores: int
    cpu: str


class Manifest(TypedDict, total=False):
    """Origin of a record, as `make records` wrote it."""

    started: str
    duration_s: float
    commit: str
    definitions: int
    machine: Machine
    made_by: list[str]
    files: dict[str, str]
    missed: list[str]
    """Commands whose results missed a requirement."""
    computed: bool
    """Value of `Recipe.computed`; older manifests lack it."""


def manifest(name: str, folder: Path = FOLDER) -> Manifest | None:
    """Returns the manifest of a record; None if `make records` did not make it."""
    path = folder / name / MANIFEST
    return json.loads(path.read_bytes()) if path.exists() else None


def origins(names: Iterable[str], place: Path, folder: Path = FOLDER) -> str:
    """Returns a sentence with the date and commit of records, for a page in the folder `place`."""
    texts = []
    for name in dict.fromkeys(names):
        facts = manifest(name, folder)
        if facts is None:
            raise UserError(f"{name} was not made by `make records`")
        started, commit = facts["started"][:10], facts["commit"]
        texts.append(f"[{name}]({way(folder / name, place)}) ({started}, commit {commit})")
    return f"*Records: {', '.join(texts)}.*" if texts else "*No record yet.*"


def way(path: Path, place: Path) -> str:
    """Returns the link to `path` for a page in the folder `place`."""
    return Path(os.path.relpath(path.resolve(), place.resolve())).as_posix()


def digests(folder: Path) -> dict[str, str]:
    """Returns a digest of every file of a record except its manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in files
    }
