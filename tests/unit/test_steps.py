"""Step times of several ranks."""

from __future__ import annotations

import pytest

from common.harness.worker.measure import steps_of_all


def test_a_step_ends_when_the_last_rank_has_done_it():
    assert steps_of_all([[0, 1, 2, 3], [0, 1.5, 2.0, 3.5]]) == pytest.approx([1.5, 0.5, 1.5])
    assert steps_of_all([[0, 2]]) == [2]


def test_steps_add_up_to_the_slowest_ranks_block_and_not_to_the_slowest_of_each_step():
    turns = [[0, 1, 4, 5, 8], [0, 3, 4, 7, 8], [0, 2, 4, 6, 8]]
    steps = steps_of_all(turns)
    assert sum(steps) == pytest.approx(8)
    assert steps == pytest.approx([3, 1, 3, 1])
