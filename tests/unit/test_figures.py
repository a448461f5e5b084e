"""Figures: which ones a sweep has the data for, what they show, and that grey prints tell all."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from common.results import rows
from common.results.records import Breakdown, FabricFacts
from common.results.records.learned import Evaluation, Learning, RankPace
from common.results.records.trust import Network
from common.results.store import Comparison, append
from dear.training.algorithm import algorithm_names
from plots import (
    bandwidth,
    breakdown,
    gallery,
    learning,
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
from tests.unit.made_record import record, with_first, with_notes

RECORDS = Path(__file__).parents[2] / "docs" / "records"
MODEL = "resnet50@rtx2080ti-modelled"


def made(algorithm, step_s=0.1, world=4, *, gbps=None, doubtful=None, parts=False, **more):
    """A trial of ResNet-50 with batch size 64, its links of `gbps`."""
    more = {"model": MODEL, "batch_size": 64, **more}
    name = f"{gbps:g}gbe" if gbps else None
    if algorithm == "none":
        world = 1
    one = record(algorithm, step_s, world, network=name, **more)
    if gbps:
        network = Network(requested={"gbps": gbps})
        one = dataclasses.replace(one, fabric=FabricFacts(network=network))
    if parts:
        shares = {"forward_s": 0.3, "backward_s": 0.5, "exposed_comm_s": 0.15, "update_s": 0.05}
        shares = {key: share * step_s for key, share in shares.items()}
        one = dataclasses.replace(one, breakdown=Breakdown(**shares, step_s=step_s, rank=1))
    return with_notes(one, *([doubtful] if doubtful else []))


def learned(algorithm, *, apart=None, stale=None, **more):
    """It has trained for 2 s; ranks are `apart`, and a neighbour is `stale`."""
    one = record(algorithm, **more)
    points = [
        Evaluation(
            **{"at_s": at, "seconds": at, "steps": [int(9 * at)] * 2, "loss": 1 / (1 + at)},
            **{"accuracy": at / 4, "consensus_distance": apart, "staleness": stale},
        )
        for at in (0.0, 1.0, 2.0)
    ]
    run = Learning(
        evaluations=points, ranks=[RankPace(steps=18, samples=9, elapsed_s=2.0)] * 2, seed=1
    )
    learn = {"budget_s": 2.0, "data": "mnist", "target_accuracy": 0.4, "eval_every_s": 1.0}
    counted = None if stale is None else [{"staleness": {"1": {"mean": stale, "max": 9}}}]
    one = dataclasses.replace(one, trial=one.trial | {"learn": learn}, results=one.results[:1])
    return with_first(one, learning=run, iters=[], statistics=counted)


def sweep(folder, records, compare_to="ddp"):
    folder.mkdir(exist_ok=True)
    for one in records:
        append(folder / "records.jsonl", one)
    Comparison(compare_to=compare_to, trials=tuple(r.hash for r in records)).save(folder)
    return folder


EVERYTHING = [
    made("none", 0.08),
    *(made("ddp", 0.1 + n / 100, n, parts=True) for n in (2, 4, 8)),
    *(made("dear", 0.09 + n / 100, n, parts=n > 2) for n in (2, 4)),
    made("dear", 0.2, 8, doubtful="disturbed: very"),
    *(made("ddp", 1 / g, 8, gbps=g) for g in (10.0, 2.5)),
    *(made("dear", 0.9 / g, 8, gbps=g) for g in (10.0, 2.5)),
    *(made("wfbp", 1.1 / g, 8, gbps=g) for g in (10.0, 2.5)),
    *(made("allreduce", 1.2 / g, 8, gbps=g) for g in (10.0, 2.5)),
    made("horovod", 0.11, 8, gbps=10.0),
    made("dadt", 0.1, 8, gbps=10.0),
    made("dear", 0.13, 8, gbps=10.0, label="notf", options={"fusion": "none"}),
    *(
        made("dear", 0.1 - size / 1e4, label=f"{size} MB", options={"threshold_mb": size})
        for size in (1.0, 4.0)
    ),
    with_first(
        made("decentralized", 0.05, 8, gbps=10.0, options={"topology": "one-peer-exp"}),
        statistics=[{"staleness": {"1": {"mean": -1.0, "max": 3}}}, None],
    ),
]
LEARNED = [
    learned("ddp"),
    learned("asyncddp", apart=0.1, stale=2.0),
    learned("neighbor", apart=0.05),
]


def test_a_sweep_has_the_figures_that_its_records_have_the_data_for(tmp_path):
    alone = gallery.fitting(sweep(tmp_path / "a", [made("ddp")]))
    assert alone == [throughput]
    assert set(gallery.fitting(sweep(tmp_path / "b", LEARNED))) == {learning}
    all_of_them = gallery.fitting(sweep(tmp_path / "c", EVERYTHING))
    assert set(gallery.FIGURES) - set(all_of_them) == {learning}
    assert all_of_them == [one for one in gallery.FIGURES if one in all_of_them], "in order"
    assert all_of_them[0] is throughput
    failed = record("ddp", status="failed")
    assert gallery.fitting(sweep(tmp_path / "d", [failed])) == []
    assert all(one.TITLE and one.NEEDS and one.__doc__ for one in gallery.FIGURES)


@pytest.mark.parametrize(
    ("figure", "needed", "lacking"),
    [
        (speedup, [made("ddp"), made("dear")], [made("ddp"), made("dear", world=8)]),
        (scaling, [made("ddp"), made("ddp", world=8)], [made("ddp"), made("none")]),
        (scaling, [made("ddp"), made("ddp", world=8)], [made("ddp"), made("dear", world=8)]),
        (breakdown, [made("ddp", parts=True)], [made("ddp")]),
        (
            bandwidth,
            [made("ddp", gbps=1.0), made("ddp", gbps=10.0)],
            [made("ddp", gbps=1.0), made("dear", gbps=10.0)],
        ),
        (paper_dear, [made("wfbp"), made("dear", options={"fusion": "none"})],
         [made("wfbp"), made("dear")]),
        (paper_dear, [made("horovod"), made("dear")], [made("horovod"), made("dear", world=8)]),
        (paper_suite, [made("wfbp", gbps=10.0), made("allreduce", gbps=10.0)],
         [made("wfbp", gbps=2.5), made("allreduce", gbps=2.5)]),
        (paper_suite, [made("wfbp", gbps=10.0), made("allreduce", gbps=10.0)],
         [made("wfbp", gbps=10.0, batch_size=8), made("allreduce", gbps=10.0, batch_size=8)]),
        (paper_suite, [made("wfbp", gbps=10.0), made("allreduce", gbps=10.0)],
         [made("wfbp", gbps=10.0, model="resnet50"), made("allreduce", gbps=10.0)]),
        (paper_dadt, [made("horovod"), made("dadt")], [made("ddp"), made("dadt")]),
        (
            paper_decent_dp,
            [made("ddp"), made("decentralized", options={"topology": "one-peer-exp"})],
            [made("ddp"), made("decentralized", options={"topology": "ring"})],
        ),
    ],
)  # fmt: skip
def test_a_figure_is_drawn_only_where_it_says_something(figure, needed, lacking):
    assert figure.fits(needed) and not figure.fits(lacking)
    # What is not believed is no second point of a comparison.
    if figure in (speedup, scaling, bandwidth, paper_dear, paper_dadt, paper_decent_dp):
        doubted = with_notes(needed[1], "disturbed: very")
        assert not figure.fits([needed[0], doubted])


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The data of every figure of `EVERYTHING` and `LEARNED`, each laid out as it would be."""
    folders = {
        False: sweep(tmp_path_factory.mktemp("all") / "all", EVERYTHING),
        True: sweep(tmp_path_factory.mktemp("learned") / "learned", LEARNED),
    }
    found = {}
    for one in gallery.FIGURES:
        drawn, table = one.figure(folders[one is learning])
        drawn.draw_without_rendering()
        assert drawn.get_supxlabel().endswith("commit unknown."), "it says what it is of"
        plt.close(drawn)
        found[gallery.name(one)] = table
    return found


