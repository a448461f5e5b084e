"""A notebook's cluster: places in a job for its engines, and the example with real ones."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import uuid

import pytest

from dear import interactive
from dear.comm.environment import rank_facts
from dear.errors import UserError
from tests.system.processes import ROOT, finished, wait_for
from tests.system.sweeps import processes_of

NOTEBOOK = ROOT / "examples" / "notebooks" / "consensus.ipynb"


class Engine:
    """Stands for an engine on a host: answers what is asked there, keeps what is told."""

    def __init__(self, host: str, joined: bool = False) -> None:
        self.host, self.joined = host, joined
        self.environment: dict[str, str] = {}

    def apply_sync(self, function, *args):
        if function is interactive._place:
            return self.host, self.joined
        if function is interactive.free_port:
            return function()
        assert function is interactive._enter
        self.environment.update(*args)
        return None


class Client(dict):
    """Engines by number."""

    @property
    def ids(self) -> list[int]:
        return sorted(self)


def test_engines_of_several_hosts_are_grouped_by_host():
    client = Client(enumerate(Engine(host) for host in ("one", "two", "one", "two", "three")))
    order = interactive.assign_ranks(client)
    assert order == [0, 2, 1, 3, 4]
    facts = [rank_facts(client[number].environment) for number in order]
    assert [fact.rank for fact in facts] == [0, 1, 2, 3, 4]
    assert [fact.local_rank for fact in facts] == [0, 1, 0, 1, 0]
    assert [fact.local_world_size for fact in facts] == [2, 2, 2, 2, 1]
    assert {client[n].environment["MASTER_ADDR"] for n in client} == {"one"}
    assert len({client[n].environment["MASTER_PORT"] for n in client}) == 1
    assert {fact.launcher for fact in facts} == {"torchrun"}
    assert interactive._place()[1] is False  # this process has joined no job


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (Client(), "no engines"),
        (
            Client({0: Engine("one"), 1: Engine("one", joined=True)}),
            "engine 1 has already joined a job",
        ),
    ],
)
def test_what_cannot_be_a_job_is_refused_in_one_line(client, words):
    with pytest.raises(UserError, match=words) as caught:
        interactive.assign_ranks(client)
    assert "\n" not in str(caught.value)
    assert not any(engine.environment for engine in client.values())


def test_an_engine_forgets_the_store_of_another_job(monkeypatch):
    monkeypatch.setenv("DEAR_STORE", "elsewhere")
    monkeypatch.setenv("RANK", "7")
    interactive._enter({"RANK": "1"})
    assert interactive.os.environ["RANK"] == "1"
    assert "DEAR_STORE" not in interactive.os.environ


def outputs(notebook: dict, kind: str) -> list[dict]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [out for cell in cells for out in cell["outputs"] if out["output_type"] == kind]


def printed(notebook: dict) -> str:
    """Everything but progress bars."""
    texts = ["".join(out["text"]) for out in outputs(notebook, "stream")]
    return "".join(text for text in texts if "\r" not in text and text.strip())


@pytest.mark.full
def test_the_notebook_gives_what_readers_see_and_leaves_no_process_behind(tmp_path):
    mark = f"notebook-{uuid.uuid4().hex}"
    environment = {
        **os.environ,
        "DEAR_TEST_MARK": mark,
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
    command += ["--output-dir", str(tmp_path), str(NOTEBOOK)]
    try:
        done = finished(command, env=environment)
        assert done.returncode == 0, f"{done.stderr}\n(pip install -r examples/requirements.txt?)"
        wait_for(lambda: not processes_of(mark))
    finally:
        for process in processes_of(mark):
            os.kill(process, signal.SIGKILL)
    notebook = json.loads((tmp_path / NOTEBOOK.name).read_text())
    assert not outputs(notebook, "error")
    text = printed(notebook)
    assert sorted(re.findall(r"rank (\d) of 4", text)) == list("0123")
    assert len(re.findall(r"less than 1e-6 after \d+ iterations", text)) == 4
    committed = json.loads(NOTEBOOK.read_text())
    assert sorted(printed(committed).splitlines()) == sorted(text.splitlines())
    assert [len(outputs(each, "display_data")) for each in (notebook, committed)] == [2, 2]


def test_the_notebook_names_no_machine():
    notebook = json.loads(NOTEBOOK.read_text())
    streams = outputs(notebook, "stream")
    assert {out["name"] for out in streams} == {"stdout"}
    text = "".join("".join(out["text"]) for out in streams)
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b|/\w+/|\d+\.\d+\.\d+\.", text)
    pictures = outputs(notebook, "display_data")
    assert all(set(out["data"]) == {"image/png", "text/plain"} for out in pictures)


def _ibfrun(environment, *arguments):
    command = [sys.executable, "-c", "from dear.bluefog.run import interactive as i; exit(i())"]
    done = finished([*command, *arguments], env=environment)
    assert done.returncode == 0, done.stderr


IN_A_NOTEBOOK = """
import ipyparallel, sys
from dear import interactive
client = ipyparallel.Client(profile="bluefog")
client.wait_for_engines(2, timeout=100)
order = interactive.assign_ranks(client)

def body():
    import torch
    import dear.bluefog as bf
    bf.init()
    return bf.rank(), bf.size(), bf.allreduce(torch.ones(1) * bf.rank()).item()

print(client[order].apply_sync(body))
"""


@pytest.mark.full
def test_ibfrun_starts_engines_that_average_and_stops_them(tmp_path):
    pytest.importorskip("ipyparallel", reason="pip install -r examples/requirements.txt")
    mark = f"ibfrun-{uuid.uuid4().hex}"
    environment = {**os.environ, "DEAR_TEST_MARK": mark, "IPYTHONDIR": str(tmp_path)}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    try:
        _ibfrun(environment, "start", "-np", "2")
        done = finished([sys.executable, "-c", IN_A_NOTEBOOK], env=environment)
        assert done.stdout.strip() == "[(0, 2, 0.5), (1, 2, 0.5)]", done.stderr
        _ibfrun(environment, "stop")
        wait_for(lambda: not processes_of(mark))
    finally:
        for process in processes_of(mark):
            os.kill(process, signal.SIGKILL)
