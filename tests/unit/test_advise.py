"""Advice: the search, the changed costs, the options that algorithms offer, and the verb."""

import json

import pytest

from common.harness.cli import main
from common.harness.verbs import advise as verb
from common.machine import processes
from common.paths import ROOT
from common.results.tables.advice import text
from common.results.tables.validated import Advised, Check
from common.virtual.advice.causes import LEFT, cost_without, without
from common.virtual.advice.search import LEAST, Answer, Axis, Candidate, advise
from common.virtual.costs.engines import costs_of
from common.virtual.costs.networks import platform_of
from common.virtual.costs.parts import Shape
from common.virtual.passes import UnmodelledError
from common.virtual.training.run import predicted
from dear.cost.event_model.link import Pairwise
from dear.cost.fit import AlphaBeta, CollectiveCost, Regime
from dear.errors import UserError
from dear.training import algorithm
from dear.training.algorithm import algorithm_class, algorithm_names, algorithm_options
from tests.unit.test_virtual_world import TINY, one_line, setting

CANDIDATES = [
    Candidate(label="plain", algorithm="plain"),
    Candidate(label="quick", algorithm="quick"),
    Candidate(label="quick(x=2)", algorithm="quick", options={"x": 2}),
    Candidate(label="quick(x=3)", algorithm="quick", options={"x": 3}),
    Candidate(label="loose", algorithm="loose", exact=False),
    Candidate(label="broken", algorithm="broken"),
]
STEPS = {"plain": 1.0, "quick": 0.9, "quick(x=2)": 0.805, "quick(x=3)": 0.8, "loose": 0.5}


PARTS = {None: 1, "messages": 0.5, "start_up": 0.9, "bytes": 0.6, "compute": 0.7}
"""Step without a part, relative to the whole step."""


def answers_of(step_of):
    """Returns the answers of steps in seconds by question; costs and compute are within 10 %."""

    def answer(question):
        step_s = step_of(question)
        if step_s is None:
            return Answer(step_s=None, note="it is broken")
        return Answer(step_s=step_s * (1 + 0.1 * question.sign) * PARTS[question.part])

    return lambda questions: [answer(question) for question in questions]


def known(question):
    return STEPS.get(question.label)


def test_the_fastest_exact_algorithm_is_advised_with_its_simplest_options():
    advice = advise(CANDIDATES, "plain", answers_of(known))
    assert advice.best.candidate.label == "quick(x=2)"  # x=3 is faster by less than 2 %
    assert advice.best.over(advice.base).value == pytest.approx(1 / 0.805)
    assert advice.best.over(advice.base).verdict == "faster"
    assert [c.candidate.label for c in advice.choices] == ["quick(x=2)", "plain"]
    assert [c.candidate.label for c in advice.inexact] == ["loose"]
    assert advice.unknown == {"broken": "it is broken"}
    shown = text(advice, "model", 64)
    assert shown.startswith("Use quick(x=2): it is 1.24 (1.24-1.24) times as fast as plain")
    assert "no prediction for broken: it is broken" in shown
    assert shown.index("change the result of training") < shown.index("| loose")


def test_a_difference_inside_the_range_is_undecided():
    def steps(question):
        costs_more = 1.03 if question.sign else 1  # than the step of the base
        return {"plain": 1.0, "quick": 0.97 * costs_more}.get(question.label)

    advice = advise(CANDIDATES, "plain", answers_of(steps))
    assert advice.best is advice.base
    assert [choice.candidate.label for choice in advice.alike] == ["quick"]
    shown = text(advice, "model", 64)
    assert shown.startswith("Stay with plain: no exact algorithm is surely faster")
    assert "Undecided" in shown and "quick 1.03 (1.00-1.03)" in shown


def test_parts_come_from_one_change_each():
    unfused = {"quick": "quick"}
    advice = advise(CANDIDATES, "plain", answers_of(known), unfused=unfused)
    base, best = advice.parts
    assert (base.label, best.label) == ("plain", "quick(x=2)")
    assert base.compute_s == 0.5 and base.start_up_s == pytest.approx(0.1)
    assert base.bytes_s == pytest.approx(0.4) and base.hidden_s == pytest.approx(0.2)
    assert base.fused_s is None and best.fused_s == pytest.approx(0.9 - 0.805)


