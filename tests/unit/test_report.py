"""The page of a sweep: what stands in it and that it asks nobody for anything."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from common.harness import cli
from common.harness.experiment_file import load
from common.results import store
from common.results.committed import catalogue
from common.results.records import Plan, SetAside, typed
from common.results.records.learned import Evaluation, Learning, RankPace
from common.results.report import flagged, page
from common.results.report.overview import overview
from common.results.report.parts import Figured, download
from common.results.store import Comparison
from plots import embedded
from tests.unit.made_record import record, sweep, with_first, with_iters, with_notes
from tests.unit.read_page import Page

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "records"
COMMANDS = page.Commands(sweep="merging", again=lambda: (None, "Nobody knows."))
SCRIPT = "<script>alert(1)</script>"


def changed(one, **more):
    return dataclasses.replace(one, **more)


def read(folder, **more) -> Page:
    return Page(page.build(folder, commands=COMMANDS, **more))


def drawn(folder):
    """A figure of the page, without a sweep's."""
    figure, axis = plt.subplots()
    axis.plot([1, 2], [3, 4])
    axis.set_title("<b>&")
    data = pd.DataFrame({"algorithm": ["ddp", SCRIPT], "throughput": [10.0, 12.0]})
    return [
        Figured(
            name="lines",
            title="Lines",
            alt=embedded.described("Lines", data),
            svg=embedded.element(figure, "lines"),
            columns=list(data.columns),
            rows=[[str(value) for value in line] for line in data.values],
            count=len(data),
            csv=data.to_csv(index=False),
        )
    ]


@pytest.mark.parametrize("name", ["merging", "emulated", "quick", "delayed"])
def test_the_answer_stands_on_top(name):
    result = read(RECORDS / name)
    comparison = Comparison.load(RECORDS / name)
    lines = overview(comparison.results(RECORDS / name), comparison.compare_to)
    assert lines.answers and [item.text for item in result.all("li", "verdict")] == lines.answers
    tags = [item.tag for item in result.elements if "header" in item.above]
    assert tags[tags.index("h1") + 1 :][:2] == ["ul", "li"], "right below the name"
    assert all(line in result.section("notes") for line in map(_plain, lines.remarks))


def _plain(text):
    return " ".join(text.split())