def test_the_data_behind_a_figure_are_those_of_the_records(tables):
    wanted = rows.make_rows(EVERYTHING, "ddp")
    assert sorted(tables["throughput"]["throughput"]) == sorted(row.throughput for row in wanted)

    table = tables["scaling"]
    here = table[(table["algorithm"] == "ddp") & table["network"].isna()]
    rates = [64 * n / (0.1 + n / 100) for n in (2, 4, 8)]
    assert here["throughput"].tolist() == pytest.approx(rates)
    assert here["efficiency"].tolist() == [pytest.approx(0.08 / (0.1 + n / 100)) for n in (2, 4, 8)]
    doubted = table[table["doubt"].notna()]
    assert doubted["throughput"].tolist() == [pytest.approx(2560)]
    assert doubted["efficiency"].isna().all()

    table = tables["breakdown"]
    steps_s = table.groupby(["algorithm", "world_size"])["seconds"].sum().to_dict()
    assert steps_s == {
        **{("ddp", n): pytest.approx(0.1 + n / 100) for n in (2, 4, 8)},
        ("dear", 4): pytest.approx(0.13),
    }

    table = tables["bandwidth"]
    pairs = table[table["algorithm"] == "dear"][["gbps", "throughput"]].to_numpy().tolist()
    assert pairs == [[g, pytest.approx(512 * g / 0.9)] for g in (10.0, 2.5)]

    assert len(tables["learning"]) == 9 and tables["learning"]["loss"].max() == 1.0


