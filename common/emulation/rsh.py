"""Stands in for ssh on virtual hosts: `python -m common.emulation.rsh [OPTIONS] HOST COMMAND...`.

The words of the command are joined and given to a shell, as ssh does it. The environment and the
folder stay what they are, which ssh does not do. ssh's options are accepted and mean nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

from common.emulation.namespaces import enter
from common.emulation.network import TABLE, published

_FAILED = 255  # as ssh says that it could not connect
_WITH_VALUE = set("BbcDEeFIiJLlmOoPpQRSWw")  # of ssh's options


def main(argv: list[str]) -> int:
    words = list(argv)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "--":
            break
        if len(option) == 2 and option[1] in _WITH_VALUE and words:
            words.pop(0)
    if len(words) < 2:
        print("usage: rsh.py [OPTIONS] HOST COMMAND...", file=sys.stderr)
        return _FAILED
    host = words[0].rpartition("@")[2]
    try:
        known = published()
    except (KeyError, OSError) as error:
        print(f"error: rsh: no table of virtual hosts in ${TABLE}: {error}", file=sys.stderr)
        return _FAILED
    if host not in known:
        print(f"error: rsh: {host}: no such virtual host", file=sys.stderr)
        return _FAILED
    try:
        enter(known[host])
    except OSError as error:
        print(f"error: rsh: {host}: {error}", file=sys.stderr)
        return _FAILED
    os.execv("/bin/sh", ["sh", "-c", " ".join(words[1:])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
