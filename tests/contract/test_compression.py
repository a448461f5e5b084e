"""Training with compressed gradients: exact if nothing is left out, and the same everywhere."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import dear
from dear.algorithms.synchronous.allreduce import AllReduce
from dear.buckets.carriers import make_carrier
from dear.comm import runtime
from tests.contract.algorithms import skip_if_unavailable
from tests.contract.loops import (
    loss_of,
    make_model,
    make_sgd,
    message,
    mine,
    moved_and_spread,
    steps,
    train_both,
    wrap,
)
from tests.contract.training import Script
from tests.contract.training import far as far_from_reference
from tests.ranks import on_ranks

# Plans and buckets are made in the first passes, which are dense.
_LONG = {"which": range(5)}


def _far(cases: list[tuple[str, dict[str, Any]]]) -> dict[str, float]:
    """Returns the distance of each case from serial training."""
    return {f"{n} {how}": train_both(n, options=dict(how), **_LONG) for n, how in cases}


def test_all_elements_are_the_dense_gradient(world):
    cases = [
        (name, {"compression": compression, "density": 1.0})
        for name in ("allreduce", "wfbp", "mgwfbp", "dear", "ddp")
        for compression in ("topk", "eftopk", "gaussian", "dgcsampling")
    ]
    for far in world(3).run(_far, cases):
        assert max(far.values()) < 1e-5, far


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 4))])
def test_all_elements_of_all_ranks_are_the_dense_gradient(world, size):
    whole = {"compression": "gtopk", "density": 1.0}
    cases = [(name, whole) for name in ("allreduce", "wfbp", "mgwfbp", "dear")]
    for far in world(size).run(_far, cases):
        assert max(far.values()) < 1e-5, far


def _tournament(numel: int, count: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Returns what a rank sent, the result, what it keeps, and the bytes that it sent."""
    communicator = runtime.communicator()
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(seed + dear.rank()))
    options = AllReduce.Options(compression="gtopk", density=count / numel)
    carrier = make_carrier(options, communicator, gradient)
    before, mean = communicator.bytes_sent, gradient.clone()
    carrier.send(mean).wait()
    carrier.receive(mean)
    return gradient, mean, carrier.compressor.residual, communicator.bytes_sent - before


@pytest.mark.parametrize("size", [2, 4])
def test_the_largest_of_the_sum_are_found_by_pairs_and_the_rest_is_kept(world, size):
    numel, count = 1000, 20
    ranks = world(size).run(_tournament, numel, count, 7)
    means = [received for _, received, *_ in ranks]
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert 0 < means[0].count_nonzero() <= count
    # Nothing is lost: what did not come through is in somebody's residual.
    total = sum(gradient for gradient, *_ in ranks)
    kept = sum(residual for _, _, residual, _ in ranks)
    assert torch.allclose(means[0] * size + kept, total, atol=1e-5)
    # As by hand: neighbours first, then pairs of them.
    held = [_largest(gradient, count) for gradient, *_ in ranks]
    while len(held) > 1:
        held = [_largest(a + b, count) for a, b in zip(held[::2], held[1::2], strict=True)]
    assert torch.allclose(means[0], held[0] / size, atol=1e-6)
    # A round per doubling, not a message per rank.
    row = count * (4 + 4) + 8
    assert {sent for *_, sent in ranks} == {row * (size.bit_length() - 1)}


def _corrected(options: dict[str, Any], numel: int, passes: int) -> list[torch.Tensor]:
    communicator, means = runtime.communicator(), []
    carrier = make_carrier(AllReduce.Options(**options), communicator, torch.empty(numel))
    for step in range(passes):
        mean = _gradient(numel, step, dear.rank())
        carrier.send(mean).wait()
        carrier.receive(mean)
        means.append(mean)
    return means


