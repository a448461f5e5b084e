"""Tests that README.md and docs print what the records give, and that these are of today's code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import records as maker
from common.harness.trial import identity
from common.results import readme
from common.results.committed import catalogue
from common.results.committed.catalogue import Recipe
from common.results.records import FabricFacts, Failure, Record
from common.results.store import Comparison, append
from dear.errors import UserError
from plots import gallery
from tests.system.processes import wait_for
from tests.unit import made_record

RECIPES = catalogue.recipes()
HEAD = maker._git("rev-parse", "--short=12", "HEAD").strip() or "0123456789ab"


def bare_figures(text):
    """Returns the images of records outside of marked places."""
    return re.findall(r"!\[[^]]*\]\(([^)]*records/[^)]*)\)", readme.without_blocks(text))


@pytest.mark.parametrize("path", readme.documents(), ids=lambda path: path.name)
def test_a_text_says_what_its_records_give_and_leans_on_no_withdrawn_one(path):
    text = path.read_text()
    new = readme.filled(text, path.parent)  # refuses numbers and links of withdrawn records
    assert text == new, "run `python -m common.results.readme`"
    assert not bare_figures(text), "figures of records stand in marked places"
    for heading, used, lines in readme.quoted(text):
        assert used <= lines, f"{heading}: does not tell the standing of {used - lines}"


@pytest.mark.parametrize("name", RECIPES)
def test_a_record_is_of_todays_definitions_or_withdrawn(name):
    problems = maker.problems(name, RECIPES[name])
    if name in catalogue.withdrawn():
        assert problems, f"{name} is fine: take it off {catalogue.WITHDRAWN}"
    else:
        assert not problems, f"make records ONLY={name}, or withdraw it with a reason"


def test_the_lists_name_what_is_there():
    folders = {path.name for path in catalogue.FOLDER.iterdir() if path.is_dir()}
    assert folders <= RECIPES.keys()
    assert catalogue.withdrawn().keys() <= RECIPES.keys()


RECIPE = Recipe(sweep="quick", minutes=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A record `quick` as of today."""
    _write(tmp_path / "quick", RECIPE)
    _note(tmp_path / "quick")
    return tmp_path


def _write(record: Path, recipe: Recipe) -> None:
    """A sweep of which every trial has failed."""
    record.mkdir()
    trials = maker.todays_trials(recipe, [])
    for trial in trials:
        append(
            record / "records.jsonl",
            Record(
                id=trial.id,
                hash=trial.hash,
                trial=trial.to_json(),
                status="failed",
                error=Failure(message="broke"),
                started="now",
                duration_s=1.0,
                machine={"commit": HEAD},
            ),
        )
    Comparison(compare_to="ddp", trials=tuple(trial.hash for trial in trials)).save(record)


def _note(record: Path, **changed: object) -> None:
    facts = {
        "commit": HEAD,
        "machine": {"cores": 2, "cpu": "a processor"},
        "made_by": maker.made_by(RECIPE),
        "definitions": catalogue.DEFINITIONS,
        "started": "2026-01-02T03:04:05+00:00",
        "files": catalogue.digests(record),
    }
    (record / catalogue.MANIFEST).write_text(json.dumps({**facts, **changed}))


def test_a_record_of_today_has_no_problem_and_one_of_another_definition_is_told(folder):
    assert maker.problems("quick", RECIPE, folder) == []
    record = folder / "quick"

    def problem() -> str:
        (result,) = maker.problems("quick", RECIPE, folder)
        return result

    _note(record, commit=f"{HEAD}+dirty")
    assert "does not identify the code" in maker.problems("quick", RECIPE, folder)[0]
    _note(record, definitions=catalogue.DEFINITIONS - 1)
    assert "has definitions" in problem()
    _note(record, made_by=["something else"])
    assert "other commands" in problem()
    _note(record)
    lines = (record / "records.jsonl").read_text().splitlines(keepends=True)
    changed = json.loads(lines[0])
    changed["hash"], changed["trial"]["seed"] = "0" * 12, 2
    trials = json.loads((record / "experiment.json").read_text())["trials"]
    Comparison(compare_to="ddp", trials=("0" * 12, *trials[1:])).save(record)
    (record / "records.jsonl").write_text(json.dumps(changed) + "\n" + "".join(lines[1:]))
    assert "files that were not made with it" in maker.problems("quick", RECIPE, folder)[0]
    _note(record)
    strange, lacking = maker.problems("quick", RECIPE, folder)
    assert "not today's" in strange and lacking == f"lacks 1 of today's {len(lines)} trials"
    (record / catalogue.MANIFEST).unlink()
    assert problem() == "was not made by `make records`"


