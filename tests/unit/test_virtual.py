"""The event model against steps that are worked out by hand, and against the bounds."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch

from common.models.profile import Call, ProfiledParameter, load, path_of
from common.models.replay.model import Replay
from common.virtual.foresee import arrived, foresee, halved, share_on_wire
from common.virtual.passes import (
    Bundle,
    Gradient,
    Message,
    Passes,
    UnmodelledError,
    messages_of,
    passes_of,
    update_s_of,
)
from dear.algorithms.synchronous.dear import with_first
from dear.buckets.grouping import RunOrder, group, launch_order
from dear.cost.bounds import StepTimes, comm_times, step_bound_s
from dear.cost.collectives import table_costs
from dear.cost.event_model.events import Events
from dear.cost.event_model.link import Link
from dear.cost.event_model.passes import grouped
from dear.cost.event_model.step import predict
from dear.cost.fit import AlphaBeta
from dear.cost.overlap import Cycles, Overlap, Transfer, Unstated
from dear.errors import UserError
from dear.training.algorithm import algorithm_class, algorithm_options

# Two layers, whose forward passes take 1 and 2 s. The second one's gradient is there after 1 s of a
# backward pass of 4 s, the first one's at its end. An update takes half a second.
PASSES = Passes(
    forward_s=(1.0, 2.0),
    backward_s=4.0,
    update_s=0.5,
    gradients=(
        Gradient(name="b", nbytes=100, ready_s=1.0, layer=1),
        Gradient(name="a", nbytes=100, ready_s=4.0, layer=0),
    ),
)
EACH = grouped(PASSES, [[0], [1]])
COSTS = {
    "all_reduce": lambda nbytes: nbytes / 50,
    "reduce_scatter": lambda nbytes: nbytes / 100,
    "all_gather": lambda nbytes: nbytes / 100,
}


def stated(algorithm, **options):
    return algorithm_class(algorithm).overlap_of(algorithm_options(algorithm, options))


def predicted(statement, messages=EACH, passes=PASSES, costs=COSTS, **more):
    return predict(passes, messages, statement, costs, 2, **more)


def waits(found):
    return [(wait.moment, wait.layer, round(wait.seconds, 9)) for wait in found.waits]


QUEUE = Overlap(
    transfers=(Transfer(kind="average", starts="gradient", awaited="layer", steps_later=1),),
    updates="layer",
)


@pytest.mark.parametrize(
    ("algorithm", "groups", "exposed_s"),
    [
        ("wfbp", [[0], [1]], 2),  # b from 1 to 3, a from 4 to 6
        ("allreduce", [[0], [1]], 4),  # after the backward pass
        ("ddp", [[0, 1]], 4),  # gradients in one message wait for the last of them
    ],
)
def test_messages_beside_and_after_the_backward_pass(algorithm, groups, exposed_s):
    result = predicted(stated(algorithm), grouped(PASSES, groups))
    assert result.step_s == pytest.approx(3 + 4 + exposed_s + 0.5)
    assert result.exposed_s == pytest.approx(exposed_s)
    assert {(wait.moment, wait.layer) for wait in result.waits} == {("pass", None)}


def test_halves_beside_both_passes():
    # Reduces: b from 1 to 2, a from 4 to 5 of the backward pass. Each of two ranks updates half:
    # b's eighth of a second while a travels, a's after it. Then a is gathered, b beside layer 0.
    result = predicted(stated("dear", small_kb=0))
    assert result.step_s == pytest.approx(1 + 1 + 2 + 4 + 1 + 0.125)
    assert waits(result) == [("layer", 0, 1), ("step", None, 0.875)]


def test_small_buckets_are_averaged_at_once_where_that_is_stated():
    # b from 1 to 3, a from 4 to 6, and no second half; updates are shared all the same.
    result = predicted(stated("dear"))
    assert result.step_s == pytest.approx(3 + 6 + 0.125) and waits(result) == [
        ("step", None, 1.875)
    ]


def test_what_runs_first_overtakes_between_two_chunks():
    # b takes 6 s from 1 on. a is ready at 4, takes over at 5, when a chunk of b has ended, and ends
    # at 7; b ends at 9. The next forward pass begins at 4: layer a is updated at 7 and runs to
    # 8.125; b is there at 9.
    b, a = PASSES.gradients
    large = dataclasses.replace(PASSES, gradients=(dataclasses.replace(b, nbytes=300), a))
    messages = grouped(large, [[0], [1]])
    result = predicted(stated("bytescheduler"), messages, large, chunk_bytes=100)
    assert waits(result) == [("layer", 0, 3), ("layer", 1, 0.875)]
    assert result.step_s == pytest.approx(3 + 0.125 + 1 + 0.875 + 0.375 + 2 + 4)
    assert waits(predicted(QUEUE, messages, large)) == [("layer", 0, 5)]


def test_urgent_messages_of_one_queue_do_not_overtake_each_other():
    large = dataclasses.replace(
        PASSES,
        gradients=(
            Gradient(name="b", nbytes=400, ready_s=1.0, layer=1),
            Gradient(name="a", nbytes=400, ready_s=4.0, layer=0),
        ),
    )
    messages = grouped(large, [[0], [1]])

    def step_s(**more):
        (sent,) = QUEUE.transfers
        sent = dataclasses.replace(sent, **more)
        order = dataclasses.replace(QUEUE, transfers=(sent,))
        return predicted(order, messages, large, chunk_bytes=100).step_s

    assert step_s(urgent=True, levels=1) == step_s()
    assert step_s(urgent=True, levels=2) == step_s(urgent=True) < step_s()


def test_gradients_in_one_message_are_awaited_before_the_first_layer_that_reads_one_of_them():
    result = predicted(QUEUE, grouped(PASSES, [[0, 1]]))
    assert waits(result) == [("layer", 0, 4)] and result.step_s == pytest.approx(4 + 0.5 + 3 + 4)


@pytest.mark.parametrize(("up_to_bytes", "step_s"), [(99, 11.5), (100, 9.5)])
def test_a_bucket_of_just_so_many_bytes_is_small(up_to_bytes, step_s):
    late = Transfer(kind="average", starts="pass", awaited="pass")
    at_once = dataclasses.replace(
        late, starts="gradient", buckets="instead", up_to_bytes=up_to_bytes
    )
    assert predicted(Overlap(transfers=(late, at_once))).step_s == pytest.approx(step_s)


@dataclass
class Latent:
    """A second of start-up that others overlap, unless it is `busy`."""

    busy: bool = False

    def __call__(self, nbytes):
        return 1 + nbytes / 50

    def occupancy_s(self, nbytes):
        return nbytes / 50 + self.busy


@pytest.mark.parametrize(("busy", "step_s"), [(False, 3 + 4 + 5 + 0.5), (True, 3 + 4 + 6 + 0.5)])
def test_queued_messages_overlap_start_ups_but_not_what_occupies_the_link(busy, step_s):
    costs = {"all_reduce": Latent(busy)}
    assert predicted(stated("allreduce"), costs=costs).step_s == pytest.approx(step_s)


def test_parts_of_a_bucket_pay_a_start_up_each():
    costs = {"all_reduce": lambda nbytes: 1 + nbytes / 50}
    parts = Transfer(kind="average", starts="pass", awaited="pass", part_bytes=40)
    whole = Transfer(kind="average", starts="pass", awaited="pass")
    times = [predicted(Overlap(transfers=(item,)), costs=costs).step_s for item in (parts, whole)]
    assert times == [pytest.approx(3 + 4 + 10 + 0.5), pytest.approx(3 + 4 + 6 + 0.5)]


# Four layers: the middle two are units that are freed after the forward pass, the others a third
# unit, whose first gradient comes first of all. A gather or reduce of the units takes 1, 2 and 3 s.
SHARDED = Passes(
    forward_s=(1.0, 1.0, 1.0, 1.0),
    backward_s=8.0,
    update_s=1.0,
    gradients=tuple(
        Gradient(name=name, nbytes=nbytes, ready_s=ready_s, layer=layer)
        for name, nbytes, ready_s, layer in [
            ("head", 100, 2.0, 3),
            ("two", 100, 4.0, 2),
            ("one", 200, 6.0, 1),
            ("stem", 200, 8.0, 0),
        ]
    ),
)
UNITS = messages_of(
    SHARDED,
    [
        Bundle(nbytes=100, names=("two",), some=True),
        Bundle(nbytes=200, names=("one",), some=True),
        Bundle(nbytes=300, names=("head", "stem"), some=False),
    ],
)


def test_units_are_gathered_before_each_pass_and_scattered_after_the_second():
    # Two ranks update half of their parameters each.
    result = predicted(stated("fsdp"), UNITS, SHARDED)
    gathered, again, scattered = 3 + 2 + 1, 1 + 2, 1 + 2 + 3
    assert result.step_s == pytest.approx(4 + gathered + 8 + again + scattered + 0.5)
    assert result.exposed_s == pytest.approx(gathered + again + scattered)
    assert waits(result) == [
        ("layer", 0, 3),
        ("layer", 1, 2),
        ("layer", 2, 1),
        ("ahead", None, 1),
        ("ahead", None, 2),
        ("gradient", None, 1),
        ("gradient", None, 2),
        ("gradient", None, 3),
    ]

    # Units that stay whole are gathered once.
    result = predicted(stated("fsdp", stage=2), UNITS, SHARDED)
    assert result.step_s == pytest.approx(4 + 6 + 8 + 6 + 0.5)
    assert {wait.moment for wait in result.waits} == {"layer", "gradient"}


def ahead(starts, awaited):
    """Three units, each gathered for the backward pass alone."""
    again = Transfer(
        kind="gather", carries=("parameters",), starts=starts, awaited=awaited, buckets="some"
    )
    return Overlap(transfers=(again,))


def test_a_gather_ahead_that_nobody_awaits_at_once_hides_behind_the_layer_before():
    late = predicted(ahead("gradient", "gradient"), UNITS, SHARDED)
    assert late.exposed_s == pytest.approx(3)
    hidden = predicted(ahead("ahead", "gradient"), UNITS, SHARDED)
    # Unit two from 0 to 1, awaited at 4; unit one from 2 to 4, awaited at 6.
    assert hidden.exposed_s == 0 and hidden.step_s == pytest.approx(4 + 8 + 0.5)


def test_the_first_layer_that_the_backward_pass_reaches_is_gathered_as_it_begins():
    each = messages_of(
        SHARDED, [Bundle(nbytes=g.nbytes, names=(g.name,), some=True) for g in SHARDED.gradients]
    )
    result = predicted(ahead("ahead", "ahead"), each, SHARDED)
    # head and two at once; then one, and stem.
    assert waits(result) == [("ahead", None, s) for s in (1, 1, 2, 2)]


def cycles(**given):
    rule = {"cycle_s": 1e-3, "fusion_bytes": 1000, "agreement_bytes": 0} | given
    return Unstated("a thread decides", Cycles(**rule))


def test_what_arrives_waits_for_the_next_cycle():
    # Messages take no time; a step ends with the update after every tenth second.
    costs = {"all_reduce": lambda nbytes: 0.0}
    assert predicted(cycles(cycle_s=10), costs=costs).step_s == pytest.approx(10)
    # A cycle is as long if ranks need a part of it to agree.
    costs = {"all_reduce": lambda nbytes: 1.0 if nbytes == 7 else 0.0}
    result = predicted(cycles(cycle_s=10, agreement_bytes=7), costs=costs)
    assert result.step_s == pytest.approx(10)


def test_cycles_send_as_many_bytes_as_the_plan_says_beside_the_backward_pass():
    assert predicted(cycles()).step_s == pytest.approx(9.5, abs=5e-3)
    # b from 1 to 2 s, a from 4 to 5 s of the backward pass.
    halves = grouped(PASSES, [[0], [1]], share=0.5)
    assert predicted(cycles(), halves).step_s == pytest.approx(3 + 5 + 0.5, abs=5e-3)


@pytest.mark.parametrize(
    ("fusion_bytes", "fused_s", "sent_s"),
    [(1000, None, 3), (150, None, 6), (0, None, 6), (1000, 5.0, 5), (150, 5.0, 6)],
)
def test_what_is_ready_is_fused_up_to_the_size_of_the_buffer_and_only_that_is_copied(
    fusion_bytes, fused_s, sent_s
):
    # Both are ready when the cycle begins; each buffer takes 3 s, or a copied one `fused_s`.
    at_once = Passes(
        forward_s=(20.0,),
        backward_s=0.0,
        update_s=0.0,
        gradients=tuple(Gradient(name=n, nbytes=100, ready_s=0.0, layer=0) for n in "ba"),
    )
    costs = {"all_reduce": lambda nbytes: 3.0 if nbytes else 0.0}
    if fused_s:
        costs["fused_all_reduce"] = lambda nbytes: fused_s
    rule = cycles(fusion_bytes=fusion_bytes)
    result = predicted(rule, grouped(at_once, [[0], [1]]), at_once, costs)
    assert result.step_s == pytest.approx(20 + sent_s, abs=5e-3)


def test_ranks_that_agree_take_time_for_it():
    # What has come meanwhile waits for the next agreement, which takes a second, too.
    costs = {"all_reduce": lambda nbytes: 1.0 if nbytes == 7 else 0.0}
    result = predicted(cycles(agreement_bytes=7), costs=costs)
    assert 7.5 + 1 <= result.step_s <= 7.5 + 2


def test_marks_travel_when_the_pass_has_ended():
    costs = {"all_reduce": lambda nbytes: 1.0 if nbytes == 8 else 0.0}
    result = predicted(cycles(fusion_bytes=0, marks_bytes=4), costs=costs)
    assert result.step_s == pytest.approx(7.5 + 1, abs=5e-3)


@pytest.mark.parametrize(
    ("statement", "costs", "reason"),
    [
        (None, COSTS, "does not state"),
        (Unstated("nobody can look"), COSTS, "does not state"),
        (stated("wfbp"), {}, "no cost of all_reduce"),
        (cycles(), {}, "no cost of all_reduce"),
        (stated("neighbor"), COSTS, "exchange with a few others"),
        (stated("fsdp"), COSTS, "not known which messages"),
    ],
)
def test_what_cannot_be_computed_says_so(statement, costs, reason):
    with pytest.raises(UnmodelledError, match=reason):
        predicted(statement, costs=costs)


def test_a_plan_is_matched_with_gradients_by_sizes_and_names():
    gradients = tuple(
        Gradient(name=name, nbytes=nbytes, ready_s=0.0, layer=0)
        for name, nbytes in [("d", 8), ("c", 8), ("b", 4), ("a", 4)]
    )
    passes = Passes(forward_s=(1.0,), backward_s=1.0, update_s=0.0, gradients=gradients)

    def members(*plan):
        return [message.members for message in messages_of(passes, plan)]

    assert members(Bundle(nbytes=16), Bundle(nbytes=8)) == [(0, 1), (2, 3)]
    late = Bundle(nbytes=8, tensors=2, names=("a", "b"))
    assert members(late, Bundle(nbytes=16, tensors=2)) == [(2, 3), (0, 1)]
    halves = messages_of(passes, [Bundle(nbytes=24)], share=0.5)
    assert halves == (Message(members=(0, 1, 2, 3), nbytes=12),)
    for plan, words in [
        ([Bundle(nbytes=12), Bundle(nbytes=12)], "do not fit"),
        ([Bundle(nbytes=16, tensors=3)], "do not fit"),
        ([Bundle(nbytes=16, names=("z",))], "do not fit"),
        ([Bundle(nbytes=16)], "lack 2 of 4"),
    ]:
        with pytest.raises(UnmodelledError, match=words):
            messages_of(passes, plan)


def test_compressing_is_not_modelled_but_halves_of_bytes_are():
    assert share_on_wire(algorithm_options("wfbp", {})) == 1
    assert share_on_wire(algorithm_options("wfbp", {"compression": "bf16"})) == 0.5
    with pytest.raises(UnmodelledError, match="topk"):
        share_on_wire(algorithm_options("wfbp", {"compression": "topk"}))


def sending(**given):
    """Events, a link, a function that sends on a channel, and the names that have ended, when."""
    events, ended = Events(), []
    link = Link(events, **given)

    def send(name, nbytes, seconds, channel, priority):
        def then():
            ended.append((name, events.now_s))

        link.send(lambda _: seconds, nbytes, channel=channel, priority=priority, then=then)

    return events, link, send, ended


def test_heads_of_channels_take_turns_by_age_and_a_channel_is_a_queue():
    events, link, send, ended = sending()
    send("first", 1, 1.0, 0, 0.0)
    send("behind", 1, 1.0, 0, 9)
    send("beside", 1, 1.0, 1, 0.0)
    events.run_for(10)
    # What is under way ends with its chunk; then the head of the urgent queue is the most urgent.
    assert ended == [("first", 1), ("behind", 2), ("beside", 3)]
    assert link.busy_s == 3
    with pytest.raises(UserError, match="an event that never comes"):
        events.run_until(lambda: False)


def test_a_more_urgent_message_that_comes_as_a_chunk_ends_goes_on_at_once():
    events, link, send, ended = sending(chunk_bytes=1)
    send("slow", 3, 3.0, 0, 0)
    events.run_for(1.0)
    send("urgent", 3, 1.0, 1, 1)
    events.run_for(10)
    assert ended == [("urgent", 2), ("slow", 4)] and link.busy_s == 4


PROFILE = load(path_of("resnet50", "rtx2080ti-modelled", 64))
ALGORITHMS = ["allreduce", "wfbp", "ddp", "mgwfbp", "bytescheduler", "dear", "horovod"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_step_is_shorter_than_its_bound_and_the_same_input_gives_the_same_bits(algorithm):
    options = algorithm_options(algorithm, {})
    costs = halved(AlphaBeta(alpha_s=2e-4, beta_s_per_byte=3.5e-9))
    result = [foresee(PROFILE, algorithm, options, costs, world_size=2) for _ in range(2)]
    assert result[0] == result[1]
    compute = StepTimes(
        forward_s=PROFILE.forward_s, backward_s=PROFILE.backward_s, update_s=update_s_of(PROFILE)
    )
    comm = comm_times(passes_of(PROFILE, 0.0).nbytes, costs)
    kind = algorithm_class(algorithm).bound_of(options)
    bound_s = step_bound_s(kind, compute, comm, 2)
    assert bound_s <= result[0].step_s <= 1.3 * bound_s
    computed_s = result[0].step_s - result[0].exposed_s
    shared = compute.update_s / 2 if algorithm == "dear" else compute.update_s
    assert computed_s == pytest.approx(compute.forward_s + compute.backward_s + shared, abs=1e-3)
    statement = algorithm_class(algorithm).overlap_of(options)
    if isinstance(statement, Overlap):
        awaited = {transfer.awaited for transfer in statement.transfers}
        assert {wait.moment for wait in result[0].waits} <= awaited


def test_half_a_collective_has_half_of_its_steps_and_of_its_bytes():
    whole, half = (AlphaBeta(alpha_s=a, beta_s_per_byte=b) for a, b in ((4.0, 2.0), (2.0, 1.0)))
    assert halved(whole) == {"all_reduce": whole, "reduce_scatter": half, "all_gather": half}


def test_a_published_cluster_of_64():
    """Merged messages beat single ones, and halves beat both, where a start-up takes 7 ms."""
    costs = halved(table_costs("10gbe", 64))

    def step_s(algorithm):
        return foresee(PROFILE, algorithm, algorithm_options(algorithm, {}), costs, 64).step_s

    times = [step_s(name) for name in ("dear", "mgwfbp", "wfbp")]
    assert times == sorted(times) and times[2] > 4 * times[0]


def test_a_parameter_is_needed_before_the_first_layer_that_reads_it():
    calls = ("", "table", "body", "table", "head")
    owned = {"head.weight": (2, 3), "body.inner.bias": (3,), "scale": ()}
    profile = dataclasses.replace(
        PROFILE,
        calls=tuple(Call(module=name, forward_s=1.0, backward_s=2.0) for name in calls),
        parameters=tuple(
            ProfiledParameter(name=name, shape=shape, position=place, ready_s=float(place))
            for place, (name, shape) in enumerate(owned.items())
        ),
        shared={"table.weight": "head.weight"},
    )
    passes = passes_of(profile, 0.0)
    assert [gradient.layer for gradient in passes.gradients] == [1, 2, 0]
    assert [gradient.nbytes for gradient in passes.gradients] == [24, 12, 4]
    assert update_s_of(profile, 7) == pytest.approx(7 * 40 / profile.memory_bytes_per_s)


@pytest.mark.parametrize("algorithm", ["allreduce", "wfbp"])
def test_each_gradient_travels_alone_where_nothing_is_fused(algorithm):
    gradients, cost = arrived(passes_of(PROFILE, 0.0)), AlphaBeta(alpha_s=1.0, beta_s_per_byte=0.0)
    options = algorithm_options(algorithm, {})
    groups = algorithm_class(algorithm).grouping(options, gradients, cost)
    assert groups == [[place] for place in range(len(gradients.sizes))]


@pytest.mark.parametrize("options", [{}, {"fusion": "none"}, {"first_mb": 25.0}])
def test_groups_without_a_model_are_those_with_one(options):
    options = algorithm_options("dear", options)
    passes = passes_of(PROFILE, 0.0)
    cost = AlphaBeta(alpha_s=1e-4, beta_s_per_byte=1e-9)
    result = algorithm_class("dear").grouping(options, arrived(passes), cost)
    options = with_first(options, lambda: cost)
    model = Replay(PROFILE, torch.Generator())
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    params = list(model.parameters())
    order = RunOrder(
        reads=list(range(len(params))),
        arrivals=[places[gradient.name] for gradient in passes.gradients],
        waits_s=[passes.backward_s - gradient.ready_s for gradient in passes.gradients],
    )
    members = group(model, params, order, options)
    names = {param: name for name, param in model.named_parameters()}
    launched = [{names[p] for p in members[i]} for i in launch_order(members, params, order)]
    assert [{passes.gradients[i].name for i in item} for item in result] == launched
    assert sorted(itertools.chain(*result)) == list(range(len(passes.gradients)))
