"""Caption of a record's figure: the setting that was measured or computed, as the record has it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from common.results.committed import catalogue
from common.results.records import fabric_words
from common.results.store import Comparison
from common.virtual.over import AXES
from dear.errors import UserError

_COLUMNS = ("model", "batch", "world_size", "network")
Setting = Mapping[str, object]


def caption(figure: Path) -> str:
    """Returns the sentences below a figure of a record.

    Raises:
        UserError: the record has no manifest, or does not say which trials the figure shows.
    """
    folder = figure.parent
    manifest = catalogue.manifest(folder.name, folder.parent)
    if manifest is None:
        raise UserError(f"{folder.name} has no {catalogue.MANIFEST}, which names the commit")
    if manifest.get("computed"):
        settings, origin = _computed(figure), "n = 1, computed. Fabric: a virtual clock and network"
    else:
        settings, origin = _measured(folder)
    models = _names(f"`{each['model']}`, batch {each['batch']}" for each in settings)
    without = "costs as given" if manifest.get("computed") else "none"
    networks = _names(str(each["network"] or without) for each in settings)
    workers = _range(each["world_size"] for each in settings)
    parts = (f"Model: {models}", f"Network: {networks}", f"Workers: {workers}", *_series(settings))
    return ". ".join((*parts, origin, f"Commit: {manifest['commit']}."))


def _measured(folder: Path) -> tuple[list[Setting], str]:
    """Returns the trials of a sweep that have results, and how they were measured."""
    records = [record for record in Comparison.load(folder).results(folder) if record.results]
    if not records:
        raise UserError(f"no trial of {folder.name} has a result")
    repeats = _range(len(record.results) for record in records)
    backends = _names(record.trial["backend"] for record in records)
    settings = [{**record.trial, "batch": record.trial["batch_size"]} for record in records]
    return settings, f"n = {repeats} repeats. Fabric: {fabric_words(records)}, over {backends}"


def _computed(figure: Path) -> list[Setting]:
    """Returns the rows of the figure's data; of `predict --json` if these lack a column."""
    data = figure.with_suffix(".csv")
    with data.open(encoding="utf-8", newline="") as file:
        rows: list[Setting] = list(csv.DictReader(file))
    if not all(set(_COLUMNS) <= row.keys() for row in rows):
        paths = sorted(figure.parent.glob("*.json"))
        texts = [path.read_bytes() for path in paths if path.name != catalogue.MANIFEST]
        rows = [row for text in texts for row in json.loads(text)]
    if not rows or not all(set(_COLUMNS) <= row.keys() for row in rows):
        raise UserError(f"{data.name} needs rows with the columns {', '.join(_COLUMNS)}")
    return rows


def _series(settings: Iterable[Setting]) -> Iterator[str]:
    """Yields the range of each property, other than the size, over which a series goes."""
    values: dict[str, list[object]] = {}
    for each in settings:
        point = each.get("point") or each
        if isinstance(point, dict) and point.get("axis", "workers") != "workers":
            values.setdefault(point["axis"], []).append(point["value"])
    for name, numbers in values.items():
        axis = AXES[name]
        yield f"{axis.title[:1].upper()}{axis.title[1:]}: {_range(numbers)} {axis.unit}"


def _range(values: Iterable[object]) -> str:
    numbers = [float(str(value)) for value in values]
    return " to ".join(f"{end:g}" for end in dict.fromkeys((min(numbers), max(numbers))))


def _names(names: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(names))
