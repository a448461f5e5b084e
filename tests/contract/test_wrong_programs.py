"""The harness's own check: wrong programs are found, right ones are not."""

from __future__ import annotations

import math

import pytest

from common.harness.settings import LearnConfig, MeasureConfig, OptimizerConfig
from dear.algorithms import reference as references
from dear.training.algorithm import algorithm_names
from tests.contract import wrong_programs
from tests.contract.algorithms import skip_if_unavailable
from tests.contract.wrong_programs import (
    FEW_TENSORS,
    begun,
    checked,
    mixing_nothing,
    spoilt,
)
from tests.system.made import make_trial

REPLAYED = "resnet50@rtx2080ti-modelled"
SGD = OptimizerConfig(lr=0.01, momentum=0.9)
ADAMW = OptimizerConfig(name="adamw", lr=0.001)


def check_of(
    pool,
    name,
    model,
    *,
    size=2,
    spoil=None,
    optimizer=SGD,
    learn=None,
    dtype="float32",
    steps=4,
    **options,
):
    trial = make_trial(
        name,
        world=size,
        model=model,
        batch_size=16 if model == REPLAYED else 4,  # the smallest of the profile; quick
        options=options,
        optimizer=optimizer,
        backend="comm_core",
        learn=learn,
        dtype=dtype,
        measure=MeasureConfig(warmup_steps=4, check_steps=2, steps_per_iter=steps),
    )
    return pool.run(checked, trial.to_json(), spoil)[0]


SIXTEEN = [
    (name, compression, optimizer, 2)
    for name in ("wfbp", "dear", "ddp", "mgwfbp", "bytescheduler")
    for compression in ("fp16", "bf16")
    for optimizer in (SGD, ADAMW)
]
# These two sum in another order than the reference does.
SIXTEEN += [("fsdp", "fp16", ADAMW, size) for size in (2, 3)]
SIXTEEN += [("horovod", "fp16", ADAMW, size) for size in (2, 4)]
QUICK = (("wfbp", "fp16", ADAMW, 2), ("dear", "bf16", SGD, 2), ("fsdp", "fp16", ADAMW, 3))


@pytest.mark.parametrize(
    ("name", "compression", "optimizer", "size", "steps"),
    [*((*case, 8) for case in QUICK)]
    + [pytest.param(*case, 100, marks=pytest.mark.full) for case in SIXTEEN],
)
def test_gradients_of_16_bits_are_right_after_any_number_of_steps(
    world, name, compression, optimizer, size, steps
):
    skip_if_unavailable(name)
    check = check_of(
        *(world(size, name), name, "mnist_cnn"),
        size=size,
        optimizer=optimizer,
        steps=steps,
        compression=compression,
    )
    assert (check.verdict, check.finding) == ("yes", None)


ON_A_REPLAY = {
    *("factor 1.01", "factor 1.019", "factor 1.021", "noise of 1 %", "noise of 5 %"),
    *("smallest 1 lost", "smallest 4 lost", "smallest 1 doubled", "smallest 4 doubled"),
    "gradients of the step before",
    "forward on the parameters of the step before",
    "third step lost",
    "no update after step 2",
}
"""Programs that `make test` runs on a replayed model, and the others on one that computes."""


@pytest.mark.parametrize(
    ("program", "model"),
    [
        pytest.param(few, model, marks=() if (few in ON_A_REPLAY) == replayed else pytest.mark.full)
        for few in FEW_TENSORS
        for model, replayed in (("mnist_cnn", False), (REPLAYED, True))
    ],
)
def test_wrong_programs_are_found(world, program, model):
    check = check_of(world(2), "allreduce", model, spoil=(spoilt, program))
    assert check.verdict == "NO" and check.judged_by == "reference"
    assert check.finding and check.worst_tensor and check.replicas_agree


def test_the_finding_says_what_and_where(world):
    lost = check_of(world(2), "allreduce", REPLAYED, spoil=(spoilt, "smallest 1 lost"))
    assert lost.worst_tensor == "scale" and lost.reference_error > 0.5
    assert "after the first steps scale is off by 0." in lost.finding
    late = check_of(world(2), "allreduce", "mnist_cnn", spoil=(spoilt, "third step lost"))
    assert late.reference_error < 2e-3 < late.end_error and "at the end" in late.finding


@pytest.mark.parametrize(
    ("dtype", "model"),
    [
        ("float64", REPLAYED),
        ("bfloat16", "mnist_cnn"),
        pytest.param("float64", "mnist_cnn", marks=pytest.mark.full),
        pytest.param("bfloat16", REPLAYED, marks=pytest.mark.full),
    ],
)
def test_right_programs_are_right_in_every_type_and_wrong_ones_wrong(world, dtype, model):
    assert check_of(world(2), "dear", model, dtype=dtype).verdict == "yes"
    wrong = check_of(
        world(2), "allreduce", model, dtype=dtype, spoil=(spoilt, "no update after step 2")
    )
    assert wrong.verdict == "NO"


