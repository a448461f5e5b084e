"""Predictions over sizes and links, in figures, and beside measured steps."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex

from common.harness.cli import main
from common.harness.verbs import validate
from common.paths import ROOT
from common.results import store
from common.results.report.overview import overview
from common.results.store import Comparison
from common.results.tables.predicted import PredictedRow, ReachRow, reach_text, table_of
from common.virtual.over import Point, reached
from dear.errors import UserError
from plots.looks import FLAGGED

TINY = ["--model", "mnist_cnn@rtx2080ti-modelled", "--batch", "32", "-k", "10gbe"]


def test_a_step_is_extrapolated_from_two_time_scales(tmp_path, capsys):
    """T = 2 T(2k) - T(k), from a sweep at 2k, or from repeats at 2k of the same trial."""
    source = ROOT / "docs" / "records" / "batches"
    lines = [json.loads(line) for line in (source / "records.jsonl").open()]
    lines = [line for line in lines if line["trial"]["batch_size"] == 64]
    for name, factor, scale in (("k", 1.0, 1), ("k2", 0.99, 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "experiment.json").write_text((source / "experiment.json").read_text())
        with (tmp_path / name / "records.jsonl").open("w") as file:
            for line in lines:
                changed = json.loads(json.dumps(line))
                changed["fabric"]["time_scale"] *= scale
                changed["trial"]["time_scale"] = changed["fabric"]["time_scale"]
                for result in changed["results"]:
                    result["iters"] = [[factor * s for s in block] for block in result["iters"]]
                file.write(json.dumps(changed) + "\n")

    def rows(*names):
        assert main(["validate", "--json", *(str(tmp_path / name) for name in names)]) == 0
        return json.loads(capsys.readouterr().out)["rows"]

    alone, both = rows("k"), rows("k", "k2")
    assert len(both) == len(alone) == 4 and {row["sweep"] for row in both} == {"k"}
    for single, row in zip(alone, both, strict=True):
        assert row["measured_s"] == pytest.approx(0.98 * single["measured_s"])
        assert row["scales"] == f"{single['scales']}, {2 * float(single['scales']):g}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--over", "size"], "unknown axis of --over 'size'"),
        (["--over", "workers=1.5"], "must be whole numbers above 0"),
        (["--over", "latency=0,1"], "must be numbers above 0"),
        (["--over", "latency="], "must be numbers above 0"),
        (["--over", "start_up"], "goes with --alpha-ms"),
        (["--over", "latency", "--alpha-ms", "1", "--beta-ns", "1"], "costs of a network"),
    ],
)
def test_a_bad_series_is_one_line(arguments, message, capsys):
    assert main(["predict", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1 and message in text


def test_bisection_gives_the_bandwidth_of_a_share():
    result = reached(lambda gbps: gbps / (gbps + 10), (0.5, 0.9, 1.0))
    assert result[0.5] == pytest.approx(10, rel=0.011) and result[0.9] == pytest.approx(
        90, rel=0.011
    )
    assert result[1.0] is None


def test_a_series_has_its_points_and_a_figure(tmp_path, capsys):
    model = [*TINY, "-k", "ddp|dear"]
    series = ["--over", "workers=1,4,16", "--figure", str(tmp_path)]
    assert main(["predict", "--json", *model, *series]) == 0
    rows = json.loads(capsys.readouterr().out)
    ddp = [row for row in rows if row["algorithm"] == "ddp"]
    assert [row["world_size"] for row in ddp] == [1, 4, 16]
    assert ddp[0]["exposed_s"] == 0 and ddp[0]["step_s"] < ddp[1]["step_s"] < ddp[2]["step_s"]
    table = (tmp_path / "workers.csv").read_text()
    assert len(table.splitlines()) == 7 and (tmp_path / "workers.png").stat().st_size > 1000

    def steps(axis):
        assert main(["predict", "--json", *model, "-k", "ddp", "--over", axis]) == 0
        return [row["step_s"] for row in json.loads(capsys.readouterr().out)]

    slow, fast = steps("bandwidth=1,100")
    assert slow > fast
    near, far = steps("latency=1,1000")
    assert near < far
    plain, twice = steps("compute=1,2")
    assert plain > twice


def test_bandwidths_are_printed_by_share(capsys):
    model = ["-k", "resnet50", "-k", "10gbe", "-k", "algorithm=ddp"]
    assert main(["predict", *model, "--over", "bandwidth=10"]) == 0
    line = capsys.readouterr().out.splitlines()[-3]
    place = [cell.strip() for cell in line.split("|")[1:6]]
    assert place == ["resnet50@rtx2080ti-modelled", "64", "64", "10gbe", "ddp"]
    gbps = [float(cell) for cell in line.split("|")[6:9]]
    assert gbps == sorted(gbps)


def test_measured_trials_are_predicted_once(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "docs" / "records" / "emulated-quick", tmp_path / "sweep")
    folder = tmp_path / "sweep"
    (folder / "foreseen.json").unlink()
    chosen = [r for r in Comparison.load(folder).results(folder) if r.label in ("wfbp", "dear")]
    Comparison(compare_to="wfbp", trials=tuple(r.hash for r in chosen)).save(folder)
    assert "predicted / measured" not in comparison_text(chosen)
    calls = []

    def mapped(call, arguments):
        calls.extend(arguments)
        return list(itertools.starmap(call, arguments))

    monkeypatch.setattr(validate, "mapped", mapped)
    kept = validate.keep_predictions(folder, chosen)
    assert [record.foreseen.step_s for record in kept] == pytest.approx(
        [record.step_s for record in kept], rel=0.05
    )
    assert all(record.foreseen.costs_of != record.trial["model"] for record in kept)
    again = Comparison.load(folder).results(folder)
    assert again == kept and validate.keep_predictions(folder, again) == kept
    assert len(calls) == len(chosen)
    assert "predicted / measured" in comparison_text(again)
    # A prediction belongs to one measurement; the next one has other costs.
    store.append(folder / "records.jsonl", replace(chosen[0], started="2100-01-01T00:00:00+00:00"))
    assert [r.foreseen is None for r in Comparison.load(folder).results(folder)].count(True) == 1


def comparison_text(records):
    """Returns the table of a sweep as Markdown."""
    return overview(records, "wfbp").table.markdown()


def test_a_figure_has_the_speed_ups_of_the_table(tmp_path):
    figure = pytest.importorskip("plots.predicted")
    place = {"model": "m@gpu", "batch": 8, "world_size": 64, "samples": 512, "network": "10gbe"}
    base = PredictedRow(**place, algorithm="ddp", step_s=1.2, step_low_s=1.0, step_high_s=1.4)
    rows = [
        replace(base, baseline_s=1.2),
        replace(base, algorithm="dear", step_s=1.0, step_low_s=0.8, step_high_s=1.2),
        replace(base, algorithm="none", step_s=None, reason="refused"),
    ]
    png, pdf, table = figure.draw(rows, tmp_path, "ddp")
    assert png.name == "speed-up.png" and png.stat().st_size and pdf.exists()
    head, line = (text.split(",") for text in table.read_text().splitlines())
    drawn = dict(zip(head, line, strict=True))
    assert drawn["algorithm"] == "dear"
    assert [float(drawn[key]) for key in ("speed_up", "low", "high")] == pytest.approx(
        [1.2, 1.4 / 1.2, 1.25]
    )
    with pytest.raises(UserError, match="no trial has a prediction that is compared with wfbp"):
        figure.draw(rows, tmp_path, "wfbp")
    with pytest.raises(UserError, match="no trial has a prediction that is compared with ddp"):
        figure.draw(rows[:1], tmp_path, "ddp")


@pytest.fixture
def faulty() -> list[PredictedRow]:
    """Rows of two algorithms with and without a fault."""
    place = {"model": "m@gpu", "batch": 8, "world_size": 64, "samples": 512, "network": "10gbe"}
    times = {"ddp": (1.2, 2.4), "dear": (1.0, 2.2)}
    return [
        PredictedRow(
            **place, algorithm=name, step_s=s, step_low_s=0.9 * s, step_high_s=1.1 * s, fault=fault
        )
        for name, both in times.items()
        for s, fault in zip(both, (None, "slow_host h1 x5"), strict=True)
    ]


def test_trials_with_a_fault_have_a_panel_and_lines_of_their_own(faulty):
    figure = pytest.importorskip("plots.predicted")
    drawn, data = figure.speed_ups(faulty, "ddp")
    assert [axis.get_title(loc="left") for axis in drawn.axes] == [
        "64 workers, 10gbe, no fault",
        "64 workers, 10gbe, slow_host h1 x5",
    ]
    assert [len(axis.patches) for axis in drawn.axes] == [1, 1]
    assert data["fault"].isna().tolist() == [True, False] and "flag" not in data
    points = [Point(axis="bandwidth", value=value) for value in (1.0, 10.0)]
    series = [replace(row, point=point) for row in faulty for point in points]
    drawn, _ = figure.figure(series, points[0])
    assert len(drawn.axes) == 6, "two places of three panels"
    for axis in drawn.axes:
        for line in axis.lines:
            x = list(line.get_xdata())
            assert x == sorted(set(x))
    text = reach_text(
        [
            ReachRow(
                **{"model": "m", "batch": 8, "workers": 64, "network": "10gbe"},
                fault=row.fault,
                algorithm="ddp",
                gbps={0.5: 1.0},
            )
            for row in faulty[:2]
        ]
    )
    assert "fault" in text and text.count("slow_host h1 x5") == 1


def test_flagged_predictions_are_grey_hollow_and_in_parentheses(faulty):
    figure = pytest.importorskip("plots.predicted")
    base, dear = replace(faulty[0], event_model_s=9.9), faulty[2]
    drawn, data = figure.speed_ups([base, dear], "ddp")
    (bar,) = drawn.axes[0].patches
    assert to_hex(bar.get_facecolor()) == FLAGGED["facecolor"]
    points = [Point(axis="bandwidth", value=value) for value in (1.0, 10.0)]
    drawn, data = figure.figure(
        [replace(base, point=points[0]), replace(faulty[0], point=points[1])], points[0]
    )
    hollow, solid = sorted(drawn.axes[0].lines[:2], key=lambda line: line.get_linestyle() != "None")
    assert list(hollow.get_xdata()) == [1.0] and list(solid.get_xdata()) == [10.0]
    assert data["flag"].isna().tolist() == [False, True]
    flagged = replace(base, baseline_s=1.2, compute_s=0.6, exposed_s=0.1, slowest_s=1.3)
    row = table_of([flagged]).markdown().splitlines()[-1]
    cells = [cell.strip() for cell in row.split("|")]
    assert "the event model gives 9900.0 ms, outside the range" in cells
    for text in ("(1200)", "(100)", "(50%)", "(1.00x)", "(+725.0%)", "(1300)"):
        assert text in cells, cells
