"""Published rates of others beside ours, for docs/validation.md.

`python -m common.results.committed.published` writes them; a test checks that the page is current.

Ours are measured where a committed record has the same place, else computed: an event model
(`common.virtual`) takes the layer profile, the algorithm's plan, and published costs of all-reduce.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.models.profile import Profile, load, path_of
from common.paths import CONFIGS, ROOT
from common.results.committed import catalogue
from common.results.committed.pages import written
from common.results.records import Record
from common.results.store import load as load_records
from common.results.validity import flag_text
from common.virtual.foresee import foresee, halved
from dear.cost.collectives import TABLES
from dear.cost.fit import AlphaBeta
from dear.training.algorithm import algorithm_options

PAGE = ROOT / "docs" / "validation.md"
_PUBLISHED = CONFIGS / "published"
DEVICE = "rtx2080ti-modelled"
MODELS = {"ResNet-50": "resnet50", "BERT-Base": "bert_base"}
BASELINE = "BSP-A2A"
METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    BASELINE: ("mgwfbp", {"merge": "threshold", "threshold_mb": 512.0}),
    "WFBP-A2A": ("wfbp", {}),
    "MG-WFBP": ("mgwfbp", {}),
    "ByteScheduler-A2A": ("bytescheduler", {}),
}
"""What the suite calls a method, and the algorithm and options that do the same: its BSP fuses all
gradients, up to 512 MB, into one message."""
NETWORKS = {"10GbE": "10gbe", "100GbIB": "100gbib"}
WIRE_BYTES_PER_S = 10e9 / 8 * 1448 / 1514
"""What 10 Gb/s Ethernet carries for TCP: of 1514 bytes of a frame 1448 are payload."""
_LARGEST = 64
_OF_DEAR = (
    ("resnet50", 64),
    ("densenet201", 32),
    ("inceptionv4", 64),
    ("bert_base", 64),
    ("bert", 32),
)
_RIVALS = ("ddp", "horovod", "mgwfbp", "wfbp", "bytescheduler")


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A published rate, and ours."""

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
    """Emulated; None where no record has the same place."""

    @property
    def ours(self) -> float:
        return self.computed if self.measured is None else self.measured


def cost(network: str, workers: int) -> AlphaBeta:
    """Published costs of an all-reduce among workers of which four share a host.

    Start-ups, and times per byte of InfiniBand and within a host, are the fits that the programs of
    MG-WFBP and DeAR ship (`dear.cost.collectives.TABLES`). Their times per byte on 10GbE are below
    what a ring's 2 (P - 1) / P bytes take on a line of 10 Gb/s; here they take that.
    """
    table = TABLES["10gbe" if network == "10GbE" else "56gbib"]
    alpha, beta = table[workers]
    if network == "10GbE" and workers > 4:
        beta = 2 * (workers - 1) / workers / WIRE_BYTES_PER_S
    return AlphaBeta(alpha_s=alpha, beta_s_per_byte=beta)


def step_s(
    profile: Profile, algorithm: str, options: Mapping[str, Any], network: str, workers: int
) -> float:
    """Seconds of a step, computed."""
    costs = halved(cost(network, workers))
    built = algorithm_options(algorithm, dict(options))
    return foresee(profile, algorithm, built, costs, workers).step_s


@functools.cache
def _profile(model: str, batch_size: int) -> Profile:
    return load(path_of(model, DEVICE, batch_size))


