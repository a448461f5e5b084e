"""Horovod's own settings reach it, and are refused where it cannot change them any more."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dear.algorithms.synchronous import horovod
from dear.algorithms.synchronous.horovod import _HorovodEngine
from dear.cost.foreign import measure_sender
from dear.errors import Unavailable, UserError
from dear.training.algorithm import algorithm_class, algorithm_options
from tests.contract.algorithms import skip_if_unavailable
from tests.contract.loops import make_model, make_sgd, message, train_both, wrap
from tests.system.processes import finished


def _with(options: dict[str, Any]) -> dict[str, Any]:
    import horovod.torch as hvd

    at_start: dict[str, str] = {}
    init = hvd.init

    def noting() -> None:
        at_start.update({k: v for k, v in os.environ.items() if k.startswith("HOROVOD_")})
        init()

    hvd.init = noting
    far, model = train_both("horovod", options=options), make_model()
    other = {**options, "cycle_time_ms": 7.5}
    refusal = message(lambda: wrap(make_sgd(model), model, "horovod", **other))
    # What is not read at the start only may change.
    free = message(lambda: wrap(make_sgd(model), model, "horovod", compression="fp16", **options))
    names = [name.removeprefix("HOROVOD_") for name in horovod._VARIABLES.values()]
    return {
        "far": far,
        "refusal": refusal,
        "free": free,
        "at start": [at_start.get(f"HOROVOD_{name}") for name in names],
        "left": [os.environ.get(f"HOROVOD_{name}") for name in names],
    }


TUNED = {"fusion_threshold_mb": 0.0, "autotune": True, "autotune_log": "/dev/null"}
TUNED |= {f"autotune_{k}": n for k, n in (("warmup_samples", 1), ("steps_per_sample", 4))}
TUNED["autotune_samples"] = 5


@pytest.mark.parametrize(
    ("options", "at_start"),
    [
        (
            {"fusion_threshold_mb": 0.5, "cycle_time_ms": 2.0, "cache_capacity": 0},
            ["524288", "2.0", "0", *[None] * 5],
        ),
        (TUNED, ["0", None, None, "1", "/dev/null", "1", "4", "5"]),
    ],
)
def test_settings_are_there_when_horovod_starts_and_cannot_change(own_pool, options, at_start):
    skip_if_unavailable("horovod")
    for seen in own_pool(2).run(_with, options):
        assert seen["far"] < 1e-5
        assert seen["at start"] == at_start
        assert seen["left"] == [None] * 8
        assert "horovod option cycle_time_ms=7.5" in seen["refusal"]
        assert "runs in this process already" in seen["refusal"]
        assert seen["free"] == ""


def _grouped(options: dict[str, Any], timeline: str) -> tuple[float, list[int], list[str]]:
    import horovod.torch as hvd

    sent: list[int] = []
    grouped = hvd.mpi_ops.grouped_allreduce_async_

    def counted(tensors: Any, *args: Any, **more: Any) -> Any:
        sent.append(len(tensors))
        return grouped(tensors, *args, **more)

    os.environ["HOROVOD_TIMELINE"] = timeline
    factors: list[tuple[float, float]] = []
    single = hvd.mpi_ops.allreduce_async_

    def noted(*args: Any, **more: Any) -> Any:
        factors.append((more.get("prescale_factor", 1.0), more.get("postscale_factor", 1.0)))
        return single(*args, **more)

    hvd.optimizer.grouped_allreduce_async_, hvd.optimizer.allreduce_async_ = counted, noted
    far = train_both("horovod", options=options)
    hvd.shutdown()  # ends the timeline
    return far, sent, sorted(set(map(str, factors)))


@pytest.mark.parametrize(
    ("options", "grouped", "factors"),
    [
        ({"groups": 2}, True, []),
        ({"gradient_predivide_factor": 4.0}, False, ["(0.25, 4.0)"]),
        ({}, False, ["(1.0, 1.0)"]),
    ],
)
def test_gradients_go_in_groups_and_are_divided_as_asked_and_horovod_writes_its_timeline(
    own_pool, tmp_path, options, grouped, factors
):
    skip_if_unavailable("horovod")
    results = own_pool(2).run(_grouped, options, str(tmp_path / "timeline.json"))
    for far, sent, used in results:
        assert far < 1e-5
        assert bool(sent) == grouped and (not sent or max(sent) > 1)
        assert factors == [] or used == factors, used
    assert "ALLREDUCE" in (tmp_path / "timeline.json").read_text()


def _sent(options: dict[str, Any]) -> list[tuple[str, ...]]:
    """Type and factors of each all-reduce of a step."""
    import horovod.torch as hvd

    seen: list[tuple[str, ...]] = []
    single = hvd.allreduce_async_

    def noted(tensor: torch.Tensor, **more: Any) -> Any:
        factors = (more[f"{name}scale_factor"] for name in ("pre", "post"))
        seen.append((str(tensor.dtype), str(more["op"]), *map(str, factors)))
        return single(tensor, **more)

    hvd.allreduce_async_ = hvd.optimizer.allreduce_async_ = noted
    model = make_model()
    wrap(make_sgd(model), model, "horovod", **options)
    model(torch.ones(2, 6)).sum().backward()
    return seen


@pytest.mark.parametrize(
    "options", [{}, {"compression": "fp16"}, {"gradient_predivide_factor": 4.0}]
)
def test_marks_of_used_parameters_travel_as_gradients_do_so_that_horovod_fuses_them(
    own_pool, options
):
    skip_if_unavailable("horovod")
    for seen in own_pool(2).run(_sent, options):
        assert len(seen) > 1 and len(set(seen)) == 1


def _timed(options: dict[str, Any]) -> dict[str, Any]:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "horovod", **options)
    sender = optimizer.sender()
    communicator = optimizer._engine.communicator
    once = measure_sender(
        communicator, sender, sizes=[4096, 65536, 1 << 22], tensors=1, budget_s=5.0
    )
    calls = []
    for tensors in (1, 2):
        call = sender.timed(1 << 22, tensors)
        communicator.barrier()
        calls.append([call() for _ in range(4)])
    model(torch.ones(2, 6) * (1 + communicator.rank)).sum().backward()
    return {
        "name": sender.name,
        "fusion": sender.fusion_bytes,
        "typical": once.typical_s,
        "calls": calls,
        "gradients": [param.grad.tolist() for param in model.parameters()],
    }


@pytest.mark.parametrize(
    "options",
    [{"compression": "fp16"}, pytest.param({"cycle_time_ms": 100.0}, marks=pytest.mark.full)],
)
def test_horovod_tells_what_its_own_all_reduces_take(own_pool, options):
    skip_if_unavailable("horovod")
    kind = algorithm_class("horovod")
    first, other = own_pool(2).run(_timed, options)
    for seen in (first, other):
        assert seen["name"] == kind.sends_by(kind.Options(**options)) == "Horovod, gloo"
        assert seen["fusion"] == 128 << 20
        assert seen["typical"] == first["typical"]
        small, _, large = seen["typical"]
        assert 0 < small < large
        # A cycle would have taken longer than all of it.
        assert options.get("cycle_time_ms") is None or small < 50e-3
        assert all(0 < call_s < 5 for calls in seen["calls"] for call_s in calls)
    assert first["gradients"] == other["gradients"], "it trains on"


def _waiting(late_s: float) -> tuple[float, float]:
    """Seconds that this rank's thread has run, and was held up, while the other one was late."""
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "horovod")
    for step in range(2):  # in the first one Horovod gets ready
        before_s, blocked_s = time.thread_time(), optimizer._engine.communicator.blocked_s
        if step and optimizer._engine.communicator.rank == 0:
            time.sleep(late_s)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    return time.thread_time() - before_s, optimizer._engine.communicator.blocked_s - blocked_s


