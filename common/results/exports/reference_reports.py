"""Reports and logs in the reference suites' formats, and a table that compares reports."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from common.results.records import Record
from common.results.tables.cells import Column, number, numbers, texts
from common.results.tables.table import Table
from common.results.validity import flag
from dear.algorithms.aliases import suite_name
from dear.errors import UserError

_ELEMENTS_PER_MB = (1 << 20) // 4
_LOG = re.compile(
    r"rdma-(.+)-method-(.+)-dnn-(.+)-bs-(\d+)-nworker-(\d+)-compressor-(.+)-thres-(.+)\.log"
)
_TOTAL = re.compile(r"Total .*[CG]PU\(s\): ([\d.eE+-]+|nan)\b")
Reports: TypeAlias = dict[str, dict[str, dict[str, list[str]]]]
"""Content of a `reports.json`: {rdma: {MODEL_BS: {method: [samples/s, ...]}}}."""


def reports(records: Iterable[Record], worlds: Iterable[int] = ()) -> Reports:
    """Returns the content of `reports.json`: mean samples per second of all workers.

    Each method has a list of rates: one for each world size in `worlds` or in the records, in
    ascending order. A rate is `nan` if there is no record, or only a flagged one. On virtual hosts,
    `rdma` is the network's name. The references have no key for sentence lengths and faults: the
    model's name gets `_lenN`, and the method's name gets the fault. Raises `ValueError` if two
    records would have the same position."""
    records = [r for r in records if r.trial["algorithm"] != "none"]
    places = sorted({*worlds, *(record.trial["world_size"] for record in records)})
    lengths: dict[str, set[object]] = {}
    for record in records:
        lengths.setdefault(_task(record), set()).add(record.trial["sentence_len"])
    rates: dict[tuple[str, str, str], dict[int, float]] = {}
    for record in records:
        trial, task = record.trial, _task(record)
        if len(lengths[task]) > 1:
            task = f"{task}_len{trial['sentence_len']}"
        method = trial["label"] + (f", {record.fault}" if record.fault else "")
        key = (variables(trial)["rdma"], task, method)
        by_world = rates.setdefault(key, {})
        if trial["world_size"] in by_world:
            raise ValueError(f"two results for {' '.join(key)} on {trial['world_size']}")
        by_world[trial["world_size"]] = statistics.fmean(_rates(record))
    return _content(rates, places) or {"0": {}}


def _content(
    rates: Mapping[tuple[str, str, str], Mapping[int, float]], places: Iterable[int]
) -> Reports:
    """Returns reports from the rates by number of workers of each (rdma, MODEL_BS, method)."""
    content: Reports = {}
    for (rdma, task, method), by_world in rates.items():
        texts = [f"{by_world.get(world, math.nan):.3f}" for world in places]
        content.setdefault(rdma, {}).setdefault(task, {})[method] = texts
    return content


def _entries(content: Reports) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields rdma, MODEL_BS, method and rates."""
    for rdma, tasks in content.items():
        for task, methods in tasks.items():
            for method, values in methods.items():
                yield rdma, task, method, values


def report_lines(records: Sequence[Record], worlds: Iterable[int] = ()) -> list[str]:
    """Returns the lines that the reference suites print at the end. First a line per valid record,
    with the mean and the population standard deviation of its rates; then a line
    `rdma:R,METHOD,v1,v2` per method, with a value per world size."""
    lines = []
    for record in records:
        if flag(record) is None and record.trial["algorithm"] != "none":
            rates = _rates(record)
            lines.append(f"Speed:  ({statistics.fmean(rates):.3f}, {statistics.pstdev(rates):.3f})")
    lines.append("==== All Reports ======")
    for rdma, _, method, values in _entries(reports(records, worlds)):
        lines.append(",".join([f"rdma:{rdma}", method, *values]))
    return lines


def load_reports(path: Path) -> Reports:
    """Reads a `reports.json` (ours or a reference suite's), or a suite's folder of logs. Raises
    `UserError` if the file cannot be read, or is no `reports.json`."""
    if path.is_dir():
        return read_logs(path)
    try:
        content: Reports = json.loads(path.read_bytes())
        for *_, values in _entries(content):
            list(map(float, values))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError):
        raise UserError(
            f"{path}: not a reports.json; must be {{rdma: {{MODEL_BS: {{method: [samples/s]}}}}}}"
        ) from None
    return content


def is_reports(name: str) -> bool:
    """Returns True for the name of a `reports.json`, or of a folder with a suite's logs."""
    return name.endswith(".json") or any(map(_LOG.fullmatch, _names(Path(name))))


