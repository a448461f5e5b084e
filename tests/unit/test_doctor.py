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


def _no_core(patch):
    patch.setattr(doctor, "missing_comm_core", lambda: "the comm core is not built")


def _no_namespaces(patch):
    patch.setattr(experiment_file.sandbox, "unable", lambda: "namespaces are forbidden here")


def _no_switch(patch):
    patch.setattr(experiment_file, "PROGRAM", SimpleNamespace(exists=lambda: False))


def _no_memory(patch):
    reasons = iter(["4 ranks need 9 GiB, and 1 GiB is available"])
    patch.setattr(doctor, "misfit", lambda trial: next(reasons, None))


def _no_disk(patch):
    patch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=5 << 20))


def _no_name(patch):
    def fail(name):
        raise OSError("unknown")

    patch.setattr(socket, "gethostbyname", fail)


def _no_way(patch):
    patch.setattr(doctor, "interface_towards", lambda host: None)


def _busy(patch):
    patch.setattr(doctor.os, "getloadavg", lambda: (64.0, 64.0, 64.0))


@pytest.mark.parametrize(
    ("lack", "what", "level", "words"),
    [
        (_no_core, "comm core", "missing", "make core; until then trials run over Gloo"),
        (_no_namespaces, "virtual hosts", "missing", "local processes"),
        (_no_switch, "virtual hosts", "missing", "local processes"),
        (_no_memory, "memory", "FAIL", "fewer hosts"),
        (_no_disk, "results", "FAIL", "--logs FOLDER"),
        (_no_name, "host name", "note", "/etc/hosts"),
        (_no_way, "interface", "missing", "several hosts"),
        (_busy, "load", "note", "end other programs"),
    ],
)
def test_what_is_missing_is_found_with_what_mends_it(
    monkeypatch, tmp_path, lack, what, level, words
):
    lack(monkeypatch)
    item = findings(tmp_path)[what]
    assert item.level == level and words in item.fix


def test_the_command_says_whether_the_default_sweep_can_run(monkeypatch, tmp_path, capsys):
    assert main(["doctor", "--logs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("the default sweep can run")
    _no_disk(monkeypatch)
    assert main(["doctor", "--logs", str(tmp_path)]) == 1
    assert "cannot run: results" in capsys.readouterr().out.splitlines()[-1]
    assert main(["doctor", "--json", "--logs", str(tmp_path)]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [item["what"] for item in result if item["level"] == "FAIL"] == ["results"]