def test_the_places_where_another_algorithm_wins():
    def steps(question):
        place = question.place
        hosts = place.value if place and place.axis == "hosts" else 8
        gbps = place.value if place and place.axis == "bandwidth" else 25
        return {"plain": 0.1 * hosts, "quick": 0.3 + 10 / gbps}.get(question.label)

    axes = [
        Axis(name="bandwidth", start=25, lower=(6.25, 1.5625), higher=(100,)),
        Axis(name="hosts", start=8, lower=(7, 2), higher=(32,), whole=True),
    ]
    advice = advise(CANDIDATES, "plain", answers_of(steps), axes)
    assert advice.best.candidate.label == "quick"
    lower, higher, fewer, more = advice.turns
    assert lower.winner.label == "plain"
    # 0.3 + 10 / x = (1 + LEAST) * 0.8
    assert lower.value == pytest.approx(10 / ((1 + LEAST) * 0.8 - 0.3), rel=0.01)
    assert lower.speedup == pytest.approx(1 + LEAST, abs=0.01)
    assert higher.winner is None and higher.value == 100
    assert fewer.winner.label == "plain" and fewer.value == 6  # 0.7 > (1 + LEAST) * 0.6
    assert more.winner is None and more.value == 32


def test_places_without_steps_are_left_out():
    def steps(question):
        return STEPS.get(question.label) if question.place is None else None

    axes = [Axis(name="batch", start=8, lower=(4,), higher=(), refined=False)]
    assert advise(CANDIDATES, "plain", answers_of(steps), axes).turns == ()


def test_without_a_step_of_the_base_there_is_no_advice():
    with pytest.raises(UserError, match="broken: it is broken"):
        advise(CANDIDATES, "broken", answers_of(known))


LINE = AlphaBeta(alpha_s=1e-3, beta_s_per_byte=1e-9, queued_alpha_s=1e-4)
REGIMES = CollectiveCost(
    alpha_s=1e-3,
    beta_s_per_byte=1e-9,
    smaller=(Regime(name="small", below_bytes=1e4, alpha_s=1e-5, beta_s_per_byte=1e-8),),
)
COMPOSED = {
    engine: costs_of(engine, platform_of("10gbe", inside), Shape(hosts=4, ranks_per_host=2))
    for engine, inside in (("nccl", "pcie4"), ("comm_core", None), ("gloo", None), ("mpi", None))
}


@pytest.mark.parametrize(
    "cost",
    [LINE, REGIMES, *(costs["all_reduce"] for costs in COMPOSED.values())],
    ids=["line", "regimes", *COMPOSED],
)
@pytest.mark.parametrize("nbytes", [100, 1e6, 1e8])
def test_start_up_and_bytes_are_the_whole_cost(cost, nbytes):
    small, wire, none = (cost_without(cost, part) for part in ("bytes", "start_up", "messages"))
    whole = cost(nbytes)
    assert small(nbytes) + wire(nbytes) == pytest.approx((1 + LEFT) * whole)
    assert none(nbytes) == pytest.approx(LEFT * whole)
    assert small(nbytes) < whole and wire(nbytes) < whole
    assert small(1e8) < 0.5 * cost(1e8)
    assert wire(1e8) > 0.5 * cost(1e8)


def test_a_cost_without_a_known_start_up_is_refused():
    with pytest.raises(UnmodelledError, match="start-up of a Pairwise"):
        cost_without(Pairwise(alone=LINE, pair=LINE), "bytes")


@pytest.mark.parametrize("name", ["ddp", "dear"])
def test_free_messages_leave_compute_and_free_compute_leaves_messages(name):
    point = setting(*TINY, name, Shape(hosts=4, ranks_per_host=2), "1gbe")
    whole = predicted(point).step_s
    free, wire = (predicted(without(point, part)).step_s for part in ("messages", "compute"))
    assert free < 1.2 * point.profile.step_s < whole
    assert max(free, wire) <= whole <= 1.01 * (free + wire)
    for part in ("start_up", "bytes"):
        assert free < predicted(without(point, part)).step_s < whole


@pytest.mark.parametrize("name", algorithm_names())
def test_algorithms_offer_options_that_exist_and_differ(name):
    kind = algorithm_class(name)
    tried = [algorithm_options(name, given) for given in ({}, *(kind.candidates or ()))]
    assert all(tried.count(options) == 1 for options in tried)
    if kind.unfused is not None:
        algorithm_options(name, kind.unfused)


@pytest.mark.parametrize(
    "name",
    [name for name in algorithm_names() if algorithm_class(name).unfused and name != "horovod"],
)
def test_unfused_gradients_travel_alone(name):
    shape = Shape(hosts=4, ranks_per_host=2)
    plain, alone = (
        predicted(setting(*TINY, name, shape, "10gbe", **options))
        for options in ({}, algorithm_class(name).unfused)
    )
    gradients = len(setting(*TINY, name, shape, "10gbe").profile.gradients())
    assert alone.messages >= gradients > plain.messages / 3


