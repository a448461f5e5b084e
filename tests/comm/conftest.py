"""Worlds that the tests of a module share end with the module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.comm.worlds import close_lent


@pytest.fixture(scope="module", autouse=True)
def _worlds_end() -> Iterator[None]:
    yield
    close_lent()
