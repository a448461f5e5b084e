"""Lower bound by the moments of gradients and layers, against steps worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from common.models.profile import load, path_of
from common.virtual.foresee import foresee, halved
from common.virtual.limit import limit_s
from common.virtual.passes import Gradient, Passes, passes_of, update_s_of
from dear.cost.bounds import CommTimes, StepTimes, comm_times, step_bound_s
from dear.cost.fit import AlphaBeta
from dear.training.algorithm import algorithm_class, algorithm_options

# Two layers, whose forward passes take 1 and 2 s. The second one's gradient is there after 3 s of a
# backward pass of 4 s, the first one's at its end. An update takes half a second.
PASSES = Passes(
    forward_s=(1.0, 2.0),
    backward_s=4.0,
    update_s=0.5,
    gradients=(
        Gradient(name="b", nbytes=300, ready_s=3.0, layer=1),
        Gradient(name="a", nbytes=100, ready_s=4.0, layer=0),
    ),
)
COMM = CommTimes(all_reduce_s=8.0, reduce_scatter_s=4.0, all_gather_s=4.0)


B, A = PASSES.gradients


@pytest.mark.parametrize(
    ("kind", "gradients", "wire_s", "step_s"),
    [
        # Both layers' gradients take 8 s from the third second of the backward pass on.
        ("wfbp", (B, A), 0.0, 3 + 3 + 8 + 0.5),
        # The link rests from the start of the second layer (1 s) to the first gradient (3 s).
        ("dear", (B, A), 0.0, 8 + 2 + 3),
        ("cross_iteration", (B, A), 0.0, 8 + 2 + 3),
        ("dear", (B, A), 10.0, 10 + 2 + 3),
        # The first layer waits for the last gradient, which takes 95 % of 8 s, beside no pass.
        ("dear", (B, dataclasses.replace(A, nbytes=5700)), 0.0, 0.95 * 8 + 3 + 4),
        ("dear", (), 0.0, None),
        ("sequential", (B, A), 0.0, None),
        ("asynchronous", (B, A), 0.0, None),
    ],
)
def test_the_link_rests_until_the_first_gradient(kind, gradients, wire_s, step_s):
    passes = dataclasses.replace(PASSES, gradients=gradients)
    result = limit_s(passes, kind, COMM, wire_s=wire_s)
    assert result == (step_s and pytest.approx(step_s))


@pytest.mark.parametrize("beta_s_per_byte", [5e-10, 3.5e-9, 2e-8])
@pytest.mark.parametrize("model", ["resnet50", "bert_base"])
@pytest.mark.parametrize(
    "algorithm", ["allreduce", "wfbp", "ddp", "mgwfbp", "bytescheduler", "dear"]
)
def test_no_step_of_the_event_model_is_shorter(model, algorithm, beta_s_per_byte):
    profile = load(path_of(model, "rtx2080ti-modelled", 64))
    options = algorithm_options(algorithm, {})
    costs = halved(AlphaBeta(alpha_s=2e-4, beta_s_per_byte=beta_s_per_byte))
    passes = passes_of(profile, update_s_of(profile))
    comm = comm_times(passes.nbytes, costs)
    kind = algorithm_class(algorithm).bound_of(options)
    step_s = foresee(profile, algorithm, options, costs, world_size=2).step_s
    limit = limit_s(passes, kind, comm)
    assert limit is None or limit <= step_s * (1 + 1e-9)


def test_output_layers_without_gradients_raise_the_bound_of_bert():
    """The vocabulary's projection shares its weight with the embedding, so nothing is sent then."""
    profile = load(path_of("bert_base", "rtx2080ti-modelled", 64))
    passes = passes_of(profile, update_s_of(profile))
    comm = CommTimes(all_reduce_s=2.0, reduce_scatter_s=1.0, all_gather_s=1.0)
    compute = StepTimes(
        forward_s=profile.forward_s, backward_s=profile.backward_s, update_s=passes.update_s
    )
    coarse_s = step_bound_s("dear", compute, comm, 2)
    assert coarse_s == 2.0 and limit_s(passes, "dear", comm) > 2.02
