"""Cuts, each of which takes an idea out of an algorithm: do the tests of order notice?

A cut patches classes of `dear` and what checks them must fail, with words that are about it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from dear.algorithms.asynchronous import asyncddp, pull_get
from dear.algorithms.decentralized import decentralized, gradient_tracking, push_diging
from dear.algorithms.delayed import dadt
from dear.algorithms.synchronous import bytescheduler, ddp, dear, fsdp, mgs, mgwfbp, wfbp
from dear.algorithms.synchronous.wfbp import AveragingEngine
from dear.buckets import carriers, halves, updates
from dear.buckets.flat import with_gradients
from dear.comm import windows
from dear.training import gradients, tuning
from dear.training.parameters import engine, exchange, overlapped, stepped
from dear.training.parameters import windows as parameter_windows
from tests.contract import test_order as suite
from tests.contract.algorithms import algorithm_class, algorithm_options, dears_own
from tests.contract.order import violations
from tests.contract.test_order import FROM_BEHIND, LAYER_MB, NONE

Patch = pytest.MonkeyPatch
AT_ONCE = "is waited for when the gradient of layer 3 is there"
BEHIND = "starts when the gradient of layer 0 is there, stated is 'gradient'"
BUCKETS = {"bucket_mb": LAYER_MB}
NOW_APART = re.escape(f"layers travel otherwise\nassert {FROM_BEHIND} ==")
NOW_IN_ONE = re.escape(f"layers travel otherwise\nassert {suite.ALL} ==")


@dataclass(frozen=True, kw_only=True)
class Cut:
    algorithm: str
    options: dict[str, Any]
    make: Callable[[Patch], None]
    says: str
    """Pattern of the suite's message."""
    check: Callable[[], Any] | None = None
    """Test that must fail; None: the comparison with what the algorithm states."""


CUTS: dict[str, Cut] = {}


def cut(algorithm: str, says: str, check: Callable[[], Any] | None = None, **options: Any) -> Any:
    def add(make: Callable[[Patch], None]) -> Any:
        CUTS[f"{algorithm}-{make.__name__}"] = Cut(
            algorithm=algorithm, options=options, make=make, says=says, check=check
        )
        return make

    return add


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_is_caught(name, monkeypatch):
    this = CUTS[name]
    algorithm, options = algorithm_class(this.algorithm), this.options
    check = this.check or (lambda: _hold(algorithm, options))
    check()  # whole it passes
    with monkeypatch.context() as patch:
        this.make(patch)
        with pytest.raises(AssertionError, match=this.says):
            check()


def test_every_algorithm_with_an_order_has_a_cut():
    cuts = {cut.algorithm for cut in CUTS.values()}
    # horovod states nothing, and auto has the order of another algorithm.
    assert set(dears_own()) - cuts == {"horovod", "auto"}


def _hold(algorithm: Any, options: dict[str, Any]) -> None:
    name = algorithm.__module__.rpartition(".")[2].replace("_", "-")
    broken = violations(
        algorithm(), algorithm_options(name, options), every=options.get("every", 1)
    )
    assert not broken, "\n".join(broken)


def _then(patch: Patch, owner: Any, name: str, more: Callable[..., Any]) -> None:
    """`more(*given)` after each call of a method, with the same arguments."""
    plain = getattr(owner, name)

    def both(*given: Any, **settings: Any) -> Any:
        result = plain(*given, **settings)
        more(*given)
        return result

    patch.setattr(owner, name, both)


def _groups(name: str, options: dict[str, Any], network: dict[str, Any], groups: Any) -> Any:
    test = suite.test_layers_travel_together_as_options_and_costs_say
    return lambda: test(name, options, network, groups)


# --- gradients in the backward pass ---------------------------------------------------------------


@cut("allreduce", "starts when the gradient of layer 3 is there, stated is 'pass'")
def sends_early(patch: Patch) -> None:
    patch.setattr(AveragingEngine.__init__, "__kwdefaults__", {"overlap": True, "channels": 1})
    plain = AveragingEngine.__init__
    patch.setattr(AveragingEngine, "__init__", lambda self, *args, **kw: plain(self, *args))


