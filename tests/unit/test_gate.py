"""The gate of `compare --fail-on`: what was valid before and is not now, in all its outputs."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from common.harness.cli import main
from common.results.exports import junit
from common.results.records import typed
from common.results.timed import gate
from common.results.timed.gate import Summary
from tests.unit.made_record import record, sweep, with_notes
from tests.unit.test_compare import trial

SCHEMA = Path(junit.__file__).with_name("compare.schema.json")
BEFORE = [trial("ddp"), trial("dear", 0.05)]
FAILED = dataclasses.replace(record("dear", status="failed"), hash=BEFORE[1].hash)
AFTER = {
    "slower": trial("dear", 0.06, seed=5),
    "failed": FAILED,
    "incorrect": record("dear", 0.05, correct=False),
    "flagged": with_notes(record("dear", 0.05), "disturbed: others used 1 core"),
    "missing": trial("wfbp", 0.05),
}
"""Trials in place of `dear`, by what is worse."""


def compare(folder, before, after, *flags):
    """Exit status of the gate, and the test cases and the summary that it wrote."""
    folder.mkdir(exist_ok=True)
    names = [str(sweep(folder / name, given)) for name, given in (("a", before), ("b", after))]
    files = [folder / "summary.json", folder / "junit.xml"]
    outputs = ["--summary", str(files[0]), "--junit", str(files[1])]
    status = main(["compare", *names, "--fail-on", "regression:5%", *outputs, *flags])
    written = json.loads(files[0].read_text())
    assert fits(json.loads(SCHEMA.read_text()), written)
    assert json.loads(json.dumps(dataclasses.asdict(typed(Summary, written)))) == written
    return status, ElementTree.parse(files[1]).getroot(), written


@pytest.mark.parametrize("kind", [*AFTER, None])
def test_what_was_valid_and_is_not_now_fails(tmp_path, capsys, kind):
    second = AFTER[kind] if kind else trial("dear", 0.0502, seed=9)
    status, suite, summary = compare(tmp_path, BEFORE, [trial("ddp", 0.1001, seed=8), second])
    out, err = capsys.readouterr()
    assert err == "" and [pair["worse"] for pair in summary["pairs"]] == [None, kind]
    assert [failure.get("type") for failure in suite.iter("failure")] == ([kind] if kind else [])
    if kind is None:
        assert (status, summary["outcome"]) == (0, "compared")
        assert out.endswith("--fail-on regression:5%: passed: 2 compared\n")
    else:
        assert (status, summary["outcome"]) == (3, "worse")
        assert f"\n{kind}: mnist_cnn, 2 workers, batch 8, dear: " in out
        assert f"--fail-on regression:5%: FAILED: {summary['compared']} compared, 1 {kind}\n" in out


@pytest.mark.parametrize("kind", ["failed", "incorrect", "flagged", "missing"])
def test_that_nothing_was_compared_has_a_status_of_its_own(tmp_path, capsys, kind):
    status, suite, summary = compare(tmp_path, BEFORE[1:], [AFTER[kind]])
    assert (status, summary["outcome"], summary["compared"]) == (4, "nothing compared", 0)
    assert "nothing was compared: " in capsys.readouterr().out
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["2", "1", "1"]


@pytest.mark.parametrize("given", [True, False])
def test_a_sweep_without_records_compares_nothing(tmp_path, capsys, given):
    first, second = sweep(tmp_path / "a", BEFORE), tmp_path / "b"
    if given:
        sweep(second, [])
    command = ["compare", str(first), str(second)]
    assert main([*command, "--fail-on", "regression:5%"]) == 4
    out, err = capsys.readouterr()
    assert "FAILED: 2 missing" in out and f"no records in {second}" in err
    assert main(command) == 2, "without a gate, the name is wrong"


def test_what_was_not_valid_before_is_not_the_second_sweeps_fault(tmp_path, capsys):
    flagged = [BEFORE[0], AFTER["flagged"]]
    status, suite, summary = compare(tmp_path / "x", flagged, [trial("ddp", seed=8)])
    assert status == 0 and summary["pairs"][1]["worse"] is None
    assert "passed: 1 compared, 1 not valid before" in capsys.readouterr().out
    assert suite.get("skipped") == "1"
    # Single repeats decide nothing, and the gate says so.
    single = [trial("ddp", repeats=1)]
    assert compare(tmp_path / "y", single, [trial("ddp", 0.2, repeats=1)])[0] == 0
    assert "passed: 1 compared (1 UNSURE: they may be slower)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("network", ("10gbe", "2.5gbe")),
        ("batch_size", (8, 16)),
        ("model", ("mnist_cnn", "resnet18")),
    ],
)
def test_sweeps_that_differ_in_a_key_are_compared_if_it_is_named(tmp_path, capsys, key, values):
    sweeps = [[trial(name, **{key: value}) for name in ("ddp", "dear")] for value in values]
    status, _, _ = compare(tmp_path, *sweeps)
    out = capsys.readouterr().out
    change = f"{key} {values[0]} -> {values[1]}"
    assert status == 4 and f"the sweeps differ in {change}; --across {key} compares them" in out
    names = [str(tmp_path / name) for name in "ab"]
    parts = [f"{name}@{key}={value}" for name, value in zip(names, values, strict=True)]
    for given in ([*names, "--across", key], parts):
        assert main(["compare", *given, "--json"]) == 0
        pairs = json.loads(capsys.readouterr().out)["pairs"]
        assert [(pair["algorithm"], pair["across"]) for pair in pairs] == [
            ("ddp", change),
            ("dear", change),
        ]
        more = 2 if key == "batch_size" else 1  # samples in the same time
        assert [pair["ratio"] for pair in pairs] == pytest.approx([more, more])
    assert main(["compare", *parts]) == 0
    assert change in capsys.readouterr().out


def test_junit_has_no_character_that_xml_forbids(tmp_path):
    died = dataclasses.replace(
        FAILED, error=dataclasses.replace(FAILED.error, message="\x1b[31m<\0>")
    )
    _, suite, _ = compare(tmp_path, BEFORE, [BEFORE[0], died])
    (failure,) = suite.iter("failure")
    assert failure.get("message") == "the second: ?[31m<?>"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--junit", "x.xml"], "--junit needs --fail-on, which says"),
        (["--summary", "{tmp}/no/x.json"], "no/x.json: No such file or directory"),
        (["--fail-on", "regression:1.2.3%"], "must be regression:N%, such as regression:5%"),
        (["--fail-on", "regression:100%"], "must be regression:N%, such as regression:5%"),
        (["--across", "networks"], "unknown key of --across 'networks'; did you mean 'network'?"),
    ],
)
def test_mistakes_are_a_line(tmp_path, capsys, flags, text):
    folder = str(sweep(tmp_path / "a", BEFORE))
    given = [flag.format(tmp=tmp_path) for flag in flags]
    assert main(["compare", folder, folder, *given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and text in err and err.count("\n") == 1


# The schema


def schema_of(hint):
    """JSON schema of a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        fields = get_type_hints(hint)
        return {
            "type": "object",
            "properties": {name: schema_of(kind) for name, kind in fields.items()},
            "required": list(fields),
            "additionalProperties": False,
        }
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": schema_of(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(inner[1])}
    if type(None) in inner:
        (kind,) = [schema_of(kind) for kind in inner if kind is not type(None)]
        return (
            {"enum": [*kind["enum"], None]} if "enum" in kind else {"type": [kind["type"], "null"]}
        )
    names = {int: "integer", float: "number", str: "string"}
    return {"type": names[hint]}


def fits(schema, value):
    """True if a JSON value has a schema of the words above."""
    kinds = {"integer": int, "number": (int, float), "string": str, "null": type(None)}
    kinds |= {"object": dict, "array": list}
    if "enum" in schema:
        return value in schema["enum"]
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    inner = []
    if isinstance(value, list):
        inner = [(schema["items"], each) for each in value]
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema["additionalProperties"] or {"enum": []}
        inner = [(known.get(name, rest), each) for name, each in value.items()]
        inner += [({"enum": []}, name) for name in schema.get("required", []) if name not in value]
    return any(isinstance(value, kinds[name]) for name in names) and all(
        fits(*each) for each in inner
    )


def test_the_schema_is_that_of_the_summary():
    """The file is generated: a change raises gate.SCHEMA and writes the wanted text."""
    wanted = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Comparison of two sweeps by DeAR Bench, version {gate.SCHEMA}",
        **schema_of(Summary),
    }
    assert json.loads(SCHEMA.read_text()) == wanted, json.dumps(wanted, indent=1)
    assert not fits(wanted, {"schema": "1"}) and not fits({"type": "integer"}, "1")
