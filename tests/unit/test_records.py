"""The file of records: nothing is lost, and damage is noticed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from common.results.records import SCHEMA, Record, append, latest, load, mend
from dear.errors import UserError

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "docs" / "records").glob("**/records.jsonl"))


def record(digest, **more):
    made = {"id": digest, "trial": {}, "status": "ok", "started": "now", "duration_s": 1.0}
    return Record(hash=digest, machine={}, **made, **more)


ONE, TWO = record("a", iters=[[[0.1, 1 / 3]]]), record("b", notes=["ü\n|"])
THREE = record("a", parameters=2)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.jsonl"


def test_records_come_back_as_they_were_appended_in_order(path):
    for each in (ONE, TWO, THREE):
        append(path, each)
    assert load(path) == [ONE, TWO, THREE]


def test_every_record_is_one_line(path):
    for each in (ONE, TWO, THREE):
        append(path, each)
    text = path.read_text()
    assert text.endswith("\n")
    found = [json.loads(line) for line in text.splitlines()]
    assert found == [each.to_json() for each in (ONE, TWO, THREE)]
    assert found[0]["repeats"] == [[0.1, 1 / 3]]


def test_a_file_that_is_not_there_has_no_records(path):
    assert load(path) == []
    mend(path)
    assert not path.exists()


def test_a_number_that_json_does_not_know_is_refused_before_anything_is_written(path):
    append(path, ONE)
    with pytest.raises(ValueError, match="JSON compliant"):
        append(path, record("b", loss=float("nan")))
    assert load(path) == [ONE]


@pytest.mark.parametrize("cut", [2, 10, 30])
def test_a_truncated_last_line_is_left_out_and_cut_off(path, cut):
    append(path, ONE)
    append(path, TWO)
    whole = path.read_bytes()
    first = whole[: whole.index(b"\n") + 1]
    path.write_bytes(whole[:-cut])
    assert load(path) == [ONE]
    mend(path)
    assert path.read_bytes() == first
    append(path, THREE)
    assert load(path) == [ONE, THREE]


def test_mending_keeps_every_record_that_is_read(path):
    append(path, ONE)
    append(path, TWO)
    path.write_bytes(path.read_bytes()[:-1])  # cut between the text and its newline
    before = load(path)
    mend(path)
    assert load(path) == before
    append(path, THREE)
    assert load(path) == [*before, THREE]


def test_a_file_cut_in_its_first_line_becomes_empty(path):
    path.write_text('{"schema"')
    assert load(path) == []
    mend(path)
    assert path.read_bytes() == b""


def test_mending_leaves_a_whole_file_alone(path):
    append(path, ONE)
    before = path.read_bytes()
    mend(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage", [b'{"schema"', b"null", b"5", b"[]", b"\xff\xfe", b"\0\0\0", b'{"schema":1,"id":"a"}']
)
def test_a_damaged_line_in_the_middle_is_named(path, damage):
    lines = [json.dumps(ONE.to_json()).encode(), damage, json.dumps(TWO.to_json()).encode(), b""]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"records\.jsonl line 2 is damaged") as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("schema", [SCHEMA + 1, 0, None, str(SCHEMA)])
def test_a_foreign_schema_is_named(path, schema):
    append(path, ONE)
    append(path, dataclasses.replace(TWO, schema=schema))
    with pytest.raises(UserError, match="line 2 has schema") as caught:
        load(path)
    assert f"this version reads {SCHEMA}" in str(caught.value)


def test_a_record_without_schema_is_refused(path):
    path.write_text('{"hash": "a"}\n')
    with pytest.raises(UserError, match="line 1 has schema None"):
        load(path)


def test_latest_is_the_newest_record_of_each_trial_in_order_of_appearance():
    found = latest([ONE, TWO, THREE])
    assert found == {"a": THREE, "b": TWO}
    assert list(found) == ["a", "b"]
    assert latest([]) == {}


def _holds(found, written):
    """Whether all that was written is in what was found, which may have more keys."""
    if isinstance(written, dict):
        return all(key in found and _holds(found[key], written[key]) for key in written)
    if isinstance(written, list):
        return all(map(_holds, found, written)) and len(found) == len(written)
    return found == written


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_records_of_every_age_are_read_whole(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = load(path)
    assert len(found) == len(lines)
    for each, written in zip(found, lines, strict=True):
        assert _holds(json.loads(json.dumps(each.to_json())), written)
        assert Record.from_json(each.to_json()) == each