def _gradient(numel: int, step: int, rank: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    places = values.abs().topk(count).indices
    return torch.zeros_like(values).index_copy_(0, places, values[places])


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("compression", ["eftopk", "dgcsampling", "gtopk"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_velocities_travel_and_are_masked(world, size, compression, masking):
    if compression == "gtopk" and size == 3:
        pytest.skip("needs pairs")
    numel, count, momentum, passes = 60, 6, 0.9, 5
    options = {"compression": compression, "density": count / numel, "factor_masking": masking}
    options["momentum_correction"] = momentum
    ranks = world(size).run(_corrected, options, numel, passes)
    velocity, rest = torch.zeros(size, numel), torch.zeros(size, numel)
    for step in range(passes):
        gradients = torch.stack([_gradient(numel, step, rank) for rank in range(size)])
        velocity = momentum * velocity + gradients
        rest = rest + velocity
        sent = [_largest(pending, count) for pending in rest]
        held = sent
        while compression == "gtopk" and len(held) > 1:
            held = [_largest(a + b, count) for a, b in zip(held[::2], held[1::2], strict=True)]
            joined = size // len(held)
            sent = [part * (held[rank // joined] != 0) for rank, part in enumerate(sent)]
        applied = sum(held)
        rest = rest - torch.stack(sent)
        if masking:
            velocity[torch.stack(sent) != 0] = 0
        for means in ranks:
            assert torch.allclose(means[step], applied / size, atol=1e-5), step


def _kept(
    options: dict[str, Any], which: list[int], overflown: list[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the means of the passes `which`, and the residual and velocity after them.

    In pass 9, each rank of `overflown` has infinite gradients, at elements that differ by rank.
    """
    communicator, means = runtime.communicator(), []
    carrier = make_carrier(AllReduce.Options(**options), communicator, torch.empty(60))
    for step in which:
        mean = _gradient(60, step, dear.rank())
        if step == 9 and dear.rank() in overflown:
            mean[dear.rank() :: 20] = torch.inf  # half of the elements that it sends
        carrier.send(mean).wait()
        carrier.receive(mean)
        means.append(mean)
    kept = carrier.compressor.residual, carrier.compressor.velocity
    return means, [state for state in kept if state is not None]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("size", [2, 4])
def test_a_tournament_forgets_a_pass_that_overflows(world, size, momentum):
    options = {"compression": "gtopk", "density": 0.1, "momentum_correction": momentum}
    everyone = list(range(size))
    with_it = world(size).run(_kept, options, [0, 1, 9, 2, 3], everyone)
    without = world(size).run(_kept, options, [0, 1, 2, 3], everyone)
    for (means, kept), (wanted, wanted_kept) in zip(with_it, without, strict=True):
        assert not means.pop(2).isfinite().all()  # it is noticed
        assert all(map(torch.equal, means + kept, wanted + wanted_kept)) and kept[0].any()


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_overflows_alone_keeps_what_it_had(world, size):
    options = {"compression": "gtopk", "density": 0.1}
    before = world(size).run(_kept, options, [0, 1], [1])
    ranks = world(size).run(_kept, options, [0, 1, 9], [1])
    assert not any(means[2].isfinite().all() for means, _ in ranks)
    assert torch.equal(ranks[1][1][0], before[1][1][0])
    for means, (residual,) in world(size).run(_kept, options, [0, 1, 9, 2, 3], [1]):
        assert all(means[step].isfinite().all() for step in (3, 4)) and residual.isfinite().all()


@pytest.mark.parametrize("algorithm", ["allreduce", "dear"])
@on_ranks(2)
def test_training_goes_on_after_an_overflow(algorithm: str) -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    options = {"compression": "gtopk", "density": 0.1}
    optimizer = wrap(make_sgd(model), model, algorithm, **options)
    moved = []
    for step in range(5):
        before = parameters_to_vector(model.parameters()).clone()
        optimizer.zero_grad()
        loss = loss_of(model, dear.rank(), step) * (torch.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
        after = parameters_to_vector(model.parameters())
        moved.append(bool(after.isfinite().all()) and not torch.equal(before, after))
    optimizer.close()
    assert moved == [True, False, True, True, True]


@pytest.mark.parametrize("algorithm", ["allreduce", "wfbp", "dear", "ddp"])
@pytest.mark.parametrize("size", [1, 2])
def test_all_velocities_are_the_momentum_of_the_optimizer(world, algorithm, size):
    world(size).run(_as_with_momentum, algorithm)


def _as_with_momentum(algorithm: str) -> None:
    """Training that sends everything is training with the optimizer's momentum."""
    corrected, plain = make_model(), make_model()
    options = {"compression": "eftopk", "density": 1.0, "momentum_correction": 0.9}
    sgd = torch.optim.SGD(corrected.parameters(), lr=0.05)
    refused = torch.optim.SGD(corrected.parameters(), lr=0.05, momentum=0.9)
    line = message(lambda: wrap(refused, corrected, algorithm, **options))
    assert line.endswith("would apply it again; make the optimizer with momentum=0")
    optimizer = wrap(sgd, corrected, algorithm, **options, factor_masking=False)
    other = wrap(torch.optim.SGD(plain.parameters(), lr=0.05), plain, "allreduce")
    plain_passes = 2 * (algorithm == "ddp")  # its first two are not compressed
    steps(plain, other, mine(), range(plain_passes))
    other.param_groups[0]["momentum"] = 0.9
    steps(plain, other, mine(), range(plain_passes, 5))
    steps(corrected, optimizer, mine(), range(5))
    for stepped in (optimizer, other):
        stepped.synchronize()
    pairs = zip(corrected.parameters(), plain.parameters(), strict=True)
    assert max(float((ours - theirs).abs().max()) for ours, theirs in pairs) < 1e-5


@on_ranks(3)
def test_a_tournament_needs_pairs() -> None:
    model = make_model()
    line = message(lambda: wrap(make_sgd(model), model, "wfbp", compression="gtopk"))
    assert line == "compression='gtopk': the number of ranks must be a power of 2, got 3"


def test_half_precision_on_the_wire_is_near(world):
    names = ["allreduce", "wfbp", "mgwfbp", "bytescheduler", "dear", "ddp"]
    for compression, most in (("fp16", 1e-3), ("bf16", 1e-2)):
        half = {"compression": compression}
        cases = [(name, half) for name in names]
        cases.append(("fsdp", half | {"min_mb": 0.00001}))
        cases += [
            ("dear", half | {"update": update, "decouple": decouple})
            for update in ("sharded", "replicated")
            for decouple in ("reduce_scatter_all_gather", "reduce_broadcast")
        ]
        for far in world(2).run(_far, cases):
            assert all(1e-7 < off < most for off in far.values()), far


def _large(algorithm: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrap(optimizer, model, algorithm, compression="fp16")
    model(torch.tensor([[40000.0, -40000.0]])).sum().backward()
    optimizer.synchronize()
    assert model.weight.grad.view(-1).tolist() == [40000.0, -40000.0]
    optimizer.close()


@pytest.mark.parametrize("algorithm", ["allreduce", "dear", "horovod"])
def test_half_precision_does_not_overflow_in_the_sum(world, algorithm):
    skip_if_unavailable(algorithm)
    world(2, algorithm).run(_large, algorithm)
    if algorithm == "horovod":
        for far in world(2, algorithm).run(_far, [(algorithm, {"compression": "fp16"})]):
            assert all(1e-7 < off < 1e-3 for off in far.values())


@pytest.mark.parametrize(
    ("algorithm", "options", "micros"),
    [
        ("allreduce", {}, "one"),
        ("wfbp", {"channels": 2}, "one"),
        ("dear", {"fusion": "none", "small_kb": 0}, "one"),
        # Sent twice, of which the second one supersedes the first.
        ("dear", {"fusion": "none", "small_kb": 0}, "two"),
    ],
)
def test_error_feedback_equals_its_reference(world, algorithm, options, micros):
    options = {"compression": "eftopk", "density": 0.1, **options}
    script = Script(model="plain", micros=micros)
    assert far_from_reference(world(2), 2, algorithm, options, script) < 2e-5


_SPARSE: list[dict[str, Any]] = [
    {"compression": "gaussian", "density": 0.05},
    {"compression": "eftopk", "density": 0.01, "density_warmup_steps": 3},
    {"compression": "signum"},
    {"compression": "efsignum"},
]
_HALF = [("dear", {"compression": "bf16", "update": u}) for u in ("sharded", "replicated")]


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [*itertools.product(("wfbp", "mgwfbp", "dear", "ddp"), _SPARSE), *_HALF],
)
@on_ranks(3)
def test_replicas_are_bitwise_equal(algorithm: str, options: dict[str, Any]) -> None:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, algorithm, **options)
    steps(model, optimizer, mine(), range(5))
    optimizer.synchronize()
    moved, spread = moved_and_spread(model, optimizer)
    assert moved > 1e-3 and spread == 0.0


class _Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"always": 3, "dead": 2, "sometimes": 5}
        self.weights = nn.ParameterDict({name: torch.zeros(n) for name, n in sizes.items()})

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        sums = {name: weight.sum() for name, weight in self.weights.items()}
        always = sums["always"] + 0 * sums["dead"]
        return x * (always + sums["sometimes"] if used else always)


_IN_ONE = {"merge": "threshold", "threshold_mb": 1.0, "profile_steps": 1}


@pytest.mark.parametrize("users", [1, 2])
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("allreduce", {}), ("wfbp", {}), ("mgwfbp", _IN_ONE), ("dear", {}), ("ddp", {})],
)
@on_ranks(3)
def test_ranks_without_a_gradient_do_not_vote(
    algorithm: str, options: dict[str, Any], users: int
) -> None:
    model = _Sometimes()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(sgd, model, algorithm, compression="signum", **options)
    x = torch.tensor([-1.0, 2.0, -3.0][dear.rank()])
    for _ in range(4):  # the first passes are dense
        optimizer.zero_grad()
        model(x, used=dear.rank() < users).backward()
        optimizer.synchronize()
        votes = {name: set(weight.grad.tolist()) for name, weight in model.weights.items()}
        optimizer.step()
    optimizer.close()
    # A zero is positive. A tie of two voters is 0.
    assert votes == {"always": {-1.0}, "dead": {1.0}, "sometimes": {-1.0 if users == 1 else 0.0}}


@pytest.mark.parametrize("algorithm", ["allreduce", "wfbp", "dear"])
@pytest.mark.parametrize("model", ["plain", "branches"])
def test_a_majority_equals_its_reference(world, algorithm, model):
    far = far_from_reference(world(3), 3, algorithm, {"compression": "signum"}, Script(model=model))
    assert far < 2e-5


_VOTING: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("allreduce", "wfbp", "mgwfbp", "dear", "ddp")),
    ("ddp", {"zero": True}),
]


@pytest.mark.parametrize(("algorithm", "options"), _VOTING)
@pytest.mark.parametrize("unscaling", [False, True])
@on_ranks(2)
def test_votes_are_not_unscaled(algorithm: str, options: dict[str, Any], unscaling: bool) -> None:
    model = make_model()
    sgd = make_sgd(model)
    declared = getattr(sgd, "_step_supports_amp_scaling", False)
    optimizer = wrap(sgd, model, algorithm, compression="signum", **options)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, dear.rank(), 0)).backward()
    optimizer.synchronize()
    if unscaling:
        scaler.unscale_(optimizer)
    line = message(lambda: scaler.step(optimizer))
    assert line.startswith(f"{algorithm} option compression=signum turns gradients into ")
    assert line.endswith("without a scaler, or use compression=efsignum")
    optimizer.close()
    assert getattr(sgd, "_step_supports_amp_scaling", False) == declared