def test_a_trial_is_the_same_on_a_machine_that_keeps_profiles_elsewhere():
    records = readme.ROOT / "docs" / "records" / "grid-1gbe" / "records.jsonl"
    trials = [json.loads(line)["trial"] for line in records.read_text().splitlines()]
    trial = next(trial for trial in trials if trial["brought"])
    elsewhere = {**trial, "brought": {**trial["brought"], "profile": "/elsewhere/profile.json"}}
    assert identity(elsewhere) == identity(trial)
    assert identity({**elsewhere, "profile_digest": "another"}) != identity(trial)


def test_a_commit_that_git_does_not_know_is_told():
    if maker._git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no whole history here")
    assert maker.commit_problem(HEAD) is None
    assert "not in git's history" in maker.commit_problem("0" * 12)


def test_marked_places_are_filled_and_of_a_withdrawn_record_emptied(folder):
    (folder / "quick" / "words.txt").write_text("so it is\n")
    text = (
        "<!-- standing of quick -->\n<!-- end -->\n<!-- output of quick: words.txt -->\n"
        "<!-- end -->\n<!-- table of quick -->\nold\n<!-- end -->\n"
        "It is 1.5<!-- quick: world_size of dear, mnist as .1f --> fast.\n"
    )
    result = readme.filled(text, readme.ROOT, folder)
    assert "Measured 2026-01-02 at commit" in result and "```\nso it is\n```" in result
    assert "broke" in result and "old" not in result
    assert "It is 2.0<!-- quick" in result
    assert readme.filled(result, readme.ROOT, folder) == result

    (folder / catalogue.WITHDRAWN).write_text("# why\nother: it\nquick: >-\n  it is\n  old\n")
    without = result.replace(
        "It is 2.0<!-- quick: world_size of dear, mnist as .1f --> fast.\n", ""
    )
    gone = readme.filled(without, readme.ROOT, folder)
    assert gone == (
        "<!-- standing of quick -->\n<!-- end -->\n<!-- output of quick: words.txt -->\n"
        "<!-- end -->\n<!-- table of quick -->\n<!-- end -->\n"
    ), "nothing of it is seen"
    assert readme.filled(gone, readme.ROOT, folder) == gone
    catalogue.restore("quick", folder)
    assert (folder / catalogue.WITHDRAWN).read_text() == "# why\nother: it\n"
    assert readme.filled(gone, readme.ROOT, folder) == without


def test_ratios_in_a_table_by_algorithm_have_their_intervals():
    text = (
        "<!-- standing of emulated -->\n<!-- end -->\n"
        "<!-- table of emulated: speedup, of_bound -->\n<!-- end -->\n"
    )
    result = readme.filled(text, readme.ROOT, readme.ROOT / "docs" / "records")
    dear = result.splitlines()[-2].split(" | ")[-2]
    assert re.fullmatch(r"1\.\d\d \(1\.\d\d-1\.\d\d\)", dear)


@pytest.mark.parametrize("number", ["1.84x", "3 %", "many", "1.84 "])
def test_a_source_behind_something_else_than_a_number_is_refused(number):
    text = f"It is {number}<!-- emulated-quick: speedup of dear, resnet50 --> as fast.\n"
    with pytest.raises(readme.PlaceError, match="there is no number"):
        readme.filled(text, readme.ROOT, readme.ROOT / "docs" / "records")


def test_a_table_by_algorithm_has_one_row_for_each_number():
    text = (
        "<!-- standing of batches -->\n<!-- end -->\n"
        "<!-- table of batches: speedup -->\n<!-- end -->\n"
    )
    with pytest.raises(readme.PlaceError, match="several batch sizes"):
        readme.filled(text, readme.ROOT, readme.ROOT / "docs" / "records")


@pytest.mark.parametrize(
    "sentence",
    [
        "It is 1.5<!-- quick: world_size of dear, mnist --> fast.\n",
        "As [measured](docs/records/quick/table.md).\n",
        "As [measured](records/quick).\n",
    ],
)
def test_a_sentence_that_leans_on_a_withdrawn_record_is_refused(folder, sentence):
    (folder / catalogue.WITHDRAWN).write_text("quick: it is old\n")
    with pytest.raises(readme.PlaceError, match="quick, which is withdrawn: drop the sentence"):
        readme.filled(sentence, readme.ROOT, folder)
    other = sentence.replace("quick", "peer").replace(
        "1.5<!-- peer: world_size of dear, mnist -->", ""
    )
    assert readme.filled(other, readme.ROOT, folder) == other


