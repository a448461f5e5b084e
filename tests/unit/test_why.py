"""Tests of the reasons why a row stands out: right where the plan says so, and silent otherwise."""

from __future__ import annotations

import dataclasses

import pytest

from common.results.records import Bound, Breakdown, Group, Plan
from common.results.report.overview import overview
from common.results.timed import explanations, rows
from dear.cost.bounds import StepTimes
from dear.cost.fit import AlphaBeta
from tests.unit.made_record import record, with_first

COMPUTE = StepTimes(forward_s=0.1, backward_s=0.2, update_s=0.0)
# A start-up of 1 ms; 10 ms per MB of an all-reduce, 5 ms of each of its halves.
COSTS = {
    "all_reduce": AlphaBeta(alpha_s=0.001, beta_s_per_byte=1e-8),
    "reduce_scatter": AlphaBeta(alpha_s=0.001, beta_s_per_byte=5e-9),
    "all_gather": AlphaBeta(alpha_s=0.001, beta_s_per_byte=5e-9),
}
MB = 1_000_000


def made(step_s, messages, kind="wfbp", *, label="ddp", exposed_s=None, sent=None, **changes):
    """A trial of 4 ranks that has sent such messages."""
    trial = record(label, step_s, 4)
    parts = {"forward_s": 0.1, "backward_s": 0.2, "update_s": 0.0, "step_s": step_s}
    facts = {
        "bound": Bound(kind=kind, step_s=None, compute_limit_s=0.3, wire_limit_s=None),
        "breakdown": Breakdown(**parts, exposed_comm_s=exposed_s),
    }
    first = {
        "compute": COMPUTE,
        "costs": COSTS,
        "plan": Plan(groups=[Group(bytes=nbytes) for nbytes in messages]),
        "gradient_bytes": sum(messages),
        "bytes_per_step": sent,
    }
    of_first = {key: value for key, value in changes.items() if key not in facts}
    others = {key: value for key, value in changes.items() if key in facts}
    return with_first(dataclasses.replace(trial, **facts | others), **first | of_first)


def reason(*arguments, **more):
    return explanations.reason(made(*arguments, **more), hidden=True)


def test_one_message_at_the_end_is_told_with_its_time():
    text = "it sends all 14.0 MB in one message after the backward pass. "
    text += "Nothing hides this message (141 ms)"
    for kind in ("wfbp", "sequential"):
        assert reason(0.44, [14 * MB], kind) == text
        assert reason(0.44, [14 * MB], kind, exposed_s=0.14) == text
    # It was 70 ms longer than that, or 70 shorter: something else is going on.
    for step_s in (0.51, 0.37):
        assert reason(step_s, [14 * MB]) is None
    # The rank did not wait: it was busy.
    assert reason(0.44, [14 * MB], exposed_s=0.01) is None
    # Behind all that a rank computes a message may start at the end.
    assert reason(0.44, [14 * MB], "cross_iteration") is None


def test_the_last_message_of_several_counts_where_the_others_are_hidden():
    assert reason(0.351, [4 * MB, 5 * MB, 5 * MB]) == (
        "it sends the last 5.00 MB of 14.0 MB in one message after the backward pass. "
        "Nothing hides this message (51.0 ms)"
    )
    assert reason(0.36, [4 * MB, 5 * MB, 5 * MB]) is not None
    assert reason(0.375, [4 * MB, 5 * MB, 5 * MB]) is None, "a third of the 75 ms is something else"


def test_the_last_message_of_two_legs_counts_twice():
    # 16 and 16 ms; what the next forward pass reads first is in it.
    assert reason(0.332, [5 * MB, 3 * MB, 3 * MB], "dear") == (
        "it sends the last 3.00 MB of 11.0 MB in one message after the backward pass, "
        "and needs it before the next forward pass. Nothing hides this message (32.0 ms)"
    )


def test_bytes_that_take_longer_than_the_backward_pass_are_told():
    # 403 ms of three messages, 200 of them hidden.
    text = "its all-reduces take 403 ms per step; the backward pass hides 200 ms of that"
    assert reason(0.503, [20 * MB, 19 * MB, MB]) == text
    assert reason(0.42, [20 * MB, 19 * MB, MB]) is None, "80 ms less than that"
    # 61 ms are left, and the last message takes 51 of these: it is not the last one's doing.
    assert "the backward pass hides 200 ms" in reason(0.363, [10 * MB, 11 * MB, 5 * MB])
    # In one message nothing would be hidden: there must have been more of them.
    assert reason(0.503, [40 * MB]) is None


