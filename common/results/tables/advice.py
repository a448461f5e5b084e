"""Advice as text: an answer in sentences, then short tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from common.results.tables.cells import UNKNOWN, significant
from common.results.tables.table import markdown
from common.virtual.advice.search import Advice, Choice, Parts, Speedup, Turn

UNITS = {"bandwidth": "Gb/s", "hosts": "hosts", "batch": "samples per worker"}
"""Unit by axis."""


def text(advice: Advice, title: str, samples: int) -> str:
    """Returns the advice as Markdown.

    Args:
        title: description of the model and the cluster.
        samples: samples of a step, of all workers.
    """
    parts = [
        *_answer(advice, samples),
        f"\n{title}\n",
        _table(advice.choices, advice.base, samples),
    ]
    if advice.inexact:
        parts += ["These change the result of training:\n"]
        parts += [_table(advice.inexact, advice.base, samples)]
    parts += ["Parts of a step in ms; each comes from a change of one thing, so they overlap:\n"]
    parts += [_parts(advice.parts)]
    if advice.turns:
        parts += ["What would change the answer:\n", *(_turn(t, advice) for t in advice.turns)]
    noted = [choice for choice in (*advice.choices, *advice.inexact) if choice.note]
    parts += ["", *dict.fromkeys(f"{c.candidate.algorithm}: {c.note}" for c in noted)]
    parts += [f"no prediction for {label}: {why}" for label, why in advice.unknown.items()]
    return "\n".join(parts)


def as_json(advice: Advice) -> dict[str, object]:
    """Returns the advice as JSON values, with the speed-ups over the base."""

    def row(choice: Choice) -> dict[str, object]:
        speedup = dataclasses.asdict(choice.over(advice.base))
        return {
            **dataclasses.asdict(choice),
            "speedup": speedup,
            "verdict": _verdict(choice, advice.base),
        }

    return {
        **dataclasses.asdict(advice),
        "choices": [row(choice) for choice in advice.choices],
        "inexact": [row(choice) for choice in advice.inexact],
        "speedup": dataclasses.asdict(advice.best.over(advice.base)),
        "alike": [choice.candidate.label for choice in advice.alike],
    }


def _answer(advice: Advice, samples: int) -> list[str]:
    best, base = advice.best, advice.base
    name, under = best.candidate.label, base.candidate.label
    step = f"{_ms(best.steps_s[0])} ms per step, {significant(samples / best.steps_s[0])} samples/s"
    if best is base:
        first = f"Stay with {under}: no exact algorithm is surely faster ({step})."
    else:
        first = f"Use {name}: it is {_ratio(best.over(base))} times as fast as {under} ({step})."
    lines = [first]
    if advice.alike:
        names = ", ".join(
            f"{choice.candidate.label} {_ratio(choice.over(best))}" for choice in advice.alike
        )
        lines.append(f"Undecided, because the range contains {name}'s speed: {names}.")
    return lines


def _ms(seconds: float) -> str:
    return significant(1e3 * seconds)


def _ratio(speedup: Speedup) -> str:
    return f"{speedup.value:.2f} ({speedup.low:.2f}-{speedup.high:.2f})"


def _verdict(choice: Choice, base: Choice) -> str:
    return "" if choice is base else choice.over(base).verdict


def _table(choices: Sequence[Choice], base: Choice, samples: int) -> str:
    under = base.candidate.label
    lines = [["algorithm", "step ms (range)", "samples/s", f"speed-up over {under} (range)", ""]]
    for choice in choices:
        middle_s, *ends_s = choice.steps_s
        ends = "-".join(_ms(end_s) for end_s in sorted(ends_s))
        lines.append(
            [
                choice.candidate.label,
                f"{_ms(middle_s)} ({ends})",
                significant(samples / middle_s),
                "" if choice is base else _ratio(choice.over(base)),
                _verdict(choice, base),
            ]
        )
    return markdown(lines, [False, True, True, True, False])


def _parts(parts: Sequence[Parts]) -> str:
    rows = {
        "step": "step_s",
        "compute, with free messages": "compute_s",
        "start-up of messages: free, they would save": "start_up_s",
        "bandwidth: free bytes would save": "bytes_s",
        "overlap and order hide": "hidden_s",
        "fusion saves": "fused_s",
    }
    lines = [["", *(part.label for part in parts)]]
    for name, field in rows.items():
        values = [getattr(part, field) for part in parts]
        lines.append([name, *(UNKNOWN if v is None else f"{1e3 * v:.1f}" for v in values)])
    return markdown(lines, [False, *[True] * len(parts)])


def _turn(turn: Turn, advice: Advice) -> str:
    unit, value = UNITS[turn.axis], significant(turn.value)
    value = f"{turn.value:g}" if turn.axis != "bandwidth" else value
    where = "up" if turn.higher else "down"
    if turn.winner is None:
        return f"- {turn.axis}: no other algorithm wins {where} to {value} {unit}"
    much = ""
    if turn.speedup is not None:
        much = f" ({turn.speedup:.2f} times as fast as {advice.best.candidate.algorithm} there)"
    more = "or more" if turn.higher else "or less"
    return f"- {turn.axis}: from {value} {unit} {more}, {turn.winner.label} wins{much}"
