"""Data that others have written can run nothing, leave its folder, or become a part of a page."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import machine
from common.harness.experiment_file import load
from common.harness.trial import Trial
from common.results import store
from common.results.exports import traces
from common.results.records import Record
from common.results.report import page
from dear.errors import UserError
from tests.system.made import make_trial
from tests.unit.made_record import record, sweep
from tests.unit.read_page import Page

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "records"

# Calls ----------------------------------------------------------------------------------------

PARTS = ("dear", "common", "bench", "plots", "scripts")
DANGEROUS = {"eval", "exec", "os.system", "os.popen", "subprocess.getoutput", "yaml.unsafe_load"}
DANGEROUS |= {"subprocess.getstatusoutput", "yaml.full_load", "yaml.load_all", "shelve.open"}
DANGEROUS |= {"pickle.load", "pickle.loads", "marshal.load", "marshal.loads", "numpy.load"}
DANGEROUS |= {"np.load", "pd.read_pickle", "pickle.Unpickler", "jsonpickle.decode"}
ALLOWED = {
    ("dear/training/files.py", "exec"),  # a plugin or model of the user's own
    ("common/harness/experiment_file.py", "yaml.load"),  # both with StrictLoader, see below
    ("common/machine/yaml_files.py", "yaml.load"),
}


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def _dangers(text: str) -> Iterator[str]:
    """Names of the calls in a program that run what data or a shell say."""
    if re.search(r"eval|exec|system|popen|yaml|pickle|marshal|shell|load", text) is None:
        return
    for name, call in _calls(ast.parse(text)):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in DANGEROUS or name == "yaml.load" or given.get("allow_pickle") == "True":
            yield name
        if given.get("shell", "False") != "False":
            yield f"{name} with a shell"
        if name == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load of more than weights"


def test_nothing_loads_a_program_from_data_or_gives_a_text_to_a_shell():
    programs = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    assert len(programs) > 300
    dangers = {
        (str(path.relative_to(ROOT)), danger)
        for path in programs
        for danger in _dangers(path.read_text(encoding="utf-8"))
    }
    assert dangers == ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        "pickle.loads(data)",
        "yaml.load(text, yaml.Loader)",
        "subprocess.run(text, shell=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "os.system(text)",
        "exec(text)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_each_of_them_would_be_noticed(text):
    assert len([*_dangers(text)]) >= 1


@pytest.mark.parametrize(
    "value",
    ["!!python/object/apply:os.system [touch {}]", "!!python/name:os.system", "!!python/module:os",
     "!!python/object/new:os.system [touch {}]", "!!python/tuple [1]", "!anything 1"],
)  # fmt: skip
def test_an_experiment_is_data_only(tmp_path, value):
    mark, path = tmp_path / "mark", tmp_path / "x.yaml"
    path.write_text(f"algorithms: [ddp]\nmodels: [mnistnet]\ndescription: {value.format(mark)}\n")
    with pytest.raises(UserError, match="not valid YAML"):
        load(path)
    path.write_text("algorithms: [ddp]\nmodels: [mnistnet]\n")
    with pytest.raises(UserError, match="not valid YAML"):
        load(path, [f"description={value.format(mark)}"])
    assert not mark.exists()


# Paths ----------------------------------------------------------------------------------------

ELSEWHERE = ["../x", "/tmp/x", "..", ".", "a/../../x", "a/b", "x/", "./x", "a\0b"]


@pytest.mark.parametrize("name", [*ELSEWHERE, "a\\b", ".hidden", "a\nb", "", " "], ids=repr)
def test_a_sweep_is_named_after_a_folder_inside(tmp_path, name):
    path = tmp_path / "x.yaml"
    path.write_text(f"name: {json.dumps(name)}\nalgorithms: [ddp]\nmodels: [mnistnet]\n")
    with pytest.raises(UserError, match=r"name: must be usable as a folder's name"):
        load(path)


@pytest.mark.parametrize("field", ["model", "algorithm", "label", "dtype"])
@pytest.mark.parametrize("name", ELSEWHERE, ids=repr)
def test_whatever_a_trial_is_called_its_folder_is_inside(monkeypatch, field, name):
    monkeypatch.setattr(Trial, "__post_init__", lambda self: None, raising=False)
    trial = dataclasses.replace(make_trial("ddp", 2), **{field: name})
    assert Path(trial.id).name == trial.id and trial.id not in (".", "..")
    assert not {"/", "\\", "\0"} & {*trial.id}


@pytest.mark.parametrize("name", ELSEWHERE, ids=repr)
@pytest.mark.parametrize("field", ["id", "evidence", "rank"])
def test_a_record_cannot_point_out_of_its_folder(tmp_path, field, name):
    values = record("ddp").to_json()
    if field == "id":
        values["id"] = name
    elif field == "evidence":
        values["results"][0]["evidence"] = name
    else:
        values |= {"status": "failed", "error": {"kind": "failed", "message": "x", "rank": name}}
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(values) + "\n")
    with pytest.raises(UserError, match=r"records\.jsonl line 1: "):
        store.load(path)
    assert traces.evidence(tmp_path, record("ddp")) is None


# Pages ----------------------------------------------------------------------------------------

EVIL = "</td></title></script></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"' &lt;"


def _texts(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways to all texts within a JSON value."""
    if isinstance(value, str):
        yield way
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, (*way, key))