@cut("allreduce", "is waited for in step")
def waits_in_step(patch: Patch) -> None:
    plain = AveragingEngine.passed
    patch.setattr(AveragingEngine, "passed", lambda self: None)

    def step(self: Any, update: Any) -> Any:
        plain(self)
        self.schedule.restart()
        return update()

    patch.setattr(AveragingEngine, "step", step)


@cut("wfbp", BEHIND)
def does_not_overlap(patch: Patch) -> None:
    whole = lambda self, replica: AveragingEngine(replica, replica.params, overlap=False)  # noqa: E731
    patch.setattr(wfbp.Wfbp, "engine", whole)


@cut("wfbp", AT_ONCE)
def waits_at_once(patch: Patch) -> None:
    _then(patch, AveragingEngine, "ready", lambda self, unit: self._batches[0].wait())


@cut("wfbp", "no_sync")
def sends_while_accumulating(patch: Patch) -> None:
    patch.setattr(gradients.BackwardSchedule, "paused", lambda self: contextlib.nullcontext())


@cut("wfbp", "nothing is sent of layers \\[0, 1, 2, 3\\]")
def sends_nothing(patch: Patch) -> None:
    patch.setattr(AveragingEngine, "ready", lambda self, unit: None)


@cut("mgwfbp", NOW_APART, _groups("mgwfbp", {}, {"alpha_s": 1e-2}, suite.ALL))
def merges_nothing(patch: Patch) -> None:
    patch.setattr(mgwfbp, "greedy", lambda sizes, **_: [[i] for i in range(len(sizes))])


@cut("mgwfbp", NOW_IN_ONE, _groups("mgwfbp", {}, {"alpha_s": 1e-9}, FROM_BEHIND))
def never_plans(patch: Patch) -> None:
    patch.setattr(mgwfbp.MergedEngine, "stepped", lambda self: None)


@cut("hierarchical", AT_ONCE, threshold_mb=LAYER_MB)
@cut("mgwfbp", AT_ONCE, merge="threshold", threshold_mb=0.0)
def waits_for_each_group(patch: Patch) -> None:
    _then(patch, mgwfbp.Exchange, "start", lambda self, *_: self._work.wait())


@cut("mgs", NOW_APART, _groups("mgs", {"density": 1.0}, {"alpha_s": 1e-2}, suite.ALL))
def merges_none(patch: Patch) -> None:
    patch.setattr(mgs, "greedy", lambda sizes, **_: [[i] for i in range(len(sizes))])


@cut("mgs", "bytes", density=1.0)
def sends_everything(patch: Patch) -> None:
    patch.setattr(mgwfbp, "make_carrier", lambda options, comm, *_: carriers.Dense(comm))


@cut("ddp", BEHIND, bucket_cap_mb=LAYER_MB)
def reduces_behind_the_pass(patch: Patch) -> None:
    whole = lambda self, replica: AveragingEngine(replica, replica.params, overlap=False)  # noqa: E731
    patch.setattr(ddp.Ddp, "engine", whole)


@cut("ddp", "nothing is sent of layers \\[0, 1, 2, 3\\]: gather", zero=True)
def updates_everything_everywhere(patch: Patch) -> None:
    patch.setattr(ddp.ZeroUpdate, "step", lambda self: self._zero.optim.step())


# --- DeAR's halves --------------------------------------------------------------------------------


@cut("dear", AT_ONCE, **NONE)
def waits_for_first_halves_at_once(patch: Patch) -> None:
    _then(patch, halves.Decoupled, "start_reduce", lambda self: self.await_reduce())


@cut("dear", "with parameters of layers \\[3\\] is waited for in step", **NONE)
def waits_for_second_halves_at_once(patch: Patch) -> None:
    _then(patch, halves.Decoupled, "start_gather", lambda self, whole: self.finish_gather())


@cut("dear", "with gradients of layers \\[3\\] is waited for in step", **NONE, update="replicated")
def waits_for_second_halves_of_gradients_at_once(patch: Patch) -> None:
    _then(patch, halves.Decoupled, "start_gather_mean", lambda self, whole: self.finish_gather())


