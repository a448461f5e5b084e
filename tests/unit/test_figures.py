"""Figures: which ones a sweep has the data for, what they show, and how algorithms look."""

from __future__ import annotations

import dataclasses
import itertools

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from common.results.records import Breakdown, FabricFacts
from common.results.records.learned import Evaluation, Learning, RankPace
from common.results.records.trust import Network
from common.results.timed import rows
from dear.training.algorithm import algorithm_names
from plots import (
    bandwidth,
    batches,
    breakdown,
    gallery,
    learning,
    looks,
    paper_dadt,
    paper_dear,
    paper_decent_dp,
    paper_suite,
    published,
    scaling,
    speedup,
    style,
    throughput,
)
from tests.unit.made_record import record, sweep, varied, with_first, with_notes

MODEL = "resnet50@rtx2080ti-modelled"
DISTURBED = "disturbed: very"


def made(algorithm, step_s=0.1, world=4, *, gbps=None, flag=None, phases=False, **trial):
    """Returns a trial of ResNet-50 with batch size 64 over links of `gbps`."""
    trial = {"model": MODEL, "batch_size": 64, **trial}
    name = f"{gbps:g}gbe" if gbps else None
    world = 1 if algorithm == "none" else world
    result = record(algorithm, step_s, world, network=name, **trial)
    if gbps:
        network = Network(requested={"gbps": gbps})
        result = dataclasses.replace(result, fabric=FabricFacts(network=network))
    if phases:
        shares = {"forward_s": 0.3, "backward_s": 0.5, "exposed_comm_s": 0.15, "update_s": 0.05}
        shares = {key: share * step_s for key, share in shares.items()}
        result = dataclasses.replace(result, breakdown=Breakdown(**shares, step_s=step_s, rank=1))
    return with_notes(result, *([flag] if flag else []))


def learned(algorithm, *, apart=None, stale=None, **trial):
    """Returns a trial that has trained for 2 s; ranks are `apart`, and a neighbour is `stale`."""
    result = record(algorithm, **trial)
    points = [
        Evaluation(
            at_s=at,
            seconds=at,
            steps=[int(9 * at)] * 2,
            loss=1 / (1 + at),
            accuracy=at / 4,
            consensus_distance=apart,
            staleness=stale,
        )
        for at in (0.0, 1.0, 2.0)
    ]
    ranks = [RankPace(steps=18, samples=9, elapsed_s=2.0)] * 2
    learn = {"budget_s": 2.0, "data": "mnist", "target_accuracy": 0.4, "eval_every_s": 1.0}
    trial = result.trial | {"learn": learn}
    result = dataclasses.replace(result, trial=trial, results=result.results[:1])
    learning = Learning(evaluations=points, ranks=ranks, seed=1)
    return with_first(result, learning=learning, iters=[])


EVERYTHING = [
    made("none", 0.08),
    *(made("ddp", 0.1 + n / 100, n, phases=True) for n in (2, 4, 8)),
    *(made("dear", 0.09 + n / 100, n, phases=n > 2) for n in (2, 4)),
    made("dear", 0.2, 8, flag=DISTURBED),
    *(made("ddp", 1 / g, 8, gbps=g) for g in (10.0, 2.5)),
    *(made("dear", 0.9 / g, 8, gbps=g) for g in (10.0, 2.5)),
    *(made("wfbp", 1.1 / g, 8, gbps=g) for g in (10.0, 2.5)),
    *(made("allreduce", 1.2 / g, 8, gbps=g) for g in (10.0, 2.5)),
    made("horovod", 0.11, 8, gbps=10.0),
    made("ddp", 0.05, 8, gbps=10.0, batch_size=16),
    made("dadt", 0.1, 8, gbps=10.0),
    made("dear", 0.13, 8, gbps=10.0, label="notf", options={"fusion": "none"}),
    made("decentralized", 0.05, 8, gbps=10.0, options={"topology": "one-peer-exp"}),
]
LEARNED = [learned("ddp"), learned("asyncddp", apart=0.1, stale=2.0)]
LEARNED.append(learned("neighbor", apart=0.05))


