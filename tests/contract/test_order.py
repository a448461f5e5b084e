"""Order and overlap: every algorithm does what it states (`dear.cost.overlap`), without a clock.

Whether these tests would notice: test_order_cuts.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dear.algorithms.asynchronous.push_sum import LEAST_P
from dear.algorithms.synchronous.wfbp import Wfbp
from dear.buckets.grouping import Arrived
from dear.comm.windows import NeighborWindow
from dear.cost.overlap import Overlap, Unstated
from dear.training.algorithm import algorithm_names
from dear.training.tuning import Tuner
from tests.contract.algorithms import (
    Meaning,
    algorithm_class,
    algorithm_options,
    dears_own,
    skip_if_unavailable,
)
from tests.contract.logged import Program
from tests.contract.network import SIZES, Network, on
from tests.contract.order import Run, statement, violations

LAYER_MB = 0.0001
"""Less than any layer's."""
NONE = {"fusion": "none", "small_kb": 0}
USUAL = {"mgs": {"density": 1.0}}
"""Options instead of the defaults: what is kept back would add up and look like another layer's."""
APART: dict[str, tuple[dict[str, Any], ...]] = {
    "mgwfbp": ({"merge": "threshold", "threshold_mb": 0.0, "profile_steps": 1},),
    "hierarchical": ({"threshold_mb": LAYER_MB}, {"compression": "fp16"}),
    "bytescheduler": ({"partition_mb": LAYER_MB}, {"levels": 2}),
    "dear": (
        NONE,
        {**NONE, "update": "replicated"},
        {**NONE, "decouple": "reduce_broadcast"},
        {**NONE, "decouple": "reduce_broadcast", "update": "replicated"},
        {**NONE, "compression": "fp16"},
        {"fusion": "none", "compression": "topk", "density": 1.0},
        {"fusion": "wait_time", "small_kb": 0, "cycle_time_ms": 0.5},
        {"fusion": "none", "small_kb": 0.2},
    ),
    "ddp": ({"bucket_cap_mb": LAYER_MB}, {"bucket_cap_mb": LAYER_MB, "zero": True}),
    "fsdp": ({"min_mb": 0.0}, {"min_mb": 0.0, "stage": 2}),
    "dadt": ({"buffer_mb": 0.0}, {"buffer_mb": 0.0, "delay": 3}),
    "decentralized": ({"bucket_mb": LAYER_MB}, {"bucket_mb": LAYER_MB, "update": "step"}),
    "neighbor": (
        {"bucket_mb": LAYER_MB},
        {"bucket_mb": LAYER_MB, "combine": "atc"},
        {"bucket_mb": LAYER_MB, "combine": "atc", "every": 2},
    ),
    "gradient-tracking": ({"bucket_mb": LAYER_MB},),
    "exact-diffusion": ({"bucket_mb": LAYER_MB},),
    "push-diging": ({"bucket_mb": LAYER_MB},),
    "asyncddp": (
        {"bucket_mb": LAYER_MB},
        {"bucket_mb": LAYER_MB, "update": "step"},
        {"bucket_mb": LAYER_MB, "max_staleness": 1},
    ),
    **{
        name: tuple(
            {"bucket_mb": LAYER_MB, "barrier": barrier, "every": every}
            for barrier, every in [(False, 1), (False, 2), (True, 1)]
        )
        for name in ("win-put", "pull-get", "push-sum")
    },
}
"""Settings in which layers travel by themselves, which shows most."""


def cases() -> list[Any]:
    """Every algorithm with its defaults, with those settings, and those of the other tests."""
    params = {}
    for name in algorithm_names():
        meaning = Meaning.of(name)
        tested = [options for options in meaning.options if meaning.worlds(options, 2)]
        for options in [USUAL.get(name, {}), *APART.get(name, ()), *tested]:
            # A machine's ranks average in a thread of their own; a credit has a test of its own.
            if not {"hierarchical", "credit_mb"} & options.keys():
                label = "-".join([name, *map(str, options.values())])
                params[label] = pytest.param(name, options, id=label)
    return list(params.values())


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("name", "options"), cases())
def test_an_algorithm_does_what_it_states(name, options, native):
    if not native and "levels" in options:
        pytest.skip("refused: priorities are the comm core's")
    skip_if_unavailable(name)
    typed = algorithm_options(name, options)
    broken = violations(
        algorithm_class(name)(), typed, native=native, every=options.get("every", 1)
    )
    assert not broken, "\n".join(broken)


class Silent(Wfbp):
    """States nothing."""

    overlap = None


def test_an_algorithm_that_states_nothing_is_told_what_to_write():
    options = algorithm_options("wfbp", {})
    with pytest.raises(AssertionError, match=r"(?s)Silent does not state.*overlap = Overlap\("):
        violations(Silent(), options)
    with pytest.raises(AssertionError, match="says why"):
        statement(type("Mute", (Silent,), {"overlap": Unstated("secret")})(), options)