@cut("dear", "all_reduce with gradients .* is not stated", **NONE)
def reduces_and_gathers_in_one(patch: Patch) -> None:
    plain = halves.AllReduced
    patch.setattr(dear, "ScatterGather", lambda bucket, comm, **how: plain(bucket, comm, **how))


@cut("dear", BEHIND, **NONE)
def starts_first_halves_behind_the_pass(patch: Patch) -> None:
    plain, late = dear.DearEngine.ready, []

    def ready(self: Any, unit: int) -> None:
        late.append(unit)
        if len(late) == len(self.schedule.order):
            while late:
                plain(self, late.pop(0))

    patch.setattr(dear.DearEngine, "ready", ready)


@cut("dear", "starts before .* needed first", **NONE)
def starts_second_halves_from_behind(patch: Patch) -> None:
    step, start, late = updates.Sharded.step, updates.Sharded._start, []

    def reversed_step(self: Any, *given: Any) -> Any:
        started = step(self, *given)
        while late:
            start(self, late.pop())
        return started

    patch.setattr(updates.Sharded, "_start", lambda self, index: late.append(index))
    patch.setattr(updates.Sharded, "step", reversed_step)


@cut("dear", "of layers \\[3\\] is waited for before the forward pass", **NONE)
def waits_for_all_second_halves_before_the_first_layer(patch: Patch) -> None:
    patch.setattr(dear.DearEngine, "before_forward", lambda self, module: self.settle())


@cut("dear", "nothing waits for it", **NONE)
def reads_what_has_not_come(patch: Patch) -> None:
    patch.setattr(dear.DearEngine, "finish", lambda self, index: None)


@cut("dear", "are updated .*, stated is 'layer'", **NONE, update="replicated")
def updates_all_in_step(patch: Patch) -> None:
    patch.setattr(updates.PartialUpdate, "possible", lambda self: False)


@cut("dear", NOW_IN_ONE, lambda: _tuned())
def never_regroups(patch: Patch) -> None:
    patch.setattr(tuning.Tuned, "_follow", lambda self, choose: False)


def _tuned() -> None:
    with pytest.MonkeyPatch.context() as patch:
        suite.test_the_tuner_of_dear_regroups_as_it_says(patch)


# --- urgency --------------------------------------------------------------------------------------


@cut("bytescheduler", "overtakes .* needed later|is needed first")
def urgency_is_reversed(patch: Patch) -> None:
    plain = bytescheduler.PartitionedEngine._shared_out
    patch.setattr(
        bytescheduler.PartitionedEngine, "_shared_out", lambda self, uses: plain(self, uses[::-1])
    )


@cut("bytescheduler", "equally urgent")
def nothing_is_urgent(patch: Patch) -> None:
    patch.setattr(
        bytescheduler.PartitionedEngine, "_shared_out", lambda self, uses: [0] * len(uses)
    )


def _credit() -> None:
    suite.test_with_credit_for_one_partition_the_most_urgent_one_goes_next(True)


@cut("bytescheduler", r"goes next\nassert \[3, 3,", _credit)
def the_queue_is_reversed(patch: Patch) -> None:
    plain = bytescheduler.planned_order
    patch.setattr(
        bytescheduler,
        "planned_order",
        lambda arrivals, urgency, *given, **how: plain(
            arrivals, [-place for place in urgency], *given, **how
        ),
    )


@cut("bytescheduler", "more is under way", _credit)
def credit_is_ignored(patch: Patch) -> None:
    plain = bytescheduler.OrderedIssuer.__init__
    patch.setattr(
        bytescheduler.OrderedIssuer, "__init__", lambda self, issue, credit: plain(self, issue)
    )


@cut("bytescheduler", r"goes next\nassert \[3, 0, 1, 2\] ==", _credit)
def nothing_is_cut_into_partitions(patch: Patch) -> None:
    patch.setattr(bytescheduler, "lengths", lambda numel, limit: [numel])