class InProcess:
    """Stands for a pool of processes, whose start takes seconds."""

    def __init__(self, *_args, **_settings):
        self.map = map

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_advice_of_the_virtual_cluster(capsys, monkeypatch):
    monkeypatch.setattr(processes, "ProcessPoolExecutor", InProcess)
    monkeypatch.setattr(verb, "FACTORS", (4.0,))
    cluster = ["--hosts", "4", "--ranks-per-host", "2", "--network", "1gbe"]
    assert main(["advise", "--json", "--model", TINY[0], *cluster]) == 0
    advice = json.loads(capsys.readouterr().out)
    best = advice["best"]["candidate"]
    assert best["exact"] and f'algorithm="{best["algorithm"]}"' in advice["use"]
    speedup = advice["speedup"]
    assert speedup["low"] <= speedup["value"] <= speedup["high"]
    assert {turn["axis"] for turn in advice["turns"]} == {"bandwidth", "hosts"}  # one batch size
    assert {"hierarchical", "dear"} <= {c["candidate"]["algorithm"] for c in advice["choices"]}
    assert "auto" not in {c["candidate"]["algorithm"] for c in advice["choices"]}
    assert advice["inexact"] == [] and advice["unknown"] == {}
    assert all(part["hidden_s"] is not None for part in advice["parts"])
    shape = Shape(hosts=4, ranks_per_host=2)
    plain = predicted(setting(*TINY, "ddp", shape, "1gbe")).step_s
    assert advice["base"]["steps_s"][0] == pytest.approx(plain)


def test_inexact_algorithms_are_apart_and_plugins_are_compared(capsys, monkeypatch):
    monkeypatch.setattr(processes, "ProcessPoolExecutor", InProcess)
    monkeypatch.setattr(verb, "FACTORS", ())
    monkeypatch.setattr(algorithm, "_plugins", {})
    cluster = ["--hosts", "2", "--ranks-per-host", "1", "--network", "1gbe"]
    plugin = ["--plugin", str(ROOT / "examples" / "bring_your_own_algorithm.py")]
    assert main(["advise", "--inexact", "--model", TINY[0], *cluster, *plugin]) == 0
    text, apart = capsys.readouterr().out.split("These change the result of training:")
    assert "asyncddp" not in text and "mgs" not in text and "| bring-your-own-algorithm" in text
    assert "| asyncddp" in apart and "| dadt" in apart and "no prediction for mgs: " in apart
    assert "What would change the answer" not in apart


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "advise answers for one model, got 0"),
        (["--model", TINY[0], "--model", "resnet50"], "got 2"),
        (["--model", "resnet5"], "unknown model 'resnet5'"),
        (["--model", "resnet50", "--gpu", "a200"], "a100-80g"),
        (["--model", "resnet50", "--network", "9gbe"], "9gbe"),
        (["--model", TINY[0], "--network", "wan"], "do not model `sites:`"),
        (["--model", TINY[0], "--inside", "10gbe"], "not a network inside a host"),
        (["--model", TINY[0], "--set", "networks=[1gbe,10gbe]"], "one network"),
        (
            ["--model", TINY[0], "--set", "dtype=bfloat16"],
            "replays times that were measured in float32",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(["advise", *arguments]) == 2
    assert one_line(capsys.readouterr().err, message)


def test_advice_in_measured_settings():
    """The distance is that of measured steps; inexact and single algorithms do not count."""
    steps = {  # predicted and measured
        "plain": (1.0, 1.0),
        "quick": (0.8, 0.92),
        "fast": (0.9, 0.9),
        "loose": (0.1, 0.1),
    }
    checks = [
        Check(
            **{"sweep": "s", "model": "m", "batch": 8, "world_size": size, "network": "10gbe"},
            **{"algorithm": name, "scales": "1", "costs_of": "m", "low_s": 0, "high_s": 2},
            predicted_s=predicted_s,
            measured_s=measured_s,
            exact=name != "loose",
        )
        for size, names in ((4, steps), (8, ["plain", "loose"]))
        for name, (predicted_s, measured_s) in steps.items()
        if name in names
    ]
    (choice,) = Advised.of(checks)
    assert (choice.place[3], choice.algorithms) == (4, 3)
    assert (choice.chosen, choice.fastest) == ("quick", "fast")
    assert choice.excess == pytest.approx(0.92 / 0.9 - 1)


@pytest.mark.full
def test_advice_is_good_in_the_measured_settings_of_a_record(capsys):
    assert main(["validate", str(ROOT / "docs" / "records" / "batches")]) == 0
    assert "in 4 of 4 settings, the advised one is within 3% of the" in capsys.readouterr().out
