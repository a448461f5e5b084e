"""Stand-in for ssh on virtual hosts.

    python -m common.emulation.hosts.rsh [OPTIONS] HOST COMMAND...

As with ssh, the words of the command are joined and passed to a shell. Unlike with ssh, the
environment and the working folder are kept. ssh's options are accepted and ignored.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3])]

from common.emulation.hosts.namespaces import enter
from common.emulation.hosts.network import TABLE, published

_FAILED = 255  # ssh's exit status if it cannot connect
_WITH_VALUE = set("BbcDEeFIiJLlmOoPpQRSWw")  # options of ssh that take a value


def main(argv: list[str]) -> int:
    arguments = list(argv)
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        if option == "--":
            break
        if len(option) == 2 and option[1] in _WITH_VALUE and arguments:
            arguments.pop(0)
    if len(arguments) < 2:
        print("usage: rsh.py [OPTIONS] HOST COMMAND...", file=sys.stderr)
        return _FAILED
    host = arguments[0].rpartition("@")[2]
    try:
        pids = published()
    except (KeyError, OSError) as error:
        print(f"error: rsh: no table of virtual hosts in ${TABLE}: {error}", file=sys.stderr)
        return _FAILED
    if host not in pids:
        print(f"error: rsh: {host}: no such virtual host", file=sys.stderr)
        return _FAILED
    try:
        enter(pids[host])
    except OSError as error:
        print(f"error: rsh: {host}: {error}", file=sys.stderr)
        return _FAILED
    os.execv("/bin/sh", ["sh", "-c", " ".join(arguments[1:])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
