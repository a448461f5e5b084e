"""What others have measured (configs/published), and what papers call our trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.results.records import Record
from plots import sweep
from plots.style import LOOKS, Look
from plots.sweep import Mark

_FOLDER = Path(__file__).parents[1] / "configs" / "published"
_MODELS = {
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "densenet201": "DenseNet-201",
    "inceptionv4": "Inception-v4",
    "bert_base": "BERT-Base",
    "bert": "BERT-Large",
}
OUTLINE = {"facecolor": "white", "linewidth": 1.1, "linestyle": (0, (2, 1))}
"""The bar of a published number; its edge has the colour of the method."""


def read(name: str) -> pd.DataFrame:
    """A file of published numbers, a row for each; every one has its `source`."""
    return pd.read_csv(_FOLDER / f"{name}.csv")


def model(record: Record) -> str:
    """As papers call it; a replayed one is the model that it replays."""
    own = record.trial["model"].partition("@")[0]
    return _MODELS.get(own, own)


def network(record: Record) -> str:
    """As papers call it: `10gbe` is 10GbE."""
    own = record.trial.get("network") or "this machine"
    return own.replace("gbe", "GbE").replace("gbib", "GbIB")


def fits(records: Sequence[Record], compared: Callable[[Sequence[Record]], bool]) -> bool:
    """Whether what a paper has compared was believed in one place, undisturbed by faults."""
    calm = [record for record in records if not record.fault]
    return any(map(compared, sweep.variants(calm, "label").values()))


def panels(
    marks: Sequence[Mark], compared: Callable[[Sequence[Record]], bool], *, each_world: bool
) -> list[list[Mark]]:
    """Believed marks by model and network, where `fits` would say so: as a paper has them.

    Of several batch sizes the largest, and of several numbers of workers, too, unless `each_world`.
    """
    good = [mark for mark in marks if not mark.row.doubt and not mark.row.fault]
    found: dict[tuple[object, ...], list[Mark]] = {}
    for panel in sweep.panels(good):
        row, record = panel[0].row, panel[0].record
        key = (model(record), network(record), row.world_size if each_world else None)
        other = found.get(key, panel)[0].row
        larger = (row.world_size, row.batch_size) >= (other.world_size, other.batch_size)
        if larger and compared([mark.record for mark in panel]):
            found[key] = panel
    return list(found.values())


def bar(look: Look) -> dict[str, object]:
    """Arguments of `Axes.bar` for a published number."""
    return {**OUTLINE, "edgecolor": look.colour, "hatch": look.hatch}


def legend(figure: Figure, names: Mapping[str, str], outlined: bool) -> None:
    """Right of the panels: what papers call each of our algorithms, and what an outline is."""
    handles = [Patch(**LOOKS[algorithm].bar) for algorithm in names]
    texts = list(names.values())
    if outlined:
        handles.append(Patch(**OUTLINE, edgecolor="#444444"))
        texts.append("published")
    place = {"loc": "outside right upper", "frameon": False, "fontsize": 8}
    figure.legend(handles, texts, **place)
