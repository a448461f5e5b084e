"""The site that `make site` builds: links, API, captions, and how its pages look in a browser."""

from __future__ import annotations

import functools
import http.server
import importlib
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from dear.training.algorithm import algorithm_names
from tests.system.browser import PROGRAM, Browser
from tests.system.processes import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
pytest.importorskip(
    "mkdocstrings_handlers.python", reason="pip install -r docs/site/requirements.txt"
)
TOO_WIDE = """(() => {
  const width = document.documentElement.clientWidth;
  const scrolls = ".md-typeset__scrollwrap, pre";
  const wide = [...document.querySelectorAll("article *")].filter((element) =>
    element.getBoundingClientRect().right > width + 1 && !element.closest(scrolls));
  if (document.documentElement.scrollWidth > width) wide.push(document.body);
  return wide.slice(0, 5).map((element) => element.outerHTML.slice(0, 100));
})()"""
BROKEN = "[...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)"


def build(tree: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site of a checkout."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", tree / "docs/site/mkdocs.yml", "-d", out],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@dataclass
class Read(HTMLParser):
    """References of a page, and its names that others may refer to."""

    html: str
    names: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    """Text behind each figure, up to the next tag that is none of a text."""

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.html)

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.loaded += [given[key] for key in ("src", "data") if key in given]
        if tag == "link" and given.get("rel") != "canonical":
            self.loaded.append(given["href"])
        if tag == "img" and "docs/records" in given["src"]:
            self.captions.append("")

    def handle_data(self, data):
        if self.captions:
            self.captions[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "site"
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout
    return out


@pytest.fixture(scope="module")
def pages(site):
    return {
        path: Read(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"
    }


def test_every_link_leads_to_a_file_and_a_name(site, pages):
    missing = []
    for path, page in pages.items():
        for link in page.links:
            file, name = urldefrag(unquote(link))
            if ":" in file:
                continue
            target = path.parent / file if file else path
            target = Path(os.path.normpath(target))
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (
                name and target in pages and name not in pages[target].names
            ):
                missing.append((str(path.relative_to(site)), link))
    assert missing == []


def test_nothing_is_loaded_from_elsewhere(pages):
    assert [url for page in pages.values() for url in page.loaded if "//" in url] == []


def test_wrong_links_and_anchors_are_refused(tmp_path):
    tree = tmp_path / "tree"
    (tree / "docs").mkdir(parents=True)
    for entry in (*ROOT.iterdir(), *(ROOT / "docs").iterdir()):
        place = tree / entry.relative_to(ROOT)
        if not place.exists() and entry.name != "site":
            place.symlink_to(entry)
    shutil.copytree(ROOT / "docs/site", tree / "docs/site")
    (tree / "docs/glossary.md").unlink()
    (tree / "docs/glossary.md").write_text("# Terms\n[a](tutorial.md#nowhere) [b](nothing.md)\n")
    done = build(tree, tmp_path / "out")
    assert done.returncode != 0
    wrong = "Doc file 'docs/glossary.md' contains a link"
    assert f"{wrong} 'nothing.md'" in done.stdout
    assert f"{wrong} 'tutorial.md#nowhere'" in done.stdout
    assert "'docs/tutorial.md' does not contain an anchor '#nowhere'" in done.stdout


@pytest.mark.parametrize("name", ["dear", "dear.bluefog", "dear.dadt", "dear.decentralized"])
def test_the_api_has_every_public_name(site, name):
    page = Read((site / "api" / f"{name.rpartition('.')[2]}.html").read_text())
    public = {f"{name}.{item}" for item in importlib.import_module(name).__all__}
    assert public <= page.names


def test_the_api_has_every_algorithm(site):
    assert set(algorithm_names()) <= Read((site / "api/algorithms.html").read_text()).names


def test_every_figure_has_its_facts_below(pages):
    captions = [text for page in pages.values() for text in page.captions]
    words = ("Model:", "Network:", "n =", "Fabric:", "Commit:")
    assert captions and [text for text in captions if not all(w in text for w in words)] == []


@pytest.fixture
def address(site):
    """Address of a server of the site; the search needs one."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Writes nothing."""


def test_pages_fit_wide_and_narrow_windows(site, pages, address, tmp_path):
    if PROGRAM is None:
        pytest.skip("no chromium on the PATH")
    browser = Browser(tmp_path / "profile")
    problems = []
    try:
        for path in sorted(pages):
            for width in (1400, 400):
                browser.look(width=width)
                browser.open(f"{address}{path.relative_to(site)}")
                wrong = [*browser.value(TOO_WIDE), *browser.value(BROKEN), *browser.complaints]
                wrong += [url for url in browser.requests if not url.startswith((address, "data:"))]
                if wrong:
                    problems.append((path.name, width, wrong))
        wide = "document.querySelector('article').innerHTML += '<p style=width:900px>wide</p>'"
        browser.value(wide)
        assert browser.value(TOO_WIDE), "the check notices what does not fit"
    finally:
        browser.close()
    assert problems == []