ALL = [[0, 1, 2, 3]]
FROM_BEHIND = [[3], [2], [1], [0]]
FROM_FRONT = [[0], [1], [2], [3]]
ALIKE = {"small_kb": 0, "first_mb": 0.00095}
START_UP = {"alpha_s": 1e-4}
TOGETHER = [
    ("wfbp", {}, {}, FROM_BEHIND),
    # A message costs 10 layers' time: gradients wait for each other. Or next to nothing.
    ("mgwfbp", {}, {"alpha_s": 1e-2}, ALL),
    ("mgwfbp", {}, {"alpha_s": 1e-9}, FROM_BEHIND),
    ("mgwfbp", {"merge": "asc"}, {"alpha_s": 1e-2}, [[3], [0, 1, 2]]),
    ("mgwfbp", {"merge": "optimal"}, {"alpha_s": 1e-2}, ALL),
    ("mgwfbp", {"merge": "threshold", "threshold_mb": 0.0007}, {}, [[2, 3], [0, 1]]),
    ("hierarchical", {"threshold_mb": LAYER_MB}, {}, FROM_BEHIND),
    ("hierarchical", {"threshold_mb": 0.0007}, {}, [[3], [2], [0, 1]]),
    ("hierarchical", {}, {}, ALL),
    ("mgs", {"density": 1.0}, {"alpha_s": 1e-2}, ALL),
    ("mgs", {"density": 1.0}, {"alpha_s": 1e-9}, FROM_BEHIND),
    ("dear", NONE, {}, [*FROM_BEHIND, *FROM_FRONT]),
    ("dear", {**ALIKE, "threshold_mb": 0.00095}, {}, [[3], [0, 1, 2], [0, 1, 2], [3]]),
    ("dear", {"small_kb": 0, "fusion": "nearby_layers", "nearby_layers": -1}, {}, [*ALL, *ALL]),
    # One layer is at most 0.2 KB.
    ("dear", {"fusion": "none", "small_kb": 0.2}, {}, [[3], [2], [1], [0], [0], [2], [3]]),
    ("dear", {}, {}, ALL),
    # A start-up takes as long as 10 KB, more than all layers; or 0.45 KB; or 0.2 KB, about a layer.
    ("dear", {"small_kb": 0}, START_UP | {"beta_s": 1e-8}, [*ALL, *ALL]),
    ("dear", {"small_kb": 0}, START_UP | {"beta_s": 2.2e-7}, [[3], [2], [0, 1], [0, 1], [2], [3]]),
    ("dear", {"small_kb": 0}, START_UP | {"beta_s": 5e-7}, [*FROM_BEHIND, *FROM_FRONT]),
    ("dadt", {"buffer_mb": 0.0}, {}, FROM_BEHIND),
    ("dadt", {"buffer_mb": 0.00095}, {}, [[2, 3], [0, 1]]),
    ("dadt", {}, {}, ALL),
    ("ddp", {}, {}, ALL),
    ("ddp", {"bucket_cap_mb": LAYER_MB}, {}, FROM_BEHIND),
    ("fsdp", {"min_mb": 0.0, "stage": 2}, {}, [*FROM_FRONT, *FROM_BEHIND]),
    ("fsdp", {"min_mb": 0.0}, {}, [*FROM_FRONT, [3], [2], [3], [1], [2], [0], [1], [0]]),
    ("bytescheduler", {}, {}, FROM_BEHIND),
    ("decentralized", {"bucket_mb": 0.00095}, {}, [[2, 3], [0, 1]]),
    ("neighbor", {"bucket_mb": 0.0005}, {}, [[0, 1], [2], [3]]),
    ("win-put", {"bucket_mb": 0.0005}, {}, [[0, 1], [2], [3]]),
]


@pytest.mark.parametrize(("name", "options", "network", "groups"), TOGETHER)
def test_layers_travel_together_as_options_and_costs_say(name, options, network, groups):
    run = Run(algorithm_class(name)(), algorithm_options(name, options), Network(**network))
    assert run.groups() == groups, "layers travel otherwise"


@pytest.mark.parametrize(("name", "options", "network", "groups"), TOGETHER)
def test_groups_that_are_stated_without_a_model_are_those_that_travel(
    name, options, network, groups
):
    kind, network = algorithm_class(name), Network(**network)
    behind = range(len(SIZES))[::-1]
    arrived = Arrived(
        sizes=[4 * SIZES[layer] for layer in behind],
        arrivals_s=[1e-3 * (place + 1) for place in range(len(SIZES))],
        owners=list(behind),
        end_s=1e-3 * len(SIZES),
    )

    stated = kind.grouping(algorithm_options(name, options), arrived, network.cost)
    if stated is None:
        assert name not in ("allreduce", "wfbp", "mgwfbp", "dear", "ddp", "bytescheduler")
        return
    layers = [sorted(behind[place] for place in group) for group in stated]
    assert layers == groups[: len(layers)], "with second halves behind them"
    assert sorted(itertools.chain(*layers)) == list(range(len(SIZES)))