def test_a_restored_record_takes_no_reason_away_that_others_share_by_an_alias(folder):
    path = folder / catalogue.WITHDRAWN
    path.write_text("# why\nquick: &reason >-\n  not made yet\npeer: *reason\nsites: *reason\n")
    catalogue.restore("quick", folder)
    assert catalogue.withdrawn(folder) == {"peer": "not made yet", "sites": "not made yet"}
    assert path.read_text().startswith("# why\n")
    catalogue.restore("peer", folder)
    catalogue.restore("sites", folder)
    assert catalogue.withdrawn(folder) == {}


def test_withdrawn_records_are_listed_with_their_reasons(folder):
    text = "<!-- withdrawn records -->\nold\n<!-- end -->\n"
    assert "None." in readme.filled(text, readme.ROOT, folder)
    (folder / catalogue.WITHDRAWN).write_text("quick: >-\n  it is\n  old\npeer: so is it\n")
    listed = readme.filled(text, readme.ROOT, folder)
    assert "| `quick` | it is old |\n| `peer` | so is it |\n<!-- end -->" in listed
    everywhere = [path.read_text() for path in readme.documents()]
    assert sum("<!-- withdrawn records -->" in item for item in everywhere) == 1
    for name, reason in catalogue.withdrawn().items():
        assert any(f"| `{name}` | {reason} |" in item for item in everywhere)


def test_a_link_leads_to_the_record_from_wherever_a_text_stands(folder):
    text = "<!-- standing of quick -->\n<!-- end -->\n"
    assert "this [record](quick) again" in readme.filled(text, folder, folder)
    assert "this [record](../quick) again" in readme.filled(text, folder / "docs", folder)


def figure_of(folder, name, **facts):
    """Returns the text of a figure's place in the record `it`."""
    (folder / "it" / name).write_bytes(b"")
    _note(folder / "it", **facts)
    return readme.filled(f"<!-- figure of it: {name} | It -->\n<!-- end -->\n", folder, folder)


def test_a_figure_of_a_sweep_has_the_facts_of_its_trials(tmp_path):
    emulated = FabricFacts(kind="emulated", time_scale=4.0)
    records = [
        made_record.record("ddp", world=2, network="10gbe", ranks_per_host=1, fabric=emulated),
        made_record.record("dear", world=4, network="10gbe", ranks_per_host=1, fabric=emulated),
        made_record.record("wfbp", world=8, network="1gbe", status="failed"),
    ]
    made_record.sweep(tmp_path / "it", records)
    caption = figure_of(tmp_path, "throughput.png").splitlines()[3]
    batch = records[0].trial["batch_size"]
    assert caption == (
        f"*It. Model: `mnist_cnn`, batch {batch}. Network: 10gbe. Workers: 2 to 4. "
        "n = 3 repeats. Fabric: emulated, 4 virtual hosts, time scale 4, over gloo. "
        f"Commit: {HEAD}.*"
    )


def test_a_computed_figure_has_the_facts_of_its_data_or_of_its_rows(tmp_path):
    (tmp_path / "it").mkdir()
    data = tmp_path / "it" / "curve.csv"
    data.write_text(
        "axis,value,model,batch,world_size,network\nlatency,1,m,8,64,10gbe\nlatency,50,m,8,64,10gbe\n"
    )
    expected = (
        "*It. Model: `m`, batch 8. Network: 10gbe. Workers: 64. Latency of a host's link: 1 to 50 "
        "us. n = 1, computed. Fabric: a virtual clock and network. "
    )
    assert expected in figure_of(tmp_path, "curve.png", computed=True)
    data.write_text("assumption,gain\nalpha,1.1\n")
    with pytest.raises(readme.PlaceError, match=r"curve\.csv needs rows with the columns model, "):
        figure_of(tmp_path, "curve.png", computed=True)
    row = {"model": "m", "batch": 8, "world_size": 64, "network": "10gbe"}
    points = [{"axis": "latency", "value": value} for value in (1, 50)]
    rows = [{**row, "point": point} for point in points]
    (tmp_path / "it" / "rows.json").write_text(json.dumps(rows))
    assert expected in figure_of(tmp_path, "curve.png", computed=True)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("world_size of mnist", "6 rows of quick are 'mnist', not one"),
        ("world_size of nobody", "0 rows"),
        ("loudness of dear, mnist", "rows of quick have no loudness"),
        ("speedup of dear, mnist", "has no speedup"),
        ("world_size", "is not `FIELD of WORDS`"),
    ],
)
def test_a_number_that_no_record_gives_is_refused(folder, query, message):
    with pytest.raises(readme.PlaceError, match=message):
        readme.filled(f"1<!-- quick: {query} -->", readme.ROOT, folder)


