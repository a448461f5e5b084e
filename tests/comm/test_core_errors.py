"""The backend `comm_core`: mistakes of one rank, and ranks that disagree."""

from __future__ import annotations

import os
import re

import pytest

from tests.comm import bodies, mistakes
from tests.comm.worlds import Job, World, pool

WORLDS = ["shm3", "tcp3", "hosts001"]

# Each rank waits for another root, and none has anything to compare: the time-out ends it.
ONLY_BY_TIMEOUT = re.compile("(broadcast|scatter|gather|reduce) root")


@pytest.mark.parametrize("name", WORLDS)
def test_a_mistake_is_a_typed_error_and_harms_nothing(name):
    with pool(name) as ranks:
        ranks.run(mistakes.mistakes_harm_nothing)
        ranks.run(mistakes.use_after_destroy)
        ranks.run(bodies.all_reduce_large)


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_that_disagree_all_learn_of_both_sides(name, odd):
    with pool(name) as ranks:
        for case in ranks.run(mistakes.mismatch_names)[0]:
            if ONLY_BY_TIMEOUT.match(case):
                continue
            for rank, (where, text, took) in enumerate(
                ranks.run(mistakes.mismatch, case, odd, 10.0)
            ):
                about = f"{case}, rank {rank}: {text}"
                assert where != "nowhere" and took < 3, about
                assert "the ranks disagree: " in text and "\n" not in text, about
                assert re.search("rank [012] [(]host", text), about


@pytest.mark.parametrize("name", WORLDS)
def test_ranks_that_disagree_about_the_root_end_by_timeout_at_the_latest(name):
    with pool(name) as ranks:
        for case in ("broadcast root, 100", "gather root"):
            for where, text, took in ranks.run(mistakes.mismatch, case, 1, 1.0):
                assert where != "nowhere" and took < 3, text
                assert "the ranks disagree" in text or "timed out after 1.0" in text


@pytest.mark.parametrize("sizes", [(10, 11), (100000, 11), (11, 100000), (100000, 100001)])
def test_a_message_of_another_size_names_both(sizes):
    with pool("shm3") as ranks:
        for text in ranks.run(mistakes.message_sizes, *sizes):
            sent, wanted = (f"{4 * size} bytes of float32" for size in sizes)
            assert f"here expects {wanted}, rank 0 " in text and f"sends {sent}" in text, text


def _joins(environments, monkeypatch):
    monkeypatch.setattr(World, "environments", property(lambda _: environments))
    with Job("shm2", bodies.meet, 2, "joined", 0) as job:
        return job.outcomes()


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("COMM_CORE_TRANSPORT", "pigeon", "COMM_CORE_TRANSPORT=pigeon must be auto, tcp or shm"),
        ("COMM_CORE_TCP_CHUNK", "12", "COMM_CORE_TCP_CHUNK=12 must be a number of bytes from 4096"),
        ("COMM_CORE_SHM_SLOT", "big", "COMM_CORE_SHM_SLOT=big must be a number of bytes"),
        ("COMM_CORE_IFNAME", "nope0", "no interface 'nope0'"),
    ],
)
def test_a_setting_that_is_none(variable, value, text, monkeypatch):
    for outcome in _joins([{variable: value}] * 2, monkeypatch):
        assert outcome.kind in ("ValueError", "DistBackendError"), outcome
        assert text in outcome.value, outcome


def test_several_hosts_do_not_meet_over_loopback(monkeypatch):
    hosts = [{"COMM_CORE_HOST_ID": f"host{k}"} for k in (0, 1)]
    for outcome in _joins(hosts, monkeypatch):
        assert outcome.kind == "ValueError" and "COMM_CORE_IFNAME" in outcome.value, outcome
    for outcome in _joins([{**h, "COMM_CORE_TRANSPORT": "shm"} for h in hosts], monkeypatch):
        assert outcome.kind == "ValueError", outcome
    assert "COMM_CORE_HOST_ID" not in os.environ
