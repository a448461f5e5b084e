"""Series of predictions over sizes and links, and steps that are extrapolated."""

import json

import pytest

from common.harness.cli import main
from common.paths import ROOT
from common.virtual.over import reached

TINY = ["--model", "mnist_cnn@rtx2080ti-modelled", "--batch", "32", "-k", "10gbe"]


def test_a_step_is_extrapolated_from_two_time_scales(tmp_path, capsys):
    """T = 2 T(2k) - T(k), from a sweep at 2k, or from repeats at 2k of the same trial."""
    source = ROOT / "docs" / "records" / "batches"
    lines = [json.loads(line) for line in (source / "records.jsonl").open()]
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
    assert len(both) == len(alone) == 16 and {row["sweep"] for row in both} == {"k"}
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
        (["--figure", "f"], "it goes with --over"),
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
    model = [*TINY, "-k", "ddp"]
    assert main(["predict", *model, "--over", "bandwidth=1,10"]) == 0
    line = capsys.readouterr().out.splitlines()[-2]
    gbps = [float(cell) for cell in line.split("|")[4:7]]
    assert gbps == sorted(gbps)