def test_a_sweep_has_the_figures_that_its_records_have_the_data_for(tmp_path):
    assert gallery.fitting(sweep(tmp_path / "a", [made("ddp")])) == [throughput]
    assert gallery.fitting(sweep(tmp_path / "b", LEARNED)) == [learning]
    fitting = gallery.fitting(sweep(tmp_path / "c", EVERYTHING))
    assert fitting == [module for module in gallery.FIGURES if module is not learning]
    assert gallery.fitting(sweep(tmp_path / "d", [record("ddp", status="failed")])) == []
    assert all(module.TITLE and module.NEEDS and module.__doc__ for module in gallery.FIGURES)


WFBP = made("wfbp", gbps=10.0)
LADDERS = {
    module: ([made("ddp", **a), made("ddp", **b)], [made("ddp", **a), made("dear", **b)])
    for module, a, b in (
        (scaling, {"world": 4}, {"world": 8}),
        (batches, {"batch_size": 16}, {"batch_size": 64}),
        (bandwidth, {"gbps": 1.0}, {"gbps": 10.0}),
    )
}
"""Figures of lines, with records of which they need two, and records of different algorithms."""


@pytest.mark.parametrize(
    ("figure", "needed", "lacking"),
    [
        (speedup, [made("ddp"), made("dear")], [made("ddp"), made("dear", world=8)]),
        *((each, needed, lacking) for each, (needed, lacking) in LADDERS.items()),
        (scaling, LADDERS[scaling][0], [made("ddp"), made("none")]),
        (breakdown, [made("ddp", phases=True)], [made("ddp")]),
        (
            paper_dear,
            [made("wfbp"), made("dear", options={"fusion": "none"})],
            [made("wfbp"), made("dear")],
        ),
        (paper_dear, [made("horovod"), made("dear")], [made("horovod"), made("dear", world=8)]),
        *(
            (paper_suite, [WFBP, made("allreduce", gbps=10.0)], lacking)
            for lacking in (
                [made("wfbp", gbps=2.5), made("allreduce", gbps=2.5)],
                [made(name, gbps=10.0, batch_size=8) for name in ("wfbp", "allreduce")],
                [WFBP, made("allreduce", gbps=10.0, model="resnet50")],
            )
        ),
        (paper_dadt, [made("horovod"), made("dadt")], [made("ddp"), made("dadt")]),
        (
            paper_decent_dp,
            [made("ddp"), made("decentralized", options={"topology": "one-peer-exp"})],
            [made("ddp"), made("decentralized", options={"topology": "ring"})],
        ),
    ],
)
def test_a_figure_is_drawn_only_where_it_says_something(figure, needed, lacking):
    assert figure.fits(needed) and not figure.fits(lacking)
    if len(needed) > 1:  # a flagged trial is no second point of a comparison, but one of an axis
        assert figure.fits([needed[0], with_notes(needed[1], DISTURBED)]) == (figure in LADDERS)


@pytest.mark.parametrize("module", LADDERS)
def test_a_sweep_of_flagged_points_alone_is_drawn_hollow_with_a_legend(module, tmp_path):
    needed, _ = LADDERS[module]
    flagged = [with_notes(each, DISTURBED) for each in needed]
    assert module.fits(flagged)
    drawn, _ = module.figure(sweep(tmp_path / "s", flagged))
    left, right = drawn.axes
    assert [line.get_markerfacecolor() for line in left.lines] == ["none", "none"]
    assert "all points are flagged" in right.texts[0].get_text()
    assert drawn.legends[0].get_texts()[-1].get_text() == "hollow: flagged"
    assert "hollow, and on no line: flagged (disturbed)" in drawn.get_supxlabel().replace("\n", " ")
    plt.close(drawn)


