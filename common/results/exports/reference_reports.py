"""What the reference suites leave behind: reports, theirs and ours, side by side; logs by name."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.results.records import Record
from common.results.tables.table import Column, Table, significant
from common.results.validity import flag
from dear.errors import UserError

_ELEMENTS_PER_MB = (1 << 20) // 4


def reports(records: Iterable[Record]) -> dict[str, Any]:
    """`reports.json` of the reference suites: {rdma: {MODEL_BS: {method: [samples/s, ...]}}}.

    One number per world size, ascending, as text with three decimals; mean rate as they take it.
    What is not believed is left out: these files have no place for a reason. On virtual hosts the
    network's name stands for `rdma`. Where records differ in something that the references have no
    key for, it is added to the nearest: `_lenN` to the model, a fault to the method.

    Raises:
        ValueError: two records would have the same place.
    """
    records = _reportable(records)
    lengths: dict[str, set[Any]] = {}
    for record in records:
        lengths.setdefault(_task(record), set()).add(record.trial["sentence_len"])
    found: dict[str, Any] = {}
    for record in records:
        trial, task = record.trial, _task(record)
        if len(lengths[task]) > 1:
            task = f"{task}_len{trial['sentence_len']}"
        rdma = trial["network"] or str(trial["launcher_options"].get("rdma", 0))
        method = trial["label"] + (f", {record.fault}" if record.fault else "")
        by_world = found.setdefault(rdma, {}).setdefault(task, {}).setdefault(method, {})
        if trial["world_size"] in by_world:
            raise ValueError(f"two results for {rdma} {task} {method} on {trial['world_size']}")
        by_world[trial["world_size"]] = statistics.fmean(_rates(record))
    for tasks in found.values():
        for methods in tasks.values():
            for method, by_world in methods.items():
                methods[method] = [f"{by_world[world]:.3f}" for world in sorted(by_world)]
    return found or {"0": {}}


def report_lines(records: Sequence[Record]) -> list[str]:
    """What the reference suites print at the end: of each result mean and population standard
    deviation of its rates, then a line `rdma:R,METHOD,v1,v2` per method, v by world size."""
    lines = []
    for record in _reportable(records):
        rates = _rates(record)
        lines.append(f"Speed:  ({statistics.fmean(rates):.3f}, {statistics.pstdev(rates):.3f})")
    lines.append("==== All Reports ======")
    for rdma, tasks in reports(records).items():
        for methods in tasks.values():
            for method, values in methods.items():
                lines.append(",".join([f"rdma:{rdma}", method, *values]))
    return lines


def _reportable(records: Iterable[Record]) -> list[Record]:
    """Returns the valid records of several workers."""
    return [r for r in records if flag(r) is None and r.trial["algorithm"] != "none"]


def load_reports(path: Path) -> dict[str, Any]:
    """A file that `reports` or a reference suite has made.

    Raises:
        UserError: there is none, or it is no such file.
    """
    try:
        found = json.loads(path.read_text())
        for tasks in found.values():
            for methods in tasks.values():
                for values in methods.values():
                    list(map(float, values))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError):
        raise UserError(
            f"{path}: is no reports.json: must be {{rdma: {{MODEL_BS: {{method: [samples/s]}}}}}}"
        ) from None
    return found


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What several reports say of one model, method and place in the list of its world sizes."""

    rdma: str
    model: str
    algorithm: str
    place: int
    """From 1: the reports do not tell the number of workers."""
    rates: tuple[float | None, ...]
    """Samples per second, by report; None where it says nothing of this."""
    status: str = "ok"

    @property
    def ratio(self) -> float | None:
        """Of the last report over the first."""
        first, last = self.rates[0], self.rates[-1]
        return None if not first or last is None else last / first


