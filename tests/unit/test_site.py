"""The site without MkDocs: its navigation has every page, its API every name."""

from __future__ import annotations

import pydoc
import re

import pytest
import yaml

from common.paths import ROOT
from tests.unit.test_docs import PAGES, name_of

SITE = ROOT / "docs" / "site"
OWN = SITE / "pages"


class Loader(yaml.SafeLoader):
    """Leaves out the objects of Python that MkDocs makes."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def named(nav) -> list[str]:
    """Returns the files of a navigation in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [name for part in parts for name in named(part)]


def test_the_navigation_names_every_page_once():
    nav = named(yaml.load((SITE / "mkdocs.yml").read_text(), Loader)["nav"])
    texts = {name_of(page) for page in PAGES if ".github" not in page.parts}
    api = {str(page.relative_to(OWN)) for page in OWN.rglob("*.md")} | {"api/algorithms.md"}
    assert sorted(nav) == sorted(texts | api)


@pytest.mark.parametrize("page", sorted(OWN.rglob("*.md")), ids=lambda page: page.stem)
def test_what_a_page_of_the_api_describes_exists(page):
    paths = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    assert paths and [path for path in paths if pydoc.locate(path) is None] == []


def test_the_extra_has_what_the_site_needs():
    lines = (SITE / "requirements.txt").read_text().splitlines()
    needed = [line for line in lines if not line.startswith("#")]
    package = (ROOT / "pyproject.toml").read_text().partition("\ndocs = [")[2].partition("\n]")[0]
    assert needed and [line for line in needed if f'"{line}"' not in package] == []
