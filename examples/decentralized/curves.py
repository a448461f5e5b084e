"""Shared code of these examples: trains by one method, and writes a table, a CSV and a figure."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

import dear

METHODS = {
    "averaging (awc)": ("neighbor", {"combine": "awc", "topology": "ring"}),
    "diffusion (atc)": ("neighbor", {"combine": "atc", "topology": "ring"}),
    "exact diffusion": ("exact-diffusion", {"topology": "ring"}),
    "gradient tracking": ("gradient-tracking", {"topology": "ring"}),
    "push-DIGing (directed)": ("push-diging", {"topology": "exp2"}),
}
"""Algorithm and options of each method. The first two methods stop near the optimum (they are
biased); the others reach it."""

COLOURS = ["#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9"]
FLOOR = 1e-15
"""Largest relative distance that may be only a rounding error."""


def arguments(description: str, iterations: int) -> argparse.ArgumentParser:
    """Returns a parser with the options of all examples."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--iterations", type=int, default=iterations)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the curves: a PNG and a CSV")
    return parser


def distances(
    method: str,
    loss: Callable[[nn.Module], torch.Tensor],
    optimum: torch.Tensor,
    lr: float,
    iterations: int,
) -> list[float]:
    """Trains a linear model from zero; measures its distance to `optimum` before and after steps.

    Args:
        loss: loss on this rank's data; `optimum` minimises the mean of all ranks' losses.
        optimum: weights `[n]`.

    Returns:
        Distances by step, equal on all ranks: root mean square over ranks / norm of `optimum`.
    """
    model = nn.Linear(optimum.numel(), 1, bias=False).to(optimum.dtype)
    nn.init.zeros_(model.weight)
    algorithm, options = METHODS[method]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    squared = [optimum.square().sum()]
    for _ in range(iterations):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        optimizer.synchronize()
        squared.append((model.weight.detach().flatten() - optimum).square().sum())
    optimizer.close()
    mean = dear.allreduce(torch.stack(squared))
    return (mean.sqrt() / optimum.norm()).tolist()


def compare(
    title: str, loss: Callable[[nn.Module], torch.Tensor], optimum: torch.Tensor, options
) -> None:
    """Trains by every method and prints the distance to the optimum after several steps."""
    curves = {
        method: distances(method, loss, optimum, options.lr, options.iterations)
        for method in METHODS
    }
    at = sorted({options.iterations * part // 4 for part in range(5)})
    rows = [[name, *(f"{curve[k]:.1e}" for k in at)] for name, curve in curves.items()]
    if dear.rank() == 0:
        print(f"{title}, {dear.size()} ranks: distance to the optimum, by step")
        table(["method", *map(str, at)], rows)
        if options.out:
            save(options.out, title, "distance to the optimum", curves)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints columns; all except the first are aligned to the right."""
    lines = [header, *rows]
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    for name, *cells in lines:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        print("  ".join([name.ljust(first), *aligned]))


def save(
    folder: Path,
    title: str,
    what: str,
    curves: dict[str, list[float]],
    predicted: dict[str, list[float]] | None = None,
) -> None:
    """Writes `title` as .csv and .png: `curves`, and their `predicted` values as dashed lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    predicted = predicted or {}
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / title.lower().replace(" ", "_")
    columns = curves | {f"{name} (predicted)": curve for name, curve in predicted.items()}
    with stem.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["iteration", *columns])
        for number, values in enumerate(zip(*columns.values(), strict=True)):
            writer.writerow([number, *(f"{value:.6e}" for value in values)])
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    widths = [2.2 - 0.2 * index for index in range(len(COLOURS))]  # curves below stay visible
    for colour, width, (name, curve) in zip(COLOURS, widths, curves.items(), strict=False):
        axes.plot(above_floor(curve), color=colour, linewidth=width, label=name)
        if name in predicted:
            axes.plot(above_floor(predicted[name]), color=colour, linestyle="--", linewidth=0.8)
    if predicted:
        axes.plot([], [], color="black", linestyle="--", linewidth=0.8, label="predicted")
    axes.set(yscale="log", xlabel="iteration", ylabel=what, title=f"{title}, {dear.size()} ranks")
    axes.margins(x=0)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(stem.with_suffix(".png"), dpi=140, bbox_inches="tight")
    plt.close(figure)
    print(f"wrote {stem}.csv and .png")


def above_floor(curve: list[float]) -> list[float]:
    """Returns the part of `curve` before the first value that may be a rounding error."""
    length = next((k for k, value in enumerate(curve) if value < FLOOR), len(curve))
    return [*curve[:length], *([FLOOR] if length < len(curve) else [])]


def run(main: Callable[[], None]) -> None:
    """Calls `main`. A user error prints one line; the exit status is then 2."""
    try:
        main()
    except dear.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