def test_published_values_stand_beside_ours_with_their_source(tables):
    for name in ("paper_dear", "paper_suite", "paper_dadt", "paper_decent_dp"):
        table = tables[name]
        theirs = table[table["whose"] == "published"]
        assert len(theirs) and theirs["source"].notna().all()
        assert table[table["whose"] == "ours"]["source"].isna().all()
    table = tables["paper_suite"]
    table = table[table["method"] == "wfbp"].set_index("whose")["rate"]
    assert table["ours"] == pytest.approx(64 / 0.11)
    assert table["published"] == pytest.approx(3146.78 / 16), "WFBP on 16 GPUs"
    table = tables["paper_dear"].set_index(["half", "whose", "method"])["speedup"]
    assert table["without tensor fusion", "ours", "dear"] == pytest.approx(0.11 / 0.13)
    assert table["without tensor fusion", "published", "bytescheduler"] == pytest.approx(
        2701.52 / 3146.78
    )
    assert table["with tensor fusion", "ours", "dear"] == pytest.approx(0.11 / 0.09)
    table = tables["paper_dadt"].set_index(["group", "method"])["relative"]
    assert table["ResNet-101, published, 4 x P40", "dadt"] == pytest.approx(301.8 / 213)
    assert table["ResNet-50, 10GbE, 8 workers", "dadt"] == pytest.approx(1.1)
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


def test_the_program_says_what_does_not_fit(tmp_path, monkeypatch, capsys):
    folder = sweep(tmp_path / "s", [made("ddp")])
    monkeypatch.setattr(style, "save", lambda figure, stem: [stem.with_suffix(".png")])
    monkeypatch.setattr("sys.argv", ["gallery", str(folder)])
    monkeypatch.chdir(tmp_path)
    style.program(bool, "", gallery.announced, "")
    said = capsys.readouterr().out
    assert "no scaling: it needs an algorithm at two numbers of workers" in said
    assert "plots/out/s/throughput.csv" in said and "throughput.png" in said
    monkeypatch.setattr("sys.argv", ["gallery", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit) as left:
        style.program(bool, "", gallery.announced, "")
    assert left.value.code == 2 and "has no experiment.json" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["scaling", str(folder)])
    with pytest.raises(SystemExit) as left:
        style.program(scaling.fits, scaling.NEEDS, scaling.draw, "")
    assert left.value.code == 2
    assert "it needs an algorithm at two numbers of workers" in capsys.readouterr().err


def test_grey_prints_tell_all_algorithms_apart():
    known = [dataclasses.replace(record(), trial={"algorithm": name, "label": name}) for name in
             ("none", *algorithm_names(), "a later one", "another one")]  # fmt: skip
    found = style.looks(known)
    for key in ("colour", "marker", "hatch", "line"):
        shown = [getattr(look, key) for look in found.values()]
        assert len(set(shown)) == len(shown), key
    assert set(style.LOOKS) == {"none", *algorithm_names()}, "all have a look of their own"
    # The same in every sweep, whatever else it has.
    assert style.looks(known[3:5]) == {one.label: found[one.label] for one in known[3:5]}


def test_variants_of_an_algorithm_are_told_apart_and_keep_its_colour():
    labels = ["dear-none", "dear", *(f"{size} MB" for size in range(8))]
    given = [dataclasses.replace(record(), trial={"algorithm": "dear", "label": label})
             for label in labels]  # fmt: skip
    given.append(dataclasses.replace(record(), trial={"algorithm": "ddp", "label": "ddp"}))
    found = style.looks(given)
    assert next(iter(found)) == "ddp" and found["dear"] == style.LOOKS["dear"]
    for one, other in itertools.combinations(found.values(), 2):
        assert one.marker != other.marker and one.hatch != other.hatch and one.line != other.line
    assert found["dear-none"].colour != style.LOOKS["dear"].colour


def test_a_figure_says_what_a_record_lacks(tmp_path):
    folder = sweep(tmp_path / "s", [made("ddp", parts=True), made("dear")])
    drawn, _ = breakdown.figure(folder)
    assert "no parts on record" in [text.get_text() for text in drawn.axes[0].texts]
    drawn, _ = scaling.figure(sweep(tmp_path / "u", [made("ddp"), made("ddp", world=8)]))
    assert "no single worker was measured" in drawn.axes[1].texts[0].get_text()
    plt.close("all")


def test_parts_that_cannot_be_are_not_to_be_trusted(tmp_path):
    one = made("ddp", parts=True)
    parts = dataclasses.replace(one.breakdown, update_s=-0.02)
    folder = sweep(tmp_path / "s", [dataclasses.replace(one, breakdown=parts)])
    drawn, _ = breakdown.figure(folder)
    assert "update -20: not to be trusted" in drawn.axes[0].texts[0].get_text()
    plt.close(drawn)
