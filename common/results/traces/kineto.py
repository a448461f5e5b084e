"""One rank's file in the form of PyTorch's profiler, as HolisticTraceAnalysis reads it.

It takes for communication what has the name of one of NCCL's kernels, and for computation every
other one, by stream. So a collective is called `ncclKernel_all_reduce` here, whatever has moved it,
and what a CPU has computed, or waited in its place, is a kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from common.results.traces.spans import RankSpans, Span, lanes

COMPUTE_STREAM, FIRST_COMM_STREAM = 7, 20
_HOST = 1
"""The thread that trains, beside the streams."""


def events(rank: RankSpans, world_size: int) -> dict[str, Any]:
    """What is in the rank's file."""
    numbers = itertools.count(1)
    listed = [*_host(rank)]
    for span in rank.computes:
        listed += _kernel(rank, span.name, span, COMPUTE_STREAM, next(numbers))
    for lane, span in lanes(rank.transfers):
        name = f"ncclKernel_{span.name}"
        listed += _kernel(rank, name, span, FIRST_COMM_STREAM + lane, next(numbers))
    told: dict[str, Any] = {
        "schemaVersion": 1,
        "distributedInfo": {"rank": rank.number, "world_size": world_size, "backend": "other"},
        "displayTimeUnit": "ms",
        "traceEvents": listed,
    }
    if not rank.computes:
        told["note"] = "older evidence, or a GPU: it does not tell when the rank computed"
    return told


def _host(rank: RankSpans) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": rank.number,
           "args": {"name": f"rank {rank.number}"}}  # fmt: skip
    for step, span in enumerate(rank.steps, start=1):
        yield _slice(rank, f"ProfilerStep#{step}", "user_annotation", span, _HOST)
    for span in (*rank.computes, *rank.waits):
        yield _slice(rank, span.name, "cpu_op", span, _HOST)


def _kernel(
    rank: RankSpans, name: str, span: Span, stream: int, number: int
) -> Iterator[dict[str, Any]]:
    """On its stream, and the call that has launched it."""
    launched = span.args.get("enqueued_us", span.start_us)
    args = {"correlation": number, "stream": stream, "device": rank.number}
    call = Span(name="cudaLaunchKernel", start_us=launched, end_us=launched + 0.001)
    yield _slice(rank, call.name, "cuda_runtime", call, _HOST) | {"args": {"correlation": number}}
    found = _slice(rank, name, "kernel", span, stream)
    yield found | {"args": {**args, **span.args}}


def _slice(rank: RankSpans, name: str, kind: str, span: Span, tid: int) -> dict[str, Any]:
    place = {"pid": rank.number, "tid": tid}
    times = {"ts": span.start_us, "dur": round(span.length_us, 3)}
    return {"ph": "X", "cat": kind, "name": name, **place, **times, "args": {**span.args}}