@cut("bytescheduler", "of layers \\[3\\] is waited for before the forward pass")
def all_layers_wait_for_all_messages(patch: Patch) -> None:
    engine = bytescheduler.PartitionedEngine
    patch.setattr(engine, "before_forward", lambda self, module: self.settle())


@cut("bytescheduler", "is waited for in step")
def waits_for_all_in_step(patch: Patch) -> None:
    engine = bytescheduler.PartitionedEngine
    patch.setattr(engine, "apply", lambda self, update: with_gradients(self._means(), update))


# --- delay ----------------------------------------------------------------------------------------


@cut("dadt", "0 steps later; stated is 'step', 1 steps later", buffer_mb=0.0)
def waits_for_its_own_step(patch: Patch) -> None:
    patch.setattr(dadt.DelayedEngine, "_due", True)


@cut("dadt", "1 steps later; stated is 'step', 2 steps later", delay=2)
def delays_less_than_asked_for(patch: Patch) -> None:
    patch.setattr(dadt.DelayedEngine, "_due", property(lambda self: len(self._held) > 1))


@cut("dadt", AT_ONCE, buffer_mb=0.0)
def waits_for_each_message(patch: Patch) -> None:
    _then(patch, dadt.DenseMessage, "send", lambda self, communicator: self.work.wait())


# --- shards ---------------------------------------------------------------------------------------


@cut("fsdp", "nothing is sent of layers \\[0, 1, 2, 3\\]: gather", min_mb=0.0)
def keeps_everything_everywhere(patch: Patch) -> None:
    patch.setattr(
        fsdp.Fsdp, "engine", lambda self, replica: AveragingEngine(replica, replica.params)
    )


@cut("fsdp", "before the forward pass", min_mb=0.0)
def gathers_all_before_the_forward(patch: Patch) -> None:
    _then(patch, fsdp._FsdpEngine, "_before_forward", lambda self, module: self._sharded.gather())


@cut("fsdp", "no_sync", min_mb=0.0)
def scatters_while_accumulating(patch: Patch) -> None:
    patch.setattr(fsdp._FsdpEngine, "no_sync", lambda self: contextlib.nullcontext())


# --- parameters between neighbours ----------------------------------------------------------------


def _wait_for_shared(self: Any, bucket: Any, steps: int) -> None:
    self.wait()


@cut("decentralized", "0 steps later; stated is 'gradient', 1 steps later", **BUCKETS)
def waits_for_its_group_at_once(patch: Patch) -> None:
    _then(patch, decentralized.GroupExchange, "share", _wait_for_shared)


@cut("decentralized", "is waited for in step.*stated is 'gradient'", **BUCKETS)
def mixes_in_step(patch: Patch) -> None:
    _then(patch, overlapped.OverlappedInBackward, "advance", lambda self, _: self.exchange.wait())


@cut("decentralized", "starts when the gradient of layer 0 is there", **BUCKETS)
def shares_all_at_the_end(patch: Patch) -> None:
    share, late = decentralized.GroupExchange.share, []

    def shared(self: Any, bucket: Any, steps: int) -> None:
        late.append(bucket)
        if len(late) == len(self.buckets):
            while late:
                share(self, late.pop(0), steps)

    patch.setattr(decentralized.GroupExchange, "share", shared)


@cut("neighbor", "starts in step.., stated is 'model'", **BUCKETS)
def shares_in_step(patch: Patch) -> None:
    patch.setattr(stepped.CombineThenAdapt, "_before_model", lambda self, module: None)


@cut("neighbor", "is waited for before the forward pass", **BUCKETS)
def waits_before_the_forward(patch: Patch) -> None:
    _then(patch, exchange.GraphExchange, "share", _wait_for_shared)


@cut("neighbor", "something is sent in a step that should send nothing", every=2)
def averages_in_every_step(patch: Patch) -> None:
    patch.setattr(stepped.SteppedEngine, "due", lambda self: True)


def _combines_in_step(patch: Patch) -> None:
    _then(patch, stepped.SteppedEngine, "share_all", lambda self: self.mix_all())


