"""Tests of what each compressor sends, keeps and refuses; no ranks are needed for that."""

from __future__ import annotations

import itertools

import pytest
import torch

from dear.algorithms.synchronous.allreduce import AllReduce
from dear.buckets.compressors import (
    Compressor,
    Gaussian,
    TopK,
    make_compressor,
    pack_signs,
    unpack_signs,
)
from dear.errors import UserError
from dear.training.algorithm import algorithm_options

FEEDBACK = ("eftopk", "gaussian", "dgcsampling", "efsignum")


def make(name: str, numel: int, dtype: torch.dtype = torch.float32, **options) -> Compressor:
    given = AllReduce.Options(compression=name, **options)
    return make_compressor(given, numel, dtype, torch.device("cpu"))


def values(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mean_of(compressor: Compressor, *payloads: torch.Tensor) -> torch.Tensor:
    output = torch.full((compressor.numel,), 7.0, dtype=compressor.dtype)
    compressor.decompress(torch.stack(payloads), output)
    return output


def sent_by(name: str, gradient: torch.Tensor, density: float) -> torch.Tensor:
    compressor = make(name, gradient.numel(), density=density)
    return mean_of(compressor, compressor.compress(gradient))


@pytest.mark.parametrize(
    ("density", "count"), [(0.05, 50), (1e-6, 1), (1.0, 1000), (0.0015, 1), (0.002, 2)]
)
def test_topk_sends_the_largest(density, count):
    compressor, gradient = make("topk", 1000, density=density), values(1000)
    sent = mean_of(compressor, compressor.compress(gradient))
    assert isinstance(compressor, TopK) and compressor.count == count
    largest = gradient.abs().topk(count).indices
    wanted = torch.zeros(1000).index_copy_(0, largest, gradient[largest])
    assert torch.equal(sent, wanted)
    assert compressor.residual is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FEEDBACK)
def test_what_does_not_travel_is_kept(name, dtype):
    options = {} if name == "efsignum" else {"density": 0.05}
    compressor = make(name, 1001, dtype, **options)
    for step in range(4):
        gradient, before = values(1001, step, dtype), compressor.residual.clone()
        given = gradient.clone()
        sent = mean_of(compressor, compressor.compress(gradient))
        compressor.commit()
        assert torch.equal(gradient, given)  # the caller's gradient is left alone
        if name == "efsignum":
            # A difference rounds; a selection does not.
            rounding = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 2e-2)
            torch.testing.assert_close(
                compressor.residual + sent, gradient + before, rtol=0, atol=rounding
            )
        else:
            assert torch.equal(compressor.residual + sent, gradient + before)
    assert compressor.residual.any()


@pytest.mark.parametrize("name", FEEDBACK)
def test_what_is_not_committed_leaves_no_trace(name):
    compressor = make(name, 100)
    compressor.compress(values(100, 1))
    compressor.commit()
    before = compressor.residual.clone()
    dropped = compressor.compress(values(100, 2)).clone()
    assert torch.equal(compressor.residual, before)
    assert torch.equal(compressor.compress(values(100, 2)), dropped)


@pytest.mark.parametrize("name", FEEDBACK)
def test_an_overflow_does_not_stay(name):
    compressor = make(name, 64)
    compressor.compress(values(64))
    compressor.commit()
    before = compressor.residual.clone()
    gradient = values(64, 1)
    gradient[3] = float("inf")
    gradient[4] = float("nan")
    sent = mean_of(compressor, compressor.compress(gradient))
    compressor.commit()
    assert not torch.isfinite(sent).all()  # it is noticed
    assert torch.equal(compressor.residual, before)


def test_the_gaussian_threshold_is_the_normal_quantile():
    compressor = make("gaussian", 100_000, density=0.05)
    assert isinstance(compressor, Gaussian)
    assert compressor.quantile() == pytest.approx(1.95996, abs=1e-5)
    gradient = values(100_000)
    sent = mean_of(compressor, compressor.compress(gradient))
    assert 2 / 3 * 5000 <= sent.count_nonzero() <= 5000
    assert sent[sent != 0].abs().min() > 1.9
    assert torch.equal(sent[sent != 0], gradient[sent != 0])


def test_the_gaussian_threshold_stays_where_it_finds_up_to_a_third_too_many():
    # 12 of 10 wanted lie above 1.645 standard deviations; half of them not far above.
    sizes = torch.tensor([2.0] * 6 + [1.3] * 6 + [0.5] * 88)
    gradient = sizes * torch.tensor([1.0, -1.0]).repeat(50)
    sent = sent_by("gaussian", gradient, density=0.1)
    assert sent.count_nonzero() == 10 and torch.equal(sent[:6], gradient[:6])
    # Equal elements travel though none is in a tail.
    sent = sent_by("gaussian", torch.full((100,), 3.0), density=0.1)
    assert sent.count_nonzero() == 10 and sent.sum() == 30


def test_a_sample_tells_about_which_elements_are_the_largest():
    compressor, gradient = make("dgcsampling", 100_000, density=0.05), values(100_000)
    sent = mean_of(compressor, compressor.compress(gradient))
    assert 0.8 * 5000 <= sent.count_nonzero() <= 5000
    assert sent[sent != 0].abs().min() > 1.8  # the 95 % quantile is 1.96
    assert torch.equal(sent[sent != 0], gradient[sent != 0])
    # Each step looks at others: what stands where a sample is taken says nothing of the rest.
    periodic = torch.ones(100_000)
    periodic[::100] = 50.0
    result = set()
    for _ in range(3):
        result.add(int(mean_of(compressor, compressor.compress(periodic)).count_nonzero()))
        compressor.commit()
    assert len(result) > 1
    # Where a sample would be too small all elements are looked at.
    gradient = values(1000)
    largest = gradient.abs().topk(10).indices
    found = sent_by("dgcsampling", gradient, density=0.01).nonzero().view(-1)
    assert torch.equal(found, largest.sort().values)