def test_a_text_that_cannot_be_filled_is_one_line_and_no_text_is_changed(
    folder, monkeypatch, capsys
):
    texts = [folder / name for name in ("a.md", "b.md")]
    texts[0].write_text("<!-- standing of quick -->\n<!-- end -->\n")
    texts[1].write_text("1<!-- nobody: x of y -->")
    monkeypatch.setattr(readme, "ROOT", folder)
    monkeypatch.setattr(readme, "documents", lambda: texts)
    with pytest.raises(UserError, match=r"b\.md: there is no record nobody"):
        readme.fill()
    assert "Measured" not in texts[0].read_text()

    monkeypatch.setattr(maker, "machine_card", lambda: {"commit": HEAD})
    built = []
    monkeypatch.setattr(maker, "make", lambda name, *_: not built.append(name))
    with pytest.raises(UserError, match=r"not filled in: b\.md: "):
        maker.main(["quick", "peers"])
    assert built == ["quick", "peers"], "hours of others are not lost"


@pytest.mark.parametrize("name", RECIPES)
def test_marked_places_ask_for_what_their_record_would_have_today(name, tmp_path):
    recipe, texts = RECIPES[name], [path.read_text() for path in readme.documents()]
    asked = [item for text in texts for item in readme.places(text) if item.record == name]
    built = tmp_path / name
    if recipe.sweep is not None:
        _write(built, recipe)
        result = Comparison.load(built).results(built)
        files = [f"{gallery.name(gallery.main_figure(result))}.png", "table.md"]
        (built / "table.md").write_text("")
    for item in asked:
        if item.kind in ("output", "figure"):
            file = item.what.partition(" | ")[0]
            output = files if recipe.sweep else " ".join(recipe.commands)
            assert (file if recipe.sweep else Path(file).stem) in output, item
        elif item.kind == "table":
            readme._table(built, item.what, readme.ROOT)
        elif item.kind == "number":
            readme.chosen_row(built, item.what)


def test_a_section_that_quotes_a_record_without_its_standing_is_found():
    text = (
        "# A\n[record](records/quick/table.md)\n## B\n<!-- standing of peer -->\n<!-- end -->\n"
        "2<!-- peer: x of y -->\n## C\n![x](records/peer/x.png)\n"
    )
    assert readme.quoted(text) == [
        ("# A", {"quick"}, set()),
        ("## B", {"peer"}, {"peer"}),
        ("## C", {"peer"}, set()),
    ]
    assert bare_figures(text) == ["records/peer/x.png"]


def test_a_record_takes_its_place_only_when_all_of_it_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(maker, "ROOT", tmp_path)
    monkeypatch.setattr(maker, "machine_card", lambda: {"commit": HEAD, "cores": 2, "cpu": "x"})
    shelf = tmp_path / "shelf"
    (shelf / "it").mkdir(parents=True)
    (shelf / "it" / "old.txt").write_text("old")
    (shelf / catalogue.WITHDRAWN).write_text("it: is old\n")
    bad = Recipe(minutes=1, commands=("echo new > {out}/new.txt", "false"))
    assert not maker.make("it", bad, HEAD, shelf)
    assert [path.name for path in (shelf / "it").iterdir()] == ["old.txt"]
    assert "it" in catalogue.withdrawn(shelf)

    assert not maker.make("it", Recipe(minutes=1, commands=("true",), needs=("NO_SUCH",)), HEAD)

    good = Recipe(minutes=1, commands=("echo new > {out}/new.txt", "exit 3"))
    assert maker.make("it", good, HEAD, shelf)
    assert catalogue.manifest("it", shelf)["missed"] == ["exit 3"], "it has measured all the same"
    assert "`exit 3` did not meet its requirement" in readme.standing("it", shelf, shelf)
    assert sorted(path.name for path in (shelf / "it").iterdir()) == ["made.json", "new.txt"]
    assert maker.problems("it", good, shelf) == []
    assert not catalogue.withdrawn(shelf)


