"""Fixture of the tests of BlueFog's algorithms."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks import RankPool


@pytest.fixture
def bluefog_pool(world: Callable[..., RankPool]) -> RankPool:
    """Four ranks on two machines of two, after `bf.init`."""
    return world(4, "bluefog")
