"""The C++ tests of the comm core, which `make core-tests` builds, without torch, as programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "build" / "comm_core"


@pytest.mark.parametrize(
    "command",
    [
        "sha256_test",
        "kernels_test",
        "messages_test",
        "group_test",
        pytest.param("collectives_test", marks=pytest.mark.full),
        pytest.param("collectives_test random 2000", marks=pytest.mark.full),
    ],
)
def test_program(command: str) -> None:
    name, *arguments = command.split()
    assert (BUILD / name).exists(), "the C++ tests are not built: make core-tests"
    ran = subprocess.run([BUILD / name, *arguments], capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