def rates(records: Sequence[Record]) -> list[Rate]:
    """Every published rate of ddl-benchmarks beside ours.

    Args:
        records: emulated ones, of which the believed ones of the same place are taken.
    """
    with (_PUBLISHED / "ddl_benchmarks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [_rate(row, records) for row in rows]


def _rate(row: Mapping[str, str], records: Sequence[Record]) -> Rate:
    model, batch_size, gpus = MODELS[row["model"]], int(row["batch_size"]), int(row["gpus"])
    algorithm, options = METHODS[row["method"]]
    seconds = step_s(_profile(model, batch_size), algorithm, options, row["network"], gpus)
    return Rate(
        model=row["model"],
        batch_size=batch_size,
        network=row["network"],
        gpus=gpus,
        hosts=int(row["hosts"]),
        method=row["method"],
        published=float(row["samples_per_s"]),
        computed=gpus * batch_size / seconds,
        measured=_measured(row, algorithm, options, records),
    )


def _measured(
    row: Mapping[str, str], algorithm: str, options: Mapping[str, Any], records: Sequence[Record]
) -> float | None:
    """The rate of the newest believed record of the same model, cluster and method."""
    gpus, hosts = int(row["gpus"]), int(row["hosts"])
    profile = _profile(MODELS[row["model"]], int(row["batch_size"]))
    place = {
        "model": f"{profile.model}@{DEVICE}",
        "batch_size": profile.batch_size,
        "network": NETWORKS[row["network"]],
        "world_size": gpus,
        "ranks_per_host": gpus // hosts,
        "algorithm": algorithm,
        "options": dataclasses.asdict(algorithm_options(algorithm, dict(options))),
        "profile_digest": profile.digest,
    }
    rates = [
        record.throughput.value
        for record in records
        if record.fabric.kind == "emulated"
        and record.throughput is not None
        and not record.fault
        and flag_text(record) is None
        and all(record.trial.get(key) == value for key, value in place.items())
    ]
    return rates[-1] if rates else None


def table(found: Sequence[Rate]) -> str:
    """Each place in a line: published and our rates beside those of `BASELINE`, and how far off."""
    others = [method for method in METHODS if method != BASELINE]
    lines = [
        "| model, batch | network | GPUs | hosts | "
        + " | ".join(f"{method}: published, ours, off" for method in others)
        + f" | rate of {BASELINE}: published, ours, off |",
        "|---|---|--:|--:|" + "--:|" * (len(others) + 1),
    ]
    for place in _places(found):
        by_method = {rate.method: rate for rate in place}
        base = by_method[BASELINE]
        cells = []
        for method in others:
            rate = by_method[method]
            theirs, ours = rate.published / base.published, rate.ours / base.ours
            measured = rate.measured is not None and base.measured is not None
            cells.append(f"{theirs:.2f}, {ours:.2f}{'*' * measured}, {ours / theirs - 1:+.0%}")
        star = "*" * (base.measured is not None)
        cells.append(
            f"{base.published:.0f}, {base.ours:.0f}{star}, {base.ours / base.published - 1:+.0%}"
        )
        lines.append(
            f"| {base.model}, {base.batch_size} | {base.network} | {base.gpus} | {base.hosts} | "
            f"{' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _places(found: Sequence[Rate]) -> list[list[Rate]]:
    places: dict[tuple[str, str, int], list[Rate]] = {}
    for rate in found:
        places.setdefault((rate.model, rate.network, rate.gpus), []).append(rate)
    return list(places.values())


def summary(found: Sequence[Rate]) -> str:
    """How far off ratios and rates are, by method: the median, and the largest."""
    lines = [
        f"| method | ratio to {BASELINE}: median, largest error | rate: median, largest error |",
        "|---|--:|--:|",
    ]
    places = _places(found)
    for method in METHODS:
        pairs = [
            (rate, next(other for other in place if other.method == BASELINE))
            for place in places
            for rate in place
            if rate.method == method
        ]
        rates = [rate.ours / rate.published - 1 for rate, _ in pairs]
        ratios = [
            (rate.ours / base.ours) / (rate.published / base.published) - 1 for rate, base in pairs
        ]
        ratio = "" if method == BASELINE else _errors(ratios)
        lines.append(f"| {method} | {ratio} | {_errors(rates)} |")
    return "\n".join(lines)


def _errors(errors: Sequence[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.0%}, {max(errors, key=abs):+.0%}"


def dear() -> str:
    """What DeAR gains over each of the others on 64 GPUs, computed, and what it published."""
    lines = [
        "| model, batch | network | over the best | "
        + " | ".join(f"over {name}" for name in _RIVALS)
        + " |",
        "|---|---|" + "--:|" * (1 + len(_RIVALS)),
    ]
    for network in NETWORKS:
        for model, batch_size in _OF_DEAR:
            profile = _profile(model, batch_size)
            seconds = {
                name: step_s(profile, name, {}, network, _LARGEST) for name in (*_RIVALS, "dear")
            }
            gains = [seconds[name] / seconds["dear"] for name in _RIVALS]
            cells = " | ".join(f"{gain:.2f}" for gain in (min(gains), *gains))
            lines.append(f"| {model}, {batch_size} | {network} | {cells} |")
    return "\n".join(lines)


def committed() -> list[Record]:
    """The records of docs/records that are not withdrawn."""
    found: list[Record] = []
    for name in catalogue.recipes():
        if name not in catalogue.withdrawn():
            found += load_records(catalogue.FOLDER / name / "records.jsonl")
    return found


def page(text: str) -> str:
    """The text of the page with everything that stands there from here."""
    found = rates(committed())
    blocks = {"ratios": table(found), "errors": summary(found), "dear": dear()}
    for name, block in blocks.items():
        text = written(text, f"anchors: {name}", block)
    return text


def main() -> int:
    PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