@pytest.mark.parametrize("name", ["merging", "emulated", "time_to_accuracy"])
def test_nothing_is_asked_for_and_nothing_but_our_own_script_may_run(name):
    result = read(RECORDS / name, figures=drawn)
    assert {item[:5] for item in result.references if not item.startswith("#")} == {"data:"}
    inside = {item.attributes.get("id") for item in result.elements}
    assert {item[1:] for item in result.references if item.startswith("#")} <= inside
    (policy,) = [
        item.attributes["content"]
        for item in result.all("meta")
        if item.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    (script,) = result.all("script")
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "connect-src 'none'" in policy
    handlers = [k for item in result.elements for k in item.attributes if k.startswith("on")]
    assert handlers == []
    interval = "t intervals over the runs" if name.startswith("time") else "t interval over repeats"
    assert interval in " ".join(element.text for element in result.elements)


def test_identifiers_are_unique_and_everything_for_who_does_not_see_it_is_there():
    result = read(RECORDS / "merging", figures=drawn)
    known = [item.attributes["id"] for item in result.elements if "id" in item.attributes]
    assert len(known) == len(set(known))
    for key in ("aria-labelledby", "for"):
        named = {item.attributes[key] for item in result.elements if key in item.attributes}
        assert named <= {*known}
    assert len(result.all("h1")) == len(result.all("main")) == len(result.all("nav")) == 1
    assert result.all("a", "skip")[0].attributes["href"] == "#main"
    assert len(result.all("caption")) == len(result.all("table"))
    assert all(item.attributes.get("scope") in ("col", "row") for item in result.all("th"))
    assert all(item.attributes["aria-label"] for item in result.all("div", "drawing"))
    levels = [int(item.tag[1]) for item in result.elements if re.fullmatch("h[1-6]", item.tag)]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_what_records_say_cannot_become_a_part_of_the_page(tmp_path):
    evil = with_notes(record("dear", 0.08, label=SCRIPT), "</td><img src=x onerror=alert(1)>")
    evil = changed(evil, machine={"cpu": SCRIPT, "cores": 2, "packages": {"torch": "</dl>"}})
    run = store.Run(run=evil.run, command=SCRIPT, experiment="</code></pre>" + SCRIPT)
    folder = sweep(tmp_path / "<img src=x>", [record("ddp"), evil, record("wfbp")])
    run.save(folder)
    result = read(folder, figures=drawn)
    assert len(result.all("script")) == 1 and result.all("img") == []
    assert result.all("h1")[0].text == "<img src=x>"
    assert result.all("li", "verdict")[0].text.count(SCRIPT) == 1
    assert "<img src=x onerror=alert(1)>" in result.section("results-section")
    assert SCRIPT in result.section("commands") and SCRIPT in result.section("environment")
    assert SCRIPT in result.section("figures")


@pytest.mark.parametrize("name", ["merging", "quick", "time_to_accuracy"])
def test_all_records_can_be_taken_out_again(name, tmp_path):
    result = read(RECORDS / name)
    files = ["records.jsonl", "experiment.json"]
    files += ["foreseen.json"] * (RECORDS / name / "foreseen.json").exists()
    for file in files:
        (tmp_path / file).write_bytes(result.file(file))
    again = Comparison.load(tmp_path)
    assert again == Comparison.load(RECORDS / name)
    assert again.results(tmp_path) == again.results(RECORDS / name)
    assert (tmp_path / "records.jsonl").read_bytes() == (
        RECORDS / name / "records.jsonl"
    ).read_bytes()
    lines = result.file("table.csv").decode().splitlines()
    assert len(lines) == 1 + len(again.trials)


def test_of_a_very_long_file_the_newest_records_are_inside(tmp_path, monkeypatch):
    old = with_notes(record("ddp"), "an older one")
    folder = sweep(tmp_path / "x", [old, record("ddp"), record("dear")])
    Comparison(compare_to="ddp", trials=(old.hash, record("dear").hash)).save(folder)
    assert len(read(folder).file("records.jsonl").splitlines()) == 3
    monkeypatch.setattr(page, "_WHOLE_FILE", 0)
    result = read(folder)
    kept = result.file("records.jsonl").decode()
    assert len(kept.splitlines()) == 2 and "an older one" not in kept
    assert "the newest of each trial" in result.section("records")


def many(folder, count=50):
    """A sweep of so many trials as large as those of a committed one."""
    model = Comparison.load(RECORDS / "merging").results(RECORDS / "merging")
    built = []
    for number in range(count):
        item = model[number % len(model)]
        trial = item.trial | {"batch_size": 32 + number // len(model)}
        slower = [[[step * (1 + number / 1e6) for step in b] for b in r] for r in item.iters]
        other = changed(item, hash=f"{number:012}", id=f"t{number}", trial=trial)
        built.append(with_iters(other, slower))
    return sweep(folder, built, "wfbp")


def test_fifty_trials_are_a_small_file_made_without_torch(tmp_path):
    folder = many(tmp_path / "fifty")
    script = (
        "import sys; from pathlib import Path; from common.results.report import page;"
        "commands = page.Commands(sweep='fifty', again=lambda: (None, ''));"
        f"html = page.build(Path({str(folder)!r}), commands=commands);"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules;"
        "print(len(html.encode()))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1_500_000, "half of what it may be: figures come on top"


STATES = ("failed", "timeout", "oom", "unsupported", "interrupted")


def test_every_way_to_end_is_marked_with_its_reason(tmp_path):
    assert flagged.mark(record()) is None and flagged.mark(record(correct=False)) == "incorrect"
    assert flagged.mark(record(status="oom")) == "oom"
    bad = [record(status=s, label=f"a {s}", seed=i) for i, s in enumerate(STATES, start=2)]
    bad[0] = changed(
        bad[0],
        error=typed(type(bad[0].error), {"kind": "crash", "message": "no <such> thing", "rank": 1}),
    )
    wrong = record("wfbp", correct=False)
    noted = with_notes(record("dear", 0.08), "disturbed: other processes used 3.0 cores")
    kept = with_notes(record("dadt", 0.09), "not measured in turn")
    folder = sweep(tmp_path / "x", [record("ddp"), *bad, wrong, noted, kept], also=["gone"])
    log = folder / bad[0].id / "log-0-rank1.txt"
    log.parent.mkdir()
    log.write_text("x" * 5000 + "\nTraceback: <boom>\n")
    result = read(folder)
    shown = result.section("flags")
    rows = result.section("results-section")
    for status in STATES:
        assert f"{status} a {status}, mnist_cnn, batch 8, 2 workers" in shown
        assert result.all("strong", status), status
    assert "no <such> thing" in rows and "no <such> thing" in shown
    assert "kind crash rank 1" in _plain(shown) and "Traceback: <boom>" in shown
    assert result.html.count("x" * 4000) == 0, "only its end"
    assert result.html.count("x" * 2500) == 1
    assert "incorrect" in rows and "off plain training" in shown
    assert "disturbed: other processes used 3.0 cores" in rows
    assert "disturbed: other processes used 3.0 cores" in shown
    assert "flagged" in rows and "note not measured in turn" in rows
    assert "not measured in turn dadt, mnist_cnn" in result.section("notes")
    marked = {item.attributes.get("class") for item in result.all("tbody")}
    assert marked == {None, "incorrect", "flagged", *STATES}
    (row,) = [item.text for item in result.all("tbody", "flagged") if "img/s" in item.text]
    assert "(200 img/s)" in row
    states = " ".join(item.text for item in result.all("ul", "counts")).split()
    lines = " ".join(states)
    assert "2 valid" in lines and "1 without a record" in lines and "1 flagged" in lines
    assert "9 of 10 trials have ended" in result.html


def test_a_sweep_without_an_answer_says_why(tmp_path, capsys):
    def never(folder):
        raise AssertionError("there is nothing to draw")

    def said(name, records, **more):
        result = read(sweep(tmp_path / name, records, **more))
        (item,) = result.all("p", "verdict")
        assert result.all("ul", "verdicts") == []
        return item.text

    nothing = sweep(tmp_path / "nothing", [record(status="failed")])
    assert read(nothing, figures=never).all("figure") == []

    assert said("none", [], also=["a", "b"]) == "No answer yet: no trial has ended."
    failed = [record(name, status="failed") for name in ("ddp", "dear")]
    failed.append(record("wfbp", correct=False))
    assert said("failed", failed) == (
        "No answer: no trial has a valid result (2 failed, 1 incorrect), for example ddp: "
        "it was a failed | and more, much more"
    )
    assert "no cell has two algorithms" in said("one", [record("ddp")])
    # So does the command, and a script sees it. `show` has it as its first line.
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "failed")]) == 4
    assert "No answer: no trial has a valid result (2 failed, 1 inc" in capsys.readouterr().err
    kept = store.load(RECORDS / "merging" / "records.jsonl")
    late = sweep(tmp_path / "late", [with_notes(record, "disturbed: by others") for record in kept])
    assert cli.main(["show", str(late)]) == 0
    assert capsys.readouterr().out.startswith("No answer: no trial has a valid result (")


