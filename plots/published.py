"""What others have measured (configs/published), and what papers call our trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.results.records import Record
from plots import sweep
from plots.style import LOOKS, Look

_FOLDER = Path(__file__).parents[1] / "configs" / "published"
_MODELS = {
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "densenet201": "DenseNet-201",
    "inceptionv4": "Inception-v4",
    "bert_base": "BERT-Base",
    "bert": "BERT-Large",
}
_NETWORKS = {"10gbe": "10GbE", "100gbib": "100GbIB"}
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
    """As papers call it."""
    own = record.trial.get("network") or "this machine"
    return _NETWORKS.get(own, own)


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


def believed(records: Sequence[Record], methods: Sequence[str]) -> int:
    """The most of these algorithms that were believed in one place."""
    places = sweep.variants(records, "label").values()
    found = [{record.trial["algorithm"] for record in own} & set(methods) for own in places]
    return max(map(len, found), default=0)