@pytest.mark.parametrize("name", ["topk", *FEEDBACK, "signum"])
def test_payloads_are_of_one_length_on_all_ranks(name):
    lengths = set()
    for shape in (values(1000), torch.zeros(1000), values(1000) ** 9, torch.ones(1000), -values(1)):
        gradient = shape.expand(1000).clone()
        payload = make(name, 1000).compress(gradient)
        assert payload.dtype == torch.uint8 and payload.dim() == 1
        lengths.add(payload.numel())
    assert len(lengths) == 1
    assert lengths.pop() % 8 == 0


def test_signs_are_packed_in_order():
    # The seed packs 33 signs into two words of 32 bits.
    signs = values(33)
    packed = pack_signs(signs)
    assert packed.numel() == 8
    assert torch.equal(unpack_signs(packed, 33), torch.where(signs >= 0, 1, -1).to(torch.int8))
    assert pack_signs(torch.tensor([1.0, -1.0, 2.0, 0.0])).tolist() == [0b1101] + [0] * 7


def test_a_warm_up_lowers_the_density_exponentially():
    options = AllReduce.Options(compression="topk", density=0.001, density_warmup_steps=4)
    densities = [options.density_at(step) for step in range(7)]
    assert densities[0] == 0.25
    assert densities[4:] == [0.001] * 3
    ratios = [b / a for a, b in itertools.pairwise(densities[:5])]
    assert ratios == pytest.approx([ratios[0]] * 4)
    compressor = make("eftopk", 1000, density=0.01, density_warmup_steps=2)
    counts = []
    for step in range(4):
        counts.append(compressor.count)
        compressor.compress(values(1000, step))
        compressor.commit()
    assert counts == [250, 50, 10, 10]


def test_signum_is_a_majority_vote_and_efsignum_the_mean_of_scaled_signs():
    compressor = make("signum", 5)
    votes = [[1, -2, 3, -4, 5], [1, -2, -3, 4, 5], [1, 2, -3, -4, -5]]
    payloads = [compressor.compress(torch.tensor(vote).float()).clone() for vote in votes]
    assert mean_of(compressor, *payloads).tolist() == [1, -1, -1, -1, 1]
    assert mean_of(compressor, *payloads[:2]).tolist() == [1, -1, 0, 0, 1]
    compressor = make("efsignum", 4)
    item = compressor.compress(torch.tensor([1.0, -2.0, 3.0, -2.0])).clone()
    other = make("efsignum", 4).compress(torch.tensor([4.0, 4.0, -4.0, -4.0]))
    assert mean_of(compressor, item, other).tolist() == [3.0, 1.0, -1.0, -3.0]


TOPK, SIGNUM = {"compression": "topk"}, {"compression": "signum"}
STEPS = "density_warmup_steps"
WARM_UP = {"compression": "eftopk", STEPS: 9}


@pytest.mark.parametrize(
    ("algorithm", "options", "said"),
    [
        ("wfbp", {"compression": "topj"}, "wfbp option 'compression': unknown value 'topj'"),
        ("wfbp", {**TOPK, "density": 0}, "wfbp option 'density' must lie in"),
        ("dear", {**TOPK, "density": 1.1}, "dear option 'density' must lie in"),
        ("allreduce", {"density": 0.1}, "'density' needs compression=topk, eftopk, gaussian"),
        ("mgwfbp", {"compression": "fp16", "density": 0.1}, "mgwfbp option 'density' needs"),
        ("mgwfbp", {**SIGNUM, "costs": "10gbe"}, "mgwfbp option costs="),
        ("mgs", SIGNUM, "mgs option 'compression': unknown value"),
        ("ddp", {**SIGNUM, "density_warmup_steps": 3}, "'density_warmup_steps' needs"),
        ("dear", {**WARM_UP, STEPS: -1}, "'density_warmup_steps' must be at least"),
        ("dear", {**WARM_UP, "density": 0.5}, "'density_warmup_steps' needs a density below 0.25"),
        ("dear", {**TOPK, "update": "sharded"}, "dear option update=sharded"),
        ("dear", {**SIGNUM, "decouple": "reduce_broadcast"}, "decouple=reduce_broadcast"),
        ("dear", {**SIGNUM, "exclude_parts": "allgather"}, "exclude_parts=allgather"),
        ("bytescheduler", TOPK, "bytescheduler option 'compression'"),
        ("bytescheduler", {"density": 0.1}, "unknown bytescheduler option 'density'"),
        ("fsdp", TOPK, "fsdp option 'compression'"),
        ("horovod", {"compression": "bf16"}, "horovod option 'compression'"),
        ("ddp", {"powersgd_rank": 2}, "ddp option 'powersgd_rank' needs"),
        (
            "ddp",
            {"compression": "powersgd", "powersgd_start_step": 1},
            "ddp option 'powersgd_start_step' must be at least 2",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(algorithm, options, said):
    with pytest.raises(UserError) as caught:
        algorithm_options(algorithm, options)
    assert said in str(caught.value) and algorithm in str(caught.value)
    assert "\n" not in str(caught.value)
