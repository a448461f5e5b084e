"""The page on what the references do: what it names is there, and it counts rightly."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/inventory.md").read_text()
FEATURES, FACTS = PAGE.split("## Facts to test against")


def rows(text):
    """Of the tables: feature, yes or no, and by what."""
    found = re.findall(r"^\| (.+) \| (.*) \| (.+) \|$", text, re.MULTILINE)
    return [row for row in found if row[0] not in ("row", "---")]


def test_every_row_says_yes_with_a_proof_or_no_with_a_reason():
    for feature, word, by in rows(PAGE):
        assert word in ("yes", "no"), feature
        proofs = re.findall(r"`(test_\w+|python \S+[^`]*)`", by)
        assert (word == "yes") == bool(proofs), feature


def test_tests_and_programs_that_are_named_are_there():
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    known = set(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))
    assert set(re.findall(r"`(test_\w+)`", PAGE)) - known == set()
    experiments = {path.stem for path in (ROOT / "configs/experiments").glob("*.yaml")}
    for program, rest in re.findall(r"`python ([^\s`]+)([^`]*)`", PAGE):
        assert (ROOT / program).is_file()
        if rest.startswith(" run "):
            assert rest.split()[1] in experiments


def test_it_counts_rightly():
    words = [word for _, word, _ in rows(FEATURES)]
    facts = [
        word
        for fact, word, _ in rows(FACTS)
        for _ in re.findall(r"\b(?:[HRS]\d+|[GAPBY]-\d+)\b", fact)
    ]
    assert (
        f"{len(words)} rows of features: {words.count('yes')} yes, {words.count('no')} no. "
        f"{len(facts)} facts: {facts.count('yes')} yes, {facts.count('no')} no."
    ) in PAGE