def side_by_side(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each number that any of the reports has.

    Args:
        found: reports by name.
    """
    rates: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for name, report in found.items():
        for rdma, tasks in report.items():
            for task, methods in tasks.items():
                for method, values in methods.items():
                    for place, value in enumerate(values, start=1):
                        rates.setdefault((rdma, task, method, place), {})[name] = float(value)
    rows = [
        Reported(rdma=r, model=t, algorithm=m, place=p, rates=tuple(of.get(name) for name in found))
        for (r, t, m, p), of in rates.items()
    ]
    columns = [
        Column(title="model_bs", text=lambda row: row.model, numeric=False, weight=0),
        Column(title="rdma", text=lambda row: row.rdma, numeric=False, weight=0),
        Column(title="method", text=lambda row: row.algorithm, numeric=False, weight=0),
        Column(title="place", text=lambda row: str(row.place), weight=0),
        *(Column(title=name, text=_reported(at), weight=1) for at, name in enumerate(found)),
        Column(
            title="last / first",
            text=lambda row: "" if row.ratio is None else f"{row.ratio:.3f}",
            weight=1,
        ),
    ]
    return Table(rows, columns)


def _reported(at: int) -> Any:
    return lambda row: "" if row.rates[at] is None else significant(row.rates[at])


def log_name(record: Record) -> str:
    """The file of a trial's log as DeAR's suite names it."""
    said = variables(record)
    keys = ("rdma", "method", "dnn", "bs", "nworkers", "compressor", "threshold")
    rdma, method, dnn, bs, workers, compressor, threshold = (said[key] for key in keys)
    return (
        f"rdma-{rdma}-method-{method}-dnn-{dnn}-bs-{bs}-nworker-{workers}-"
        f"compressor-{compressor}-thres-{threshold}.log"
    )


def variables(record: Record) -> dict[str, str]:
    """The variables with which `dear/horovod_mpi_cj.sh` makes the trial, in the suite's order."""
    trial = record.trial
    options = trial["options"]
    merges = trial["algorithm"] == "mgwfbp" and options.get("merge") in ("greedy", "asc")
    threshold = options.get("threshold_mb") or 0
    return {
        "rdma": str(trial["network"] or trial["launcher_options"].get("rdma", 0)),
        "dnn": trial["model"],
        "bs": str(trial["batch_size"]),
        "nworkers": str(trial["world_size"]),
        "method": trial["algorithm"],
        "compressor": options.get("compression", "none"),
        "threshold": f"{0 if merges else threshold * _ELEMENTS_PER_MB:.0f}",
        "mgwfbp": str(int(merges)),
        "asc": str(int(options.get("merge") == "asc")),
        "nstreams": str(options.get("channels", 1)),
    }


def command(record: Record) -> str:
    """What runs the trial again, as the suite's commands do."""
    said = " ".join(f"{key}={value}" for key, value in variables(record).items())
    return f"cd dear;{said} ./horovod_mpi_cj.sh"


def link_logs(folder: Path, records: Iterable[Record]) -> list[Path]:
    """Gives rank 0's logs of a sweep in `folder` the suite's names, below `reference_logs`, and
    writes beside them with which command each is made (`commands.txt`).

    Trials that differ in nothing which such a name tells keep one of it; the last counts.
    """
    into = folder / "reference_logs"
    links, lines = {}, []
    for record in records:
        log = folder / record.id / "log-0-rank0.txt"
        if record.trial["algorithm"] == "none" or not log.exists():
            continue
        link = into / log_name(record)
        links[link] = log
        lines.append(f"{link.name}: {command(record)}")
    if links:
        into.mkdir(exist_ok=True)
        (into / "commands.txt").write_text("\n".join(lines) + "\n")
    for link, log in links.items():
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(log, into))
    return list(links)


def _task(record: Record) -> str:
    return f"{record.trial['model']}_{record.trial['batch_size']}"


def _rates(record: Record) -> list[float]:
    """Samples per second of all workers, by iteration."""
    trial = record.trial
    return [
        trial["world_size"] * trial["batch_size"] * len(block) / sum(block)
        for repeat in record.iters
        for block in repeat
    ]
