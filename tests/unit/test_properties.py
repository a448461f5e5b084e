"""Properties that hold for every input: experiments, trials, topologies, and the virtual clock."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.harness.experiment import Experiment
from common.harness.experiment_file import load
from common.harness.trial import Trial
from common.paths import ROOT
from common.results import store
from dear import topology
from dear.cost.event_model.events import Events
from dear.cost.event_model.link import Link
from dear.cost.fit import AlphaBeta
from dear.errors import UserError
from dear.topology.schedules import DYNAMIC, schedule

PLAIN = ("quick", "emulated-quick", "predicted-64", "slow_host", "decentralized")
"""Experiments that need no data."""
KEYS = sorted(Experiment.__dataclass_fields__)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
    | st.sampled_from(["dear", "resnet50", "10gbe", "float16", "../x", "$(id)", "a b", "é\n"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "options", "kind", "label", "hosts"]), inner)
    ),
    max_leaves=5,
)


def plan(values: object) -> list[Trial]:
    """Returns the trials of an experiment, given as the values of its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return load(path, ["threads_per_rank=1"]).trials("0")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PLAIN), st.sampled_from(KEYS), VALUES)
@example("quick", "plugins", "\n")
def test_any_value_of_any_key_makes_trials_or_one_line(name, key, value):
    values = yaml.safe_load((ROOT / "configs" / "experiments" / f"{name}.yaml").read_text())
    try:
        trials = plan(values | {key: value})
    except UserError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert trials


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_a_file_with_anything_is_refused_in_one_line(value):
    with pytest.raises(UserError) as caught:
        plan(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", PLAIN)
def test_a_trial_survives_its_json_and_each_has_an_id_of_its_own(name):
    trials = load(ROOT / "configs" / "experiments" / f"{name}.yaml").trials("0")
    assert [Trial.from_json(json.loads(json.dumps(trial.to_json()))) for trial in trials] == trials
    assert len({trial.id for trial in trials}) == len({trial.hash for trial in trials})


WEIGHTED = ("complete", "ring", "exponential", "symmetric_exponential", "mesh", "star")


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(WEIGHTED), st.integers(1, 20))
def test_averaging_keeps_a_constant_and_converges_at_the_mixing_rate(name, world_size):
    graph = getattr(topology, name)(world_size)
    weights = topology.matrix(graph)
    assert (weights >= 0).all()
    assert weights.sum(axis=0) == pytest.approx(1)
    rate = topology.mixing_rate(graph)
    assert 0 <= rate < 1 or world_size == 1
    if np.allclose(weights, weights.T):  # then one round shrinks every deviation by the rate
        values = np.random.default_rng(world_size).normal(size=world_size)
        spread = np.linalg.norm(weights.T @ values - values.mean())
        assert spread <= rate * np.linalg.norm(values - values.mean()) + 1e-9


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(DYNAMIC)), st.sampled_from([2, 4, 8, 12, 16]), st.integers(1, 4))
def test_whoever_is_sent_to_receives_and_all_hear_of_all_within_a_period(name, world_size, local):
    try:
        schedules = [schedule(name, world_size, rank, local) for rank in range(world_size)]
    except UserError:
        return
    reached = np.eye(world_size, dtype=bool)
    for step in range(schedules[0].period):
        peers = [each(step) for each in schedules]
        sent = {(rank, to) for rank, (send, _) in enumerate(peers) for to in send}
        received = {(source, rank) for rank, (_, recv) in enumerate(peers) for source in recv}
        assert sent == received and all(rank != to for rank, to in sent)
        assert schedules[0](step) == schedules[0](step + schedules[0].period)
        before = reached.copy()
        for rank, to in sent:
            reached[:, to] |= before[:, rank]
    for _ in range(world_size):  # a ring needs several periods
        reached = (reached.astype(int) @ reached.astype(int)) > 0
    assert reached.all()


MESSAGES = st.lists(
    st.tuples(
        st.floats(0, 10),  # when it is sent
        st.integers(0, 3),  # its channel
        st.integers(0, 3),  # its priority
        st.integers(1, 10**6),  # its bytes
    ),
    min_size=1,
    max_size=20,
)


