"""Search for the fastest algorithm on a cluster, the parts of its step, and where others win.

The search asks for steps by `Question`; it does not know how they are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from common.virtual.over import turn
from dear.errors import UserError

if TYPE_CHECKING:
    from common.virtual.advice.causes import Part

LEAST = 0.02
"""Smallest relative difference of two steps that counts; measured steps may be as far from
predicted ones (docs/prediction.md)."""
Verdict = Literal["faster", "slower", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Algorithm with options."""

    label: str
    """Name in tables, different for each candidate."""
    algorithm: str
    options: Mapping[str, object] = field(default_factory=dict)
    exact: bool = True
    """True if it trains like a single worker with the joined batch."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Value of a property of the cluster or the model, in place of the asked one."""

    axis: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Question:
    """Question for the step of a candidate."""

    label: str
    place: Place | None = None
    sign: int = 0
    """End of the ranges of costs and compute: -1 or 1; 0: the middle."""
    part: Part | None = None
    """Part that costs nearly nothing."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Predicted step in seconds; None: the note says why there is none."""

    step_s: float | None
    note: str | None = None


Answers = Callable[[Sequence[Question]], Sequence[Answer]]
"""Function that predicts steps."""


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Ratio of two steps, and its ends: those of the ratio with both steps at an end."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """Verdict on the step below: undecided if 1 is not outside the range by `LEAST`."""
        if self.low > 1 + LEAST:
            return "faster"
        return "slower" if self.high < 1 / (1 + LEAST) else "undecided"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Algorithm with its best options, and its step in seconds."""

    candidate: Candidate
    steps_s: tuple[float, float, float]
    """Step in the middle of the ranges, and at their ends."""
    note: str | None = None

    def over(self, other: Choice) -> Speedup:
        """Returns the speed relative to another choice."""
        ratios = [b / a for a, b in zip(self.steps_s, other.steps_s, strict=True)]
        return Speedup(value=ratios[0], low=min(ratios), high=max(ratios))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts of a step in seconds, each from a step in which one thing is changed. They overlap, so
    they do not add up. None: not modelled, or there is no such thing."""

    label: str
    step_s: float
    compute_s: float | None
    """Step with free messages."""
    start_up_s: float | None
    """Time by which free start-ups shorten the step."""
    bytes_s: float | None
    """Time by which free bytes shorten the step."""
    hidden_s: float | None
    """Time by which compute and messages one after the other would take longer."""
    fused_s: float | None
    """Time by which the step is longer if every gradient travels alone."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Property that the search changes, and its values from the asked one outwards."""

    name: str
    start: float
    lower: tuple[float, ...] = ()
    higher: tuple[float, ...] = ()
    whole: bool = False
    """True: only whole numbers are possible."""
    refined: bool = True
    """True: the place between two values can be searched."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """First place along an axis, in one direction, at which another algorithm wins."""

    axis: str
    higher: bool
    """Direction."""
    value: float
    """Value of the place; without a winner, the last value that was tried."""
    winner: Candidate | None = None
    speedup: float | None = None
    """Speed of the winner relative to the best candidate of the advised algorithm."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Answer of the search."""

    best: Choice
    """Fastest exact choice; the base if none is surely faster."""
    base: Choice
    choices: tuple[Choice, ...]
    """Exact algorithms, the fastest first; a variant of the base is there, too."""
    inexact: tuple[Choice, ...]
    """Algorithms that change the result of training."""
    unknown: Mapping[str, str]
    """Reason by candidate without a step."""
    parts: tuple[Parts, ...]
    """Parts of the step of the base and of the best."""
    turns: tuple[Turn, ...]

    @property
    def alike(self) -> tuple[Choice, ...]:
        """Other exact choices that are as fast as the best, within the range."""
        others = [choice for choice in self.choices if choice is not self.best]
        return tuple(c for c in others if c.over(self.best).verdict == "undecided")


def advise(
    candidates: Sequence[Candidate],
    base: str,
    answers: Answers,
    axes: Sequence[Axis] = (),
    unfused: Mapping[str, str] | None = None,
) -> Advice:
    """Searches the candidates.

    Args:
        base: label of the candidate to which the others are compared.
        unfused: label by algorithm with which every gradient travels alone.

    Raises:
        UserError: the base has no step.
    """
    asked = _Asked(answers)
    steps = asked.steps(candidates)
    by_label = {candidate.label: candidate for candidate in candidates}
    if base not in steps:
        raise UserError(f"{base}: {asked.note(base)}")
    families: dict[str, list[Candidate]] = {}
    for label in steps:
        families.setdefault(by_label[label].algorithm, []).append(by_label[label])
    chosen = [by_label[base], *(_simplest(family, steps) for family in families.values())]
    choices = asked.choices(list({candidate.label: candidate for candidate in chosen}.values()))
    choices.sort(key=lambda choice: choice.steps_s[0])
    exact = [choice for choice in choices if choice.candidate.exact]
    under = next(choice for choice in exact if choice.candidate.label == base)
    best = exact[0] if exact[0].over(under).verdict == "faster" else under
    every = [candidate for candidate in candidates if candidate.exact]
    turns = [
        _turn(asked, every, best.candidate, axis, higher)
        for axis in axes
        for higher in (False, True)
    ]
    return Advice(
        best=best,
        base=under,
        choices=tuple(exact),
        inexact=tuple(choice for choice in choices if not choice.candidate.exact),
        unknown={c.label: str(asked.note(c.label)) for c in candidates if c.label not in steps},
        parts=tuple(
            asked.parts(choice.candidate.label, (unfused or {}).get(choice.candidate.algorithm))
            for choice in ([under] if best is under else [under, best])
        ),
        turns=tuple(place for place in turns if place is not None),
    )


