"""A short soak is right, and a soak notices what it should notice."""

from __future__ import annotations

import random

import pytest

from tests.comm.soak import __main__ as soak
from tests.comm.soak import bodies, sweep

MB = 1 << 20
USED = {"rss_bytes": 300 * MB, "descriptors": 40, "threads": 4}
SAMPLE = {"rss_bytes": 60 * MB, "descriptors": 9, "threads": 1, "descendants": 3}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(soak, "PAUSE_S", 0.001)


def test_a_piece_of_a_soak_is_right(world, quick):
    period = soak.Period(algorithm="dear", options={"small_kb": 0}, model="plain")
    period.run(world(4), random.Random(1), 0.0)
    assert period.far < 1e-5
    assert period.steps > 0
    assert period.collectives > 0
    assert len(period.used) == 4


def test_a_wrong_parameter_ends_a_soak(own_pool, quick, monkeypatch):
    def wrong(self, steps):
        states = right(self, steps)
        next(iter(states[2].values())).flat[0] += 1.0
        return states

    right = bodies.Reference.advance
    monkeypatch.setattr(bodies.Reference, "advance", wrong)
    with pytest.raises(AssertionError, match=r"wfbp \{\}, .* from its reference"):
        soak.Period(algorithm="wfbp", options={}, model="plain").run(
            own_pool(4), random.Random(1), 0.0
        )


def _facts(used: dict[str, int], left: list[str]) -> dict:
    periods = [{"used": [USED, USED]}] * 3 + [{"used": [USED, {**USED, **used}]}] * 2
    return {"baseline": [USED, USED], "periods": periods, "shared memory left": left}


@pytest.mark.parametrize(
    ("used", "left", "message"),
    [
        ({"rss_bytes": 307 * MB}, [], "rank 1: resident memory grew by 2.3%"),
        ({"descriptors": 41}, [], "rank 1: 40 descriptors before, 41 after"),
        ({"threads": 5}, [], "rank 1: 4 threads in the first half, 5 at the end"),
        ({}, ["comm_core_1"], "comm_core_1 is left in shared memory"),
    ],
)
def test_growth_of_a_rank_is_a_miss(used, left, message):
    assert soak._misses(_facts({}, [])) == []
    assert soak._misses(_facts(used, left)) == [message]


def _swept(last: dict[str, int], **changed) -> dict:
    records = [0, 100, 500, 900, 1000]
    samples = [{**SAMPLE, "records": count} for count in records]
    samples[3] |= last
    facts = {"status": 0, "records": {"ok": 1000}, "samples": samples, "left": [], "output": ""}
    return {**facts, **changed}


@pytest.mark.parametrize(
    ("last", "changed", "message"),
    [
        ({"rss_bytes": 120 * MB}, {}, "the driver's memory grew from 60 to 120 MB"),
        ({"descriptors": 10}, {}, "more descriptors in the second half than in the first"),
        ({"descendants": 4}, {}, "more descendants in the second half than in the first"),
        ({}, {"left": ["port 7"]}, "left: port 7"),
        ({}, {"records": {"ok": 999, "failed": 1}}, "status 0, records {'ok': 999, 'failed': 1}"),
    ],
)
def test_growth_of_a_driver_is_a_miss(last, changed, message):
    assert sweep._misses(_swept({}), 1000) == []
    (miss,) = sweep._misses(_swept(last, **changed), 1000)
    assert message in miss
