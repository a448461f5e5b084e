"""What a trial that trains for a time has learned, by run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What had been learned at a mark; without data, only how many steps were made."""

    at_s: float
    """The mark; of training for epochs the same as `seconds`."""
    epoch: float | None = None
    """After which epoch; None of training for a time."""
    seconds: float
    """When the last rank had its copy."""
    steps: list[int | None]
    """By rank; None of one that has died."""
    staleness: float | None = None
    """Since the evaluation before, of the stalest neighbour; None where it is not counted."""
    accuracy: float | None = None
    """Of the mean of all ranks' models, as `loss`; the other ones are of single ranks, which only
    the last evaluation judges."""
    accuracy_min: float | None = None
    accuracy_max: float | None = None
    accuracy_top5: float | None = None
    """How often the right answer is among the best five; None where there are no more."""
    train_loss: float | None = None
    """The mean of all ranks' steps since the evaluation before; None at the first, and in older
    records."""
    loss: float | None = None
    loss_min: float | None = None
    loss_max: float | None = None
    consensus_distance: float | None = None

    @property
    def mean_steps(self) -> float:
        """Of the ranks that live."""
        counts = [count for count in self.steps if count is not None]
        return sum(counts) / len(counts)


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """What a rank has trained."""

    steps: int
    samples: int
    elapsed_s: float

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.elapsed_s


@dataclass(frozen=True, kw_only=True)
class Learning:
    """One repeat of a trial that trains for a time."""

    evaluations: list[Evaluation]
    ranks: list[RankPace | None]
    """None of one that has died."""
    seed: int | None = None
    """Of the data's order, the first weights and dropout. Older records do not tell; they have the
    trial's, in every repeat."""

    @property
    def lost(self) -> list[int]:
        """Ranks that have died while the others went on."""
        return [rank for rank, pace in enumerate(self.ranks) if pace is None]


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a trial has learned from, and what it was judged by."""

    name: str
    train: int
    """Number of images."""
    test: int
    split: str | None
    """Of what both are parts; None where the data's own training and test images are used."""

    @property
    def title(self) -> str:
        """In a sentence's words."""
        if self.split is None:
            return f"{self.train:,} training images of {self.name}, judged by {self.test:,} others"
        return f"{self.train:,} of {self.split}, judged by the other {self.test:,}"