MIXING = ("neighbor", "decentralized", "gradient-tracking", "win-put", "pull-get", "asyncddp")


@pytest.mark.parametrize("name", MIXING)
def test_mixing_that_mixes_nothing_is_found(world, name):
    check = check_of(world(3, name), name, REPLAYED, size=3, spoil=(mixing_nothing, name))
    assert check.verdict == "NO"
    assert check.judged_by == ("reference" if name in MIXING[:3] else "invariants")


def test_push_sum_weights_that_leak_are_found(world):
    check = check_of(world(3), "push-sum", REPLAYED, size=3, spoil=(wrong_programs.leaking, ""))
    assert check.verdict == "NO" and check.finding.startswith("weights of values must add up to ")


def test_values_staler_than_declared_are_found(world):
    spoil = (wrong_programs.too_stale, "")
    check = check_of(world(3), "asyncddp", REPLAYED, size=3, spoil=spoil, max_staleness=2)
    assert check.verdict == "NO" and check.finding.endswith("at most 2 are declared")


RATES = LearnConfig(budget_s=1, eval_every_s=1)


def test_training_for_a_time_is_judged_before_it_begins(world):
    right = check_of(world(2), "asyncddp", REPLAYED, learn=RATES, max_staleness=3)
    assert (right.verdict, right.judged_by, right.finding) == ("yes", "invariants", None)
    wrong = check_of(world(2), "allreduce", REPLAYED, learn=RATES, spoil=(spoilt, "factor 1.01"))
    assert (wrong.verdict, wrong.judged_by) == ("NO", "reference")


def test_training_of_shards_for_a_time_is_judged_too(world):
    skip_if_unavailable("fsdp")
    check = check_of(world(2, "fsdp"), "fsdp", "mnist_cnn", learn=RATES)
    assert (check.verdict, check.finding) == ("yes", None)


def test_that_leaves_nothing_behind(world):
    trial = make_trial("dear", world=2, backend="comm_core", optimizer=SGD, learn=RATES)
    judged, plain = (world(2).run(begun, trial.to_json(), repeat) for repeat in (0, 1))
    assert judged == plain and judged[0][0]


@pytest.mark.parametrize("model", [pytest.param("mnist_cnn", marks=pytest.mark.full), REPLAYED])
@pytest.mark.parametrize("name", algorithm_names())
def test_right_programs_are_right(world, name, model):
    skip_if_unavailable(name)
    lossless = {"density": 1.0} if name == "mgs" else {}
    check = check_of(world(3, name), name, model, size=3, **lossless)
    assert (check.verdict, check.finding) == ("yes", None)
    free = name in ("win-put", "pull-get", "push-sum", "asyncddp")
    assert check.judged_by == ("invariants" if free else "reference")
    assert math.isfinite(check.end_error)


MORE = [
    ("mgs", {}, "unchecked"),
    ("wfbp", {"compression": "fp16"}, "yes"),
    ("dear", {"compression": "bf16"}, "yes"),
    ("allreduce", {"compression": "signum"}, "yes"),
    ("wfbp", {"compression": "eftopk", "density": 0.1}, "unchecked"),
    ("ddp", {"compression": "powersgd"}, "unchecked"),
    ("dadt", {"delay": 3}, "yes"),
    ("neighbor", {"combine": "atc", "dynamic": "one-peer-exp", "every": 2}, "yes"),
    ("neighbor", {"every": 3}, "yes"),
    ("win-put", {"barrier": True}, "yes"),
    ("push-sum", {"barrier": True, "topology": "star"}, "yes"),
    ("dear", {"fusion": "tuned"}, "yes"),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "options", "verdict"), MORE)
def test_settings_are_judged_as_far_as_they_can_be(world, name, options, verdict):
    check = check_of(world(3, name), name, REPLAYED, size=3, **options)
    assert check.verdict == verdict and check.replicas_agree
    assert (check.finding is None) == (verdict == "yes")


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", ["mnist_cnn", REPLAYED])
@pytest.mark.parametrize("name", algorithm_names())
def test_right_programs_are_right_with_adamw(world, name, model, size):
    skip_if_unavailable(name)
    lossless = {"density": 1.0} if name == "mgs" else {}
    check = check_of(world(size, name), name, model, size=size, optimizer=ADAMW, **lossless)
    assert (check.verdict, check.finding) == ("yes", None)


def test_without_a_reference_only_replicas_are_compared(world):
    check = check_of(world(2), "neighbor", REPLAYED, spoil=(wrong_programs.unreferenced, ""))
    assert check.verdict == "unchecked" and check.judged_by == "replicas"
    assert "neighbor has no serial reference" in check.finding


def test_every_algorithm_has_a_reference():
    assert all(references.reference_of(name, _Nothing()) for name in algorithm_names())


class _Nothing:
    """Options that change nothing."""
