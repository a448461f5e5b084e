"""The notebook runs as it is, from the start of its workers to their end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "consensus.ipynb"
LIMIT_S = 90


def marked(mark: str) -> list[int]:
    """Processes that have `mark` in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # it has ended meanwhile, or is somebody else's
    return found


def outputs(notebook: dict, kind: str) -> list[dict]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [out for cell in cells for out in cell["outputs"] if out["output_type"] == kind]


def pictures(notebook: dict) -> list[dict]:
    return outputs(notebook, "display_data")


def printed(notebook: dict) -> str:
    """Everything but progress bars."""
    texts = ["".join(out["text"]) for out in outputs(notebook, "stream")]
    return "".join(text for text in texts if "\r" not in text and text.strip())


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The executed notebook, and the processes that were left ten seconds later."""
    folder = tmp_path_factory.mktemp("notebook")
    mark = f"notebook-{uuid.uuid4().hex}"
    environment = {
        **os.environ,
        "DEAR_TEST_MARK": mark,
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
    command += ["--output-dir", str(folder), str(NOTEBOOK)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, f"{done.stderr}\n(pip install -r examples/requirements.txt?)"
        deadline = time.monotonic() + 10
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield json.loads((folder / NOTEBOOK.name).read_text()), marked(mark)
    finally:
        for process in marked(mark):
            os.kill(process, signal.SIGKILL)


@pytest.mark.full
def test_four_ranks_find_the_mean(executed):
    notebook, _ = executed
    assert not outputs(notebook, "error")
    said = printed(notebook)
    assert sorted(re.findall(r"rank (\d) of 4", said)) == list("0123")
    assert len(re.findall(r"less than 1e-6 after \d+ iterations", said)) == 4
    assert len(pictures(notebook)) == 2


@pytest.mark.full
def test_it_leaves_no_process_behind(executed):
    assert executed[1] == []


@pytest.mark.full
def test_what_readers_see_is_what_it_gives(executed):
    committed, notebook = json.loads(NOTEBOOK.read_text()), executed[0]
    assert sorted(printed(committed).splitlines()) == sorted(printed(notebook).splitlines())
    assert len(pictures(committed)) == 2


def test_it_names_no_machine():
    notebook = json.loads(NOTEBOOK.read_text())
    streams = outputs(notebook, "stream")
    assert {out["name"] for out in streams} == {"stdout"}
    said = "".join("".join(out["text"]) for out in streams)
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b|/\w+/|\d+\.\d+\.\d+\.", said)
    assert all(set(out["data"]) == {"image/png", "text/plain"} for out in pictures(notebook))
