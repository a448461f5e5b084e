"""Tests that execute a line, and how long each takes: a pytest plugin that asks coverage.py.

As a plugin (`-p tests.mutants.seen`) it gives the lines that a test executes the test's name: here,
in ranks of pools, which serve many tests, and in ranks that a test starts. `Seen` reads the result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import coverage
import pytest

HERE = Path(__file__).parent
_TIMES = "tests.jsonl"


def environment(tree: Path, folder: Path) -> dict[str, str]:
    """Environment that a pytest process with this plugin needs to look at the code in `tree`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = (HERE / "site", tree, tree / "common")
    return {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "COVERAGE_PROCESS_START": str(HERE / "coverage.ini"),
        "MUTANTS_TREE": str(tree),
        "MUTANTS_SEEN": str(folder),
    }


def pytest_configure() -> None:
    """Ranks are told which test they work for."""
    from common.launch.ranks import Ranks
    from tests.ranks import RankPool

    start, run = Ranks.function, RankPool.run

    def named_start(self: Ranks, function: Callable[..., Any], *args: Any, **how: Any) -> None:
        start(self, _Named(function), *args, **how)

    def named_run(self: RankPool, function: Callable[..., Any], *args: Any) -> list[Any]:
        return run(self, _Named(function), *args)

    Ranks.function, RankPool.run = named_start, named_run


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Everything between two tests' starts is the first one's."""
    _switch(item.nodeid)
    yield
    _switch("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes how each test ended, and how long it took without what it was set up with."""
    if report.when == "call" or not report.passed:
        line = {"id": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        with Path(os.environ["MUTANTS_SEEN"], _TIMES).open("a") as file:
            file.write(json.dumps(line) + "\n")


class _Named:
    """A function that says in its process whose test it works for; it can be sent there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.test = _current()
        self.function = function

    def __call__(self, *args: Any) -> Any:
        _switch(self.test)
        return self.function(*args)


def _current() -> str:
    return test_of(os.environ.get("PYTEST_CURRENT_TEST", ""))


def _switch(test: str) -> None:
    measuring = coverage.Coverage.current()
    if measuring is not None:
        measuring.switch_context(test)


def test_of(context: str) -> str:
    """The test in a context: `static|dynamic`, each perhaps with ` (call)` behind its name."""
    static, _, dynamic = context.partition("|")
    test = dynamic or static
    head, space, phase = test.rpartition(" (")
    return head if space and phase in ("setup)", "call)", "teardown)") else test


class Seen:
    """Coverage of a run: `seconds` by test that has passed, and `tests(path, lines)`."""

    def __init__(self, folder: Path) -> None:
        self.seconds = _passed(folder / _TIMES)
        self._data = coverage.CoverageData(str(folder / "combined"))
        parts = [str(path) for path in folder.glob("coverage.*")]
        if parts:
            whole = coverage.Coverage(data_file=str(folder / "combined"), config_file=False)
            whole.load()
            whole.combine(parts, strict=False, keep=False)
            whole.save()
        self._data.read()
        self._files = {Path(path): path for path in self._data.measured_files()}
        self._by_line: dict[str, dict[int, list[str]]] = {}

    def tests(self, path: str, lines: Iterable[int] | None) -> list[str]:
        """Tests that have passed and executed one of the lines of a file, relative to the root.

        Args:
            lines: None: any line of it.
        """
        measured = next(
            (full for pattern, full in self._files.items() if pattern.match(path)), None
        )
        if measured is None:
            return []
        if measured not in self._by_line:
            self._by_line[measured] = self._data.contexts_by_lineno(measured)
        by_line = self._by_line[measured]
        lines = by_line if lines is None else lines
        names = {test_of(context) for line in lines for context in by_line.get(line, ())}
        return sorted(names & self.seconds.keys())


def _passed(path: Path) -> dict[str, float]:
    """Seconds by test; one that has failed at any time is none to ask."""
    ended = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    bad = {test["id"] for test in ended if test["outcome"] != "passed"}
    return {test["id"]: test["seconds"] for test in ended if test["id"] not in bad}