def test_trials_that_learn_have_their_curves_numbers_and_runs(tmp_path):
    def learned(name, accuracy):
        runs = [
            Learning(
                evaluations=[
                    Evaluation(at_s=float(at), seconds=at, steps=[at, at], accuracy=value, loss=1.0)
                    for at, value in enumerate((0.1, accuracy / 2, accuracy))
                ],
                ranks=[RankPace(steps=2, samples=16, elapsed_s=2.0)] * 2,
                seed=seed,
            )
            for seed in (1, 101, 201)
        ]
        built = record(name)
        learn = {"budget_s": 2.0, "target_accuracy": 0.9, "data": "digits", "epochs": None}
        rate = dataclasses.replace(built.throughput, ci_low=7.5, ci_high=8.5, n=3)
        trial = built.trial | {"learn": learn | {"batch_sizes": None, "sampler": "shared"}}
        first = dataclasses.replace(built.results[0], iters=[])
        results = [dataclasses.replace(first, learning=run) for run in runs]
        return changed(built, trial=trial, results=results, throughput=rate)

    folder = sweep(tmp_path / "x", [learned("ddp", 0.95), learned("dear", 0.8)])
    result = read(folder)
    shown = result.section("results-section")
    (answer,) = result.all("li", "verdict")
    assert "ddp is the first at 90%" in answer.text
    assert "7.50-8.50" in shown and "runs" in shown and "95.0%" in shown
    assert "in the time to the target" in shown
    assert "breakdown-section" not in [item.attributes["id"] for item in result.all("section")]
    assert "--breakdown" not in result.section("commands")