for _name, _options in [
    ("neighbor", {**BUCKETS, "combine": "atc"}),
    ("exact-diffusion", BUCKETS),
    ("push-diging", BUCKETS),
]:
    cut(_name, "is waited for in step.*stated is 'layer'", **_options)(_combines_in_step)


@cut("push-diging", "with parameters of layers .* is not stated", **BUCKETS)
def sends_no_estimates(patch: Patch) -> None:
    def mix(self: Any, bucket: Any, steps: int) -> None:
        (transfer,) = self.pending.pop(bucket)
        transfer.wait()

    kind = push_diging.PushDigingExchange
    patch.setattr(kind, "carried", lambda self, bucket: [self._numerators[bucket]])
    patch.setattr(kind, "mix", mix)


@cut("gradient-tracking", "nothing is sent of layers \\[0, 1, 2, 3\\]: exchange", **BUCKETS)
def tracks_alone(patch: Patch) -> None:
    kind = gradient_tracking.GradientTrackingExchange
    patch.setattr(kind, "carried", exchange.GraphExchange.carried)


@cut("gradient-tracking", "is waited for before the forward pass", **BUCKETS)
def waits_for_estimates_at_once(patch: Patch) -> None:
    _then(patch, gradient_tracking.GradientTrackingExchange, "share", _wait_for_shared)


# --- one-sided ------------------------------------------------------------------------------------


def _waits_for_puts(patch: Patch) -> None:
    _then(patch, windows.NeighborWindow, "put", lambda self, *_: self.wait())


def _meets(patch: Patch) -> None:
    _then(patch, engine.ParameterEngine, "begin", lambda self: self.communicator.barrier())


def _waits_for_old_puts(patch: Patch) -> None:
    plain = windows.NeighborWindow.idle
    patch.setattr(windows.NeighborWindow, "idle", lambda self, wait: plain(self, wait=True))


def _busy(name: str) -> Any:
    def check() -> None:
        suite.test_a_neighbour_that_takes_nothing_holds_nobody_up_and_gets_nothing_more(
            name, BUCKETS
        )

    return check


def _sends_to_the_busy(patch: Patch) -> None:
    patch.setattr(windows.NeighborWindow, "idle", lambda self, wait: list(self.targets))


for _name in ("win-put", "push-sum", "asyncddp"):
    cut(_name, "is waited for .*, and nothing should", **BUCKETS)(_waits_for_puts)
    cut(_name, "barrier is waited for", **BUCKETS)(_meets)
    cut(_name, "waits for", _busy(_name), **BUCKETS)(_waits_for_old_puts)
    cut(_name, "more is sent to who has taken nothing", _busy(_name), **BUCKETS)(_sends_to_the_busy)


@cut("win-put", "ranks do not meet at 'step'", **BUCKETS, barrier=True)
def barrier_is_ignored(patch: Patch) -> None:
    patch.setattr(parameter_windows.Policy, "waits", lambda self: False)


@cut("pull-get", "starts in step.., stated is 'model'", **BUCKETS)
def reads_in_step(patch: Patch) -> None:
    patch.setattr(stepped.CombineThenAdapt, "_before_model", lambda self, module: None)


@cut("pull-get", "is waited for before the forward pass", **BUCKETS)
def waits_for_reads_at_once(patch: Patch) -> None:
    def wait(self: Any) -> None:
        for reading in self._reading.values():
            for _, _, work in reading:
                work.wait()

    _then(patch, pull_get.PullExchange, "shared", wait)


def _bounded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        suite.test_a_step_waits_for_a_neighbour_that_is_further_behind_than_the_bound(patch, 1)


@cut("asyncddp", "nobody waits for its steps", _bounded)
def follows_nobody(patch: Patch) -> None:
    patch.setattr(asyncddp.AsyncExchange, "_catch_up", lambda self, *_: None)


@cut("asyncddp", "nothing is sent of layers", **BUCKETS, max_staleness=1)
def sends_without_bound(patch: Patch) -> None:
    patch.setattr(parameter_windows.Policy, "waits", lambda self: False)
