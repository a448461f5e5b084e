"""What the README shows comes from records that are in the repository, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.results.readme import with_tables
from common.results.records import load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_table_is_that_of_the_committed_record():
    assert with_tables(README) == README
    assert "| dear " in README


@pytest.mark.parametrize(
    ("name", "trials"),
    [("quick", 12), ("emulated-quick", 3), ("emulated", 20), ("emulated-bert", 8)],
)
def test_the_committed_record_is_good_and_complete(name, trials):
    found = load(ROOT / "docs" / "records" / name / "records.jsonl")
    assert len(found) == trials
    assert all(record.ok for record in found)
    assert all("dirty" not in record.machine["commit"] for record in found)


def test_every_link_leads_to_a_file():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), (document.name, target)


def test_make_targets_that_the_readme_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
