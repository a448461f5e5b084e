"""Bad options are refused in one line that names the option, what is allowed and what was meant."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

import dear
from tests.contract.algorithms import algorithm_class, algorithm_names, algorithm_options
from tests.contract.loops import make_model, make_sgd, message

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("wfbp", {"channels": 0}, "'channels'"),
    ("wfbp", {"fusion": "none"}, "allowed: channels"),
    ("mgwfbp", {"merge": "gredy"}, "did you mean 'greedy'"),
    ("mgwfbp", {"costs": "1gbe"}, "'costs'"),
    ("mgwfbp", {"profile_steps": 0}, "'profile_steps'"),
    (
        "mgwfbp",
        {"profile_steps": 3, "layer_times": {"a": 1.0}},
        "no effect with 'layer_times'",
    ),
    ("mgwfbp", {"small_elements": -1}, "'small_elements'"),
    ("mgwfbp", {"small_elements": 10, "merge": "optimal"}, "'small_elements'"),
    ("mgwfbp", {"threshold_mb": 5.0}, "'threshold_mb'"),
    ("mgwfbp", {"merge": "threshold"}, "'threshold_mb'"),
    ("mgwfbp", {"merge": "threshold", "threshold_mb": -1.0}, "'threshold_mb'"),
    ("mgwfbp", {"merge": "threshold", "threshold_mb": 1.0, "costs": "10gbe"}, "costs="),
    ("mgwfbp", {"layer_times": {"0.weight": -1.0}}, "'layer_times': 0.weight must be at least 0"),
    ("mgwfbp", {"layer_times": {"0.weight": "soon"}}, "'layer_times.0.weight': must be a number"),
    ("wfbp", {"compression": "topk", "is_sparse": False}, "is_sparse=False"),
    ("mgs", {"compression": "none"}, "'compression'"),
    ("mgs", {"density": 10**400}, "a number below 1e308"),
    ("mgs", {"density": 0.0}, "'density'"),
    ("mgs", {"density": 1.5}, "'density'"),
    ("mgs", {"profile_steps": 0}, "'profile_steps'"),
    ("bytescheduler", {"partition_mb": 0.0}, "'partition_mb'"),
    ("bytescheduler", {"credit_mb": -1.0}, "'credit_mb'"),
    ("bytescheduler", {"levels": 0}, "'levels'"),
    ("bytescheduler", {"levels": 2, "credit_mb": 4.0}, "cannot be used with a credit"),
    ("bytescheduler", {"profile_steps": 0}, "'profile_steps'"),
    ("hierarchical", {"local_size": 0}, "'local_size' must be at least 1"),
    ("ddp", {"bucket_cap_mb": 0}, "bucket_cap_mb"),
    ("ddp", {"bucket_cap_mb": 1e308}, "'bucket_cap_mb' must be greater than 0 and at most"),
    ("ddp", {"find_unused_parameters": 1}, "true or false"),
    ("fsdp", {"min_mb": -1}, "fsdp option 'min_mb'"),
    ("fsdp", {"stage": 1}, "fsdp option 'stage'"),
    ("horovod", {"controller": "tcp"}, "gloo, mpi"),
    ("horovod", {"fusion_threshold_mb": -1.0}, "'fusion_threshold_mb' must be at least 0"),
    ("horovod", {"fusion_threshold_mb": 1e308}, "must be at least 0 and at most 1099511627776"),
    ("horovod", {"cycle_time_ms": 0.0}, "'cycle_time_ms' must be greater than 0"),
    ("horovod", {"cache_capacity": -1}, "'cache_capacity' must be at least 0"),
    ("horovod", {"compression": "topk"}, "horovod option 'compression'"),
    ("horovod", {"adasum": True}, "'adasum' needs controller='mpi'"),
    ("horovod", {"autotune": 1}, "'autotune': must be true or false"),
    ("dear", {"threshold_mb": 0}, "'threshold_mb' must be greater than 0"),
    ("dear", {"threshold_mb": -1.0}, "'threshold_mb' must be greater than 0"),
    ("dear", {"threshold_mb": "much"}, "number"),
    ("dear", {"threshold": -1}, "'threshold_mb' must be greater than 0"),
    ("dear", {"first_mb": 0}, "'first_mb' must be greater than 0"),
    ("dear", {"nearby_layers": 0}, "'nearby_layers' must not be 0"),
    ("dear", {"cycle_time_ms": 0}, "'cycle_time_ms' must be greater than 0"),
    ("dear", {"small_kb": -1}, "'small_kb' must be at least 0"),
    ("dear", {"small_kb": 4, "decouple": "reduce_broadcast"}, "'small_kb' needs decouple"),
    ("dear", {"small_kb": 4, "exclude_parts": "allgather"}, "'small_kb' needs exclude_parts"),
    ("dear", {"small_kb": 4, "compression": "topk"}, "small_kb=4"),
    ("dear", {"fusion": "none", "threshold_mb": 8.0}, "needs fusion=threshold or tuned"),
    ("dear", {"nearby_layers": 2}, "needs fusion=nearby_layers"),
    ("dear", {"cycle_time_ms": 2.0}, "needs fusion=wait_time"),
    ("dear", {"fusion": "all"}, "none, planned, threshold"),
    ("dear", {"fusion": "planned", "threshold_mb": 8.0}, "needs fusion=threshold or tuned"),
    (
        "dear",
        {"fusion": "planned", "decouple": "reduce_broadcast"},
        "needs decouple=reduce_scatter_all_gather",
    ),
    ("auto", {"candidates": []}, "must name an algorithm"),
    ("auto", {"candidates": ["fsdp"]}, "(allowed: bytescheduler, dear, mgwfbp, wfbp)"),
    ("auto", {"profile_steps": 0}, "'profile_steps'"),
    ("dear", {"fusion": "thresold"}, "did you mean 'threshold'"),
    ("dear", {"compression": "fp8"}, "dear option 'compression'"),
    ("dear", {"exclude_parts": "allgathers"}, "did you mean 'allgather'"),
    ("dear", {"threshold": 25, "threshold_mb": 25}, "threshold"),
    ("dear", {"threshold": 25, "num_nearby_layers": 2}, "num_nearby_layers"),
    ("dear", {}, "dear.init()"),  # this process has joined no job
    ("dadt", {"delay": 0}, "'delay'"),
    ("dadt", {"delay": 1.5}, "'delay'"),
    ("dadt", {"buffer_mb": -1.0}, "'buffer_mb'"),
    ("dadt", {"cycle_time_ms": 0.0}, "'cycle_time_ms'"),
    ("neighbor", {"topology": "exp3"}, "did you mean 'exp2'"),
    ("neighbor", {"combine": "cta"}, "'combine'"),
    ("neighbor", {"dynamic": "one-peer"}, "did you mean 'one-peer-exp'"),
    ("neighbor", {"every": 0}, "'every'"),
    ("neighbor", {"bucket_mb": 0.0}, "'bucket_mb'"),
    ("neighbor", {"local_size": 2}, "'local_size' needs"),
    ("neighbor", {"dynamic": "one-peer-exp", "topology": "ring"}, "'topology' is not used"),
    ("neighbor", {"dynamic": "inner-outer-ring", "hierarchical": True}, "dynamic="),
    ("exact-diffusion", {"topology": "exp2"}, "symmetric weights"),
    ("exact-diffusion", {"topology": "rng"}, "did you mean 'ring'"),
    ("push-diging", {"bucket_mb": -1.0}, "'bucket_mb'"),
    ("decentralized", {"topology": "rign"}, "did you mean 'ring'"),
    ("decentralized", {"bucket_mb": 0.0}, "'bucket_mb'"),
    ("decentralized", {"adaptive_factor": 1.5}, "'adaptive_factor'"),
    ("decentralized", {"adaptive_factor": -0.5}, "'adaptive_factor'"),
    ("decentralized", {"update": "never"}, "'update'"),
    ("decentralized", {"ranks_per_node": 0}, "'ranks_per_node'"),
    ("win-put", {"every": 0}, "'every'"),
    ("win-put", {"finish_timeout_s": 0.0}, "win-put option 'finish_timeout_s'"),
    ("push-sum", {"barrier": 3}, "true or false"),
    ("pull-get", {"combine": "atc"}, "unknown pull-get option"),
    ("asyncddp", {"topology": "rnig"}, "did you mean 'ring'"),
    ("asyncddp", {"max_staleness": -1}, "'max_staleness'"),
    ("asyncddp", {"max_staleness": 1.5}, "'max_staleness'"),
    ("asyncddp", {"bucket_mb": -1.0}, "'bucket_mb'"),
    ("asyncddp", {"finish_timeout_s": 0.0}, "'finish_timeout_s'"),
    ("asyncddp", {"update": "later"}, "'update'"),
    ("gradient_tracking", {}, "did you mean 'gradient-tracking'"),
]


@pytest.mark.parametrize(("name", "options", "words"), CASES)
def test_bad_options_are_refused_in_one_line(name, options, words):
    model = make_model()
    line = message(
        lambda: dear.DistributedOptimizer(make_sgd(model), model, algorithm=name, **options)
    )
    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize("name", algorithm_names())
def test_a_misspelt_option_is_told_what_it_might_be(name):
    for field in fields(algorithm_class(name).Options):
        line = message(
            lambda wrong=field.name[:1] + field.name: algorithm_options(name, {wrong: 1})
        )
        assert f"did you mean '{field.name}'" in line and name in line
