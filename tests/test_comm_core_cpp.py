"""The C++ tests of the comm core: built once, without torch, and run as programs."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "comm_core_tests"


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of the built programs; after the first time, only what has changed is built."""
    scripts = sysconfig.get_path("scripts")  # cmake and ninja of the virtual environment
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    source = ROOT / "common" / "comm_core"
    for command in (
        ["cmake", "-S", source, "-B", BUILD, "-G", "Ninja", "-DCOMM_CORE_TESTS=ON"],
        ["cmake", "--build", BUILD],
    ):
        built = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=900
        )
        assert built.returncode == 0, (built.stdout + built.stderr)[-4000:]
    return BUILD


@pytest.mark.timeout(900)  # the first also builds
@pytest.mark.parametrize(
    "command",
    [
        "sha256_test",
        "kernels_test",
        "messages_test",
        "group_test",
        "collectives_test",
        "collectives_test random 2000",
    ],
)
def test_program(programs: Path, command: str) -> None:
    name, *arguments = command.split()
    ran = subprocess.run([programs / name, *arguments], capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
