"""The comm core's layers: which folder of its sources may include which."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "common" / "comm_core" / "src"
BELOW = {
    "base": set(),
    "io": {"base"},
    "secret": {"base"},
    "reduce": {"base"},
    "transport": {"base", "io", "secret"},
    "tcp": {"base", "io", "secret", "transport"},
    "shm": {"base", "io", "secret"},
}
MOST = {"base", "io", "secret", "reduce", "transport", "engine", "group", "collectives", "messages"}
ABOVE = {
    "engine": MOST,
    "group": MOST | {"shm"},
    "collectives": MOST - {"messages"} | {"shm"},
    "messages": MOST - {"collectives"},
}
# Where one is chosen, and nowhere else.
NAMES_A_TRANSPORT = {"engine/engine.cc": {"tcp"}}


def _sources() -> list[Path]:
    result = sorted(path for path in SRC.rglob("*") if path.suffix in (".cc", ".h"))
    assert len(result) > 50
    return result


def _included(path: Path) -> set[str]:
    return set(re.findall(r'#include "(\w+)/', path.read_text()))


def test_each_folder_includes_only_what_it_stands_on():
    allowed = BELOW | ABOVE
    for path in _sources():
        name = path.relative_to(SRC).as_posix()
        folder = name.split("/")[0]
        more = NAMES_A_TRANSPORT.get(name, set())
        wrong = _included(path) - allowed[folder] - {folder} - more
        assert not wrong, f"{name} includes {', '.join(sorted(wrong))}"


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
