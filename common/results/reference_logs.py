"""Logs of the reference suites as records, so that their results stand in the same tables.

  python -m common.results.reference_logs FOLDER [--into logs/NAME]

reads every `*.log` below FOLDER: those that DeAR's `benchmarks.py` names
`rdma-R-method-M-dnn-D-bs-B-nworker-N-compressor-C-thres-T.log`, and others whose lines tell the
same. Records are marked `imported`: what a log does not tell they do not know, such as whether the
training was right.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.results import stats, store
from common.results.records import IMPORTED, Record, Throughput
from common.results.records.trust import Check
from common.results.store import Comparison
from dear.errors import UserError

_NAME = re.compile(
    r"rdma-(?P<rdma>\d)-method-(?P<method>.+)-dnn-(?P<dnn>.+)-bs-(?P<bs>\d+)-nworker-(?P<nworkers>\d+)"
    r"-compressor-(?P<compressor>.+)-thres-(?P<threshold>-?\d+)\.log"
)
_DATE = re.compile(r"^#Date:\s*(.+)$", re.MULTILINE)
_COMMAND = re.compile(r"^#CMD:\s*(.+)$", re.MULTILINE)
_ITERATION = re.compile(r"^Iter #\d+: ([\d.]+) (img|sentences)/sec per (GPU|CPU)", re.MULTILINE)
_TOTAL = re.compile(r"^.*Total .*(?:GPU|CPU)\(s\).*$", re.MULTILINE)
_WORKERS = re.compile(r"on (\d+) (GPU|CPU)\(s\)")
_FACTS = {
    "dnn": re.compile(r"^Model: (\S+)", re.MULTILINE),
    "bs": re.compile(r"^Batch size: (\d+)", re.MULTILINE),
    "senlen": re.compile(r"Sentence len: (\d+)"),
}


@dataclass(frozen=True, kw_only=True)
class Log:
    """What one log tells."""

    settings: dict[str, str]
    """rdma, method, dnn, bs, nworkers, compressor, threshold and what else the command gave."""
    started: str
    """ISO 8601; empty: not told."""
    command: str
    device: str
    """GPU or CPU."""
    unit: str
    """img or sen."""
    totals: list[float]
    """Samples per second of all workers, one of each try."""
    iterations: list[list[float]]
    """Samples per second and worker, by try."""

    @property
    def speed(self) -> tuple[float, float]:
        """Mean and population standard deviation over the tries, as the references report."""
        return statistics.fmean(self.totals), statistics.pstdev(self.totals)


def parse(path: Path) -> Log:
    """Reads one log.

    Raises:
        UserError: it tells no result, or not what of.
    """
    text = path.read_text(errors="replace")
    totals = [_last_number(line) for line in _TOTAL.findall(text)]
    if not totals:
        raise UserError(f"{path} is no log of a run that ended: no line with `Total` and `GPU(s)`")
    command = _first(_COMMAND, text)
    named = _NAME.fullmatch(path.name)
    settings = dict(word.partition("=")[::2] for word in re.findall(r"\b[a-z]\w*=[^;\s]*", command))
    settings |= {key: found[1] for key, rule in _FACTS.items() if (found := rule.search(text))}
    settings |= named.groupdict() if named else {}
    workers = _WORKERS.search(text)
    settings["nworkers"] = workers[1] if workers else settings.get("nworkers", "")
    folder = re.match(r"cd\s+([\w-]+)\s*;", command)
    if folder:
        settings.setdefault("method", folder[1])
    missing = [key for key in ("method", "dnn", "bs", "nworkers") if not settings.get(key)]
    if missing:
        raise UserError(f"{path}: neither its name nor its lines tell {', '.join(missing)}")
    iterations = [
        [float(rate) for rate, _, _ in _ITERATION.findall(part)]
        for part in re.split(r"^.*Total .*(?:GPU|CPU)\(s\).*$", text, flags=re.MULTILINE)[:-1]
    ]
    return Log(
        settings=settings,
        started=_date(_first(_DATE, text)),
        command=command,
        device=workers[2] if workers else "GPU",
        unit="sen" if "sen/sec" in text or "sentences/sec" in text else "img",
        totals=totals,
        iterations=iterations,
    )


def _first(rule: re.Pattern[str], text: str) -> str:
    found = rule.search(text)
    return found[1].strip() if found else ""


def _last_number(line: str) -> float:
    """The word after the last colon, as the references' parser takes it."""
    return float(line.split(": ")[-1].split()[0])