def test_each_tensor_that_plain_averaging_sends_is_a_group_of_the_plan():
    network = Network()
    with on(network):
        algorithm, options = algorithm_class("allreduce")(), algorithm_options("allreduce", {})
        trained = Program(algorithm, options, network)
        trained.train(2)
        groups = trained.optimizer.groups()
    assert [len(params) for _, params in groups] == [1] * len(SIZES)


STATED: dict[str, set[tuple[Any, ...]]] = {
    "sequential": {("pass", "pass", 0)},
    "wfbp": {("gradient", "pass", 0)},
    "legs": {("gradient", "pass", 0)},
    "cross_iteration": {("gradient", "layer", 1)},
    "delayed": {("gradient", "step", 1)},
    "dear": {("gradient", "step", 0), ("step", "layer", 1)},
    "sharded": {("layer", "layer", 0), ("ahead", "ahead", 0), ("gradient", "gradient", 0)},
    "decentralized": {("gradient", "gradient", 1), ("step", "step", 1)},
    "beside_passes": {("model", "step", 0)},
    "after_update": {("step", "layer", 1)},
    "asynchronous": {("model", None, 0), ("gradient", None, 0), ("step", None, 0)},
}
"""Statements that may stand where a formula of `dear.cost.bounds` is named."""


@pytest.mark.parametrize(("name", "options"), cases())
def test_what_is_stated_allows_what_the_bound_assumes(name, options):
    algorithm, typed = algorithm_class(name), algorithm_options(name, options)
    stated, bound = algorithm.overlap_of(typed), algorithm.bound_of(typed)
    if isinstance(stated, Unstated) or bound is None:
        return
    for t in stated.transfers:
        later = min(t.steps_later, 1)
        if bound == "sequential" and options.get("barrier"):  # nothing overlaps
            assert (t.starts, t.awaited, later) == ("step", "step", 0)
        elif not options.get("zero") or t.kind == "average":
            assert (t.starts, t.awaited, later) in STATED[bound]


BUSY = [
    ("win-put", {"bucket_mb": LAYER_MB}),
    ("push-sum", {"bucket_mb": LAYER_MB}),
    ("asyncddp", {"bucket_mb": LAYER_MB}),
    ("asyncddp", {"bucket_mb": LAYER_MB, "update": "step"}),
]


@pytest.mark.parametrize(("name", "options"), BUSY)
def test_a_neighbour_that_takes_nothing_holds_nobody_up_and_gets_nothing_more(name, options):
    network = Network()
    with on(network):
        trained = Program(algorithm_class(name)(), algorithm_options(name, options), network)
        trained.train(2, after=network.end)
        network.ends_itself = False  # waiting is an error from now on
        trained.train(3)
        sent = [e for e in network.log if e.what == "start" and e.message.carries]
        steps = [e.step for e in sent if e.step >= 2]
        assert steps == [2] * len(SIZES), "more is sent to who has taken nothing"
        network.end()
        trained.train(1)
        sent = [e for e in network.log if e.what == "start" and e.message.carries]
        assert [e.step for e in sent if e.step > 2] == [5] * len(SIZES)


@pytest.mark.parametrize("native", [True, False])
def test_with_credit_for_one_partition_the_most_urgent_one_goes_next(native):
    """Each message takes longer than all gradients: all are ready when the first one has ended."""
    network = Network(native=native, alpha_s=1.0)
    given = {"partition_mb": LAYER_MB, "profile_steps": 1, "credit_mb": 1e-6}
    with on(network):
        trained = Program(
            algorithm_class("bytescheduler")(), algorithm_options("bytescheduler", given), network
        )
        trained.train(1)
        trained.optimizer.zero_grad()
        trained.backward()
        layers, nbytes = [], []
        while network.under_way:
            assert len(network.under_way) == 1, "more is under way than the credit allows"
            (message,) = network.under_way
            layers.append(min(message.layers))
            nbytes.append(message.nbytes)
            network.end(message)
    wanted = [3, *[0] * 3, *[1] * 2, *[2] * 5, *[3] * 3]
    assert layers == wanted, "something less urgent goes next"
    assert max(nbytes) <= LAYER_MB * 2**20


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_step_waits_for_a_neighbour_that_is_further_behind_than_the_bound(monkeypatch, bound):
    """The neighbour takes what it is sent, and makes a step whenever somebody looks for one."""
    options = algorithm_options("asyncddp", {"bucket_mb": LAYER_MB, "max_staleness": bound})
    network, their_steps, seen = Network(), 0, []

    def step_of_neighbour(seconds: float) -> None:
        nonlocal their_steps
        their_steps += 1

    monkeypatch.setattr(NeighborWindow, "steps_in", lambda self, source: their_steps)
    network.pause = step_of_neighbour
    with on(network):
        trained = Program(algorithm_class("asyncddp")(), options, network)
        trained.train(6, after=lambda: seen.append(their_steps))
    assert seen == [max(0, n - bound) for n in range(6)], "nobody waits for its steps"


