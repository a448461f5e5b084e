"""`python -m tests.comm.soak`: four ranks exchange and train for hours; every result is checked.

Random collectives of random size, type and order alternate with a training that takes another
algorithm every `--period` seconds. All ways of the comm core are taken: the ranks pretend to be on
two hosts. A wrong result ends it. The status is 3 if memory or descriptors grew.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.comm import worlds
from tests.comm.soak import bodies
from tests.contract.algorithms import Meaning, algorithm_names
from tests.contract.training import Script
from tests.ranks import RankPool

WORLD = "hosts0011"
SIZE = 4
MODELS = ("awkward", "plain")
PAUSE_S = 0.02
"""Mean of the random delays of each rank."""
WARM = 1500
"""Collectives before memory counts."""
FAR = 1e-3
"""Largest relative difference from the reference. A training has at most about 120 steps: the
rounding of exact diffusion grows, to 1e-3 in 400 steps."""
GROWTH = 0.02
LEFT_OUT = frozenset({"horovod"})
"""Algorithms that bring their own communication."""


def main() -> int:
    options = _arguments()
    names = options.only or [name for name in algorithm_names() if name not in LEFT_OUT]
    # torch warns of its own older names, which are tested, too.
    os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"
    draw = random.Random(options.seed)
    shared = _shared_memory()
    began = time.monotonic()
    periods: list[Period] = []
    with worlds.pool(WORLD, timeout_s=120.0) as ranks:
        baseline = _warmed_up(ranks, names, draw)
        until = time.monotonic() + options.seconds
        while (left := until - time.monotonic()) > 0:
            name = names[len(periods) % len(names)]
            setting = {"options": draw.choice(_settings(name)), "model": draw.choice(MODELS)}
            period = Period(algorithm=name, **setting)
            periods.append(period.run(ranks, draw, min(options.period, left)))
            _say(periods[-1])
    facts = {
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
        "collectives": sum(period.collectives for period in periods),
        "steps": sum(period.steps for period in periods),
        "far": max(period.far for period in periods),
        "baseline": baseline,
        "shared memory left": sorted(_shared_memory() - shared),
        "periods": [dataclasses.asdict(period) for period in periods],
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(facts, indent=1))
    misses = _misses(facts)
    print(_summary(facts), *misses, sep="\n")
    return 3 if misses else 0


def _warmed_up(ranks: RankPool, names: list[str], draw: random.Random) -> list[dict[str, int]]:
    """Returns what the ranks use once each setting has been tried.

    What is imported, connected and cached then, lasts.
    """
    for name in names:
        for options, model in itertools.product(_settings(name), MODELS):
            Period(algorithm=name, options=options, model=model).run(ranks, draw, 0.0)
    ranks.run(bodies.collectives, draw.randrange(1 << 30), WARM, PAUSE_S / 20)
    ranks.reset()
    return ranks.run(bodies.used)


def _settings(name: str) -> list[dict[str, Any]]:
    meaning = Meaning.of(name)
    return [options for options in meaning.options if meaning.worlds(options, SIZE)]


@dataclass(kw_only=True)
class Period:
    """Time of an algorithm in a soak: its training, with collectives in between.

    Attributes:
        collectives, steps: numbers of those that were right.
        far: largest relative difference of a state from its reference.
        used: what each rank uses after the period.
    """

    algorithm: str
    options: dict[str, Any]
    model: str
    collectives: int = 0
    steps: int = 0
    far: float = 0.0
    used: list[dict[str, int]] = field(default_factory=list)

    def run(self, ranks: RankPool, draw: random.Random, seconds: float) -> Period:
        """Trains for a while; raises AssertionError for a wrong result."""
        until = time.monotonic() + seconds
        while not self.steps or time.monotonic() < until:
            self._train(ranks, draw, most=60 if seconds else 5)
        ranks.reset()
        self.used = ranks.run(bodies.used)
        return self

    def _train(self, ranks: RankPool, draw: random.Random, *, most: int) -> None:
        """Trains for `most` steps or a few more, in pieces; before each come some collectives."""
        given = self.algorithm, self.options, Script(model=self.model)
        reference = bodies.Reference(*given, SIZE)
        ranks.run(bodies.begin, *given)
        until = self.steps + most
        while self.steps < until:
            count, steps = draw.randint(1, most), draw.randint(1, most)
            ranks.run(bodies.collectives, draw.randrange(1 << 30), count, PAUSE_S)
            states = ranks.run(bodies.advance, steps, draw.randrange(1 << 30), PAUSE_S)
            self._compare(states, reference.advance(steps))
            self.collectives += count
            self.steps += steps
        self._compare(ranks.run(bodies.end), reference.close())

    def _compare(self, got: list[bodies.State], wanted: list[bodies.State]) -> None:
        far = bodies.far(got, wanted)
        self.far = max(self.far, far)
        if far > FAR:
            where = f"{self.algorithm} {self.options}, after step {self.steps}"
            raise AssertionError(f"{where}: {far:.1e} from its reference")


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _misses(facts: dict[str, Any]) -> list[str]:
    """Returns a sentence for each bar that was missed."""
    misses = []
    for rank, before in enumerate(facts["baseline"]):
        after = [period["used"][rank] for period in facts["periods"]]
        grown = median(use["rss_bytes"] for use in after[-3:]) / before["rss_bytes"] - 1
        if grown > GROWTH:
            misses.append(f"rank {rank}: resident memory grew by {grown:.1%}")
        if after[-1]["descriptors"] > before["descriptors"]:
            misses.append(
                f"rank {rank}: {before['descriptors']} descriptors before, "
                f"{after[-1]['descriptors']} after"
            )
        # Autograd starts one of its threads late.
        threads = [use["threads"] for use in [before, *after]]
        if (half := max(threads[: len(threads) // 2 + 1])) < threads[-1]:
            misses.append(
                f"rank {rank}: {half} threads in the first half, {threads[-1]} at the end"
            )
    misses += [f"{name} is left in shared memory" for name in facts["shared memory left"]]
    return misses


def _summary(facts: dict[str, Any]) -> str:
    """Sentence with what was done, and the memory of each rank."""
    grown = []
    for rank, before in enumerate(facts["baseline"]):
        after = [period["used"][rank]["rss_bytes"] for period in facts["periods"]]
        last, most = (bytes_ / before["rss_bytes"] - 1 for bytes_ in (after[-1], max(after)))
        grown.append(f"{last:+.2%} (at most {most:+.2%})")
    return (
        f"{facts['seconds']:.0f} s, {len(facts['periods'])} periods: {facts['collectives']} "
        f"collectives and {facts['steps']} steps are right (at most {facts['far']:.1e} off); "
        f"resident memory of ranks: {', '.join(grown)}"
    )


def _say(period: Period) -> None:
    used = period.used
    print(
        f"{time.strftime('%H:%M:%S')} {period.algorithm:<18} {period.steps:>6} steps "
        f"{period.collectives:>6} collectives, off {period.far:.1e}, MB "
        f"{' '.join(str(use['rss_bytes'] >> 20) for use in used)}, descriptors "
        f"{' '.join(str(use['descriptors']) for use in used)}",
        file=sys.stderr,
        flush=True,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.comm.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--period", type=float, default=300.0, help="seconds of one algorithm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these algorithms")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
