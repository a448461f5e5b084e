"""docs/inventory.md: the tests and programs that it names exist, and its counts are right."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/inventory.md").read_text()
ROWS = [
    row
    for row in re.findall(r"^\| (.+) \| (.*) \| (.+) \|$", PAGE, re.MULTILINE)
    if row[0] not in ("feature", "---")
]


def test_every_row_has_a_proof_and_says_what_is_missing():
    for feature, word, by in ROWS:
        assert word in ("yes", "part", "no"), feature
        proofs = re.findall(r"`(test_\w+|python \S+[^`]*)`", by)
        assert (word != "no") == bool(proofs), feature
        if word == "part":
            assert "; " in by, f"{feature}: what is missing?"
        lacking = re.search(r"\bnot yet run\b|\bno word error\b|\bnot supported\b", by)
        assert word != "yes" or lacking is None, feature


def test_tests_and_programs_that_are_named_exist():
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    known = set(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))
    assert set(re.findall(r"`(test_\w+)`", PAGE)) - known == set()
    experiments = {path.stem for path in (ROOT / "configs/experiments").glob("*.yaml")}
    for program, rest in re.findall(r"`python ([^\s`]+)([^`]*)`", PAGE):
        assert (ROOT / program).is_file()
        if rest.startswith(" run "):
            assert rest.split()[1] in experiments


def test_the_counts_are_right():
    words = [word for _, word, _ in ROWS]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("yes", "part", "no"))
    assert f"{len(words)} features: {counts}." in PAGE
