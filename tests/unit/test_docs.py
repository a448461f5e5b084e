"""Documents: links, anchors, names of files, commands and exit statuses are right."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import dear
from common.harness.verbs import MEANINGS, Status
from common.machine.processes import started
from common.paths import ROOT
from common.results.records import SCHEMA
from common.virtual.pool import PRELOAD
from tests.unit import dry_runs

_TRACKED = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
_FILES = [ROOT / name for name in subprocess.check_output(_TRACKED, text=True).splitlines()]
_ELSEWHERE = ("docs/records/", "docs/site/", "unit/shown/")  # MkDocs checks those of the site
PAGES = [
    path
    for path in _FILES
    if path.suffix == ".md" and not any(folder in str(path) for folder in _ELSEWHERE)
]
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_FOLDERS = "bench|common|configs|dear|docs|examples|plots|scripts|tests"
_NAMED = re.compile(rf"`((?:{_FOLDERS})/[^\s`<>{{$]*)`")
# A part that is nothing but capitals, also before a suffix; README.md is a file.
_PLACEHOLDER = re.compile(r"(?:^|/)[A-Z][A-Z0-9_]+(?:\.(?!md\b)\w+)?(?:/|$)|\.\.\.")
_COMMAND = re.compile(r"^(?:python benchmarks\.py|dear-bench)(?: .*)?$", re.MULTILINE)
_INLINE = re.compile(r"`((?:python benchmarks\.py|dear-bench) [^`]+)`")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def broken(page: Path, target: str) -> bool:
    """True if a link of the page leads to no file, or to no heading."""
    file, _, anchor = target.partition("#")
    path = page.parent / file if file else page
    return not path.exists() or bool(anchor and anchor not in anchors(path))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\(([^)\s]+)\)", _FENCED.sub("", page.read_text()))
    local = [link for link in links if not re.match(r"\w+:", link)]
    assert [link for link in local if broken(page, link)] == []


def test_pages_that_programs_name_exist_with_their_headings():
    pattern = re.compile(r"\b(docs/[\w-]+\.md|README\.md|CONTRIBUTING\.md)(#[\w-]+)?")
    for path in _FILES:
        if path.suffix in (".py", ".yaml", ".yml", ".sh", ".html") and "tests" not in path.parts:
            for page, anchor in pattern.findall(path.read_text()):
                assert not broken(ROOT / "README.md", page + anchor), (name_of(path), page, anchor)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page):
    if page.name == "CHANGELOG.md":  # it names what was there once
        return
    for named in _NAMED.findall(page.read_text()):
        path = re.split(r"::|#", named)[0].rstrip("/")
        there = any(any(folder.glob(path)) for folder in (ROOT, page.parent))
        assert there or _PLACEHOLDER.search(path), named


@pytest.mark.parametrize(
    ("path", "stands_for_others"),
    [
        ("common/launch/NAME.py", True),
        ("docs/records/SWEEP/table.md", True),
        ("docs/.../table.md", True),
        ("docs/README.md", False),
        ("tests/unit/test_SGD.py", False),
    ],
)
def test_a_placeholder_is_a_whole_name(path, stands_for_others):
    assert bool(_PLACEHOLDER.search(path)) is stands_for_others


def test_make_targets_that_a_page_names_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([\w-]+)\b(?!=)", page.read_text(), re.MULTILINE):
            assert target in targets, (name_of(page), target)


def test_exit_statuses_are_those_of_the_command_line():
    table = (ROOT / "docs" / "experiments.md").read_text().partition("| exit status |")[2]
    listed = re.findall(r"^\| (\d+) \| (.*) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert listed == [(str(int(status)), text) for status, text in MEANINGS.items()]
    assert list(MEANINGS) == list(Status)
    for page in PAGES:
        for status in re.findall(r"exit(?: status|s with) (\d+)", page.read_text()):
            assert int(status) in list(Status), (name_of(page), status)


def test_the_version_is_in_one_place_and_has_a_changelog():
    assert f"\n## {dear.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    for name in ("pyproject.toml", "setup.py", "CITATION.cff", "README.md"):
        assert dear.__version__ not in (ROOT / name).read_text(), name


def test_the_table_of_versions_begins_with_this_one_and_what_it_needs():
    changes, package = (ROOT / "CHANGELOG.md").read_text(), (ROOT / "pyproject.toml").read_text()
    rows = [line.strip("| ").split(" | ") for line in changes.splitlines() if line[:1] == "|"][2:]
    assert [row[0] for row in rows] == re.findall(r"^## (.+)", changes, re.MULTILINE)
    version, date, python, torch, schema, _ = rows[0]
    assert version == dear.__version__ and re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert f'requires-python = ">={python.removesuffix(" or newer")}"' in package
    assert f'"torch>={torch.removesuffix(" or newer")}"' in package
    assert int(schema) == SCHEMA


def test_the_environment_and_the_package_require_the_same_versions():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith(("#", "torch"))]
    package = (ROOT / "pyproject.toml").read_text()
    assert [line for line in pinned if f'"{line}"' not in package] == []


def _commands() -> list[str]:
    """Commands of all pages and comments of experiment files, each once."""
    result: dict[str, None] = {}
    for page in PAGES:
        text = page.read_text()
        fenced = "\n".join(_FENCED.findall(text)).replace("\\\n", " ")
        result |= dict.fromkeys([*_COMMAND.findall(fenced), *_INLINE.findall(text)])
    for path in ROOT.glob("examples/**/*.yaml"):
        result |= dict.fromkeys(re.findall(r"# +(python benchmarks\.py .*)", path.read_text()))
    commands = {" ".join(command.split()) for command in result}
    return sorted(command for command in commands if "..." not in command)


COMMANDS = _commands()


@pytest.fixture(scope="session")  # tests with Horovod in their names come last of all
def outcomes(tmp_path_factory):
    """Returns what each command printed if it failed, or None."""
    folder = str(tmp_path_factory.mktemp("dry"))
    assert len(COMMANDS) > 30 and any("--model-file" in command for command in COMMANDS)
    # Not in this process, which would know the models and algorithms of the documents ever after.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        with started(1, preload=PRELOAD) as pool:
            failures = pool.submit(dry_runs.failures, COMMANDS, folder).result()
    return dict(zip(COMMANDS, failures, strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documents_can_run(command, outcomes):
    assert outcomes[command] is None
