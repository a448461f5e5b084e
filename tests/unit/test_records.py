"""The file of records, of which nothing is lost."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import threading
from pathlib import Path

import pytest

from common.harness import output
from common.results.records import SCHEMA, FabricFacts, Record, Result, fabric_words
from common.results.records.trust import Check, Note
from common.results.store import (
    Comparison,
    Run,
    append,
    latest,
    load,
    load_foreseen,
    logs_of,
    mend,
    runs,
    write_whole,
)
from dear.errors import UserError

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "docs" / "records").glob("**/records.jsonl"))


def record(digest, **more):
    built = {"id": digest, "trial": {}, "status": "ok", "started": "now", "duration_s": 1.0}
    return Record(hash=digest, machine={}, **built | more)


def result(**more):
    return Result(cpu_s_per_s=1.0, check=Check(), **more)


ONE = record("a", results=[result(iters=[[0.1, 1 / 3]])])
TWO = record("b", notes=[Note(kind="beside", text="ü\n|")])
THREE = record("a", results=[result(parameters=2)])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.jsonl"


def test_records_come_back_as_they_were_appended_each_one_line(path):
    assert load(path) == []
    for each in (ONE, TWO, THREE):
        append(path, each)
    assert load(path) == [ONE, TWO, THREE]
    text = path.read_text()
    assert text.endswith("\n")
    matches = [json.loads(line) for line in text.splitlines()]
    assert matches == [each.to_json() for each in (ONE, TWO, THREE)]


def test_a_number_that_json_does_not_know_is_refused_before_anything_is_written(path):
    append(path, ONE)
    with pytest.raises(ValueError, match="JSON compliant"):
        append(path, record("b", duration_s=float("nan")))
    assert load(path) == [ONE]


@pytest.mark.parametrize("cut", range(40))
def test_a_truncated_last_line_is_left_out_and_cut_off(path, cut):
    append(path, ONE)
    append(path, TWO)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    kept = [ONE, TWO] if cut < 2 else [ONE]  # the first byte is only the newline
    assert load(path) == kept
    mend(path)
    assert whole.startswith(path.read_bytes().rstrip(b"\n"))
    append(path, THREE)
    assert load(path) == [*kept, THREE]
    # Cut in its first line a file becomes empty, and one that is not there stays so.
    path.write_text('{"schema"')
    mend(path)
    assert path.read_bytes() == b"" and load(path) == []
    path.unlink()
    mend(path)
    assert not path.exists()


@pytest.mark.parametrize(
    "damage",
    [
        *(b'{"schema"', b"null", b"5", b"[]", b"\xff\xfe", b"\0\0\0", b'{"schema":2,"id":"a"}'),
        json.dumps({**ONE.to_json(), "fabric": 5}).encode(),
    ],
)
def test_a_damaged_line_costs_no_other_and_is_counted_once(path, damage, caplog):
    lines = [json.dumps(ONE.to_json()).encode(), damage, json.dumps(TWO.to_json()).encode(), b""]
    path.write_bytes(b"\n".join(lines))
    for _ in range(2):
        assert load(path) == [ONE, TWO]
    text = [record.getMessage() for record in caplog.records]
    assert text == [f"{path}: 1 of its lines is damaged and left out (2)"]
    path.write_bytes(b"null\n[]\n\n")
    assert load(path) == []
    assert "2 of its lines are damaged and left out (1, 2)" in caplog.text


@pytest.mark.parametrize("schema", [SCHEMA + 1, 0, None, str(SCHEMA)])
def test_a_foreign_schema_is_named(path, schema):
    append(path, ONE)
    append(path, dataclasses.replace(TWO, schema=schema))
    with pytest.raises(UserError, match="line 2 has schema") as caught:
        load(path)
    assert f"this version reads {SCHEMA}" in str(caught.value)
    path.write_text('{"hash": "a"}\n')
    with pytest.raises(UserError, match="line 1 has schema None"):
        load(path)


def test_cycles_are_searched_for_again_after_reading(path):
    append(path, dataclasses.replace(ONE, schema=SCHEMA + 1))
    with pytest.raises(UserError):
        load(path)
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(UserError):
            load(path)
        assert not gc.isenabled(), "somebody else has turned it off"
    finally:
        gc.enable()


def test_latest_is_the_newest_record_of_each_trial_in_order_of_appearance():
    assert [*latest([ONE, TWO, THREE]).items()] == [("a", THREE), ("b", TWO)]
    assert latest([]) == {}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_a_committed_record_is_read_whole(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    again = [json.loads(json.dumps(each.to_json())) for each in load(path)]
    assert [_without_newer_keys(*pair) for pair in zip(again, lines, strict=True)] == lines


def _without_newer_keys(read, line):
    """Returns `read` without the unset keys that `line`, written by an older version, lacks."""
    if isinstance(read, dict) and isinstance(line, dict):
        both = {key: value for key, value in read.items() if key in line or value is not None}
        return {key: _without_newer_keys(value, line.get(key)) for key, value in both.items()}
    if isinstance(read, list) and isinstance(line, list) and len(read) == len(line):
        return [_without_newer_keys(*pair) for pair in zip(read, line, strict=True)]
    return read


@pytest.mark.parametrize(
    ("agree", "matches", "verdict"),
    [
        (True, True, "yes"),
        (False, True, "NO"),
        (True, False, "NO"),
        (None, False, "NO"),
        (True, None, "unchecked"),
        (None, None, "unchecked"),
    ],
)
def test_what_was_not_compared_is_not_right(agree, matches, verdict):
    assert Check(replicas_agree=agree, matches_reference=matches).verdict == verdict


@pytest.mark.parametrize(
    ("trial", "place"),
    [
        ({"world_size": 3, "ranks_per_host": 2}, "2 virtual hosts"),
        ({"world_size": 3}, "local processes, compute replayed"),
    ],
)
def test_a_title_names_the_emulated_fabric(trial, place):
    fabrics = [FabricFacts(kind="emulated", time_scale=scale) for scale in (2.0, 4.0)]
    records = [record("a", trial=trial, fabric=fabric) for fabric in fabrics]
    assert fabric_words(records) == f"emulated, {place}, time scale 2 to 4"
    assert fabric_words([record("a", trial=trial)]) == "real processes"


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_whole(path, "before")
    wanted = OSError(errno.ENOSPC, "No space left on device")

    def full(self: Path, text: str, **_: object) -> None:
        self.touch()
        raise wanted

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space") as caught:
        write_whole(path, "after")
    assert caught.value.filename == str(path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_run_that_follows_a_crash_is_not_lost_with_it(tmp_path):
    (tmp_path / "runs.jsonl").write_text('{"run": "1", "comm')
    run = Run(run="2", command="c", experiment="e")
    run.save(tmp_path)
    assert runs(tmp_path) == [run]


def test_links_and_devices_stay_what_they_are(tmp_path, capfd):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    output.write_whole(link, "after")
    assert link.is_symlink() and target.read_text() == "after"
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(UserError, match=r"cannot write .*circle"):
        output.write_whole(circle, "text")
    os.mkfifo(tmp_path / "pipe")
    reader = threading.Thread(target=(tmp_path / "pipe").read_text)
    reader.start()
    output.write_whole(tmp_path / "pipe", "text")
    reader.join(10)
    assert (tmp_path / "pipe").is_fifo() and not reader.is_alive()
    output.write_whole(Path("/dev/stdout"), "shown")
    assert capfd.readouterr().out == "shown"


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "5", '{"trials": ["a"]}', '{"compare_to": "a", "trials": ["a"], "labels": []}'],
)
def test_a_damaged_list_of_trials_is_one_line(tmp_path, text):
    (tmp_path / "experiment.json").write_text(text)
    if "labels" in text:  # none is the older form
        assert Comparison.load(tmp_path).trials == ("a",)
        text = text.replace('"labels": []', '"labels": ["a", "b"]')
        (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(UserError, match=r"experiment\.json is damaged: run the sweep again"):
        Comparison.load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 5}'])
def test_damaged_predictions_are_one_line(tmp_path, text):
    (tmp_path / "foreseen.json").write_text(text)
    with pytest.raises(UserError, match=r"foreseen\.json is damaged; remove it"):
        load_foreseen(tmp_path)


def test_damaged_runs_are_left_out_and_counted(tmp_path, caplog):
    run = Run(run="1", command="c", experiment="e")
    run.save(tmp_path)
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"run": "2"}\n')
    assert runs(tmp_path) == [run]
    assert "1 of its lines is damaged and left out (2)" in caplog.text


def test_logs_are_in_the_order_of_their_repeats(tmp_path):
    for repeat in range(12):
        (tmp_path / f"log-{repeat}-rank0.txt").touch()
    (tmp_path / "log-99-rank1.txt").touch()
    assert [path.name for path in logs_of(tmp_path, 0)][-2:] == [
        "log-10-rank0.txt",
        "log-11-rank0.txt",
    ]