def test_numbers_are_sorted_as_numbers_and_nothing_else_is():
    result = read(RECORDS / "quick")
    cells = [item for item in result.all("td") if "data-number" in item.attributes]
    for item in cells:
        number = float(item.attributes["data-number"])
        shown = float(re.search(r"[-+]?\d[\d.]*", item.text)[0])
        units = [shown, shown / 100, shown / 1000]  # as it is, per cent, milliseconds
        assert any(number == pytest.approx(value, rel=0.01, abs=0.005) for value in units), item
    (table,) = [item for item in result.all("table") if item.attributes.get("id") == "results"]
    rates = [item.text for item in cells if "img/s" in item.text or "sen/s" in item.text]
    assert len(rates) == len(Comparison.load(RECORDS / "quick").results(RECORDS / "quick"))
    assert "single worker" in table.text


def test_machines_commits_scales_links_and_settings(tmp_path):
    model, *_ = Comparison.load(RECORDS / "sites").results(RECORDS / "sites")
    network = dataclasses.replace(model.fabric.network, off_percent=-42.8, flagged=True)
    model = changed(model, fabric=dataclasses.replace(model.fabric, network=network))
    dirty = model.machine | {"commit": "abc+dirty", "diff": "0123"}
    other = changed(model, hash="other", trial=model.trial | {"label": "b"}, machine=dirty)
    plan = typed(Plan, {"groups": [{"bytes": 1 << 20, "tensors": 3}], "found": {}})
    other = with_first(other, plan=plan)
    result = read(sweep(tmp_path / "x", [model, other]))
    shown = result.section("environment")
    assert f"1 trial at commit {model.machine['commit']}, and no file differed from it" in shown
    assert "1 trial at commit abc, but files differed from it (digest 0123)" in shown
    assert model.machine["cpu"] in shown and model.machine["packages"]["torch"] in shown
    assert model.fabric.time_scale_reason in shown
    assert "-42.8 %: not as requested" in shown
    delays_us = sorted(each["delay_us"] for each in network.delays)
    assert f"{delays_us[0]:.1f} to {delays_us[-1]:.0f}" in shown
    assert "here-there 1" in shown and "h0 to h1" in shown and "load" not in shown.split()
    assert "backend" in shown and "1 groups of 3 tensors" in result.section("notes")
    assert "and 1 more machines or commits" in result.html


def test_a_withdrawn_record_is_called_so(monkeypatch):
    monkeypatch.setattr(catalogue, "withdrawn", lambda: {})
    assert read(RECORDS / "merging").all("p", "warning") == []
    monkeypatch.setattr(catalogue, "withdrawn", lambda: {"merging": "its links were slow"})
    (warning,) = read(RECORDS / "merging").all("p", "warning")
    assert "its links were slow" in warning.text
    assert "benchmarks.py run" in read(RECORDS / "merging").section("commands"), "its made.json"


def test_the_runs_of_the_records_tell_their_commands_and_what_was_done_again(tmp_path):
    aside = [SetAside(repeat=i, time_scale=2.0, reason=f"disturbed: {i}") for i in (0, 2)]
    folder = sweep(tmp_path / "x", [record("ddp"), changed(record("dear", 0.08), set_aside=aside)])
    page_before = read(folder)
    assert "Nobody knows." in page_before.section("commands")
    assert "2 launches were discarded and repeated" in page_before.section("flags")
    assert "repeat 3: disturbed: 2" in page_before.section("flags")
    for name in ("A", "of no record"):
        text = "models: [bert]"
        store.Run(run=name, command=f"python {name}", experiment=text, commit="c").save(folder)
    shown = read(folder).section("commands")
    assert "2 trials at commit c, run A:" in shown and "models: [bert]" in shown
    assert "of no record" not in shown and "Nobody knows." not in shown
    merged = tmp_path / "merged"
    store.merge([folder, folder], merged)
    assert [item.run for item in store.runs(merged)] == ["A", "of no record"]


