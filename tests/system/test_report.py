"""The report in a browser: it complains of nothing, asks for nothing, and does what is clicked."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.harness.cli import main
from common.results.report import page
from plots import embedded
from tests.system.browser import PROGRAM, Browser
from tests.system.processes import ROOT, wait_for
from tests.unit.read_page import Page

RECORDS = ROOT / "docs" / "records"
COMMANDS = page.Commands(sweep="x", again=lambda: (None, ""))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if PROGRAM is None:
        pytest.skip("no chromium on the PATH")
    chromium = Browser(tmp_path_factory.mktemp("browser") / "profile")
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """`made(name)` is the report of a committed sweep, with its figures."""
    folder = tmp_path_factory.mktemp("reports")

    def write(name: str) -> str:
        path = folder / f"{name}.html"
        if not path.exists():
            text = page.build(RECORDS / name, commands=COMMANDS, figures=embedded.figures)
            path.write_text(text)
        return path.as_uri()

    return write


@pytest.mark.parametrize("name", ["merging", "emulated", "quick", "time_to_accuracy", "slow_host"])
def test_the_console_is_clean_and_nothing_is_asked_for(browser, report, name):
    for dark in (False, True):
        browser.look(dark=dark)
        browser.open(report(name))
        assert browser.value("document.querySelector('h1').textContent") == name
        assert browser.complaints == []
        urls = [url for url in browser.requests if not url.startswith("data:")]
        assert urls == [report(name)], "itself alone"


def column(browser, table: str, number: int) -> list[str]:
    """The texts of a column, from top to bottom."""
    rows = f"[...document.querySelectorAll('#{table} tbody:not([hidden]) tr:first-child')]"
    return browser.value(f"{rows}.map((row) => row.cells[{number}].textContent.trim())")


def test_tables_are_sorted_by_mouse_and_by_keyboard(browser, report):
    browser.look()
    browser.open(report("merging"))
    usual = column(browser, "results", 0)
    head = "document.querySelectorAll('#results thead button')[1]"
    browser.value(f"{head}.click()")
    rates = [float(text.split()[0]) for text in column(browser, "results", 1)]
    assert rates == sorted(rates) and column(browser, "results", 0) != usual
    assert browser.value(f"{head}.closest('th').getAttribute('aria-sort')") == "ascending"
    browser.value(f"{head}.focus()")
    browser.press("Enter")
    assert column(browser, "results", 1)[0].startswith(f"{max(rates):.0f}")
    assert browser.value(f"{head}.closest('th').getAttribute('aria-sort')") == "descending"
    browser.press("Enter")
    assert column(browser, "results", 0) == usual
    assert browser.value("document.querySelectorAll('[aria-sort]').length") == 0
    browser.press("Tab")
    assert browser.value("document.activeElement.textContent") == "95 % CI, this run", (
        "and on to the next"
    )


def test_a_reason_moves_with_its_row_and_empty_cells_stay_below(browser, report):
    browser.look()
    browser.open(report("emulated"))
    heads = "[...document.querySelectorAll('#results thead button')]"
    verdict = f"{heads}.find((one) => one.textContent.startsWith('speed-up'))"
    browser.value(f"{verdict}.click()")
    number = browser.value(f"{verdict}.closest('th').cellIndex")
    shown = column(browser, "results", number)
    known = [text for text in shown if text]
    assert shown[: len(known)] == known and "" in shown, "what has none comes last"
    bodies = "[...document.querySelectorAll('#results tbody')]"
    alone = f"{bodies}.filter((body) => body.rows[0].classList.contains('reason')).length"
    assert browser.value(alone) == 0


def test_rows_are_filtered_and_the_filter_taken_back(browser, report):
    browser.look()
    browser.open(report("merging"))
    every = column(browser, "results", 0)
    wanted = [name for name in every if "dear" in name]
    assert 1 < len(wanted) < len(every)
    browser.value("document.getElementById('filter-results').focus()")
    for letter in "dear":
        browser.press(letter)
    assert column(browser, "results", 0) == wanted
    output = "document.querySelector('.filter output').textContent"
    assert browser.value(output) == f"{len(wanted)} of {len(every)} rows"
    browser.press("Escape")
    assert column(browser, "results", 0) == every and browser.value(output) == ""


def test_colours_are_the_systems_until_somebody_chooses(browser, report):
    background = "getComputedStyle(document.body).backgroundColor"
    browser.look(dark=True)
    browser.open(report("merging"))
    dark = browser.value(background)
    browser.look(dark=False)
    light = browser.value(background)
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(20, 24, 28)")
    button = "document.querySelector('button.theme')"
    for name, wanted in (("light", light), ("dark", dark), ("automatic", light)):
        browser.value(f"{button}.click()")
        assert browser.value(f"{button}.textContent") == f"Colours: {name}"
        assert browser.value(background) == wanted
    drawing = "getComputedStyle(document.querySelector('.drawing')).backgroundColor"
    assert browser.value(drawing) == light, "figures are drawn for paper"


@pytest.mark.parametrize("width", [400, 1400])
def test_only_tables_are_wider_than_the_window(browser, report, width):
    browser.look(width=width)
    for name in ("emulated", "time_to_accuracy"):
        browser.open(report(name))
        assert browser.value("document.documentElement.scrollWidth") <= width


def test_what_is_packed_is_saved_unpacked(browser, report):
    browser.look()
    browser.open(report("merging"))
    link = "document.querySelector('a[data-packed]')"
    assert browser.value(f"{link}.download") == "records.jsonl"
    # What it makes to be saved, as a text; the page's policy lets nobody fetch it.
    browser.value("window.saved = []")
    browser.value(
        "URL.createObjectURL = ((usual) => (one) => { saved.push(one); return usual(one); })"
        "(URL.createObjectURL.bind(URL))"
    )
    browser.value(f"{link}.click()")
    wait_for(lambda: browser.value("saved.length"), 20)
    wanted = (RECORDS / "merging" / "records.jsonl").read_text()
    assert browser.value("saved[0].text()") == wanted
    assert browser.complaints == []


def test_without_javascript_all_of_it_is_there(browser, report):
    browser.look()
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(report("merging"))
        assert browser.complaints == []
        shown = browser.send("DOM.getDocument")["root"]["nodeId"]
        answer = browser.send("DOM.querySelectorAll", nodeId=shown, selector="button, input")
        assert answer["nodeIds"] == [], "nothing to click on that would do nothing"
        answer = browser.send("DOM.querySelectorAll", nodeId=shown, selector="#results tbody")
        assert len(answer["nodeIds"]) == 7
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.full
def test_the_report_of_fifty_trials_is_under_3_mb(tmp_path, capsys):
    from tests.unit.test_report import many

    assert main(["report", str(many(tmp_path / "fifty"))]) == 0
    path = capsys.readouterr().out.strip()
    assert Path(path).stat().st_size < 3_000_000
    assert len(Page(Path(path).read_text()).all("svg")) > 3
