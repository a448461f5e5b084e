"""DeAR's setting, 64 predicted GPUs:
`python -m plots.paper_dear_64 FOLDER NETWORK:TITLE=ROWS.json ...`.

Each file has the rows of `predict --json` under an assumption, which the title names. The rows have
no network of their own, because their costs were given. The table of DeAR's speed-ups goes to
stdout, the figure and its data into the folder.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from common.results.records import grouped
from common.results.tables.predicted import PredictedRow
from common.results.tables.table import markdown
from dear.errors import UserError
from dear.options import build_options
from plots import published, style

HALVES = {
    "the best with fusion": ("dear", ("ddp", "horovod", "mgwfbp")),
    "the best without fusion": ("dear-none", ("wfbp", "bytescheduler")),
    "mgwfbp": ("dear", ("mgwfbp",)),
    "ddp": ("dear", ("ddp",)),
}
"""Label of DeAR's row, and labels of the rows that it is compared with, by their title."""
_DRAWN = ("the best with fusion", "mgwfbp")
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7")

Gains = dict[str, object]
"""Row of the figure's data: assumption, network, model, and the speed-up over each half."""


def read(path: Path, network: str) -> list[PredictedRow]:
    """Reads rows, whose costs are those of a network; raises `UserError` if the file does not have
    the output of `predict --json`."""
    try:
        rows = [row | {"network": network} for row in json.loads(path.read_bytes())]
        return [build_options(PredictedRow, row, "key") for row in rows]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: no output of predict --json ({error})") from None


def gains(title: str, rows: Sequence[PredictedRow]) -> list[Gains]:
    """Returns DeAR's speed-ups by model, network and point of a series, without flagged rows."""
    result: list[Gains] = []
    for here in grouped(rows, lambda row: row.place).values():
        valid = (row for row in here if row.step_s is not None and row.flag is None)
        step_s = {row.algorithm: row.step_s for row in valid}
        assumption = ", ".join(filter(None, (title, here[0].at)))
        line: Gains = {"assumption": assumption, "network": published.network_name(here[0].network)}
        line["model"] = published.model_name(here[0].model)
        for half, (dear, others) in HALVES.items():
            times = [step_s[name] for name in others if name in step_s]
            line[half] = min(times) / step_s[dear] if times and dear in step_s else None
        result.append(line)
    return result


def table(lines: Sequence[Gains]) -> str:
    """Returns the Markdown table: a line per network and assumption, the claim below each network.

    Each cell has the smallest and the largest speed-up of the models.
    """
    texts = [["network", "assumption", *(f"DeAR over {half}" for half in HALVES)]]
    for network, here in grouped(lines, lambda line: line["network"]).items():
        for assumption, models in grouped(here, lambda line: line["assumption"]).items():
            cells = [_range([line[half] for line in models]) for half in HALVES]
            texts.append([str(network), str(assumption), *cells])
        texts.append(
            [str(network), "claim of the abstract", f"at most {claims()[network]}", *[""] * 3]
        )
    return markdown(texts, [False, False, *[True] * len(HALVES)])


def claims() -> Mapping[object, float]:
    """Returns the largest speed-up of the paper's abstract by network."""
    table = published.read("dear")
    return dict(zip(table["network"], table["speedup_at_most"], strict=True))


def _range(values: Sequence[object]) -> str:
    known = [value for value in values if isinstance(value, float)]
    missing = f" ({len(known)} of {len(values)} models)" if len(known) < len(values) else ""
    return f"{min(known):.2f} to {max(known):.2f}{missing}" if known else "-"


def figure(lines: Sequence[Gains]) -> style.Drawn:
    """Draws the speed-ups by assumption, a bar for each model; the claim is a line."""
    style.setup(grid="x")
    networks = grouped(lines, lambda line: line["network"])
    models = list(dict.fromkeys(line["model"] for line in lines))
    most = max(len({line["assumption"] for line in here}) for here in networks.values())
    size = (10.5, 0.9 + len(networks) * (0.5 + 0.55 * most))
    drawn, axes = plt.subplots(len(networks), 2, figsize=size, squeeze=False, layout="constrained")
    for row, (network, here) in zip(axes, networks.items(), strict=True):
        for axis, half in zip(row, _DRAWN, strict=True):
            names = list(dict.fromkeys(line["assumption"] for line in here))
            for line in here:
                at = names.index(line["assumption"]) + 0.16 * (models.index(line["model"]) - 2)
                if isinstance(value := line[half], float):
                    axis.barh(at, value, 0.15, color=_COLOURS[models.index(line["model"])])
            axis.set_yticks(range(len(names)), [textwrap.fill(str(name), 30) for name in names])
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.axvline(1, color="#777777", lw=1)
            axis.axvline(claims()[network], color="#D55E00", lw=1.2, ls="--")
            axis.tick_params(axis="y", length=0, labelsize=7, labelleft=axis is row[0])
            style.title(axis, f"{network}: DeAR over {half}")
    handles = [Patch(facecolor=_COLOURS[i]) for i in range(len(models))]
    handles.append(Line2D([], [], color="#D55E00", lw=1.2, ls="--"))
    names = [*map(str, models), "claim: at most"]
    drawn.legend(handles, names, loc="outside right upper", frameon=False, fontsize=8)
    text = "64 GPUs, 4 on each host, computed on a virtual clock (docs/prediction.md)"
    drawn.supxlabel(text, fontsize=7, color="#555555", x=0.01, ha="left")
    return drawn, style.data(lines)


def main(arguments: Sequence[str]) -> int:
    """Prints the table and writes the figure; a user error prints one line, exit status 2."""
    try:
        if len(arguments) < 2 or not all(re.match(".+:.+=.", text) for text in arguments[1:]):
            usage = "python -m plots.paper_dear_64 FOLDER NETWORK:TITLE=ROWS.json ..."
            raise UserError(f"usage: {usage}")
        folder = Path(arguments[0])
        lines: list[Gains] = []
        for text in arguments[1:]:
            about, _, name = text.rpartition("=")
            network, _, title = about.partition(":")
            lines += gains(title, read(Path(name), network))
        print(table(lines), end="")
        style.writer("dear_64", lambda _: figure(lines))(folder, folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
