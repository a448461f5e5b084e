"""Every loop is right with every algorithm, or ends with a UserError that helps."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from dear.algorithms import reference as references
from dear.training.algorithm import algorithm_class, plugin_of
from tests.contract.algorithms import Meaning, algorithm_names, reference_of, skip_if_unavailable
from tests.contract.loops.catalogue import LOOPS
from tests.contract.loops.expected import REFUSED, UNDEFINED, words_of
from tests.contract.loops.runs import Loop, Seen, Subject, by_threads, difference, on_rank
from tests.contract.pairs import one_case

MORE = {"ddp": [{"zero": True}], "decentralized": [{"update": "backward"}]}
"""Options that change what a loop meets, beside the first ones that are tested."""
TOLERANCE = 2e-5


def _cases() -> list[Any]:
    """All loops; marked `full` are those with all options, those with three ranks, and two of three
    of each algorithm, so that each loop is tried with a third of the algorithms. Of a plugin none
    is left out.

    Ranks that take turns do so in `step()`, so updates in the backward pass are left out.
    """
    cases = []
    for place, name in enumerate(algorithm_names()):
        thinned = plugin_of(name) is None
        first, *others = Meaning.of(name).options
        quick = [first, *[{**first, **more} for more in MORE.get(name, [])]]
        chosen = [(options, 2, False) for options in quick]
        chosen += [(options, 2, True) for options in others if options not in quick]
        chosen += [(options, 3, True) for options in quick]
        for options, size, full in chosen:
            if Meaning.of(name).in_turn and options.get("update") != "step":
                continue
            if Meaning.of(name).worlds(options, size):
                subject = Subject(name, tuple(options.items()))
                for number, loop in enumerate(LOOPS):
                    label = f"{subject}-{size}-{loop.__name__}"
                    left = full or (thinned and (place + number) % 3 > 0)
                    cases += one_case(subject, size, loop, label=label, full=left)
    return cases


@functools.cache
def _wanted(loop: Loop, size: int, subject: Subject, reference: Any) -> list[Seen]:
    return by_threads(subject, size, loop)


def wanted(loop: Loop, size: int, subject: Subject) -> list[Seen]:
    reference = reference_of(subject.name, dict(subject.options))
    plain = reference is references.average
    return _wanted(loop, size, Subject("allreduce") if plain else subject, reference)


@pytest.mark.parametrize(("subject", "size", "loop"), _cases())
def test_a_loop_is_right_or_refused(world, subject: Subject, size: int, loop: Loop):
    skip_if_unavailable(subject.name)
    pool = world(size, subject.name)
    results = pool.run(on_rank, subject, loop)
    texts = [result for result in results if isinstance(result, str)]
    if any(text.startswith("broken") or "the ranks disagree" in text for text in texts):
        pool.close()  # transfers may be under way
    words = words_of(loop, subject)
    plugin = not algorithm_class(subject.name).__module__.startswith("dear.")
    if plugin and all(isinstance(result, str) for result in results):
        # What it has from `dear` may refuse the loop.
        words = next((text for text in REFUSED.get(loop, {}).values() if text in results[0]), "")
        assert words, results
    if words is not None:
        assert all(isinstance(result, str) and words in result for result in results), results
        return
    assert not any(isinstance(result, str) for result in results), results
    if subject.name in UNDEFINED.get(loop, "").split():
        assert all(value.isfinite().all() for result in results for value in result[-1].values())
        return
    pairs = zip(results, wanted(loop, size, subject), strict=True)
    assert max(difference(*pair) for pair in pairs) < TOLERANCE
