#!/usr/bin/env python3
"""How near the emulated cluster comes to what it stands for.

  python bench/fidelity.py links         rates of the links, asked and measured; bar 2 %
  python bench/fidelity.py compute       replayed steps against their profiles; bar 2 %
  python bench/fidelity.py collective    a 4-rank all-reduce at 1 Gb/s against the wire; bar 6 %
  python bench/fidelity.py scales        the same trial at time scales k and 2k; bar 3 %

Exit status: 0 within the bar, 1 not or something failed, 2 a mistake in the options.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import session
from common.emulation import sandbox
from dear.errors import UserError

SANDBOXED = ("links", "collective")


def main(argv: list[str]) -> int:
    args = _parse(argv)
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}: must be at least 1")
    if args.what in SANDBOXED and not sandbox.inside():
        return sandbox.run([sys.executable, str(Path(__file__)), *argv])
    return int(importlib.import_module(f"bench.fidelity_{args.what}").run(args))


def _parse(argv: list[str]) -> argparse.Namespace:
    shape = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    whats = parser.add_subparsers(dest="what", required=True)
    made = {}
    for name, repeats, text in (
        ("links", 5, "rates of the links, asked and measured"),
        ("compute", 5, "replayed steps against their profiles"),
        ("collective", 7, "an all-reduce against the wire"),
        ("scales", 3, "the same trial at time scales k and 2k"),
    ):
        made[name] = whats.add_parser(name, help=text, description=text, formatter_class=shape)
        made[name].add_argument("--repeats", type=int, default=repeats, help="rounds")
        made[name].add_argument(
            "--json", type=Path, default=None, help="keep raw numbers in this new file"
        )
    _add_collective(made["collective"])
    _add_scales(made["scales"])
    return parser.parse_args(argv)


def _add_collective(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engines", nargs="+", default=["comm_core"], metavar="NAME", help="comm_core, gloo")
    add("--hosts", type=int, default=4, help="virtual hosts, one rank each")
    add("--gbps", type=float, default=1.0, help="rate of the links in Gb/s")
    add("--size", default="25Mi", help="bytes to reduce")
    add("--mtu", nargs="+", type=int, default=[1500], help="packet sizes of the links, in bytes")


def _add_scales(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--time-scale", type=float, default=10.0, help="k; the other scale is 2k")
    add("--algorithms", nargs="+", default=["ddp", "dear"], metavar="NAME", help="algorithms")
    add("--model", default="bert_base@rtx2080ti-modelled", help="a replayed model")
    add("--batch-size", type=int, default=64, help="samples per worker")
    add("--hosts", type=int, default=4, help="virtual hosts, one rank each")
    add("--network", default="10gbe", help="network profile or bandwidth")
    add("--steps", type=int, default=3, help="timed steps in each round")


if __name__ == "__main__":
    session.program(main)