def test_figures_are_elements_that_stand_beside_each_other():
    result = read(RECORDS / "merging", figures=lambda folder: [
        dataclasses.replace(item, name=name, svg=item.svg.replace("lines-", f"{name}-"))
        for name in ("first", "second") for item in drawn(folder)
    ])  # fmt: skip
    assert len(result.all("svg")) == 2 and "<b>&" in result.all("svg")[0].text, "text is text"
    label = result.all("div", "drawing")[0].attributes["aria-label"]
    assert label == "Lines: 2 rows of algorithm, throughput."
    known = [item.attributes["id"] for item in result.elements if "id" in item.attributes]
    assert len(known) == len(set(known))
    assert result.file("first.csv").decode().startswith("algorithm,throughput\n")


def test_small_files_are_plain_and_the_same_page_is_made_twice():
    assert not download("x", "a" * 100, "text/plain").packed
    assert download("x", "a" * 100_000, "text/plain").name == "x.gz"
    built = [page.build(RECORDS / "merging", commands=COMMANDS) for _ in range(2)]
    assert built[0] == built[1]


# The command


def test_the_command_writes_a_file_and_says_where(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(embedded, "figures", drawn)
    (tmp_path / "logs").mkdir()
    folder = sweep(tmp_path / "logs" / "mine", [record("ddp"), record("dear", 0.08)])
    assert cli.main(["report", "mine", "--logs", str(tmp_path / "logs")]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    result = Page((folder / "report.html").read_text())
    assert "python benchmarks.py show FOLDER/mine" in result.section("commands")
    assert str(tmp_path) not in result.html, "nobody's business"
    assert "No experiment file that comes with the harness" in result.section("commands")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(RECORDS / "merging"), "--out", "x.html"]) == 0
    assert capsys.readouterr().out == "x.html\n"
    shown = Page(Path("x.html").read_text()).section("commands")
    assert "python benchmarks.py compare docs/records/merging OTHER" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "x.html"]


def test_an_experiment_of_that_name_is_asked_whether_it_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "figures", lambda folder: [])
    out = tmp_path / "x.html"
    folder = tmp_path / "merging"
    folder.mkdir()
    today = [trial.hash for trial in load(ROOT / "configs/experiments/merging.yaml").trials()]
    kept = store.load(RECORDS / "merging" / "records.jsonl")
    for built, name in zip(kept[: len(today)], today, strict=True):
        store.append(folder / "records.jsonl", dataclasses.replace(built, hash=name))
    Comparison(compare_to="wfbp", trials=tuple(today)).save(folder)
    assert cli.main(["report", str(folder), "--out", str(out)]) == 0
    shown = Page(out.read_text()).section("commands")
    assert (
        "the experiment of this name has this command" in shown
        and "python benchmarks.py run merging" in shown
    )
    assert "exactly these trials" in shown
    Comparison(compare_to="wfbp", trials=(today[0], "gone")).save(folder)
    assert cli.main(["report", str(folder), "--out", str(out)]) == 0
    assert "1 of them are among the 2 of this page" in Page(out.read_text()).section("commands")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-sweep"], "no records in"),
        (["{merging}", "--out", "{merging}/records.jsonl/x.html"], "cannot write"),
        (["{merging}", "--serv"], "--serv"),
    ],
)
def test_mistakes_are_a_line(tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(embedded, "figures", lambda folder: [])
    monkeypatch.setattr("os.nice", lambda by: 0)
    given = [item.format(merging=RECORDS / "merging") for item in arguments]
    assert cli.main(["report", *given, "--logs", str(tmp_path)]) == 2
    text = capsys.readouterr()
    assert text.out == "" and words in text.err and text.err.count("\n") == 1
