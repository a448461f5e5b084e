"""Tests that messages on the page about troubles stand in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = [
    text
    for row in re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE)
    for text in re.findall(r"`([^`]+)`", row)
]
SOURCES = [
    path
    for pattern in ("common/**/*.py", "dear/**/*.py", "scripts/**/*.sh", "common/**/*.cc")
    for path in ROOT.glob(pattern)
]


@pytest.fixture(scope="module")
def said() -> str:
    """All the code, with strings that go on in the next line put together."""
    assert len(QUOTED) > 12
    texts = [path.read_text() for path in [ROOT / "benchmarks.py", *SOURCES]]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_code_says_it(quoted, said):
    """Numbers, names and what `...` stands for are others each time."""
    parts = [part.strip(" :;'()/") for part in re.split(r"\.\.\.|\d[\d., ]*", quoted)]
    part = max(parts, key=len)
    assert part in said, part
