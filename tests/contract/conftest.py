"""BlueFog's ranks. Serial references are computed beside the ranks, with one thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.ranks import RankPool

torch.set_num_threads(1)


@pytest.fixture
def bluefog_pool(world: Callable[..., RankPool]) -> RankPool:
    """Four ranks on two machines of two, after `bf.init`."""
    return world(4, "bluefog")
