"""The checkout: set up once, also where Horovod cannot be built."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from dear.errors import Unavailable
from dear.training.algorithm import algorithm_class
from tests.system.processes import finished

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bare_path(tmp_path):
    """A PATH with the usual tools but no compiler."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "mktemp", "rm", "find", "head", "uname", "nproc", "env"):
        (tools / name).symlink_to(shutil.which(name))
    return str(tools)


def test_a_failed_horovod_build_is_one_line_and_no_failure(tmp_path, bare_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    done = finished(
        [str(ROOT / "scripts" / "horovod.sh"), str(venv)],
        env={"PATH": bare_path, "HOME": str(tmp_path), "HOROVOD_WHEELS": str(tmp_path / "none")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert "Horovod not built: no C++ compiler" in done.stdout
    assert (venv / "horovod-build-failed.txt").read_text() == "no C++ compiler (g++) found\n"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "Building errors.cc.o\n  error: subprocess-exited-with-error\n"
            "  CMake Error at CMakeLists.txt:3:\n    Compatibility with\n    CMake < 3.5.\n more\n",
            "CMake Error at CMakeLists.txt:3: Compatibility with CMake < 3.5.",
        ),
        ("a.cc:1:2: error: no\n" + "x\n" * 100_000, "a.cc:1:2: error: no x x"),
        ("ModuleNotFoundError: No module named 'wheel'\n", "ModuleNotFoundError: No module named"),
        ("all is well\n", "no error in "),
    ],
    ids=["two places", "many lines", "Python", "none"],  # a test's name is in its environment
)
def test_a_failed_build_names_its_first_error(tmp_path, log, cause):
    (tmp_path / "log").write_text(log)
    text = 'set -euo pipefail; source "$1"; cause "$2"'
    words = ["bash", "-c", text, "_", str(ROOT / "scripts" / "shared.sh"), str(tmp_path / "log")]
    done = finished(words)
    assert done.returncode == 0 and done.stdout.startswith(cause), done.stdout


def test_horovod_says_why_it_is_missing(tmp_path, monkeypatch):
    horovod = algorithm_class("horovod")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "not installed" in horovod.unavailable()
    (tmp_path / "horovod-build-failed.txt").write_text("no C++ compiler (g++) found\n")
    assert "no C++ compiler" in horovod.unavailable()
    assert "make horovod" in horovod.unavailable()
    with pytest.raises(Unavailable, match="make horovod"):
        horovod().wrap(None, None, None, horovod.Options())


def test_without_pip_the_packages_are_linked(tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    for _ in range(2):
        done = _set_up(venv)
        assert "going on with what is there" in done.stdout and "linking it" in done.stdout
        assert done.returncode != 0  # there is no torch in there
    code = "import dear, comm_core"
    done = finished([venv / "bin" / "python", "-c", code], cwd=tmp_path)
    # The comm core is found, and then asks for torch.
    assert "No module named 'torch'" in done.stderr
    assert "comm_core/__init__.py" in done.stderr


@pytest.mark.full
def test_an_interrupted_set_up_begins_anew(tmp_path):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    command = [str(ROOT / "scripts" / "setup.sh"), str(environment)]
    env = {**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    for line in ("is incomplete", None, "of another Python"):
        done = finished(command, env=env)
        assert ("making it anew" in done.stdout) == (line is not None)
        assert line is None or line in done.stdout
        assert finished([environment / "bin" / "python", "-m", "pip", "--version"]).returncode == 0
        if line is None:
            (environment / "made_by").write_text("/usr 3.9.1\n")


def test_make_notices_that_another_python_is_given(tmp_path):
    for made_by, kept in (
        ("/usr 3.9.1\n", False),
        (f"{sys.base_prefix} {platform.python_version()} \n", True),
    ):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "python").write_text("#!/bin/sh\n")
        (tmp_path / "bin" / "python").chmod(0o755)
        (tmp_path / "made_by").write_text(made_by)
        (tmp_path / "ready").touch()
        finished(
            ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path}", f"PYTHON={sys.executable}", "help"]
        )
        assert (tmp_path / "ready").exists() == kept


