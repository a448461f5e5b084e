"""Algorithms train a replayed model as they train any other."""

from __future__ import annotations

import pytest

from tests.system import replay_bodies

_VARIANTS = [
    ("allreduce", {}),
    ("wfbp", {}),
    ("ddp", {}),
    ("ddp", {"bucket_cap_mb": 0.1}),
    ("dear", {}),
    ("dear", {"fusion": "none"}),
]
_IDS = ["-".join([name, *map(str, options.values())]) for name, options in _VARIANTS]


@pytest.mark.parametrize(("algorithm", "options"), _VARIANTS, ids=_IDS)
def test_averages_a_replays_gradients(world, algorithm, options):
    for off, alone_off, spread in world(2).run(replay_bodies.train, algorithm, options, 3):
        assert off < 1e-4
        assert alone_off > 0.3  # a missing average could not hide
        assert spread == 0.0
