"""Costs of collectives by regime: what is measured, what is fitted, and what that foresees."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from common.harness.worker.timing import costs as timing_costs
from common.harness.worker.timing.costs import engine_costs, time_sender
from common.results.records import typed
from dear.comm import runtime
from dear.cost.collectives import (
    BUDGET_S,
    TIMED_BARRIERS,
    WARM_BYTES,
    is_distant,
    measure_collective,
    timed_by_size,
)
from dear.cost.fit import CollectiveCost, Regime, fit_alpha_beta
from dear.cost.measurement import Measurement, carried, typical_s
from dear.errors import UserError
from tests.unit.made_record import record

CPU = torch.device("cpu")
RATE = 125e6
WIRE = carried("all_reduce", 4) / RATE
KIB, MIB = 1 << 10, 1 << 20
REGIMES = (("direct", 0), ("blocks", 32 * KIB), ("pieces", 128 * KIB), ("pipeline", 4 * MIB))
LINES = {"direct": (2e-3, 4e-9), "blocks": (3.4e-3, 1.4 * WIRE), "pieces": (3.5e-3, 1.1 * WIRE)}
LINES |= {"pipeline": (2.8e-3, WIRE)}
SIZES = [4 * KIB << power for power in range(12)]


def seconds(nbytes: float) -> float:
    name = [name for name, first in REGIMES if first <= nbytes][-1]
    alpha, beta = LINES[name]
    return alpha + beta * nbytes


def sampled(noise=0.0, repeats=16, sizes=SIZES, **more) -> Measurement:
    """Disturbances only add time."""
    luck = random.Random(1)
    times = [
        [seconds(size) * (1 + abs(luck.gauss(0, noise))) for _ in range(repeats)] for size in sizes
    ]
    facts = {"regimes": REGIMES, "wire_s_per_byte": WIRE} | more
    return Measurement(operation="all_reduce", nbytes=list(sizes), seconds=times, **facts)


def zigzag() -> Measurement:
    """Times that no lines have."""
    times = [[seconds(size) * (1.4 if place % 2 else 1.0)] * 4 for place, size in enumerate(SIZES)]
    return dataclasses.replace(sampled(), seconds=times)


def test_each_regime_that_the_engine_tells_has_a_line_and_the_pipeline_that_of_the_wire():
    fit = sampled().fit()
    assert [(part.name, part.below_bytes) for part in fit.smaller] == [
        ("direct", 32 * KIB),
        ("blocks", 128 * KIB),
        ("pieces", 4 * MIB),
    ]
    assert (fit.name, fit.slope, fit.beta_s_per_byte) == ("pipeline", "wire", WIRE)
    for nbytes in (5000, 32 * KIB - 4, 32 * KIB, 100_000, MIB, 3 * MIB, 100 * MIB):
        assert fit(nbytes) == pytest.approx(seconds(nbytes))
        assert fit.latency_s(nbytes) + fit.transfer_s(nbytes) == fit(nbytes)
    assert fit.latency_s(MIB) == pytest.approx(3.5e-3) and fit(0) == fit.latency_s(0) == 0
    naive = fit_alpha_beta(SIZES, sampled().typical_s)
    assert abs(naive(96 * KIB) / seconds(96 * KIB) - 1) > 0.1, "one line cannot say all of them"
    fit = sampled(wire_s_per_byte=None).fit()  # the rate of links is not known
    assert fit.slope == "fit" and fit.beta_s_per_byte == pytest.approx(WIRE)


def test_an_engine_that_tells_no_regimes_has_lines_where_its_times_bend_and_the_fit_says_so():
    fit = sampled(regimes=None).fit()
    assert fit.name is None and fit.slope == "fit"
    assert fit.smaller and {part.name for part in fit.smaller} == {None}
    for size in SIZES:
        assert fit(size) == pytest.approx(seconds(size), rel=0.05)
    straight = dataclasses.replace(
        sampled(regimes=None), seconds=[[2e-3 + WIRE * size] * 4 for size in SIZES]
    )
    assert straight.fit().smaller == ()


def test_a_regime_whose_times_bend_has_two_lines_and_noise_bends_nothing():
    # As the kernel does it, which hands on 64 KiB at once.
    times = [seconds(size) - 1e-3 * (512 * KIB <= size < 4 * MIB) for size in SIZES]
    bent = dataclasses.replace(sampled(), seconds=[[item] * 4 for item in times]).fit()
    names = [(part.name, part.below_bytes) for part in bent.smaller]
    assert names[2:] == [("pieces", 512 * KIB), ("pieces", 4 * MIB)]
    assert [bent(size) for size in SIZES] == pytest.approx(times)
    assert len(sampled(noise=0.05).fit().smaller) == 3


def test_a_regime_without_enough_sizes_has_the_line_of_the_one_before():
    fit = sampled(sizes=SIZES[:6]).fit()  # up to 128 KiB, where a third regime begins
    assert [part.name for part in fit.smaller] == ["direct"] and fit.name == "blocks"
    # Of the pipeline one size is enough where its slope is known.
    assert sampled(sizes=SIZES[:11]).fit().name == "pipeline"
    assert sampled(sizes=SIZES[:11], wire_s_per_byte=None).fit().name == "pieces"
    alone = sampled(sizes=[4 * KIB, 64 * KIB]).fit()
    assert alone.smaller == () and alone(64 * KIB) == pytest.approx(seconds(64 * KIB))


def test_what_links_pass_at_once_is_left_out_where_messages_are_larger():
    free = 50e3
    sizes = [size for size in SIZES if not 32 * KIB <= size < 128 * KIB]
    built = sampled(sizes=sizes, free_bytes=free, regimes=(REGIMES[0], ("pipeline", 128 * KIB)))
    times = [seconds(size) if size < 32 * KIB else 2.8e-3 + WIRE * (size - free) for size in sizes]
    built = dataclasses.replace(built, seconds=[[item] * 2 for item in times])
    fit = built.fit()
    assert (fit.alpha_s, fit.beta_s_per_byte) == (pytest.approx(2.8e-3), WIRE)
    assert built.expected_s(fit)[-4:] == pytest.approx(times[-4:])


def test_times_do_not_bend_among_what_costs_nothing():
    sizes = SIZES[:8]
    times = [[(1e-4 if size < 32 * KIB else 9e-4) + 1e-8 * size] * 4 for size in sizes]
    built = Measurement(
        operation="all_reduce", nbytes=sizes, seconds=times, free_bytes=40e3, regimes=(("one", 0),)
    )
    fit = built.fit()
    assert fit.name == "one" and all(part.below_bytes > 64 * KIB for part in fit.smaller)


def test_costs_come_back_from_json_and_those_of_before_have_one_regime():
    fit = sampled().fit()
    assert typed(CollectiveCost, json.loads(json.dumps(dataclasses.asdict(fit)))) == fit
    before = typed(CollectiveCost, {"alpha_s": 1.0, "beta_s_per_byte": 0.5})
    assert before(4) == 3.0 and before.name is None
    # In another unit of time.
    part = Regime(alpha_s=1.0, beta_s_per_byte=2.0, name="direct", below_bytes=10)
    fit = CollectiveCost(alpha_s=8.0, beta_s_per_byte=4.0, smaller=(part,), name="pipeline")
    assert [fit.divided(2.0)(n) for n in (5, 10)] == [fit(5) / 2, fit(10) / 2]


def test_repeats_that_were_disturbed_do_not_count_even_if_they_are_most():
    assert typical_s([1.0] * 5 + [1.5] * 10) == 1.0
    assert typical_s([4.0, 1.0, 2.0, 3.0, 5.0]) == 2.0
    assert typical_s([1.0, 2.0]) == pytest.approx(1.25) and typical_s([3.0]) == 3.0


def test_one_half_of_the_repeats_says_whether_the_fit_has_the_right_shape():
    assert sampled().agreement().error == pytest.approx(0, abs=1e-9)
    noisy = sampled(noise=0.1).agreement(32 * KIB)
    assert 0 < noisy.noise < 0.1 and noisy.misfit < 0.03 and noisy.worst >= noisy.error
    wrong = zigzag().agreement(32 * KIB)
    assert wrong.noise == 0 and wrong.misfit == wrong.error > 0.1
    with pytest.raises(UserError, match="no message of 1e\\+12 bytes"):
        sampled().agreement(1e12)
    with pytest.raises(UserError, match="two are needed"):
        sampled(repeats=1).agreement()


class _Link:
    """A communicator of four ranks, all alike, on a network whose times are those above."""

    size, rank, native, burst_bytes, wire_bytes_per_s = 4, 0, False, 0, RATE
    other_s, time_scale = 0.0, 1.0

    def __init__(self, slower=1.0):
        self.now, self.slower = 0.0, slower
        self.calls = [[]]

    def clock(self):
        return self.now

    def regimes(self, operation, device):
        return REGIMES

    def all_reduce(self, tensor, *, op):
        self.calls[-1].append(tensor.nbytes)
        self.now += self.slower * seconds(tensor.nbytes)
        return self

    def wait(self):
        return None

    def barrier(self):
        self.calls.append([])

    def broadcast_object(self, value):
        return value

    def gather_objects(self, value):
        return [value]


def test_connections_are_warm_before_anything_is_timed():
    link = _Link()
    built = measure_collective(link, "all_reduce", CPU, sizes=SIZES)
    warm, *timed = link.calls[1 + TIMED_BARRIERS :]
    assert WARM_BYTES <= 1.5 * sum(warm) < WARM_BYTES + 4 * 1.5 * MIB
    turns = [1 + (nbytes < MIB) for nbytes in built.nbytes]  # the first call of each is left out
    assert sum(map(len, timed)) == sum(map(len, built.seconds)) + sum(turns)
    counts = dict(zip(built.nbytes, map(len, built.seconds), strict=True))
    assert counts[4 * KIB] == counts[512 * KIB] == 16 and counts[MIB] == 6
    assert {first for _, first in REGIMES[1:]} <= counts.keys()
    assert built.fit()(MIB) == pytest.approx(seconds(MIB))
    again = _Link()
    measure_collective(again, "all_reduce", CPU, sizes=SIZES, warm=False)
    assert again.calls[1 + TIMED_BARRIERS] == []


@pytest.mark.parametrize("slower", [1.0, 3.0, 10.0, 100.0])
def test_measuring_takes_no_longer_than_it_may(slower):
    link = _Link(slower)
    built = measure_collective(link, "all_reduce", CPU, sizes=[*SIZES, 64 * MIB])
    assert len(built.nbytes) >= 3 and min(map(len, built.seconds)) >= 2
    least = sum(slower * seconds(size) * 3 for size in built.nbytes[:3])
    assert link.now < 1.1 * BUDGET_S + least + 4 * slower * seconds(MIB)
    # Of the pipeline, whose slope is known, two sizes say all.
    assert sum(size >= 4 * MIB for size in built.nbytes) <= 2


def test_a_slowed_network_is_measured_like_the_real_one():
    """An algorithm that measures must find the same costs at each time scale."""
    slowed, real = _Link(100.0), _Link()
    slowed.time_scale = 100.0
    for link in (slowed, real):
        measure_collective(link, "all_reduce", CPU, sizes=SIZES)
    assert slowed.calls == real.calls


class _Last(_Link):
    """The rank that leaves every barrier last, so that what it waits for is there."""

    def gather_objects(self, value):
        if isinstance(value, float):
            return [value, value + 2.0]
        return [value, [item + 2.0 for item in value]]


def test_of_all_ranks_the_slowest_counts():
    built = measure_collective(_Last(), "all_reduce", CPU, sizes=SIZES, repeats=1)
    assert built.nbytes == SIZES[:3], "there is no time for a fourth"
    assert built.seconds == [[pytest.approx(2.0 + seconds(size))] for size in SIZES[:3]]


def _told():
    return measure_collective(
        runtime.communicator(), "all_reduce", CPU, sizes=[4096, 65536], repeats=2
    ).fit()


def test_the_comm_core_tells_its_regimes(world):
    fit, *others = world(2).run(_told)
    assert others == [fit] and fit.name == "shared_memory" and fit.slope == "fit"


@pytest.mark.parametrize(
    ("check", "flag"),
    [
        ({"residual": 0.2, "noise": 0.1}, "their fit is off by 17%, in addition to 10% of noise"),
        ({"residual": 0.14, "noise": 0.14}, None),  # chance alone
        ({"residual": 0.1, "noise": 0.16}, "repeats of the same message differ by 16%"),
        ({"residual": 0.01, "noise": 0.01, "drift": -0.2}, "they changed by -20% during the trial"),
    ],
)
def test_costs_are_doubted_for_what_chance_does_not_explain(check, flag):
    built = record("dear", 0.1, 4, facts={"cost_check": {"drift": 0.0, **check}})
    wanted = [] if flag is None else [f"costs of collectives are doubtful: {flag}"]
    assert [note.text for note in built.notes if note.kind == "costs"] == wanted


def test_a_queue_tells_what_of_a_start_up_is_left_behind_another_message():
    """A message takes 2 s and a byte 0.001 s; behind another one 0.5 s of the start-up are left."""
    nbytes = [1000, 2000, 4000, 8000]
    measured = Measurement(
        operation="all_reduce",
        nbytes=nbytes,
        seconds=[[2 + 0.001 * size] * 4 for size in nbytes],
        queued=((2000, 2.5),),
    )
    fit = measured.fit()
    assert fit.alpha_s == pytest.approx(2) and fit.queued_alpha_s == pytest.approx(0.5)
    assert fit(4000) == pytest.approx(6) and fit.occupancy_s(4000) == pytest.approx(4.5)
    assert fit.occupancy_s(0) == 0
    assert fit.divided(10).occupancy_s(4000) == pytest.approx(0.45)
    alone = dataclasses.replace(measured, queued=()).fit()
    assert alone.queued_alpha_s is None and alone.occupancy_s(4000) == alone(4000)
    # It is never more than the start-up, nor less than nothing.
    for seconds, left_s in ((9.0, 2.0), (1.0, 0.0)):
        fit = dataclasses.replace(measured, queued=((2000, seconds),)).fit()
        assert fit.queued_alpha_s == pytest.approx(left_s)


def test_a_regime_without_a_queue_has_what_the_one_before_tells():
    nbytes = [1000, 2000, 4000, 10_000, 20_000, 40_000]
    measured = Measurement(
        operation="all_reduce",
        nbytes=nbytes,
        seconds=[[(1 if size < 10_000 else 3) + 0.001 * size] * 4 for size in nbytes],
        regimes=(("direct", 0), ("blocks", 10_000)),
        queued=((2000, 2.25),),
    )
    fit = measured.fit()
    assert fit.occupancy_s(2000) == pytest.approx(2.25)
    assert fit.occupancy_s(20_000) == pytest.approx(20.25)


def _queues():
    how = {"sizes": [1 << 14, 1 << 16, 1 << 18], "repeats": 4, "warm": False, "queues": True}
    return measure_collective(runtime.communicator(), "all_reduce", CPU, **how).queued


def test_queues_are_measured_alike_on_all_ranks(world):
    first, second = world(2).run(_queues)
    assert first == second and first
    assert all(nbytes >= 1 << 14 and seconds >= 0 for nbytes, seconds in first)


class _Alone:
    def gather_objects(self, mine):
        return [mine]


def test_small_messages_have_a_second_turn_which_is_every_other_repeat():
    calls = []

    def timed_of(nbytes):
        def timed():
            calls.append(nbytes)
            return 2.0 if nbytes == 8 and len(calls) < 40 else 1.0  # the machine is busy at first

        return timed

    done = timed_by_size(_Alone(), [4, 8, MIB], timed_of, left_s=lambda: 1e9, repeats=16)
    assert calls == [4] * 9 + [8] * 9 + [MIB] * 17 + [4] * 9 + [8] * 9
    assert done == {4: [1.0] * 16, 8: [2.0, 1.0] * 8, MIB: [1.0] * 16}


def test_large_messages_are_timed_where_a_barrier_takes_as_long_as_a_message():
    """Sites that are 20 ms apart; ranks also exchange the time left and the times."""
    elapsed_s = 0.0

    def timed_of(nbytes):
        def timed():
            nonlocal elapsed_s
            latencies = 2 if nbytes < 32 * KIB else 4
            elapsed_s += 0.08 + 0.02 * latencies + 12e-9 * nbytes
            return 0.02 * latencies + 12e-9 * nbytes

        return timed

    sizes = [4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB]
    done = timed_by_size(_Alone(), sizes, timed_of, left_s=lambda: 3.0 - elapsed_s)
    assert list(done) == sizes and all(len(times) >= 2 for times in done.values())
    assert elapsed_s < 1.5 * 3.0


class _Distant(_Link):
    """A `_Link` between distant sites: a barrier takes as long as a message."""

    def barrier(self):
        super().barrier()
        self.now += 0.08 * self.time_scale

    def allocate(self, like, numel):
        return like.new_zeros(numel)


class _Skewed(_Distant):
    """Two distant ranks that wait for each other in turns. A message takes 20 ms longer after a
    barrier, and after a smaller message. Start-ups of queued messages overlap in the pipeline."""

    last, pending = 0, 0

    def barrier(self):
        super().barrier()
        self.last = 0

    def all_reduce(self, tensor, *, op):
        slow = 0.02 if tensor.nbytes > self.last else 0.0
        start_up = 0.0 if self.pending and tensor.nbytes >= 4 * MIB else 0.04
        self.last, self.pending = tensor.nbytes, self.pending + 1
        self.now += slow + start_up
        return super().all_reduce(tensor, op=op)

    def wait(self):
        self.pending -= 1

    def gather_objects(self, value):
        if isinstance(value, float):
            return [value + 0.02, value - 0.02]
        return [[item + 0.02 for item in value], [item - 0.02 for item in value]]


def test_between_distant_ranks_a_message_is_timed_after_one_of_its_size():
    how = {"sizes": [*SIZES, 16 * MIB], "queues": True, "budget_s": 30.0}
    fit = measure_collective(_Skewed(), "all_reduce", CPU, **how).fit()
    for size in (16 * KIB, MIB, 4 * MIB):
        assert fit(size) == pytest.approx(seconds(size) + 0.04, rel=1e-3)
    assert fit.name == "pipeline"
    assert fit.occupancy_s(4 * MIB) == pytest.approx(seconds(4 * MIB), rel=1e-3)
    assert fit.occupancy_s(MIB) == pytest.approx(fit(MIB), rel=1e-3), "they do not overlap"


class _Three(_Skewed):
    """Three ranks, of which two exchange. The third one does nothing."""

    size, native = 3, ()

    def connect(self, device):
        return None

    def exchange(self, received, sent, *, peer):
        return self.all_reduce(sent, op="sum")

    def gather_objects(self, value):
        two = super().gather_objects(value)
        return [*two, 1e-9 if isinstance(value, float) else [1e-9 for _ in value]]


def test_the_time_of_an_exchange_is_that_of_a_pair():
    link = _Three()
    fit = measure_collective(link, "exchange", CPU, sizes=SIZES[:4], budget_s=30.0).fit()
    assert fit(16 * KIB) == pytest.approx(seconds(16 * KIB) + 0.04, rel=0.05)


def test_queues_end_when_their_time_is_over():
    alone, queued = _Skewed(), _Skewed()
    for link, queues in ((alone, False), (queued, True)):
        how = {"sizes": [*SIZES, 16 * MIB], "queues": queues, "budget_s": 6.0}
        measure_collective(link, "all_reduce", CPU, **how)
    # The smallest three sizes are always measured: at least three times a queue of 8 messages, each
    # after a single one. A message takes less than 0.1 s.
    assert queued.now - alone.now < 0.5 * 6.0 + 3 * 3 * 9 * 0.1


def test_all_measurements_of_a_communicator_use_the_same_method():
    link = _Link()
    assert not is_distant(link)
    link.barrier = lambda: setattr(link, "now", link.now + 1.0)
    assert not is_distant(link), "the network has not moved away"
    assert is_distant(_Distant())


def test_a_rank_that_waits_for_a_core_is_not_distant():
    link = _Link()
    late = iter([0.0, 5e-3, 5e-3, 1e-4, 5e-3, 5e-3])
    link.barrier = lambda: setattr(link, "now", link.now + next(late))
    assert not is_distant(link)


def test_queues_of_large_messages_are_left_out_where_a_start_up_is_short():
    built = measure_collective(_Link(), "all_reduce", CPU, sizes=SIZES, queues=True)
    assert max(built.nbytes) >= 4 * MIB > max(size for size, _ in built.queued)


@pytest.mark.parametrize("time_scale", [1.0, 40.0])
def test_a_trial_times_large_messages_between_distant_sites(monkeypatch, time_scale):
    monkeypatch.setattr(timing_costs, "OPERATIONS", ("all_reduce",))
    link = _Distant(slower=time_scale)
    link.time_scale = time_scale
    (built,) = timing_costs.time_collectives(link, CPU, 14 * MIB)
    assert max(built.nbytes) >= 8 * MIB and min(map(len, built.seconds)) >= 2
    assert link.now < 2.5 * time_scale * timing_costs.BARRIERS * 0.08


class Library:
    """An engine that takes what it says, and rank 1 longer."""

    name = "a library"

    def __init__(self, communicator, fusion_bytes):
        self._communicator, self.fusion_bytes = communicator, fusion_bytes
        self.sent = []

    def timed(self, nbytes, tensors):
        def timed():
            self.sent.append((nbytes, tensors))
            return (1 + self._communicator.rank) * tensors * (1e-3 + 1e-9 * nbytes)

        return timed


def timed_library(fusion_bytes):
    communicator = runtime.communicator()
    library = Library(communicator, fusion_bytes)
    measured = time_sender(communicator, library, 1 << 20)
    return engine_costs(library, measured, 2.0), sorted(set(library.sent))


def test_a_foreign_engine_is_timed_with_one_tensor_and_with_several_that_it_joins(world):
    for costs, sent in world(2).run(timed_library, 100 * KIB):
        # The slower rank's times, of which half are of what the fabric stands for.
        assert costs.all_reduce(MIB) == pytest.approx(1e-3 + 1e-9 * MIB)
        assert costs.fused(MIB) == pytest.approx(2e-3 + 2e-9 * MIB)
        assert (costs.engine, costs.noise) == ("a library", 0)
        assert costs.error == pytest.approx(0, abs=1e-9)
        sizes = [4 * KIB << power for power in range(8)]
        assert sent == sorted([(n, 1) for n in sizes] + [(n, 2) for n in sizes if n < 100 * KIB])


def test_an_engine_that_joins_nothing_is_timed_with_two_at_once(world):
    for costs, sent in world(2).run(timed_library, 0):
        assert costs.fused is None and {tensors for _, tensors in sent} == {1, 2}
        assert costs.pair(MIB) == pytest.approx(2e-3 + 2e-9 * MIB)