@pytest.mark.parametrize(("barrier", "sends"), [(False, False), (True, True)])
def test_a_free_rank_of_push_sum_keeps_its_last_sixteenth(barrier, sends):
    options = algorithm_options("push-sum", {"bucket_mb": LAYER_MB, "barrier": barrier})
    network, algorithm = Network(), algorithm_class("push-sum")()
    with on(network):
        trained = Program(algorithm, options, network)
        trained.train(1, after=network.end)
        for window in trained.optimizer._engine.exchange.windows.values():
            window.p = LEAST_P / 2
        trained.train(1, after=network.end)
    sent = [e.message.operation for e in network.log if e.what == "start" and e.step == 1]
    # A message that is added has its number of steps behind it, which is not added.
    assert sent.count("put") == 2 * len(SIZES) * sends


class ByNorm(torch.optim.SGD):
    """Looks at whole tensors, as LARS does."""

    element_wise = False


@pytest.mark.parametrize("of_torch", [True, False])
@pytest.mark.parametrize("update", ["auto", "replicated"])
def test_what_dear_overlaps_with_an_optimizer_that_is_not_element_wise(
    monkeypatch, of_torch, update
):
    """Torch's own optimizers update a bucket before its layers run; of others nothing is known."""
    monkeypatch.setattr(torch.optim, "SGD", ByNorm)
    monkeypatch.setattr(ByNorm, "__module__", "torch.optim.it" if of_torch else "it")
    dear, options = algorithm_class("dear"), algorithm_options("dear", {**NONE, "update": update})
    stated = dear.overlap_of(dataclasses.replace(options, update="replicated"))
    if not of_torch:
        first, second = stated.transfers
        second = dataclasses.replace(second, awaited="step", steps_later=0)
        stated = Overlap(transfers=(first, second), updates="step")
    as_stated = type("AsStated", (dear,), {"overlap_of": classmethod(lambda *_: stated)})
    assert not violations(as_stated(), options)
    assert bool(violations(dear(), options)) == (update == "auto" or not of_torch)


def test_the_tuner_of_dear_regroups_as_it_says(monkeypatch):
    """Trials have a threshold below every layer; then the better one is kept: all in one."""
    tried = iter([{"threshold_mb": LAYER_MB}] * 9)
    monkeypatch.setattr(Tuner, "observe", lambda self, seconds: None)
    monkeypatch.setattr(Tuner, "propose", lambda self: next(tried))
    monkeypatch.setattr(Tuner, "best", lambda self: {"threshold_mb": 25.0})
    options = algorithm_options("dear", {"fusion": "tuned", "small_kb": 0, "first_mb": 25.0})
    network = Network()
    with on(network):
        trained = Program(algorithm_class("dear")(), options, network)
        trained.train(options.settling_steps() + 2)
    sent = [e.message for e in network.log if e.what == "start" and e.message.carries]
    reduced = [(m.step, sorted(m.layers)) for m in sent if m.operation == "reduce_scatter"]
    groups = [[layers for at, layers in reduced if at == step] for step in range(network.step)]
    assert groups[1] == groups[-1] == ALL
    assert groups[10] == FROM_BEHIND, "layers travel otherwise"
    assert groups[40] == FROM_BEHIND


def test_the_docs_tell_what_every_algorithm_states():
    docs = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    documented = dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", _section(docs), re.MULTILINE))
    stated = {name: algorithm_class(name) for name in dears_own()}
    assert documented == {name: str(c.overlap_of(c.Options())) for name, c in stated.items()}


def _section(docs: str) -> str:
    return docs.partition("## Order and overlap")[2].partition("\n## ")[0]


def test_tensors_of_wfbp_take_turns_on_its_channels():
    run = Run(algorithm_class("wfbp")(), algorithm_options("wfbp", {"channels": 2}))
    assert [message.channel for message in run.started(run.ordinary[0])] == ["0", "1", "0", "1"]


def test_levels_of_bytescheduler_are_channels_of_rising_priority():
    run = Run(algorithm_class("bytescheduler")(), algorithm_options("bytescheduler", {}))
    sent = {min(m.layers): (m.channel, m.priority) for m in run.started(run.ordinary[0])}
    assert sent[0] == ("1", 3) and sent[3] == ("4", 0)  # channel 0 is left to everything else
