"""Tests of what the doctor finds, on machines that lack one thing each."""

from __future__ import annotations

import json
import re
import shutil
import socket
from types import SimpleNamespace

import pytest

from common.harness import experiment_file
from common.harness.cli import main
from common.harness.verbs import doctor
from common.paths import ROOT


def findings(tmp_path):
    return {item.what: item for item in doctor.examine(tmp_path)}


def test_every_finding_says_what_and_what_is_amiss_says_how_to_mend_it(tmp_path):
    result = findings(tmp_path)
    assert {"Python", "torch", "comm core", "virtual hosts", "memory", "results", "ports"} <= set(
        result
    )
    for item in result.values():
        assert item.state and (item.level == "ok") == (item.fix is None), item


def test_what_mends_it_is_a_target_or_a_script_that_there_is(tmp_path):
    """Commands in the file: `make X`, and scripts."""
    text = (ROOT / "common/harness/verbs/doctor.py").read_text()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"make (core|horovod|\w+)\b", text)) - {"room"} <= set(targets)
    assert all((ROOT / script).exists() for script in re.findall(r"scripts/\w+\.sh", text))


NO_DISK = shutil, "disk_usage", lambda place: SimpleNamespace(free=5 << 20)


def _fail(*_):
    raise OSError("unknown")


MISFITS = iter(["4 ranks need 9 GiB, and 1 GiB is available"])  # and all others fit


@pytest.mark.parametrize(
    ("lack", "what", "level", "words"),
    [
        (
            (doctor, "missing_comm_core", lambda: "the comm core is not built"),
            *("comm core", "missing", "make core; until then trials run over Gloo"),
        ),
        (
            (experiment_file.sandbox, "unable", lambda: "namespaces are forbidden here"),
            *("virtual hosts", "missing", "local processes"),
        ),
        (
            (experiment_file, "PROGRAM", SimpleNamespace(exists=lambda: False)),
            *("virtual hosts", "missing", "local processes"),
        ),
        ((doctor.sandbox, "run", lambda command: 1), "priority", "note", "ulimit -r 10"),
        ((doctor, "misfit", lambda trial: next(MISFITS, None)), "memory", "FAIL", "fewer hosts"),
        (NO_DISK, "results", "FAIL", "--logs FOLDER"),
        ((socket, "gethostbyname", _fail), "host name", "note", "/etc/hosts"),
        ((doctor, "interface_towards", lambda host: None), "interface", "missing", "several hosts"),
        ((doctor.os, "getloadavg", lambda: (64.0,) * 3), "load", "note", "end other programs"),
    ],
)
def test_what_is_missing_is_found_with_what_mends_it(
    monkeypatch, tmp_path, lack, what, level, words
):
    monkeypatch.setattr(*lack)
    item = findings(tmp_path)[what]
    assert item.level == level and words in item.fix


def test_the_command_says_whether_the_default_sweep_can_run(monkeypatch, tmp_path, capsys):
    assert main(["doctor", "--logs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("the default sweep can run")
    monkeypatch.setattr(*NO_DISK)
    assert main(["doctor", "--logs", str(tmp_path)]) == 1
    assert "cannot run: results" in capsys.readouterr().out.splitlines()[-1]
    assert main(["doctor", "--json", "--logs", str(tmp_path)]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [item["what"] for item in result if item["level"] == "FAIL"] == ["results"]
