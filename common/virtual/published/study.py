"""Published throughputs of a study, and what ran there in the words of this project."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from common.paths import CONFIGS
from dear.errors import UserError
from dear.options import build_options

FOLDER = CONFIGS / "published"
TABLE = FOLDER / "ddl_benchmarks.csv"
"""Throughputs of ddl-benchmarks; files with the same columns can be compared as well."""
_NUMBERS = {
    "batch_per_gpu": int,
    "gpus": int,
    "samples_per_s_total": float,
    "single_gpu_samples_per_s": float,
}
COLUMNS = ("model", "network", "method", *_NUMBERS)


@dataclass(frozen=True, kw_only=True)
class Method:
    """Algorithm, and options of it."""

    algorithm: str
    options: dict[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Rows to which the links are fitted."""

    model: str
    methods: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Apart:
    """Rows that are listed apart, with the reason."""

    model: str
    method: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Study:
    """Declaration of a study: models, methods and hosts."""

    gpus_per_host: int
    device: str
    """Device of the layer profiles, which are scaled to each row's rate of a single GPU."""
    models: dict[str, str]
    methods: dict[str, Method]
    alone: str
    """Method that sends one message after the backward pass: its step is compute and an
    all-reduce."""
    fit: Fitted
    apart: Apart


@dataclass(frozen=True, kw_only=True)
class Row:
    """Published throughput."""

    model: str
    batch: int
    """Samples per GPU."""
    network: str
    method: str
    gpus: int
    samples_per_s: float
    """Samples per second of all GPUs."""
    single_samples_per_s: float
    """Samples per second of one GPU alone."""

    @property
    def step_s(self) -> float:
        return self.gpus * self.batch / self.samples_per_s

    @property
    def single_step_s(self) -> float:
        return self.batch / self.single_samples_per_s


@functools.cache
def declared() -> Study:
    """Returns the declaration of `TABLE`, a YAML file next to it."""
    values = yaml.safe_load(TABLE.with_suffix(".yaml").read_text(encoding="utf-8"))
    methods = values.pop("methods")
    study = build_options(Study, {**values, "methods": {}}, "key")
    built = {name: build_options(Method, given, "key", name) for name, given in methods.items()}
    return replace(study, methods=built)


def read(path: Path) -> list[Row]:
    """Reads throughputs; columns other than `COLUMNS` are ignored.

    Raises:
        UserError: the file cannot be read, lacks a column or a row, or has a bad number.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(
                    f"{path}: no column {missing[0]} (needed: {', '.join(COLUMNS)}, as in "
                    f"configs/published/{TABLE.name})"
                )
            rows = [_row(line, f"{path}, line {reader.line_num}") for line in reader]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV file ({error})") from None
    if not rows:
        raise UserError(f"{path}: no row below the names of the columns")
    return rows


def _row(line: Mapping[str, str | None], place: str) -> Row:
    numbers = {}
    for name, kind in _NUMBERS.items():
        text = line[name]
        try:
            numbers[name] = kind(text or "")
        except ValueError:
            numbers[name] = 0
        if not 0 < numbers[name] < float("inf"):
            what = "whole number" if kind is int else "number"
            raise UserError(f"{place}: {name} must be a {what} above 0, got {text!r}")
    return Row(
        model=line["model"] or "",
        network=line["network"] or "",
        method=line["method"] or "",
        batch=int(numbers["batch_per_gpu"]),
        gpus=int(numbers["gpus"]),
        samples_per_s=numbers["samples_per_s_total"],
        single_samples_per_s=numbers["single_gpu_samples_per_s"],
    )