class Wire(AlphaBeta):
    """Link whose start-ups overlap other messages."""

    def occupancy_s(self, nbytes):
        return self.beta_s_per_byte * nbytes


def carried(messages, alpha_s=0.3):
    """Returns when each message of a link ends, and for how long the link is busy."""
    events = Events()
    link, ends_s = Link(events), {}
    cost = Wire(alpha_s=alpha_s, beta_s_per_byte=1e-6)

    def send(index, channel, priority, nbytes):
        def over():
            ends_s[index] = events.now_s

        link.send(cost, nbytes, channel=channel, priority=priority, then=over)

    for index, (at_s, *message) in enumerate(messages):
        events.at(at_s, lambda index=index, message=message: send(index, *message))
    events.run_for(1e3)
    return ends_s, link.busy_s


@settings(max_examples=150, deadline=None)
@given(MESSAGES)
def test_a_link_carries_every_byte_once_and_each_channel_in_order(messages):
    ends_s, busy_s = carried(messages)
    assert sorted(ends_s) == list(range(len(messages)))
    assert busy_s == pytest.approx(1e-6 * math.fsum(m[3] for m in messages), rel=1e-6)
    for index, (at_s, _, _, nbytes) in enumerate(messages):
        assert ends_s[index] >= at_s + 0.3 + 1e-6 * nbytes - 1e-9
    for channel in range(4):
        sent = sorted((m[0], i) for i, m in enumerate(messages) if m[1] == channel)
        ended = [ends_s[index] for _, index in sent]
        assert ended == sorted(ended)
    assert carried(messages) == (ends_s, busy_s)  # to the bit


@settings(max_examples=100, deadline=None)
@given(MESSAGES)
def test_with_one_channel_and_no_start_up_messages_follow_each_other_without_a_gap(messages):
    queued = [(at_s, 0, 0, nbytes) for at_s, _, _, nbytes in messages]
    ends_s, _ = carried(queued, alpha_s=0)
    free_s = 0.0
    for _, index in sorted((m[0], i) for i, m in enumerate(queued)):
        free_s = max(free_s, queued[index][0]) + 1e-6 * queued[index][3]
        assert ends_s[index] == pytest.approx(free_s, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e3), max_size=30))
def test_the_clock_runs_events_in_order_and_never_goes_back(moments):
    events, seen = Events(), []
    for index, moment_s in enumerate(moments):
        events.at(moment_s, lambda index=index: seen.append((events.now_s, index)))
    events.run_for(2e3)
    assert seen == sorted((moment_s, index) for index, moment_s in enumerate(moments))


LINES = (ROOT / "docs" / "records" / "scaling" / "records.jsonl").read_bytes().splitlines()[:3]


def loaded(data):
    """Returns the ids of the records in a file of these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        path.write_bytes(data)
        return [record.id for record in store.load(path)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(b"\n".join(LINES))))
def test_a_file_that_is_cut_anywhere_has_all_complete_records_and_takes_more(cut):
    whole, data = loaded(b"\n".join(LINES)), b"\n".join(LINES)[:cut]
    complete = sum(cut >= len(b"\n".join(LINES[: count + 1])) for count in range(len(LINES)))
    assert loaded(data) == whole[:complete]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        path.write_bytes(data)
        store.mend(path)
        path.write_bytes(path.read_bytes() + LINES[0] + b"\n")
        assert [record.id for record in store.load(path)] == [*whole[:complete], whole[0]]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(LINES[1])), st.binary(min_size=1, max_size=40))
@example(18, b"/")
def test_damage_to_a_line_costs_at_most_that_record(start, garbage):
    damaged = LINES[1][:start] + garbage + LINES[1][start + len(garbage) :]
    whole = loaded(b"\n".join(LINES) + b"\n")
    try:
        ids = loaded(b"\n".join([LINES[0], damaged, LINES[2]]) + b"\n")
    except UserError as error:
        # Of another version, or with a name that leads out of its folder.
        assert re.search("has schema|is not the name of a file or folder", str(error))
    else:
        assert whole[0] == ids[0] and whole[2] == ids[-1]
