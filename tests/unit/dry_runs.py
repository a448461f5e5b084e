"""Commands of the documents, tried in one process: `run` as a dry run, other verbs only parsed."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from unittest import mock

from common import machine
from common.harness import cli
from common.models import datasets
from dear.errors import UserError

EXAMPLES = {
    "X.yaml": "quick",
    "mine.yaml": "quick",
    "mine.py": "examples/bring_your_own_model.py",
    "my_algorithm.py": "examples/bring_your_own_algorithm.py",
    "/tmp/my_idea.py": "examples/bring_your_own_algorithm.py",
}
"""Files of the project in place of files that only the documents name."""


def arguments(command: str) -> list[str]:
    """Returns the arguments of the harness in a command, without comments, pipes and `[` `]`."""
    words = shlex.split(command, comments=True)
    ends = [index for index, word in enumerate(words) if word in ("|", ">", "&&")]
    words = words[: ends[0]] if ends else words
    start = 2 if words[0] == "python" else 1
    plain = [re.sub(r"^\[(\w+)\]$", r"\1", word) for word in words[start:]]
    return [EXAMPLES.get(word, word) for word in plain]


def failure(words: list[str], folder: str) -> str | None:
    """Returns what the command line prints if it refuses the arguments, or None."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            if cli.parse(words).verb != "run":
                return None
            words = words if words[:1] == ["run"] else ["run", *words]
            status = cli.main([*words, "--dry-run", "--logs", folder])
        except UserError as error:
            return str(error)
    return output.getvalue() if status else None


def failures(commands: list[str], folder: str) -> list[str | None]:
    """Returns what each of the commands prints if it fails, or None."""
    with (
        # Neither the data nor the memory of the machine matter to a plan.
        mock.patch.object(datasets, "digest", lambda *_: "0"),
        mock.patch.object(datasets, "path_of", lambda *_: None),
        mock.patch.object(machine, "available_bytes", lambda: 1 << 50),
    ):
        return [failure(arguments(command), folder) for command in commands]
