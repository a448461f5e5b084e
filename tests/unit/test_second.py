"""The second method from a record alone: what it is for, what it says, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest

from common.models.profile import load, path_of
from common.results.records import FabricFacts, Group, Plan
from common.results.records.trust import Modelled
from common.results.timed.event_model import modelled, prediction
from common.results.validity import flag_text
from common.virtual.passes import passes_of
from tests.unit.made_record import record, with_first

MODEL = "resnet50@rtx2080ti-modelled"
PROFILE = load(path_of("resnet50", "rtx2080ti-modelled", 64))
PASSES = passes_of(PROFILE, 1e-3)
COSTS = {"all_reduce": {"alpha_s": 1e-3, "beta_s_per_byte": 1e-9}}
FACTS = {
    "compute": {"forward_s": 0.1, "backward_s": 0.2, "update_s": 1e-3},
    "costs": COSTS,
    "plan": {"groups": [{"bytes": PASSES.nbytes}]},
    "gradient_bytes": PASSES.nbytes,
}
STEP_S = sum(PASSES.forward_s) + PASSES.backward_s + 1e-3 + 1e-3 + 1e-9 * PASSES.nbytes
EMULATED = FabricFacts(kind="emulated")


def made(algorithm="ddp", step_s=STEP_S, *, facts=FACTS, fabric=EMULATED, world=2, **trial):
    trial = {"model": MODEL, "batch_size": 64, "profile_digest": PROFILE.digest} | trial
    return record(algorithm, step_s, world, facts=facts, fabric=fabric, **trial)


def test_a_record_holds_the_step_of_the_model():
    result = made()
    assert result.modelled.step_s == pytest.approx(STEP_S, rel=1e-5)
    assert result.modelled.exposed_s == pytest.approx(1e-3 + 1e-9 * PASSES.nbytes, rel=1e-5)
    assert result.modelled.off(1.02 * STEP_S) == pytest.approx(0.02, rel=1e-3)
    assert flag_text(result) is None


@pytest.mark.parametrize(("factor", "believed"), [(0.94, False), (0.97, True), (1.06, False)])
def test_a_measured_step_that_is_far_off_is_not_believed(factor, believed):
    result = flag_text(made(step_s=factor * STEP_S))
    if believed:
        assert result is None
    else:
        computed, measured = (f"{1e3 * s:.1f} ms" for s in (STEP_S, factor * STEP_S))
        assert result == f"off the model: the event model computes {computed}, measured {measured}"


@pytest.mark.parametrize(
    "given", [{"fabric": FabricFacts()}, {"world": 1}, {"algorithm": "dadt"}, {"status": "failed"}]
)
def test_there_is_nothing_to_model(given):
    assert made(**given).modelled is None
    assert modelled(dataclasses.replace(made(), status="failed")) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"costs": None}, "costs of collectives are not"),
        ({"compute": None}, "times of compute or"),
        ({"plan": None}, "messages of a step are not on record"),
        ({"plan": Plan()}, "messages of a step are not on record"),
        ({"plan": Plan(groups=[Group(bytes=8)])}, "do not fit"),
        ({"trial": {"model": "resnet50"}}, "no layer profile"),
        ({"trial": {"model": "resnet50@nowhere"}}, "is missing"),
        ({"trial": {"profile_digest": "0"}}, "has changed since the trial"),
        ({"trial": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"trial": {"algorithm": "gone"}}, "gone"),
        ({"trial": {"options": {"compression": "topk", "density": 0.01}}}, "topk"),
        ({"trial": {"fault": {"kind": "slow_host", "host": 0, "factor": 2.0}}}, "injects faults"),
    ],
)
def test_what_cannot_be_modelled_says_why(change, reason):
    result = made()
    if "trial" in change:
        result = dataclasses.replace(result, trial=result.trial | change["trial"])
    else:
        result = with_first(result, **change)
    result = modelled(result)
    assert result.step_s is None and reason in result.reason


def test_the_profile_of_a_model_that_was_brought_is_where_the_trial_says(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(path_of("resnet50", "rtx2080ti-modelled", 64).read_text())
    brought = {"source": "file:/mine.py", "profile": str(path)}
    trial = made().trial | {"model": "mine.py@rtx3090-modelled"}
    assert modelled(dataclasses.replace(made(), trial=trial)).step_s is None
    there = dataclasses.replace(made(), trial=trial | {"brought": brought})
    assert modelled(there).step_s == pytest.approx(STEP_S, rel=1e-5)


def test_groups_of_blocks_have_costs_that_nobody_measured():
    result = made("hierarchical", options={"local_size": 2}, world=4)
    default = made("hierarchical", world=4)
    by_host = dataclasses.replace(default, trial=default.trial | {"ranks_per_host": 2})
    assert modelled(by_host) == result.modelled
    assert result.modelled == Modelled(
        reason="the ranks average in groups, whose costs are not on record"
    )


def test_an_engine_in_legs_is_modelled_by_one_message_and_by_two_at_once():
    """Legs of a message go beside those of the one before it, which a cost of one cannot tell."""
    half = PASSES.nbytes // 2
    cut = next(i for i in range(len(PASSES.gradients)) if tail(i) <= half)
    plan = {"groups": [{"bytes": PASSES.nbytes - tail(cut)}, {"bytes": tail(cut)}]}
    alone, free = {"alpha_s": 0.0, "beta_s_per_byte": 4e-9}, {"alpha_s": 0.0, "beta_s_per_byte": 0}
    steps = {}
    for name, pair_s_per_byte in (("side by side", 2.5e-9), ("in turn", 4e-9)):
        pair = free | {"beta_s_per_byte": pair_s_per_byte}
        legs = {"engine": "three legs", "all_reduce": alone, "pair": pair, "error": 0, "noise": 0}
        given = {"algorithm": "hierarchical", "options": {"local_size": 2}, "world": 4}
        result = made(**given, facts=FACTS | {"plan": plan, "engine_costs": legs})
        steps[name] = result.modelled.step_s
        assert result.bound.step_s is None, "blocks of one's own have no bound"
    # In turn, the second waits for the end of the first: 4 ns per byte after its last gradient.
    # Side by side the first has left the links by then, after 2 * 2.5 - 4 ns per byte.
    first, second = (PASSES.gradients[place].ready_s for place in (cut - 1, -1))
    first_nbytes = PASSES.nbytes - tail(cut)
    assert first + 1e-9 * first_nbytes < second
    waited_s = first + 4e-9 * first_nbytes - second
    assert steps["in turn"] - steps["side by side"] == pytest.approx(waited_s, rel=1e-6)


def tail(first):
    return sum(gradient.nbytes for gradient in PASSES.gradients[first:])


def test_a_plan_that_tells_what_is_gathered_twice_is_modelled():
    costs = dict.fromkeys(("all_gather", "reduce_scatter"), COSTS["all_reduce"])
    group = {"bytes": PASSES.nbytes}
    groups = [group | {"some": some} for some in (True, False, None)]
    twice, once, unknown = (
        made("fsdp", facts=FACTS | {"costs": costs, "plan": {"groups": [lines]}}).modelled
        for lines in groups
    )
    message_s = 1e-3 + 1e-9 * PASSES.nbytes
    assert twice.exposed_s == pytest.approx(3 * message_s, rel=1e-5)
    assert once.exposed_s == pytest.approx(2 * message_s, rel=1e-5)
    assert unknown == Modelled(reason="it is not known which messages have which transfers")


def test_half_the_bytes_take_half_the_time():
    whole, half = made(), made(options={"compression": "bf16"})
    saved = prediction(whole).exposed_s - prediction(half).exposed_s
    assert saved == pytest.approx(0.5e-9 * PASSES.nbytes)


SHIPPED = {"alpha_s": 2e-3, "beta_s_per_byte": 2e-9}
ENGINE = {"engine": "Horovod, gloo", "all_reduce": SHIPPED, "error": 0.02, "noise": 0.01}
COMPUTE_S = sum(PASSES.forward_s) + PASSES.backward_s + 1e-3


def by_an_engine(**given):
    """Plan of Horovod: each gradient by itself."""
    plan = {"groups": [{"bytes": gradient.nbytes} for gradient in PASSES.gradients]}
    return made("horovod", facts=FACTS | {"plan": plan, "engine_costs": ENGINE | given})


def test_what_sends_by_an_engine_of_its_own_is_modelled_by_what_that_costs():
    free = {"alpha_s": 0.0, "beta_s_per_byte": 0.0}
    result = by_an_engine(all_reduce=free, fused=free).modelled.step_s
    assert COMPUTE_S <= result <= COMPUTE_S + 2e-3, "within cycles of a millisecond"
    slow = by_an_engine().modelled.step_s
    # Twice as long per byte as on the communicator, so the backward pass hides little of it.
    assert slow > COMPUTE_S - PASSES.backward_s + 2e-9 * PASSES.nbytes
    copied = by_an_engine(fused={"alpha_s": 2e-3, "beta_s_per_byte": 3e-9}).modelled.step_s
    assert copied > slow + 0.5e-9 * PASSES.nbytes


@pytest.mark.parametrize("given", [{"engine": "Horovod, mpi"}, None])
def test_costs_of_another_engine_do_not_count(given):
    result = made("horovod") if given is None else by_an_engine(**given)
    assert result.first.costs
    reason = "the algorithm sends by Horovod, gloo, whose costs are not on record"
    assert result.modelled == Modelled(reason=reason)


def test_the_bound_is_of_what_the_engine_costs_that_sends():
    result = by_an_engine(fused=SHIPPED)
    sent_s = 2e-3 + 2e-9 * result.first.gradient_bytes
    assert result.bound.step_s == pytest.approx(0.1 + max(0.2, sent_s) + 1e-3)
    assert result.sending_costs == {"all_reduce": result.first.engine_costs.all_reduce}
    assert made("horovod").bound.step_s is None, "not by those of the communicator"
    assert made().sending_costs == made().first.costs


def test_costs_of_the_engine_may_be_doubtful():
    assert by_an_engine().notes == []
    (note,) = by_an_engine(error=0.5).notes
    assert note.text.startswith("costs of Horovod, gloo are doubtful: their fit is off by 50%")
