"""The C++ tests of the comm core, which `make core-tests` builds, without torch, as programs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "comm_core"
NOT_BUILT = "the C++ tests are not built: make core-tests"


@pytest.mark.parametrize(
    "command",
    [
        "sha256_test",
        "settings_test",
        "kernels_test",
        "messages_test",
        "turns_test",
        "engine_alone_test",
        "collectives_alone_test",
        "messages_alone_test",
        "callback_order_test",
        "windows_test",
        "model_test 1000",  # a group fails in it, and a rank forks
        "regimes_test",
        "fuzz_test 10000",
        pytest.param("model_test 20000 2", marks=pytest.mark.full),
        pytest.param("fuzz_test 1000000 2", marks=pytest.mark.full),
        pytest.param("collectives_test", marks=pytest.mark.full),
        pytest.param("collectives_test random 2000", marks=pytest.mark.full),
    ],
)
def test_program(command: str) -> None:
    name, *arguments = command.split()
    assert (BUILD / name).exists(), NOT_BUILT
    ran = subprocess.run([BUILD / name, *arguments], capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]


def test_groups() -> None:
    """Each of the program's tests in a process of its own, at once: they mostly wait."""
    program = BUILD / "group_test"
    assert program.exists(), NOT_BUILT
    source = (ROOT / "common" / "comm_core" / "tests" / "group_test.cc").read_text()
    names = re.findall(r'{"([^"]+)", \w+}', source.partition("return run_tests(")[2])
    assert len(names) >= 7
    pipe = subprocess.PIPE
    running = {
        name: subprocess.Popen([program, name], stdout=pipe, stderr=subprocess.STDOUT, text=True)
        for name in names
    }
    try:
        outputs = {name: process.communicate(timeout=200)[0] for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    for name, process in running.items():
        assert process.returncode == 0 and f"{name}: right" in outputs[name], outputs[name][-4000:]