def test_who_waits_for_horovod_leaves_its_core_to_others_and_is_held_up_by_communication(own_pool):
    skip_if_unavailable("horovod")
    _, (ran_s, blocked_s) = own_pool(2).run(_waiting, 1.0)
    assert blocked_s > 0.5
    assert ran_s < blocked_s / 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": 0}, "horovod option 'groups'"),
        ({"gradient_predivide_factor": 0.0}, "'gradient_predivide_factor'"),
        ({"gradient_predivide_factor": 2.0, "compression": "fp16"}, "used with compression"),
    ],
)
def test_what_horovod_cannot_do_is_said(options, text):
    with pytest.raises(UserError, match=text):
        algorithm_options("horovod", options)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")
def test_adasum_adds_what_the_gradients_do_not_share():
    """Maleki et al. 2020, equation 1; the mean of the same gradients is something else."""
    skip_if_unavailable("horovod")
    import horovod.torch as hvd

    if not hvd.mpi_built():
        pytest.skip("this Horovod is built without MPI")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    done = finished(
        [
            *("mpirun", *root, "--oversubscribe", "-np", "2"),
            *(sys.executable, "-m", "tests.contract.adasum_program"),
        ]
    )
    assert done.returncode == 0, done.stderr
    results = {name: torch.tensor(values) for name, values in json.loads(done.stdout).items()}
    first, other = torch.tensor([3.0, 1.0]), torch.tensor([3.0, 2.0])
    shared = first @ other / 2
    wanted = (1 - shared / (first @ first)) * first + (1 - shared / (other @ other)) * other
    torch.testing.assert_close(results["adasum"], wanted)
    torch.testing.assert_close(results["mean"], (first + other) / 2)
    assert (wanted - results["mean"]).norm() > 0.1


def test_horovod_counts_passes_again_when_the_outermost_no_sync_ends():
    calls = []
    engine = object.__new__(_HorovodEngine)
    engine._paused = False
    engine._horovod = SimpleNamespace(set_backward_passes_per_step=calls.append)
    engine.schedule = SimpleNamespace(paused=contextlib.nullcontext)
    with engine.no_sync():
        with engine.no_sync():
            pass
        assert calls == [2**30, 2**30] and engine._paused
    assert calls[2:] == [1] and not engine._paused


def test_a_horovod_for_cpus_says_so_of_a_model_on_a_gpu(monkeypatch):
    replica = SimpleNamespace(params=[SimpleNamespace(is_cuda=True)])
    monkeypatch.setattr(horovod, "_moves_cuda_tensors", lambda: False)
    with pytest.raises(Unavailable, match=r"built for CPU tensors.*make horovod"):
        horovod.Horovod().refuse(replica)


def test_a_horovod_of_another_torch_is_to_be_rebuilt(tmp_path):
    metadata = tmp_path / "metadata.json"
    assert horovod._other_torch(metadata) is None
    metadata.write_text(json.dumps({"pytorch": torch.__version__, "dummy": "none"}))
    assert horovod._other_torch(metadata) is None
    metadata.write_text(json.dumps({"pytorch": "2.10.0+cpu"}))
    message = horovod._other_torch(metadata)
    words = f"built for torch 2.10.0+cpu, but this is torch {torch.__version__}; rebuild it with"
    assert words in message
