"""Tables in docs/validation.md that compare published rates (samples per second) with ours.

`python -m common.results.committed.published` writes them; a test checks that the page is current.

Our rate is measured if a committed record has the same settings. Otherwise the event model
(`common.virtual`) computes it, from a layer profile, the messages, and published all-reduce costs.
"""

from __future__ import annotations

import csv
import functools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from common.models.profile import Profile, load, path_of
from common.paths import CONFIGS, ROOT
from common.results.committed import catalogue
from common.results.committed.pages import with_block
from common.results.records import Record, grouped
from common.results.store import load as load_records
from common.results.tables.table import markdown
from common.results.validity import flag
from common.virtual.foresee import foresee, halved
from dear.cost.collectives import TABLES
from dear.cost.fit import AlphaBeta
from dear.options import settings
from dear.training.algorithm import algorithm_options

Options: TypeAlias = Mapping[str, str | float]
"""Options of an algorithm."""
PAGE = ROOT / "docs" / "validation.md"
_PUBLISHED = CONFIGS / "published"
DEVICE = "rtx2080ti-modelled"
MODELS = {"ResNet-50": "resnet50", "BERT-Base": "bert_base"}
BASELINE = "BSP-A2A"
METHODS: Mapping[str, tuple[str, Options]] = {
    BASELINE: ("mgwfbp", {"merge": "threshold", "threshold_mb": 512.0}),
    "WFBP-A2A": ("wfbp", {}),
    "MG-WFBP": ("mgwfbp", {}),
    "ByteScheduler-A2A": ("bytescheduler", {}),
}
"""Algorithm and options, by the name of a method in ddl-benchmarks. Its method BSP fuses all
gradients (up to 512 MB) into one message."""
NETWORKS = {"10GbE": "10gbe", "100GbIB": "100gbib"}
WIRE_BYTES_PER_S = 10e9 / 8 * 1448 / 1514
"""Payload bytes per second of TCP on 10 Gb/s Ethernet: 1448 bytes of payload per frame."""
_LARGEST = 64
_OF_DEAR = (
    ("resnet50", 64),
    ("densenet201", 32),
    ("inceptionv4", 64),
    ("bert_base", 64),
    ("bert", 32),
)
_PLACE = ("model, batch", "network")
_RIVALS = ("ddp", "horovod", "mgwfbp", "wfbp", "bytescheduler")


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Published rate, and ours for the same settings."""

    model: str
    batch_size: int
    network: str
    gpus: int
    hosts: int
    method: str
    published: float
    """Samples per second of all GPUs."""
    computed: float
    measured: float | None
    """Rate on an emulated cluster; None if no record has the same settings."""

    @property
    def ours(self) -> float:
        return self.computed if self.measured is None else self.measured


def cost(network: str, workers: int) -> AlphaBeta:
    """Returns the published costs of an all-reduce among workers; four workers share a host. The
    sources are the tables in the programs of MG-WFBP and DeAR (`dear.cost.collectives.TABLES`),
    except for the time per byte on 10GbE: theirs is shorter than a ring can achieve. It is computed
    here: a ring of P ranks sends 2 (P - 1) / P bytes per byte, over links of 10 Gb/s."""
    table = TABLES["10gbe" if network == "10GbE" else "56gbib"]
    alpha, beta = table[workers]
    if network == "10GbE" and workers > 4:
        beta = 2 * (workers - 1) / workers / WIRE_BYTES_PER_S
    return AlphaBeta(alpha_s=alpha, beta_s_per_byte=beta)


def step_s(profile: Profile, algorithm: str, options: Options, network: str, workers: int) -> float:
    """Returns the seconds of a step by the event model."""
    costs = halved(cost(network, workers))
    built = algorithm_options(algorithm, dict(options))
    return foresee(profile, algorithm, built, costs, workers).step_s


@functools.cache
def _profile(model: str, batch_size: int) -> Profile:
    return load(path_of(model, DEVICE, batch_size))


def rates(records: Sequence[Record]) -> list[Rate]:
    """Returns every published rate of ddl-benchmarks together with ours. `records` are records of
    emulated trials; only valid records with the same settings are used."""
    with (_PUBLISHED / "ddl_benchmarks.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [_rate(row, records) for row in rows]


def _rate(row: Mapping[str, str], records: Sequence[Record]) -> Rate:
    batch_size, gpus, hosts = (int(row[key]) for key in ("batch_size", "gpus", "hosts"))
    algorithm, options = METHODS[row["method"]]
    profile = _profile(MODELS[row["model"]], batch_size)
    seconds = step_s(profile, algorithm, options, row["network"], gpus)
    place = {
        "model": f"{profile.model}@{DEVICE}",
        "batch_size": profile.batch_size,
        "network": NETWORKS[row["network"]],
        "world_size": gpus,
        "ranks_per_host": gpus // hosts,
        "algorithm": algorithm,
        "options": settings(algorithm_options(algorithm, dict(options))),
        "profile_digest": profile.digest,
    }
    return Rate(
        model=row["model"],
        batch_size=batch_size,
        network=row["network"],
        gpus=gpus,
        hosts=hosts,
        method=row["method"],
        published=float(row["samples_per_s"]),
        computed=gpus * batch_size / seconds,
        measured=_measured(place, records),
    )


def _measured(place: Mapping[str, object], records: Sequence[Record]) -> float | None:
    """Returns the newest valid rate of an emulated trial with these settings."""
    rates = [
        record.throughput.value
        for record in records
        if record.fabric.kind == "emulated"
        and record.throughput is not None
        and not record.fault
        and flag(record) is None
        and all(record.trial.get(key) == value for key, value in place.items())
    ]
    return rates[-1] if rates else None


def table(compared: Sequence[Rate]) -> str:
    """Returns the table of published and our rates, relative to those of `BASELINE`."""
    others = [method for method in METHODS if method != BASELINE]
    titles = [f"{method}: published, ours, off" for method in others]
    lines = [[*_PLACE, "GPUs", "hosts", *titles, f"rate of {BASELINE}: published, ours, off"]]
    for place in _places(compared):
        by_method = {rate.method: rate for rate in place}
        base = by_method[BASELINE]
        line = [f"{base.model}, {base.batch_size}", base.network, str(base.gpus), str(base.hosts)]
        for method in others:
            rate = by_method[method]
            theirs, ours = rate.published / base.published, rate.ours / base.ours
            measured = rate.measured is not None and base.measured is not None
            line.append(f"{theirs:.2f}, {ours:.2f}{'*' * measured}, {ours / theirs - 1:+.0%}")
        star = "*" * (base.measured is not None)
        off = base.ours / base.published - 1
        lines.append([*line, f"{base.published:.0f}, {base.ours:.0f}{star}, {off:+.0%}"])
    return _markdown(lines, 2)


def _markdown(lines: Sequence[Sequence[str]], texts: int) -> str:
    right = [index >= texts for index in range(len(lines[0]))]
    return markdown(lines, right, padded=False).rstrip("\n")


def _places(compared: Sequence[Rate]) -> list[list[Rate]]:
    return list(grouped(compared, lambda rate: (rate.model, rate.network, rate.gpus)).values())


def summary(compared: Sequence[Rate]) -> str:
    """Returns the table of the median and largest errors of ratios and rates by method."""
    ratio_title = f"ratio to {BASELINE}: median, largest error"
    lines = [["method", ratio_title, "rate: median, largest error"]]
    places = [{rate.method: rate for rate in place} for place in _places(compared)]
    for method in METHODS:
        pairs = [(place[method], place[BASELINE]) for place in places if method in place]
        rates = [rate.ours / rate.published - 1 for rate, _ in pairs]
        ratios = [
            (rate.ours / base.ours) / (rate.published / base.published) - 1 for rate, base in pairs
        ]
        ratio = "" if method == BASELINE else _errors(ratios)
        lines.append([method, ratio, _errors(rates)])
    return _markdown(lines, 1)


def _errors(errors: Sequence[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.0%}, {max(errors, key=abs):+.0%}"


def dear() -> str:
    """Returns the table of DeAR's computed gains over the other methods on 64 GPUs."""
    lines = [[*_PLACE, "over the best", *(f"over {name}" for name in _RIVALS)]]
    for network in NETWORKS:
        for model, batch_size in _OF_DEAR:
            profile = _profile(model, batch_size)
            seconds = {
                name: step_s(profile, name, {}, network, _LARGEST) for name in (*_RIVALS, "dear")
            }
            gains = [seconds[name] / seconds["dear"] for name in _RIVALS]
            cells = [f"{gain:.2f}" for gain in (min(gains), *gains)]
            lines.append([f"{model}, {batch_size}", network, *cells])
    return _markdown(lines, 2)


def committed() -> list[Record]:
    """Returns the records of docs/records that are not withdrawn."""
    withdrawn = catalogue.withdrawn()
    return [
        record
        for name in catalogue.recipes()
        if name not in withdrawn
        for record in load_records(catalogue.FOLDER / name / "records.jsonl")
    ]


def page(text: str) -> str:
    """Returns the page with its tables renewed."""
    compared = rates(committed())
    blocks = {"ratios": table(compared), "errors": summary(compared), "dear": dear()}
    for name, block in blocks.items():
        text = with_block(text, f"anchors: {name}", block)
    return text


def main() -> int:
    """Renews the page; the exit status is 0."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
