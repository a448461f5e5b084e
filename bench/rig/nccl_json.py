"""Measurements of collectives as nccl-tests writes them with `-J`, for tools that read its JSON.

The keys are those of version 2 of its file (NVIDIA/nccl-tests, src/util.cu): one program, so one
operation, per file; times in microseconds, bandwidths in 1e9 bytes per second, sizes in bytes. Like
there, a time is that of the slowest process of each iteration, and their mean. What does not apply
is null, and unlike there the environment is not the whole one.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.rig import table
from dear.errors import UserError

VERSION = 2
_BYTES = 4
"""Of a float32."""
_TIME = "%Y-%m-%d %H:%M:%S"


def write(
    folder: Path,
    samples: Sequence[Any],
    *,
    world: int,
    began: datetime.datetime,
    args: Sequence[str],
    ranks: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str],
) -> list[Path]:
    """A new file per engine and operation, `ENGINE-OP.json`; an older one is never overwritten.

    Args:
        samples: all rounds, of `bench.collectives.Sample`.
        ranks: what is known of each: rank, pid, host.

    Raises:
        UserError: a file is there already, or cannot be written.
    """
    files: dict[tuple[str, str], dict[int, list[Any]]] = {}
    for sample in samples:
        files.setdefault((sample.engine, sample.op), {}).setdefault(sample.nbytes, []).append(
            sample
        )
    paths = []
    for (engine, op), by_size in files.items():
        results = [_result(op, nbytes, rounds, world) for nbytes, rounds in by_size.items()]
        path = folder / f"{engine}-{op}.json"
        told = {
            "version": VERSION,
            "start_time": began.strftime(_TIME),
            "args": list(args),
            "env": [f"{name}={value}" for name, value in environment.items()],
            "nccl_version": None,
            "config": _config(list(by_size), results, world, ranks, engine),
            "results": results,
            **_summary(op, results),
            "errors": [],
            "end_time": datetime.datetime.now().strftime(_TIME),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("x") as file:
                json.dump(told, file)
        except OSError as error:
            raise UserError(f"--nccl-json: {path}: {error.strerror}") from None
        paths.append(path)
    return paths


def _config(
    sizes: Sequence[int],
    results: Sequence[Mapping[str, Any]],
    world: int,
    ranks: Sequence[Mapping[str, Any]],
    engine: str,
) -> dict[str, Any]:
    devices = [
        {
            **{"rank": place, "group": 0, "pid": one.get("pid"), "hostname": one.get("host")},
            **{"device": None, "device_hex": None, "device_info": f"CPU, {engine}"},
        }
        for place, one in enumerate(one for one in ranks if one.get("engine") == engine)
    ]
    return {
        **{"nthreads": 1, "ngpus": 0, "nranks": world},
        **{"minimum_bytes": min(sizes), "maximum_bytes": max(sizes), "step_bytes": None},
        **{"warmup_iters": None, "iterations": max(r["actual_iterations"] for r in results)},
        **{"aggregated_iterations": 1, "validation": 1, "graph": 0},
        **{"blocking_collectives": "true", "per_iter_timing": "true", "parallel_init": "false"},
        "devices": devices,
    }


def _result(op: str, nbytes: int, rounds: Sequence[Any], world: int) -> dict[str, Any]:
    times_us = [1e6 * step for one in rounds for step in one.steps_s()]
    mean_us = statistics.fmean(times_us)
    alg_bw = nbytes / mean_us / 1e3
    measured = {
        "time": mean_us,
        "alg_bw": alg_bw,
        "bus_bw": alg_bw * table.bus_factor(op, world),
        "nwrong": sum(one.wrong for one in rounds),
    }
    # An all-reduce works in place.
    where, other = ("in_place", "out_of_place")[:: 1 if op == "all_reduce" else -1]
    # Of a gather or scatter theirs counts what each rank has.
    part = 1 if op == "all_reduce" else world
    spread = statistics.pstdev(times_us)
    by_rank = [
        [1e6 * step for one in rounds for step in one.times_s[rank]] for rank in range(world)
    ]
    return {
        "size": nbytes,
        "count": nbytes // _BYTES // part,
        "type": "float",
        "redop": "none" if op == "all_gather" else "sum",
        "root": "-1",
        where: measured,
        other: None,
        f"{where}_per_iter": {
            **{"min_us": min(times_us), "max_us": max(times_us), "avg_us": mean_us},
            **{f"p{p}_us": table.percentile(times_us, p) for p in (50, 95, 99)},
            **{"stdev_us": spread, "cv_pct": 100 * spread / mean_us},
            **{"times_us": times_us, "per_process_max_times_us": by_rank},
        },
        "actual_iterations": len(times_us),
        "experiment_name": op,
    }


def _summary(op: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    bodies = [one["in_place"] or one["out_of_place"] for one in results]
    wrong = sum(body["nwrong"] for body in bodies)
    mean = statistics.fmean(body["bus_bw"] for body in bodies)
    return {
        "out_of_bounds": {"count": wrong, "okay": "false" if wrong else "true"},
        "average_bus_bandwidth": {"bandwidth": mean, "okay": "unchecked"},
    }