@on_ranks(1)
def test_alone_a_scaler_works_with_signum() -> None:
    for algorithm in ("wfbp", "ddp"):
        model = make_model()
        optimizer = wrap(make_sgd(model), model, algorithm, compression="signum")
        before = parameters_to_vector(model.parameters()).clone()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, 0, 0)).backward()
        scaler.step(optimizer)
        assert not torch.equal(parameters_to_vector(model.parameters()), before)
        optimizer.close()


@on_ranks(2)
def test_new_groups_of_dear_keep_what_has_not_travelled() -> None:
    model = make_model()
    options = {"compression": "eftopk", "density": 0.1, "fusion": "nearby_layers"}
    optimizer = wrap(make_sgd(model), model, "dear", nearby_layers=-1, **options)
    steps(model, optimizer, mine(), range(2))
    engine = optimizer._engine

    def kept() -> dict[Any, torch.Tensor]:
        return {
            param: (step, rest.clone())
            for part in engine._parts
            for param, (step, rest, _) in part.kept().items()
        }

    before = kept()
    engine._lay_out(learn=False)
    after = kept()
    same = all(
        step == after[param][0] == 2 and torch.equal(rest, after[param][1])
        for param, (step, rest) in before.items()
    )
    optimizer.close()
    assert same and len(before) == len(after) and any(rest.any() for _, rest in before.values())


