"""Tests of `make mutants`: what it draws; tests of a copy catch a mutant and leave nothing."""

from __future__ import annotations

import configparser
import json
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path

import coverage
import psutil
import pytest

from tests.mutants import report, seen, trees

ROOT = Path(__file__).parents[2]
SOURCE = '''\
from __future__ import annotations

Pair = tuple[int, str] | None
__all__ = ["smaller"]


@decorated(1)
def smaller(one: int | None, other: int = 2, *, limit: int = 100) -> int | None:
    """Of 2 numbers."""
    assert one < other
    if one < other:
        return one
    log.info("of %d", 3 - 1)
    wait(
        other,
        one + 1,
    )
    raise ValueError(f"{one + 1} not below {other}")
'''


@pytest.mark.full
def test_only_changes_of_meaning_are_drawn():
    from tests.mutants import mutations

    result = mutations.candidates("dear/it.py", SOURCE)
    changed = {
        (item.operator, item.line, item.end_line) for item in result if item.means_something(SOURCE)
    }
    assert changed == {
        ("NumberReplacer", 8, 8),  # the default 2; not 100, not a star, not the decorator's 1
        ("AddNot", 11, 11),
        ("ReplaceComparisonOperator_Lt_LtE", 11, 11),
        ("ReplaceComparisonOperator_Lt_GtE", 11, 11),
        ("DropCall", 14, 17),
        ("NumberReplacer", 14, 17),
        ("ReplaceBinaryOperator_Add_Sub", 14, 17),
    }
    (dropped,) = [item for item in result if (item.operator, item.line) == ("DropCall", 14)]
    text = dropped.apply(SOURCE)
    assert "wait(" not in text and "    pass\n    raise" in text
    compile(text, "it", "exec")
    assert {item.line for item in result if item.at_import} == {8}


@pytest.mark.full
def test_what_the_library_cannot_change_is_no_mutant():
    from tests.mutants import mutations

    source = "try:\n    f()\nexcept (a.Error, ValueError):\n    g()\n"
    good = [item for item in mutations.candidates("it.py", source) if item.means_something(source)]
    assert good and len(good) < len(mutations.candidates("it.py", source))
    assert mutations.sample({"it.py": source}, 50, seed=1)


@pytest.mark.full
def test_a_sample_is_that_of_its_seed_and_has_some_of_every_file():
    from tests.mutants import mutations

    sources = {"large.py": SOURCE + SOURCE.replace("smaller", "less") * 9, "small.py": SOURCE}
    sources["none.py"] = "import os\n"
    drawn = mutations.sample(sources, 20, seed=1)
    assert drawn == mutations.sample(sources, 20, seed=1) != mutations.sample(sources, 20, seed=2)
    paths = [item.path for item in drawn]
    assert len(paths) == 20 and 3 < paths.count("small.py") < paths.count("large.py")
    places = [(item.path, item.line, item.column, item.operator.split("_")[0]) for item in drawn]
    assert len(set(places)) == 20
    assert {item.path for item in mutations.sample(sources, 1, seed=1)} == {"large.py", "small.py"}


@pytest.mark.full
def test_a_mutant_keeps_its_name_when_other_lines_come_and_no_two_share_one():
    from tests.mutants import mutations
    from tests.mutants.__main__ import identity

    def names(source: str) -> list[str]:
        result = mutations.candidates("dear/it.py", source)
        return [identity(item, source) for item in result if item.means_something(source)]

    twice = SOURCE + SOURCE.split("]\n", 1)[1]  # the same function again
    assert names(SOURCE) == names("# A line.\n\n" + SOURCE) == names(twice)[: len(names(SOURCE))]
    assert len(set(names(twice))) == len(names(twice)) == 2 * len(names(SOURCE))


TESTS = """\
import os, subprocess, sys, time
import pytest
from it import number

def test_quick():
    assert number() > 0

def test_exact():
    assert number() == 2

@pytest.mark.parametrize("much", [1])
def test_what_it_starts(much):
    if number() == 3:  # a child in a session of its own, whose parent dies
        code = "import subprocess; subprocess.Popen(['sleep', '1234.5'], start_new_session=True)"
        subprocess.run([sys.executable, "-c", code], check=True)
        time.sleep(60)
"""