def test_a_figure_is_drawn_again_but_not_of_a_changed_record(tmp_path):
    shelf, source = tmp_path / "shelf", catalogue.FOLDER / "time_to_accuracy"
    shutil.copytree(source, shelf / "it")
    (shelf / "it" / "learning.png").write_bytes(b"old")
    with pytest.raises(UserError, match="files that were not made with it"):
        maker.draw("it", HEAD, shelf)
    facts = json.loads((shelf / "it" / "made.json").read_text())
    facts["files"] = catalogue.digests(shelf / "it")
    (shelf / "it" / "made.json").write_text(json.dumps(facts))
    maker.draw("it", HEAD, shelf)
    after = json.loads((shelf / "it" / "made.json").read_text())
    changed = {name for name, digest in after["files"].items() if digest != facts["files"][name]}
    assert changed == {"learning.png"} and after["drawn_at"] == HEAD
    assert after["commit"] == facts["commit"] and after["files"] == catalogue.digests(shelf / "it")
    with pytest.raises(UserError, match="no record of a sweep"):
        maker.draw("links", HEAD)
    with pytest.raises(UserError, match="needs the names of the records"):
        maker.main(["--draw"])


@pytest.mark.parametrize("size", [10, maker.EVIDENCE_BYTES + 1])
def test_small_evidence_is_a_part_of_the_record_and_large_evidence_is_kept_apart(
    tmp_path, monkeypatch, size
):
    monkeypatch.setattr(maker, "ROOT", tmp_path)
    monkeypatch.setattr(maker, "machine_card", lambda: {"commit": HEAD})
    monkeypatch.setattr(maker, "todays_trials", lambda recipe, records: [])
    clock = iter([100.0, 220.0])
    monkeypatch.setattr(maker.time, "monotonic", lambda: next(clock))

    def swept(recipe: Recipe, work: Path, out: Path) -> bool:
        trial = work / "logs" / "quick" / "trial-1"
        trial.mkdir(parents=True)
        for name in ("evidence.json.gz", "evidence-1.json.gz"):
            (trial / name).write_bytes(bytes(size))
        return True

    monkeypatch.setattr(maker, "_swept", swept)
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    assert maker.make("quick", RECIPE, HEAD, shelf)
    built = catalogue.manifest("quick", shelf)
    assert built["duration_s"] == 120.0
    if size == 10:
        assert list(built["files"]) == ["trial-1/evidence.json.gz"] and "evidence" not in built
    else:
        assert built["files"] == {}
        assert len(list((tmp_path / built["evidence"]).glob("trial-1/*"))) == 2


def test_records_are_made_from_a_clean_commit_only(monkeypatch, capsys):
    monkeypatch.setattr(maker, "machine_card", lambda: {"commit": "123+dirty"})
    with pytest.raises(UserError, match="a clean commit, but this is 123"):
        maker.main(["quick"])
    with pytest.raises(UserError, match="unknown record 'quack'"):
        maker.main(["quack"])


def test_the_plan_says_what_cannot_be_made_here(monkeypatch, capsys):
    monkeypatch.delenv("PEER", raising=False)
    monkeypatch.setattr(maker, "available_bytes", lambda: 1 << 30)
    monkeypatch.setattr(catalogue, "withdrawn", lambda: {"quick": "its sweep was shorter"})
    assert maker.main(["--plan", "quick", "merging", "peers"]) == 0
    quick, merging, peer, total = capsys.readouterr().out.splitlines()
    assert "0.5 GiB" in quick and "left out" not in quick
    assert " about " in quick and " took " in merging
    assert re.search(r"it needs \d\.\d GiB of memory, and 1\.0 GiB are available$", merging)
    assert peer.endswith("left out: set PEER first") and total.startswith("3 records, about")


def test_a_record_that_does_not_fit_is_left_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(maker, "available_bytes", lambda: 1 << 30)
    recipe = catalogue.recipes()["merging"]
    assert not maker.make("merging", recipe, "0123456789ab", tmp_path)
    assert "merging: left out: it needs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_command_ends_with_the_program_that_makes_its_record(tmp_path):
    path = tmp_path / "pid"
    program = (
        "import signal, sys; from bench import records\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"records._status(['bash', '-c', 'sleep 600 & echo $! > {path}; wait'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=maker.ROOT) as process:
        try:
            sleeper = wait_for(lambda: path.exists() and path.read_text().strip())
            process.terminate()
            assert process.wait(30) == 143
            wait_for(lambda: not Path("/proc", sleeper).exists())
        finally:
            process.kill()
