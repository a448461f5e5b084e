"""The file of records: nothing is lost, and damage is noticed."""

from __future__ import annotations

import json

import pytest

from common.results.records import SCHEMA, append, latest, load, mend
from dear.errors import UserError


def record(digest, **more):
    return {"schema": SCHEMA, "hash": digest, "status": "ok", **more}


ONE, TWO, THREE = record("a", repeats=[[0.1, 1 / 3]]), record("b", note="ü\n|"), record("a", n=2)


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
    assert [json.loads(line) for line in text.splitlines()] == [ONE, TWO, THREE]


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


@pytest.mark.parametrize("damage", [b'{"schema"', b"null", b"5", b"[]", b"\xff\xfe", b"\0\0\0"])
def test_a_damaged_line_in_the_middle_is_named(path, damage):
    lines = [json.dumps(ONE).encode(), damage, json.dumps(TWO).encode(), b""]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"records\.jsonl line 2 is damaged") as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("schema", [SCHEMA + 1, 0, None, str(SCHEMA)])
def test_a_foreign_schema_is_named(path, schema):
    append(path, ONE)
    append(path, TWO | {"schema": schema})
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