def _date(text: str) -> str:
    if not text:
        return ""
    try:
        return datetime.datetime.strptime(text, "%b %d %Y %H:%M:%S").isoformat()
    except ValueError:
        return ""


def record_of(log: Log) -> Record:
    """One block per iteration, of one step: how many there were the logs do not tell."""
    settings = log.settings
    batch, workers = int(settings["bs"]), int(settings["nworkers"])
    tries = zip(log.totals, log.iterations, strict=True)
    rates = [per_worker or [total / workers] for total, per_worker in tries]
    iters = [[[batch / rate] for rate in one] for one in rates]
    threshold, compressor = settings.get("threshold", "0"), settings.get("compressor", "none")
    label = settings["method"]
    label += f"({compressor})" if compressor not in ("none", label) else ""
    trial: dict[str, Any] = {
        "algorithm": settings["method"],
        "options": {"threshold": threshold, "compressor": compressor},
        "model": settings["dnn"],
        "batch_size": batch,
        "sentence_len": int(settings["senlen"]) if settings.get("senlen") else None,
        "world_size": workers,
        "label": label,
        "launcher": "imported",
        "launcher_options": {"rdma": int(settings.get("rdma", 0))},
        "device": {"GPU": "cuda", "CPU": "cpu"}[log.device],
        "network": None,
        "fault": None,
        "ranks_per_host": None,
    }
    text = json.dumps([trial, log.command, log.started], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    found = stats.throughput([[step for [step] in one] for one in iters], batch * workers)
    return Record(
        id=f"{trial['model']}-bs{batch}-n{workers}-{label}-{digest[:8]}",
        hash=digest,
        trial=trial,
        fabric=IMPORTED,
        status="ok",
        started=log.started,
        duration_s=0.0,
        machine={},
        iters=iters,
        check=Check(finding="a log of the references does not tell"),
        throughput=Throughput(
            value=found.value, unit=f"{log.unit}/s", ci_low=found.low, ci_high=found.high, n=found.n
        ),
        notes=[f"imported: {log.command or 'a log without its command'}"],
        run=digest,
    )


def read(folder: Path) -> tuple[list[Record], list[str]]:
    """The records of all logs below `folder`, and why others are none.

    Raises:
        UserError: there is no log that tells a result.
    """
    paths = sorted(folder.rglob("*.log"))
    records, refused = [], []
    for path in paths:
        try:
            records.append(record_of(parse(path)))
        except UserError as error:
            refused.append(str(error))
    if not records:
        why = refused[0] if refused else f"there is no *.log in {folder}"
        raise UserError(why)
    return list(store.latest(records).values()), refused


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="with *.log files, at any depth")
    parser.add_argument("--into", type=Path, default=Path("logs/imported"), help="a new folder")
    options = parser.parse_args(arguments)
    try:
        records, refused = read(options.folder)
        if options.into.exists():
            raise UserError(f"{options.into} exists; import into a new folder")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.into.mkdir(parents=True)
    for record in records:
        store.append(options.into / "records.jsonl", record)
    labels = list(dict.fromkeys(record.label for record in records))
    Comparison(compare_to=labels[0], trials=tuple(one.hash for one in records)).save(options.into)
    for line in refused:
        print(f"left out: {line}", file=sys.stderr)
    print(f"{len(records)} records in {options.into}; {len(refused)} logs left out")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