def test_an_all_gather_behind_the_next_forward_pass_is_told():
    # 204 and 204 ms: 4 ms are left behind the backward pass, 104 behind the forward pass.
    assert reason(0.408, [13 * MB, 13 * MB, 13 * MB, MB], "dear") == (
        "its reduce-scatters take 204 ms per step; the backward pass hides 200 ms of that. "
        "Its all-gathers take 204 ms per step; the next forward pass hides 100 ms of that"
    )
    # What one leg leaves of its window is of no use to the other.
    light = COSTS | {"reduce_scatter": AlphaBeta(alpha_s=0.0005, beta_s_per_byte=2.5e-9)}
    assert reason(0.404, [13 * MB, 13 * MB, 13 * MB, MB], "dear", costs=light) == (
        "its reduce-scatters take 102 ms per step; the backward pass hides 102 ms of that. "
        "Its all-gathers take 204 ms per step; the next forward pass hides 100 ms of that"
    )
    # The same step with all-reduces in its place would be a riddle.
    assert reason(0.408, [13 * MB, 13 * MB, 13 * MB, MB], "wfbp") is None


def test_a_shared_update_is_told_where_only_that_comes_to_the_step():
    update = StepTimes(forward_s=0.1, backward_s=0.2, update_s=0.08)
    messages = [13 * MB, 13 * MB, 13 * MB, MB]
    text = reason(0.428, messages, "dear", compute=update)
    assert text.endswith(". Each rank makes 1/4 of the update, which saves 60.0 ms")
    # With all of the update the step is 60 ms longer: it is not shared.
    text = reason(0.488, messages, "dear", compute=update)
    assert "hides 100 ms" in text and "update" not in text


def test_start_ups_of_many_messages_are_told_where_their_bytes_would_be_hidden():
    many = [10_000] * 400
    # 400 ms of start-ups and 40 of bytes; how far start-ups overlap nobody knows.
    assert reason(0.45, many, exposed_s=0.14) == (
        "it sends 400 messages, whose start-ups take up to 399 ms. In one message, its 4.00 MB "
        "would take 41.0 ms, behind the backward pass of 200 ms"
    )
    assert reason(0.45, many, exposed_s=0.02) is None, "it did not wait for them"
    # 450 ms in all, of which 200 are hidden; without start-ups all would be.
    assert reason(0.55, [50_000] * 300).startswith("it sends 300 messages, whose start-ups")
    assert reason(0.45, [400_000] * 10) is None, "10 start-ups are not 150 ms"


def test_what_is_hidden_is_told_of_the_fastest_alone():
    hidden = made(0.302, [9 * MB, 100_000])
    assert explanations.reason(hidden, hidden=True) == (
        "it hides all but 2.00 ms of its communication. Its all-reduces (93.0 ms) run behind the "
        "backward pass"
    )
    assert explanations.reason(hidden, hidden=False) is None
    # Neither 300 ms of messages nor one at the end can be hidden: who knows what it has sent.
    assert reason(0.302, [15 * MB, 15 * MB, 100_000]) is None
    assert reason(0.302, [9 * MB]) is None
    # Behind all that a rank computes that one can.
    assert "behind all that a rank computes" in reason(0.302, [9 * MB], "cross_iteration")


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": None},
        {"plan": Plan()},
        {"compute": None},
        {"costs": None},
        {"bound": None},
        {"gradient_bytes": None},
        {"gradient_bytes": 20 * MB},  # the plan is not of all gradients
        {"sent": 7 * MB},  # compressed
        {"kind": "sharded"},
        {"kind": "decentralized"},
        {"kind": None},
    ],
    ids=str,
)
def test_where_something_is_not_known_there_is_no_sentence(changes):
    assert reason(0.44, [14 * MB], sent=14 * MB) is not None
    assert reason(0.44, [14 * MB], **changes) is None


def told(*records):
    result = rows.make_rows(records, "ddp")
    return explanations.sentences(result, records)


def test_the_fastest_and_the_slowest_and_those_far_from_their_bound_are_explained():
    slow, fast = made(0.44, [14 * MB]), made(0.302, [9 * MB, 100_000], label="wfbp")
    bound = Bound(kind="wfbp", step_s=0.3, compute_limit_s=0.3, wire_limit_s=None)
    between = made(0.35, [4 * MB, 5 * MB, 5 * MB], label="dear", bound=bound)
    place = "mnist_cnn, batch 8, 4 workers: "
    first, last, far = told(slow, between, fast)
    assert first.startswith(f"{place}wfbp (fastest): it hides")
    assert last.startswith(f"{place}ddp (slowest): it sends all 14.0 MB")
    assert far.startswith(f"{place}dear (86% of its bound): it sends the last 5.00 MB")
    assert first in overview([slow, between, fast], "ddp").lines
    # Of several seeds it is said once.
    again = [dataclasses.replace(item, hash=f"{item.hash}2") for item in (slow, between, fast)]
    assert told(slow, between, fast, *again) == [first, last, far]
    # Rows that are alike, and numbers that are not believed, have no reason.
    near = made(0.43, [14 * MB], label="wfbp")
    assert told(slow, near) == []
    fastest = made(0.301, [9 * MB, 100_000], label="dear")
    assert told(slow, fast, fastest)[0].startswith(f"{place}dear (fastest)")
    wrong = dataclasses.replace(fastest, check=record(correct=False).check)
    assert told(slow, fast, wrong) == [first, last]
    assert told(record("none", 0.3, 1), record("ddp", 0.4, 1)) == []