@pytest.mark.parametrize(
    ("records", "module"),
    [([made("ddp"), made("dear")], throughput), (LEARNED, learning)]
    + [(needed, each) for each, (needed, _) in LADDERS.items() if each is not bandwidth],
)
def test_the_main_figure_shows_the_axis_of_the_sweep(records, module):
    assert gallery.main_figure(records) is module


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Returns the data of every figure of `EVERYTHING` and `LEARNED`, each with its layout done."""
    everything = sweep(tmp_path_factory.mktemp("all") / "all", EVERYTHING)
    training = sweep(tmp_path_factory.mktemp("learned") / "learned", LEARNED)
    data = {}
    for module in gallery.FIGURES:
        drawn, data[gallery.name(module)] = module.figure(
            training if module is learning else everything
        )
        drawn.draw_without_rendering()
        caption = drawn.get_supxlabel().replace("\n", " ")
        assert caption.endswith("commit unknown."), "the caption names the source"
        plt.close(drawn)
    return data


def test_the_data_behind_a_figure_are_those_of_the_records(tables):
    wanted = rows.make_rows(EVERYTHING, "ddp")
    assert sorted(tables["throughput"]["throughput"]) == sorted(row.throughput for row in wanted)

    table = tables["scaling"]
    here = table[(table["algorithm"] == "ddp") & table["network"].isna()]
    rates = [64 * n / (0.1 + n / 100) for n in (2, 4, 8)]
    assert here["throughput"].tolist() == pytest.approx(rates)
    assert here["efficiency"].tolist() == [pytest.approx(0.08 / (0.1 + n / 100)) for n in (2, 4, 8)]
    flagged = table[table["flag"].notna()]
    assert flagged["throughput"].tolist() == [pytest.approx(2560)]
    assert flagged["efficiency"].isna().all()

    table = tables["breakdown"]
    assert table.groupby(["algorithm", "world_size"])["seconds"].sum().to_dict() == {
        **{("ddp", n): pytest.approx(0.1 + n / 100) for n in (2, 4, 8)},
        ("dear", 4): pytest.approx(0.13),
    }

    table = tables["bandwidth"]
    pairs = table[table["algorithm"] == "dear"][["gbps", "throughput"]].to_numpy().tolist()
    assert pairs == [[g, pytest.approx(512 * g / 0.9)] for g in (10.0, 2.5)]

    assert len(tables["learning"]) == 9 and tables["learning"]["loss"].max() == 1.0


def test_published_values_are_beside_ours_with_their_source(tables):
    for name in ("paper_dear", "paper_suite", "paper_dadt", "paper_decent_dp"):
        table = tables[name]
        theirs = table[table["whose"] == "published"]
        assert len(theirs) and theirs["source"].notna().all()
        assert table[table["whose"] == "ours"]["source"].isna().all()
    table = tables["paper_suite"]
    table = table[table["method"] == "WFBP"].set_index("whose")["rate"]
    assert table["ours"] == pytest.approx(64 / 0.11)
    assert table["published"] == pytest.approx(3146.78 / 16), "WFBP on 16 GPUs"
    table = tables["paper_dear"].set_index(["half", "whose", "method"])["speedup"]
    assert table["without tensor fusion", "ours", "DeAR"] == pytest.approx(0.11 / 0.13)
    assert table["without tensor fusion", "published", "ByteScheduler"] == pytest.approx(
        2701.52 / 3146.78
    )
    assert table["with tensor fusion", "ours", "DeAR"] == pytest.approx(0.11 / 0.09)
    table = tables["paper_dadt"].set_index(["model", "whose", "method"])["relative"]
    assert table["ResNet-101", "published", "DADT"] == pytest.approx(301.8 / 213)
    assert table["ResNet-50", "ours", "DADT"] == pytest.approx(1.1)
    for name in ("ddl_benchmarks", "dear", "dadt", "decent_dp"):
        assert published.read(name)["source"].notna().all()


def test_files_are_written_and_the_csv_holds_the_data(tmp_path):
    folder = sweep(tmp_path / "s", [made("ddp"), made("dear", 0.05)])
    paths = speedup.draw(folder, tmp_path / "out")
    assert [path.name for path in paths] == ["speedup.png", "speedup.pdf", "speedup.csv"]
    assert all(path.stat().st_size > 100 for path in paths)
    table = pd.read_csv(paths[2]).set_index("algorithm")
    assert table.loc["dear", "speedup"] == pytest.approx(2.0)
    assert table.loc["dear", "verdict"] == "FASTER" and table.loc["dear", "compared_to"] == "ddp"


def test_the_program_names_what_does_not_fit(tmp_path, monkeypatch, capsys):
    folder = sweep(tmp_path / "s", [made("ddp")])
    monkeypatch.setattr("sys.argv", ["gallery", str(folder)])
    monkeypatch.chdir(tmp_path)
    style.program(bool, "", gallery.draw)
    out = capsys.readouterr().out
    assert "no scaling: it needs an algorithm at two numbers of workers" in out
    assert "s/figures/throughput.csv" in out and "throughput.png" in out
    for name, text in (("nothing", "has no experiment.json"), ("s", "two numbers of workers")):
        monkeypatch.setattr("sys.argv", ["scaling", str(tmp_path / name)])
        with pytest.raises(SystemExit) as left:
            style.program(scaling.fits, scaling.NEEDS, scaling.draw)
        assert left.value.code == 2 and text in capsys.readouterr().err


def _labelled(*trials):
    return [
        dataclasses.replace(record(), trial={"algorithm": algorithm, "label": label})
        for algorithm, label in trials
    ]


@pytest.mark.parametrize("label", [r"dear $\lr$", "ddp, $5 or $6"])
@pytest.mark.parametrize("module", gallery.FIGURES)
def test_dollars_of_a_label_are_no_mathematics(module, label, tmp_path):
    records = LEARNED if module is learning else EVERYTHING
    named = [
        dataclasses.replace(r, trial={**r.trial, "label": label})
        if r.trial["algorithm"] == "ddp" and r.label == "ddp"
        else r
        for r in records
    ]
    compared = label if any(r.label == label for r in named) else "dear"
    drawn, _ = module.figure(sweep(tmp_path / "s", named, compare_to=compared))
    style.literal(drawn)
    drawn.draw_without_rendering()
    # Two dollars around what can be mathematics raise nothing.
    word = label.split()[1]
    texts = [text for text in drawn.findobj(Text) if word in text.get_text()]
    assert texts or module is not throughput
    assert not any(text.get_parse_math() for text in texts)
    plt.close(drawn)


def test_training_with_two_batch_sizes_has_a_panel_for_each(tmp_path):
    both = [learned(name, batch_size=size) for name in ("ddp", "dear") for size in (16, 64)]
    drawn, data = learning.figure(sweep(tmp_path / "s", both))
    titles = {axis.get_title(loc="left").partition("\n")[0] for axis in drawn.axes} - {""}
    assert len(titles) == 2 and any("batch 64" in title for title in titles)
    keys = ["model", "batch", "world_size", "network", "fault", "algorithm", "repeat", "at_s"]
    assert not data.duplicated(keys).any()
    plt.close(drawn)


def test_where_a_fault_slows_every_rank_the_figure_says_so(tmp_path):
    fault = {"kind": "slow_host", "host": 0, "factor": 5.0}
    slow = [learned(name) for name in ("ddp", "dear")]
    learn = {**slow[0].trial["learn"], "data": None, "target_accuracy": None}
    more = {"fault": fault, "ranks_per_host": 4, "network": "10gbe", "learn": learn}
    slow = [dataclasses.replace(each, trial={**each.trial, **more}) for each in slow]
    for each in slow:
        for mark in each.results[0].learning.evaluations:
            object.__setattr__(mark, "accuracy", None)
    drawn, _ = learning.figure(sweep(tmp_path / "s", slow))
    drawn.draw_without_rendering()
    texts = [text.get_text() for text in drawn.axes[0].texts]
    assert texts == ["a fault slows every rank"] * 2
    plt.close(drawn)


def test_a_curve_far_below_the_others_is_inside(tmp_path):
    low = learned("ddp")
    run = low.results[0].learning
    points = [dataclasses.replace(each, accuracy=0.1) for each in run.evaluations]
    points[-1] = dataclasses.replace(points[-1], seconds=2.4)
    low = with_first(low, learning=dataclasses.replace(run, evaluations=points))
    high = learned("dear")
    run = high.results[0].learning
    points = [dataclasses.replace(each, accuracy=0.97) for each in run.evaluations]
    high = with_first(high, learning=dataclasses.replace(run, evaluations=points))
    others = [dataclasses.replace(high, trial={**high.trial, "label": str(n)}) for n in range(6)]
    drawn, _ = learning.figure(sweep(tmp_path / "s", [low, *others]))
    assert drawn.axes[0].get_xlim()[1] > 2.4
    assert drawn.axes[1].get_ylim()[0] < 0.1
    plt.close(drawn)


def test_grey_prints_tell_all_algorithms_apart():
    names = ["none", *algorithm_names(), "a later one", "another one"]
    known = _labelled(*((name, name) for name in names))
    result = looks.looks(known)
    for key in ("colour", "marker", "hatch", "line"):
        shown = [getattr(look, key) for look in result.values()]
        assert len(set(shown)) == len(shown), key
    assert set(looks.LOOKS) == {"none", *algorithm_names()}, "each algorithm has its own look"
    # A look does not depend on the other trials of a sweep.
    assert looks.looks(known[3:5]) == {each.label: result[each.label] for each in known[3:5]}


def test_variants_of_an_algorithm_are_told_apart_and_keep_its_colour():
    labels = ["dear-none", "dear", *(f"{size} MB" for size in range(8))]
    result = looks.looks(_labelled(*(("dear", label) for label in labels), ("ddp", "ddp")))
    assert next(iter(result)) == "ddp" and result["dear"] == looks.LOOKS["dear"]
    for first, second in itertools.combinations(result.values(), 2):
        assert first.marker != second.marker and first.hatch != second.hatch
        assert first.line != second.line
    assert result["dear-none"].colour != looks.LOOKS["dear"].colour


def test_a_figure_says_what_a_record_lacks(tmp_path):
    folder = sweep(tmp_path / "s", [made("ddp", phases=True), made("dear")])
    drawn, _ = breakdown.figure(folder)
    assert "no phases on record" in [text.get_text() for text in drawn.axes[0].texts]
    drawn, _ = scaling.figure(sweep(tmp_path / "u", [made("ddp"), made("ddp", world=8)]))
    assert "no valid baseline" in drawn.axes[1].texts[0].get_text()
    plt.close("all")


def test_a_negative_phase_is_called_not_reliable(tmp_path):
    trial = made("ddp", phases=True)
    phases = dataclasses.replace(trial.breakdown, update_s=-0.02)
    folder = sweep(tmp_path / "s", [dataclasses.replace(trial, breakdown=phases)])
    drawn, _ = breakdown.figure(folder)
    assert "update of -20 included: not reliable" in drawn.axes[0].texts[0].get_text()
    plt.close(drawn)


def test_the_figure_is_grey_where_a_result_is_flagged(tmp_path):
    reason = "unfaithful: ranks waited for a core for 9 % of a step"
    folder = sweep(
        tmp_path / "s",
        [
            varied("none", (1, 1, 1), world=1),
            varied("ddp", (1, 1.01, 0.99)),
            with_notes(varied("horovod", (1, 1.1, 0.9), 0.01), reason),
            varied("dear", (1,), 0.05, label="a label, " * 8),
            varied("wfbp", (1, 2), 0.05),
        ],
    )
    drawn, _ = throughput.figure(folder)
    (axis,) = drawn.axes
    names = [text.get_text() for text in axis.get_yticklabels()]
    bars = dict(zip(names, axis.patches, strict=True))
    assert to_hex(bars["horovod"].get_facecolor()) == looks.FLAGGED["facecolor"]
    assert to_hex(bars["ddp"].get_facecolor()) == "#0072b2"
    texts = [text.get_text() for text in axis.texts]
    assert f"(1600) {reason}" in texts and {"160", "320"} <= set(texts)
    # Two trials have whiskers: a single repeat has no interval, and a flagged one shows none.
    assert len(axis.containers) - len(bars) == 2
    # Neither a flagged result nor the interval of two repeats makes the other bars small.
    assert axis.get_xlim()[1] < 700
    caption = drawn.get_supxlabel().replace("\n", " ")
    assert "95 % t interval" in caption and "grey: flagged" in caption
    plt.close(drawn)
