"""End of a fork server."""

from __future__ import annotations

import pytest

from tests.system.processes import python


@pytest.mark.parametrize("where", ["multiprocessing.forkserver", "any other program"])
def test_only_a_fork_server_ends_without_freeing_its_modules(where: str):
    program = f"# {where}\nimport atexit; atexit.register(print, 'freed')\n"
    done = python("-c", program + "import common.machine.fork_server")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if where.startswith("multiprocessing") else "freed\n")
