"""A pytest plugin that runs the named tests in the named order, and says which failed first.

Names given as arguments would be looked up one by one, for seconds where there are hundreds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def environment(names: list[str], folder: Path) -> dict[str, str]:
    """Environment of a pytest process with this plugin; in `folder` it talks to its caller."""
    (folder / "names.json").write_text(json.dumps(names))
    (folder / "failed.json").unlink(missing_ok=True)
    return {"MUTANTS_CHOSEN": str(folder)}


def failed(folder: Path) -> dict[str, str] | None:
    """Test and message of the first failure, None if there was none."""
    path = folder / "failed.json"
    return json.loads(path.read_text()) if path.exists() else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Horovod's stay the last, as tests/conftest.py has them."""
    names = json.loads(Path(os.environ["MUTANTS_CHOSEN"], "names.json").read_text())
    place = {name: number for number, name in enumerate(names)}
    items[:] = [item for item in items if item.nodeid in place]
    items.sort(key=lambda item: ("horovod" in item.name, place[item.nodeid]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = Path(os.environ["MUTANTS_CHOSEN"], "failed.json")
    if report.failed and not path.exists():
        text = str(report.longrepr)
        path.write_text(json.dumps({"test": report.nodeid, "message": text[-2000:]}))
