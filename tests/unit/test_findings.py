"""Findings on top of the README: sentences that agree with their records, or an error."""

from __future__ import annotations

import pytest

from common.results import readme
from common.results.committed import catalogue, findings
from common.results.committed.findings import Finding, Number, Ratio
from common.results.committed.ratios import Source
from dear.errors import UserError
from tests.unit.test_claims import COMPUTED, PREDICTED, ROWS, shelf

M = Source(**PREDICTED, model="m")


def finding(holds: str = "at least 1.1", rows: Source = M, **more: object) -> Finding:
    given = {"finding": "DeAR is {ratio} times as fast.", "limit": "Only here."}
    return Finding(**(given | {"ratios": (Ratio(name="ratio", holds=holds, rows=rows),)} | more))


def test_a_sentence_has_its_figure_and_its_record(tmp_path):
    text = findings.section([finding()], tmp_path, shelf(tmp_path, ROWS))
    assert text.startswith("1. DeAR is 1.20 (1.20 to 1.20) times as fast. Only here.\n\n")
    assert f"[{COMPUTED}]({COMPUTED}) (2026-01-02, commit 0123456789ab)" in text


@pytest.mark.parametrize("holds", ["at least 1.21", "below 1.19", "1.3 to 2"])
def test_a_figure_that_contradicts_its_sentence_is_an_error(tmp_path, holds):
    with pytest.raises(UserError, match=f"is 1.20 .*, not {holds}: rewrite"):
        finding(holds).text(shelf(tmp_path, ROWS))


def test_so_is_one_of_a_withdrawn_record(tmp_path):
    folder = shelf(tmp_path, ROWS)
    (folder / catalogue.WITHDRAWN).write_text(f"{COMPUTED}: It is old.\n")
    with pytest.raises(UserError, match=r"no figure, not at least 1.1"):
        finding().text(folder)
    with pytest.raises(UserError, match=f"{COMPUTED} is withdrawn"):
        Number(name="n", record=COMPUTED, file="t", key="x").text(folder)


def test_a_sentence_needs_each_figure_that_it_shows(tmp_path):
    with pytest.raises(UserError, match="has no figure 'other'"):
        finding(finding="It is {other}.").text(shelf(tmp_path, ROWS))


def test_a_number_comes_from_a_file_of_its_record(tmp_path):
    folder = shelf(tmp_path, ROWS)
    (folder / COMPUTED / "t").write_text('{"summary": {"mean": 0.0148}}')
    number = Number(name="n", record=COMPUTED, file="t", key="summary.mean", form=".1%")
    assert finding(finding="{n}: {ratio}.", numbers=(number,)).text(folder).startswith("1.5%: 1.2")
    with pytest.raises(UserError, match=f"{COMPUTED}/t has no summary.worst"):
        Number(name="n", record=COMPUTED, file="t", key="summary.worst").text(folder)


def test_the_readme_has_what_is_listed():
    page = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    assert findings.section(findings.findings(), readme.ROOT) in page
    assert len(findings.findings()) == 5
