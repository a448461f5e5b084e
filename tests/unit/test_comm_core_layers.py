"""The comm core's layers: which folder of its sources may include which."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "common" / "comm_core" / "src"
LISTS = ROOT / "common" / "comm_core" / "CMakeLists.txt"
# Where one is chosen, and nowhere else.
NAMES_A_TRANSPORT = "engine/engine.cc"


def _layers() -> dict[str, set[str]]:
    """Returns, by folder, the folders that it links, directly or through others."""
    below: dict[str, set[str]] = {}
    for folder, linked in re.findall(r"^layer\((\w+)([\w ]*)\)$", LISTS.read_text(), re.MULTILINE):
        below[folder] = set()
        for lower in linked.split():
            assert lower in below, f"{folder} links {lower}, which is not below it"
            below[folder] |= {lower} | below[lower]
    return below


def _sources() -> list[Path]:
    result = sorted(path for path in SRC.rglob("*") if path.suffix in (".cc", ".h"))
    assert len(result) > 50
    return result


def _included(path: Path) -> set[str]:
    return set(re.findall(r'#include "(\w+)/', path.read_text()))


def test_no_source_uses_streams_which_a_second_copy_of_the_library_breaks():
    header = re.compile(r"#include <(\w*stream|iomanip|locale)>")
    assert [str(path) for path in _sources() if header.search(path.read_text())] == []


def test_every_folder_is_a_library():
    assert set(_layers()) == {path.name for path in SRC.iterdir()}


def test_each_folder_includes_only_what_it_links():
    below = _layers()
    for path in _sources():
        name = path.relative_to(SRC).as_posix()
        folder = name.split("/")[0]
        wrong = _included(path) - below[folder] - {folder}
        assert not wrong, f"{name} includes {', '.join(sorted(wrong))}"


def test_only_one_file_names_the_transport():
    naming = {
        path for path in _sources() if "tcp" in _included(path) and path.parent != SRC / "tcp"
    }
    assert {path.relative_to(SRC).as_posix() for path in naming} == {NAMES_A_TRANSPORT}


def test_only_the_device_over_tcp_knows_a_socket_option():
    knowing = {path.parent.name for path in _sources() if "setsockopt" in path.read_text()}
    assert knowing == {"tcp"}


def test_what_runs_without_the_comm_core_does_not_import_it_at_the_top():
    folders = [ROOT / "dear", ROOT / "plots", *(ROOT / "common").glob("[!c]*/")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 200
    for path in files:
        imports = re.findall(r"^(?:import|from) comm_core\b", path.read_text(), re.MULTILINE)
        assert not imports, path