def _spoil(value: Any, way: tuple[Any, ...]) -> None:
    """Appends the evil text to the text at `way`."""
    for key in way[:-1]:
        value = value[key]
    value[way[-1]] += EVIL


def _kind(way: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple("" if isinstance(key, int) else key for key in way)


MEANT = {"id", "hash", "status", "kind", "started", "schema"}
"""Last keys of texts that programs act on: another text is no record."""


def _built(folder: Path, lines: list[dict[str, Any]], trials: tuple[str, ...]) -> Page:
    records = [Record.from_json(line) for line in lines]
    place = sweep(folder, records)
    store.Comparison(compare_to=records[0].label, trials=trials).save(place)
    return Page(page.build(place, commands=page.Commands(sweep="x", again=lambda: (None, "No."))))


def _check_page(folder: Path, lines: list[dict[str, Any]], kinds: list[tuple[Any, ...]]) -> int:
    """Checks the page of records with evil texts of these kinds; returns how often it shows one.

    A text that must name something leaves no page: then the others are tried without it.
    """
    changed = json.loads(json.dumps(lines))
    for line in changed:
        for way in [way for way in _texts(line) if _kind(way) in kinds]:
            _spoil(line, way)
    folder.mkdir()
    try:
        result = _built(folder / "sweep", changed, tuple(line["hash"] for line in lines))
    except (UserError, KeyError, ValueError):
        half = len(kinds) // 2
        parts = {"a": kinds[:half], "b": kinds[half:]} if half else {}
        return sum(_check_page(folder / key, lines, part) for key, part in parts.items())
    tags = [(item.tag, item.text) for item in result.elements if item.tag in ("script", "img")]
    assert len(tags) == 1 and "alert(1)" not in tags[0][1]
    attributes = {key for item in result.elements for key in item.attributes}
    assert not [key for key in attributes if key.startswith("on")]
    return " ".join(item.text for item in result.elements).count("alert(1)")


@pytest.mark.parametrize("name", ["merging", "quick", "time_to_accuracy"])
def test_no_text_of_a_record_becomes_an_element(tmp_path, name):
    """Texts of all kinds, wherever they are in a record."""
    comparison = store.Comparison.load(RECORDS / name)
    records = comparison.results(RECORDS / name)[:3]
    failed = dataclasses.replace(record("ddp", status="failed"), trial=records[0].trial)
    lines = [json.loads(json.dumps(item.to_json())) for item in [*records, failed]]
    kinds = {_kind(way) for line in lines for way in _texts(line) if way[-1] not in MEANT}
    assert len(kinds) > 20
    shown = _check_page(tmp_path / "page", lines, sorted(kinds))
    assert shown > 20, "hardly any text is on the page"


# Environment ----------------------------------------------------------------------------------


def test_records_keep_no_variable_but_those_of_libraries(monkeypatch):
    stems = ("AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "HF_TOKEN", "PASSWORD", "SSH_AUTH_SOCK")
    stems += ("WANDB_API_KEY", "HOME", "USER", "PATH", "KUBECONFIG", "http_proxy", "MYSQL_PWD")
    for stem in stems:
        monkeypatch.setenv(stem, "hunter2")
    for letters in itertools.product(string.ascii_uppercase, repeat=2):
        monkeypatch.setenv("".join(letters) + "_SOMETHING", "hunter2")
    for family in machine._FAMILIES:  # a secret may have a name of a family, too
        for word in ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "secret_file_password"):
            monkeypatch.setenv(family + word, "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    card = machine.machine_card()
    assert "hunter2" not in json.dumps(card)
    assert card["environment"]["NCCL_DEBUG"] == "INFO"
