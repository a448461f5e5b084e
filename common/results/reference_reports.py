"""The reports of the reference suites, for programs that read them: a file and its lines."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from common.results.faith import doubt
from common.results.records import Record


def reports(records: Iterable[Record]) -> dict[str, Any]:
    """`reports.json` of the reference suites: {rdma: {MODEL_BS: {method: [samples/s, ...]}}}.

    One number per world size, ascending, as text with three decimals; mean rate as they take it.
    What is not believed is left out: these files have no place for a reason. On virtual hosts the
    network's name stands for `rdma`. Where records differ in something that the references have no
    key for, it is added to the nearest: `_lenN` to the model, a fault to the method.

    Raises:
        ValueError: two records would have the same place.
    """
    records = [one for one in records if doubt(one) is None and one.trial["algorithm"] != "none"]
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
    found = [one for one in records if doubt(one) is None and one.trial["algorithm"] != "none"]
    lines = []
    for record in found:
        rates = _rates(record)
        lines.append(f"Speed:  ({statistics.fmean(rates):.3f}, {statistics.pstdev(rates):.3f})")
    lines.append("==== All Reports ======")
    for rdma, tasks in reports(records).items():
        for methods in tasks.values():
            for method, values in methods.items():
                lines.append(",".join([f"rdma:{rdma}", method, *values]))
    return lines


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