def read_logs(folder: Path) -> Reports:
    """Reads the logs of a suite's sweep. The rate of a run is the mean of its lines `Total ...`.

    Each method has a list of rates: one for each number of workers among all logs, in ascending
    order. A rate is `nan` if there is no log, or if the log has no such line (the run crashed). If
    a method ran with several compressors or thresholds, its name contains them. Raises `UserError`
    if a log cannot be read."""
    rates: dict[tuple[str, str, str], dict[tuple[str, str], dict[int, float]]] = {}
    for name in sorted(_names(folder)):
        if not (match := _LOG.fullmatch(name)):
            continue
        rdma, method, dnn, bs, world, *variant = match.groups()
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UserError(f"{folder / name}: {error.strerror}") from None
        totals = list(map(float, _TOTAL.findall(text)))
        by_variant = rates.setdefault((rdma, f"{dnn}_{bs}", method), {})
        by_world = by_variant.setdefault((variant[0], variant[1]), {})
        by_world[int(world)] = statistics.fmean(totals) if totals else math.nan
    every = [by_world for variants in rates.values() for by_world in variants.values()]
    named = {}
    for (rdma, task, method), variants in rates.items():
        for (compressor, threshold), by_world in variants.items():
            more = f"-compressor-{compressor}-thres-{threshold}" if len(variants) > 1 else ""
            named[rdma, task, method + more] = by_world
    return _content(named, sorted({world for by_world in every for world in by_world}))


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


@dataclass(frozen=True, kw_only=True)
class Reported:
    """Rates of several reports for one model, method and position in the list of rates."""

    flag: ClassVar[None] = None
    reason: ClassVar[None] = None
    rdma: str
    model: str
    algorithm: str
    place: int
    """Position from 1, because the reports do not contain the number of workers."""
    rates: tuple[float | None, ...]
    """Samples per second, by report; None: not in the report, or `nan` there."""
    status: str = "ok"

    @property
    def ratio(self) -> float | None:
        """Rate of the last report, divided by the rate of the first."""
        first, last = self.rates[0], self.rates[-1]
        return None if not first or last is None else last / first


def side_by_side(by_name: Mapping[str, Reports]) -> Table[Reported]:
    """Returns a table with a row for each rate of any report, and a column per report."""
    rates: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for name, report in by_name.items():
        for *key, values in _entries(report):
            for place, rate in enumerate(map(float, values), start=1):
                known = rates.setdefault((*key, place), {})
                if not math.isnan(rate):
                    known[name] = rate
    rows = [
        Reported(rdma=r, model=t, algorithm=m, place=p, rates=tuple(map(known.get, by_name)))
        for (r, t, m, p), known in rates.items()
    ]
    columns: list[Column[Reported]] = [
        texts("model_bs", "model", weight=0, role="place"),
        texts("rdma", weight=0, role="place"),
        texts("method", "algorithm", weight=0, role="name"),
        Column(title="place", cell=lambda row: number(row.place, str), weight=0),
        *(
            Column(title=name, cell=lambda row, i=i: number(row.rates[i]), weight=1)
            for i, name in enumerate(by_name)
        ),
        numbers("last / first", "ratio", "{:.3f}".format, weight=1),
    ]
    return Table(rows, columns)


def log_name(record: Record) -> str:
    """Returns the name of a trial's log in DeAR's suite."""
    value = variables(record.trial)
    return (
        f"rdma-{value['rdma']}-method-{value['method']}-dnn-{value['dnn']}-bs-{value['bs']}-"
        f"nworker-{value['nworkers']}-compressor-{value['compressor']}-"
        f"thres-{value['threshold']}.log"
    )


def variables(trial: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables of `dear/horovod_mpi_cj.sh` for a trial, in the suite's order. `trial`
    has the JSON values of a trial."""
    options = trial["options"]
    merges = trial["algorithm"] == "mgwfbp" and options.get("merge") in ("greedy", "asc")
    threshold = options.get("threshold_mb") or 0
    return {
        "rdma": str(trial["network"] or trial["launcher_options"].get("rdma", 0)),
        "dnn": trial["model"],
        "bs": str(trial["batch_size"]),
        "nworkers": str(trial["world_size"]),
        "method": suite_name(trial["algorithm"], options),
        "compressor": options.get("compression", "none"),
        "threshold": f"{0 if merges else threshold * _ELEMENTS_PER_MB:.0f}",
        "mgwfbp": str(int(merges)),
        "asc": str(int(options.get("merge") == "asc")),
        "nstreams": str(options.get("channels", 1)),
    } | ({"use_zero": "1"} if options.get("zero") else {})


def link_logs(
    folder: Path, records: Iterable[Record], command: Callable[[Record], str]
) -> list[Path]:
    """Links rank 0's logs of a sweep by the suite's names and writes the suite's commands. Both are
    written to `reference_logs` in the sweep's folder. If an earlier trial has the same name, the
    trial's id is added. `command` returns the command that makes a record's trial again."""
    into = folder / "reference_logs"
    links, lines = {}, []
    for record in records:
        log = folder / record.id / "log-0-rank0.txt"
        if record.trial["algorithm"] == "none" or not log.exists():
            continue
        link = into / log_name(record)
        if link in links:
            link = link.with_name(f"{link.stem}-{record.id}.log")
        links[link] = log
        lines.append(f"{link.name}: {command(record)}")
    if links:
        into.mkdir(exist_ok=True)
        (into / "commands.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for link, log in links.items():
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(log, into))
    return list(links)


def _task(record: Record) -> str:
    return f"{record.trial['model']}_{record.trial['batch_size']}"


def _rates(record: Record) -> list[float]:
    """Returns samples per second of all workers, by iteration; a `nan` for a flagged record."""
    trial = record.trial
    if flag(record) is not None:
        return [math.nan]
    return [
        trial["world_size"] * trial["batch_size"] * len(block) / sum(block)
        for repeat in record.iters
        for block in repeat
    ]