@on_ranks(2)
def test_a_parameter_that_nobody_uses_is_left_alone_and_so_is_what_is_kept_of_it() -> None:
    """Layer 4 has no gradient in the second step, on any rank."""
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "wfbp", compression="eftopk", density=0.1)
    steps(model, optimizer, mine(), range(1))
    carrier = optimizer._engine._carriers[model[4].weight]
    rest, values = carrier.compressor.residual.clone(), model[4].weight.detach().clone()
    optimizer.zero_grad()
    model[:4](torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert model[4].weight.grad is None and torch.equal(model[4].weight, values)
    assert torch.equal(carrier.compressor.residual, rest)
    optimizer.close()


@on_ranks(2)
def test_complex_gradients_are_refused() -> None:
    lines = []
    for algorithm in ("wfbp", "allreduce", "mgwfbp", "dear", "bytescheduler", "ddp", "fsdp"):
        model = nn.Linear(3, 2, dtype=torch.complex64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lines.append(message(partial(wrap, optimizer, model, algorithm, compression="fp16")))
    assert all("compression=fp16" in line and "complex64" in line for line in lines)


@on_ranks(1)
def test_alone_nothing_is_compressed() -> None:
    names = ("wfbp", "mgwfbp", "dear", "ddp")
    far = _far([(name, {"compression": c}) for name in names for c in ("fp16", "signum")])
    assert not any(far.values()), far