@pytest.fixture
def tree(tmp_path: Path) -> trees.Tree:
    root = tmp_path / "root"
    shutil.copytree(ROOT / "tests" / "mutants", root / "tests" / "mutants")
    (root / "tests" / "__init__.py").touch()
    (root / "common").mkdir()
    (root / "common" / "it.py").write_text("def number():\n    return 2\n")
    (root / "tests" / "test_it.py").write_text(TESTS)
    (root / "tests" / "test_none.py").write_text("import nothing_of_this_name\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return trees.Tree(root, tmp_path / "copy")


NAMES = [
    ("tests/test_it.py::test_quick", 0.1),
    ("tests/test_it.py::test_exact", 0.1),
    ("tests/test_it.py::test_what_it_starts[1]", 0.1),
]


def _with(number: str) -> str:
    return f"def number():\n    return {number}\n"


def _apart(tree: trees.Tree, *given: object) -> trees.Trial:
    """`tree.try_out` in a process of its own: it ends all that its process has ever started."""
    with multiprocessing.get_context("fork").Pool(1, trees.adopt) as pool:
        return pool.apply(tree.try_out, given)


@pytest.mark.full
def test_a_mutant_is_caught_or_survives_and_leaves_the_copy_as_it_was(tree):
    path = "common/it.py"
    caught = _apart(tree, path, _with("4"), NAMES)
    assert (caught.outcome, caught.by) == ("failed", "tests/test_it.py::test_exact")
    assert caught.message and "assert 4 == 2" in caught.message
    assert _apart(tree, path, _with("4"), NAMES[:1]).outcome == "survived"
    assert _apart(tree, path, "import nothing_of_this_name\n", NAMES).outcome == "unstartable"
    assert (tree.folder / path).read_text() == _with("2")
    assert _apart(tree, path, _with("2"), NAMES).outcome == "survived"


@pytest.mark.full
def test_a_mutant_that_hangs_is_told_apart_and_its_processes_are_ended(tree, monkeypatch):
    monkeypatch.setattr(trees, "START_S", 15.0)
    assert _sleepers() == []
    assert _apart(tree, "common/it.py", _with("3"), NAMES[2:]).outcome == "hang"
    assert _sleepers() == []


@pytest.mark.full
def test_what_does_not_start_is_caught_though_a_test_fails_anyway(tree):
    path = "common/it.py"
    tree._write("tests/test_it.py", TESTS.replace("== 2", "== 7"))
    assert _apart(tree, path, "import nothing_of_this_name\n", NAMES).outcome == "unstartable"
    # What does not start where nothing is changed has caught nothing.
    none = [("tests/test_none.py::test_it", 0.1)]
    trial = _apart(tree, "common/it.py", _with("4"), none)
    assert trial.outcome == "survived" and "with nothing changed" in trial.message


def _sleepers() -> list[int]:
    every = psutil.process_iter(["cmdline"])
    return [item.pid for item in every if item.info["cmdline"] == ["sleep", "1234.5"]]


@pytest.mark.full
def test_what_cannot_be_is_said_in_one_line(monkeypatch, capsys, tmp_path):
    from tests.mutants import __main__ as program

    command = ["tests.mutants", "--dirty", "--scratch", str(tmp_path), "--only"]
    monkeypatch.setattr(sys, "argv", [*command, "no/such/file"])
    monkeypatch.setattr(program, "adopt", lambda: None)
    monkeypatch.setattr(program, "end_descendants", lambda: None)
    monkeypatch.setattr(program, "tracked", lambda root: ["dear/errors.py", "dear/options.py"])
    monkeypatch.setattr(program, "_state", lambda: "")
    monkeypatch.setattr(report, "judgements", dict)
    assert program.main() == 2
    assert capsys.readouterr().err == "--only no/such/file: no mutant of such a file was drawn\n"
    judged = {"dear/errors.py": {"0123456789": "It is equal."}}
    monkeypatch.setattr(report, "judgements", lambda: judged)
    assert program.main() == 2
    assert "dear/errors.py 0123456789: no such change today" in capsys.readouterr().err


def test_lines_executed_on_import_are_of_all_tests_that_execute_their_file(tmp_path):
    first, second = "tests/test_a.py::test_first", "tests/test_b.py::test_second"
    data = coverage.CoverageData(str(tmp_path / "coverage.1"))
    for test, lines in ((first, [1, 2]), (second, [3])):
        data.set_context(test)
        data.add_lines({"/copy/dear/it.py": lines})
    data.write()
    times = [{"id": test, "outcome": "passed", "seconds": 1.0} for test in (first, second)]
    (tmp_path / "tests.jsonl").write_text("\n".join(map(json.dumps, times)))
    result = seen.Seen(tmp_path)
    assert result.tests("dear/it.py", [1]) == [first]
    assert result.tests("dear/it.py", None) == [first, second]
    assert result.tests("dear/other.py", None) == []


@pytest.mark.full
def test_tests_are_looked_at_where_code_is_changed():
    from tests.mutants.__main__ import _MUTATED

    ini = configparser.ConfigParser(interpolation=None)
    ini.read(seen.HERE / "coverage.ini")
    looked_at = [line.removeprefix("${MUTANTS_TREE}/") for line in ini["run"]["source"].split()]
    assert sorted(f"{folder}/" for folder in looked_at) == sorted(_MUTATED)
    for folder in _MUTATED:
        assert [*(ROOT / folder).rglob("*.py")], folder


def test_a_context_names_its_test():
    assert seen.test_of("") == ""
    assert seen.test_of("tests/a.py::test[x (y)] (call)") == "tests/a.py::test[x (y)]"
    assert seen.test_of("tests/a.py::test_first (setup)|tests/a.py::test_second") == (
        "tests/a.py::test_second"
    )


def test_the_report_counts_and_shows_what_survived():
    item = {"id": "x", "path": "dear/comm/a.py", "line": 3, "operator": "AddNot", "diff": "-a\n+b"}
    results = [
        {**item, "outcome": "failed", "asked": 3},
        {**item, "outcome": "hang", "asked": 3},
        {**item, "outcome": "unstartable", "asked": 3, "path": "dear/b.py"},
        {**item, "outcome": "survived", "asked": 0, "path": "dear/b.py"},
    ]
    assert report.share(results) == 0.75
    facts = {"commit": "abc", "seed": 1, "candidates": 9, "files": 2}
    text = report.markdown(facts, results, {"dear/b.py": {"x": "It is equal."}})
    assert "| dear/comm | 2 | 1 | 1 | 0 | 0 | 0 | 100% |" in text
    assert "| dear | 2 | 0 | 0 | 1 | 1 | 1 | 50% |" in text
    assert "It is equal. (AddNot, no test executes it)\n\n```diff\n-a\n+b\n```" in text
