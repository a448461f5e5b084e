"""The GPU check's environment: what is missing is named, and it comes about without network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.harness import gpu_environment, gpu_probe

ROOT = Path(__file__).parents[2]


def test_the_probe_names_what_is_missing_and_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    requirements = "# comment\ntorch==2.13.0\nnot-a-package>=1.0\n\nnumpy>=2.0  # why\n"
    assert gpu_probe.missing(requirements) == {
        "not-a-package": "pip install 'not-a-package>=1.0'",
        "c++": "no C++ compiler",
    }


def test_without_pip_the_packages_are_linked(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    gpu_environment.link_packages(python)
    gpu_environment.link_packages(python)
    code = "import dear, comm_core, pathlib; print(dear.__file__)"
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    # There is no torch in there: the comm core is found, and then asks for it.
    assert "No module named 'torch'" in done.stderr
    assert "comm_core/__init__.py" in done.stderr


def test_the_packages_of_a_python_that_is_a_virtual_environments_stay_visible(tmp_path):
    if sys.prefix == sys.base_prefix:
        pytest.skip("this Python is no virtual environment's")
    if not gpu_environment.own_torch():
        pytest.skip("no torch 2.11 and torchvision here")
    gpu_environment.create(tmp_path / "venv", with_pip=False)
    code = "import importlib.util as u; print(u.find_spec('torch').origin)"
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-c", code],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    assert done.stdout.startswith(sys.prefix)
