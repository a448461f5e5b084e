"""Tests of the output of a running sweep: a bar on a terminal, a line per launch in a kept log."""

from __future__ import annotations

import io
import re

import pytest

from common.harness.running.ui import Planned, Progress, ProgressLine
from tests.system.made import make_trial


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Returns the lines that were drawn one after the other in the same place."""
        return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue()))


def begun(total: int = 18) -> Progress:
    trial = make_trial("dear")
    progress = Progress(total=total, left=[Planned(trial)] * total)
    progress.title, progress.label = "resnet50@rtx2080ti-modelled bs=64 n=4 dear 5gbe", "dear"
    progress.end(Planned(trial), 10.0)
    progress.best = "dear 895/s"
    return progress


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminals_line_is_never_longer_than_it_and_says_what_matters_first(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    terminal = Terminal()
    line = ProgressLine(terminal)
    line(begun())
    line.clear()
    assert terminal.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the cursor is shown again"
    drawn = terminal.lines()
    assert max(map(len, drawn)) <= width
    (last,) = {item.rstrip() for item in drawn if "2/18" in item}
    assert re.search(r"2/18  ETA 2 min 50 s  best: dear 895/s", last)
    assert ("now dear  resnet50@rtx2080ti-modelled bs=64 n=4 dear 5gbe" in last) == (width == 200)


def test_a_kept_log_has_a_line_per_launch():
    kept = io.StringIO()
    line, progress = ProgressLine(kept), begun()
    line(progress)
    line(progress)
    progress.end(progress.left[0], 10.0)
    line(progress)
    line.clear()
    title = r"resnet50@rtx2080ti-modelled bs=64 n=4 dear 5gbe  best: dear 895/s"
    first, second, rest = kept.getvalue().split("\n")
    assert re.fullmatch(rf"\d\d:\d\d:\d\d \[2/18\] {title}  ETA 2 min 50 s", first)
    assert re.fullmatch(rf"\d\d:\d\d:\d\d \[3/18\] {title}  ETA 2 min 40 s", second)
    assert rest == ""


def test_quiet_is_quiet():
    terminal = Terminal()
    line = ProgressLine(terminal, quiet=True)
    line(begun())
    line.clear()
    assert terminal.getvalue() == ""