def _simplest(candidates: Sequence[Candidate], steps: Mapping[str, float]) -> Candidate:
    """Returns the first candidate that is at most `LEAST` slower than the fastest."""
    least_s = min(steps[candidate.label] for candidate in candidates)
    return next(c for c in candidates if steps[c.label] <= (1 + LEAST) * least_s)


def _turn(
    asked: _Asked, candidates: Sequence[Candidate], best: Candidate, axis: Axis, higher: bool
) -> Turn | None:
    """Returns where another algorithm wins; None if no value of the axis has steps.

    At each value, every algorithm may change its options. Between two values, it may not.
    """
    before, last = axis.start, None
    for value in axis.higher if higher else axis.lower:
        duel = _Duel.at(asked, candidates, best, Place(axis=axis.name, value=value))
        if duel is None:
            break
        if duel.is_lost(value):
            if axis.refined:
                value = turn(duel.is_lost, before, value, whole=axis.whole)
            return Turn(
                axis=axis.name,
                higher=higher,
                value=value,
                winner=duel.winner,
                speedup=duel.speedup(value),
            )
        before = last = value
    return None if last is None else Turn(axis=axis.name, higher=higher, value=last)


@dataclass(frozen=True, kw_only=True)
class _Duel:
    """Comparison of the advised algorithm with the fastest other one along an axis."""

    asked: _Asked
    axis: str
    ours: Sequence[Candidate]
    winner: Candidate

    @classmethod
    def at(
        cls, asked: _Asked, candidates: Sequence[Candidate], best: Candidate, place: Place
    ) -> _Duel | None:
        """Returns the comparison with the fastest at a place; None if nothing else has a step."""
        steps = asked.steps(candidates, place)
        ours = [c for c in candidates if c.algorithm == best.algorithm and c.label in steps]
        theirs = [c for c in candidates if c.algorithm != best.algorithm and c.label in steps]
        if not theirs:
            return None
        least = min(theirs, key=lambda candidate: steps[candidate.label])
        alike = [candidate for candidate in theirs if candidate.algorithm == least.algorithm]
        fitting = [best, *([_simplest(ours, steps)] if ours else [])]
        return cls(asked=asked, axis=place.axis, ours=fitting, winner=_simplest(alike, steps))

    def speedup(self, value: float) -> float | None:
        """Returns the speed of the other algorithm relative to the advised one; None if only the
        other has a step."""
        place = Place(axis=self.axis, value=value)
        steps = self.asked.steps([self.winner, *self.ours], place)
        ours_s = [steps[candidate.label] for candidate in self.ours if candidate.label in steps]
        if self.winner.label not in steps:
            return 0.0
        return min(ours_s) / steps[self.winner.label] if ours_s else None

    def is_lost(self, value: float) -> bool:
        """Returns True if the other algorithm is faster by more than `LEAST`."""
        speedup = self.speedup(value)
        return speedup is None or speedup > 1 + LEAST


class _Asked:
    """Answers so far; each question is asked once."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._known: dict[Question, Answer] = {}

    def _ask(self, questions: Iterable[Question]) -> list[Answer]:
        questions = list(questions)
        new = [question for question in dict.fromkeys(questions) if question not in self._known]
        self._known.update(zip(new, self._answers(new) if new else (), strict=True))
        return [self._known[question] for question in questions]

    def steps(
        self, candidates: Sequence[Candidate], place: Place | None = None
    ) -> dict[str, float]:
        """Returns the seconds by label of the candidates that have a step."""
        labels = [candidate.label for candidate in candidates]
        answers = self._ask(Question(label=label, place=place) for label in labels)
        known = zip(labels, answers, strict=True)
        return {label: answer.step_s for label, answer in known if answer.step_s is not None}

    def note(self, label: str) -> str | None:
        """Returns the note of a candidate's step."""
        return self._ask([Question(label=label)])[0].note

    def choices(self, candidates: Sequence[Candidate]) -> list[Choice]:
        """Returns candidates with their steps, also at the ends of the ranges."""
        signs = (0, -1, 1)
        self._ask(Question(label=c.label, sign=sign) for c in candidates for sign in signs)
        choices = []
        for candidate in candidates:
            questions = [Question(label=candidate.label, sign=sign) for sign in signs]
            middle, low, high = self._ask(questions)
            assert middle.step_s and low.step_s and high.step_s, "these candidates have steps"
            steps_s = (middle.step_s, low.step_s, high.step_s)
            choices.append(Choice(candidate=candidate, steps_s=steps_s, note=middle.note))
        return choices

    def parts(self, label: str, unfused: str | None) -> Parts:
        """Returns the parts of a candidate's step.

        Args:
            unfused: label of the same algorithm with every gradient alone; None: there is none.
        """
        changed: list[Part] = ["messages", "start_up", "bytes", "compute"]
        questions = [Question(label=label, part=part) for part in changed]
        whole, alone, *others = self._ask(
            [Question(label=label), Question(label=unfused or label), *questions]
        )
        free_s, start_up_s, bytes_s, wire_s = (answer.step_s for answer in others)
        assert whole.step_s is not None, "only candidates with a step have parts"
        step_s = whole.step_s
        return Parts(
            label=label,
            step_s=step_s,
            compute_s=free_s,
            start_up_s=_difference(step_s, start_up_s),
            bytes_s=_difference(step_s, bytes_s),
            hidden_s=None if free_s is None or wire_s is None else free_s + wire_s - step_s,
            fused_s=_difference(alone.step_s, step_s) if unfused else None,
        )


def _difference(longer_s: float | None, shorter_s: float | None) -> float | None:
    return None if longer_s is None or shorter_s is None else longer_s - shorter_s