def test_without_the_headers_of_python_the_build_names_them(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho /nowhere\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    done = finished([str(ROOT / "scripts" / "build.sh"), str(tmp_path)])
    assert done.returncode == 2 and "no Python.h in /nowhere (Debian: apt-get" in done.stderr


def test_another_distribution_is_told_what_to_install(tmp_path, bare_path):
    done = finished([str(ROOT / "scripts" / "system_packages.sh")], env={"PATH": bare_path})
    assert done.returncode == 2 and done.stderr.startswith("error: this is no Debian; install")


def test_a_part_of_the_tests_that_was_killed_is_repeated_whole(tmp_path):
    """The stub of pytest is killed in one part, and has one failed test in another."""
    for name in ("scripts/test.sh", "scripts/shared.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    cache = "'.pytest_cache/comm/v/cache/lastfailed'"
    stub = f"""#!{sys.executable}
import os, pathlib, sys
words = " ".join(sys.argv[1:])
if sys.argv[1] == "-c":
    print("test_one")
elif "tests/unit" in sys.argv and not os.path.exists("again"):
    os.kill(os.getpid(), 9)
elif "tests/comm" in sys.argv and "--last-failed" not in words:
    path = pathlib.Path({cache})
    path.parent.mkdir(parents=True)
    path.write_text('{{"test_one": true}}')
    sys.exit(1)
print("ran", words)
"""
    program = tmp_path / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(stub)
    program.chmod(0o755)
    first = finished([tmp_path / "scripts" / "test.sh"])
    assert first.returncode != 0
    (tmp_path / "again").touch()
    again = finished([tmp_path / "scripts" / "test.sh", "", "--again"])
    assert again.returncode == 0, again.stdout + again.stderr
    assert "tests/unit: stopped, so all of them again" in again.stdout
    assert "--last-failed" in again.stdout and "test_one" in again.stdout
    third = finished([tmp_path / "scripts" / "test.sh", "", "--again"])
    assert "stopped" not in third.stdout


@pytest.mark.full
@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="no virtual environment's Python")
def test_the_packages_of_a_python_that_is_a_virtual_environments_stay_visible(tmp_path):
    venv = tmp_path / "venv"
    done = _set_up(venv, PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    code = "import importlib.util as u; print(u.find_spec('torch').origin)"
    printed = finished([venv / "bin" / "python", "-c", code])
    assert printed.stdout.startswith(sys.prefix)


def _set_up(venv, **env):
    return finished(
        [str(ROOT / "scripts" / "setup.sh"), str(venv), "--what-can-be"],
        env={**os.environ, "PYTHON": sys.executable, **env},
    )


@pytest.mark.parametrize("make_level", ["0", "1"], ids=["by_hand", "under_make_test"])
def test_a_second_make_does_no_set_up_work(tmp_path, make_level):
    _has_a_python(tmp_path)
    (tmp_path / "ready").touch()
    (tmp_path / "comm-core-built").touch()
    (tmp_path / "horovod-tried").touch()
    done = finished(
        ["make", "--no-print-directory", "--dry-run", "bench", f"VENV={tmp_path}"],
        env={**os.environ, "MAKEFLAGS": "", "MAKELEVEL": make_level},
        check=True,
    )
    python = f"{tmp_path}/bin/python benchmarks.py"
    assert done.stdout.splitlines() == [f"{python} predict", python]


def _has_a_python(environment):
    (environment / "bin").mkdir()
    (environment / "bin" / "python").symlink_to(sys.executable)


def test_another_torch_or_a_python_that_is_gone_begin_anew(tmp_path):
    def planned() -> str:
        words = ["make", "--no-print-directory", "--dry-run", "bench", f"VENV={tmp_path}"]
        return finished(words, env={**os.environ, "MAKEFLAGS": ""}, check=True).stdout

    _has_a_python(tmp_path)
    for name in ("ready", "comm-core-built", "horovod-tried"):
        (tmp_path / name).touch()
    torch = tmp_path / "lib" / "python3.11" / "site-packages" / "torch" / "version.py"
    torch.parent.mkdir(parents=True)
    torch.touch()
    os.utime(torch, (2e9, 2e9))  # newer than the builds
    assert "scripts/build.sh" in planned() and "scripts/horovod.sh" in planned()
    os.utime(torch, (1e9, 1e9))
    assert "scripts/" not in planned()
    (tmp_path / "bin" / "python").unlink()
    (tmp_path / "bin" / "python").symlink_to("/nowhere")
    assert "scripts/setup.sh" in planned()


def test_the_first_table_does_not_wait_for_horovod(tmp_path):
    _has_a_python(tmp_path)
    for done in ("ready", "comm-core-built"):
        (tmp_path / done).touch()
    done = finished(
        ["make", "--no-print-directory", "--dry-run", "bench", f"VENV={tmp_path}"],
        env={**os.environ, "MAKEFLAGS": ""},
        check=True,
    )
    predicted, first, horovod, _, whole = done.stdout.splitlines()
    assert predicted == f"{tmp_path}/bin/python benchmarks.py predict"
    assert first == f"{tmp_path}/bin/python benchmarks.py run --filter 'ddp|wfbp|dear'"
    assert horovod == f"scripts/horovod.sh {tmp_path}"
    assert whole == f"{tmp_path}/bin/python benchmarks.py"


@pytest.mark.parametrize("has", ["an environment", "none"])
def test_it_runs_in_the_projects_environment_whatever_python_starts_it(tmp_path, has):
    """A line says otherwise what is missing where, before any trial fails."""
    shutil.copy(ROOT / "benchmarks.py", tmp_path)
    (tmp_path / "common" / "harness").mkdir(parents=True)
    stub = "import sys\ndef main(arguments):\n    print(sys.prefix, arguments)\n    return 7\n"
    (tmp_path / "common" / "harness" / "cli.py").write_text(stub)
    bare = tmp_path / "bare"
    venv.create(bare)
    if has == "an environment":
        (tmp_path / ".venv").symlink_to(sys.prefix)
    done = finished([bare / "bin" / "python", tmp_path / "benchmarks.py", "run", "--quiet"], env={})
    if has == "none":
        assert (done.returncode, done.stdout) == (2, "")
        lacks = "no torch and no numpy and no yaml and no psutil"
        wanted = f"error: {bare}/bin/python has {lacks}: `make bench`"
        assert done.stderr.startswith(wanted) and done.stderr.count("\n") == 1
    else:
        prefix, arguments = done.stdout.split(" ", 1)
        assert os.path.realpath(prefix) == os.path.realpath(sys.prefix), done.stderr
        assert (done.returncode, arguments) == (7, "['run', '--quiet']\n")


def test_an_environment_that_is_a_wrapper_is_tried_once(tmp_path):
    shutil.copy(ROOT / "benchmarks.py", tmp_path)
    wrapper = tmp_path / ".venv" / "bin" / "python"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f'#!/bin/sh\necho once\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    done = finished([sys.executable, tmp_path / "benchmarks.py", "list"], env={})
    assert done.stdout == "once\n" and "No module named 'common'" in done.stderr
