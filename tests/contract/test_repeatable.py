"""Passes that the check compares use kernels of a GPU that add in the same order each time."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from common.harness.worker.checking import checker, plain_training, recompute
from common.harness.worker.checking.repeatable import repeatable
from common.models.workload import Workload
from tests.contract.test_wrong_programs import check_of


def test_only_a_gpu_changes_and_only_within_the_block():
    repeats = torch.are_deterministic_algorithms_enabled
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with repeatable(torch.device("cpu")):
        assert not repeats()
    with pytest.raises(KeyError), repeatable(torch.device("cuda")):
        assert repeats() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("x does not have a deterministic implementation", stacklevel=1)
        assert not caught
        raise KeyError
    assert not repeats()
    assert torch.utils.deterministic.fill_uninitialized_memory == filled


@contextlib.contextmanager
def restless(blocks: bool) -> Iterator[None]:
    """Losses are noisy, as on a GPU; but not in the blocks of `repeatable`, if these work."""
    within = False
    noise = torch.Generator().manual_seed(torch.initial_seed() % 1000)
    loss_of = Workload.loss

    @contextlib.contextmanager
    def block(device: torch.device) -> Iterator[None]:
        nonlocal within
        within = blocks
        yield
        within = False

    def loss(workload: Workload) -> torch.Tensor:
        factor = 1.0 if within else 1 + 0.1 * torch.rand((), generator=noise).item()
        return loss_of(workload) * factor

    with contextlib.ExitStack() as patches:
        for module in (checker, plain_training, recompute):
            patches.enter_context(mock.patch.object(module, "repeatable", block))
        patches.enter_context(mock.patch.object(Workload, "loss", loss))
        yield


@pytest.mark.parametrize("blocks", [True, False])
def test_noise_of_kernels_is_no_mistake_of_an_algorithm(world, blocks):
    check = check_of(world(2), "allreduce", "mnist_cnn", spoil=(restless, blocks))
    assert check.matches_reference is blocks, check.finding
