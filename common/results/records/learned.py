"""Results of a training trial, by repeat."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """State of the training at a mark (a time or an epoch at which the model is evaluated). Trials
    without data have only the number of steps."""

    at_s: float
    """Time of the mark in seconds; equal to `seconds` if the training counts epochs."""
    epoch: float | None = None
    """Number of finished epochs; None if the trial trains for seconds."""
    seconds: float
    """Time at which the last rank had copied its model."""
    steps: list[int | None]
    """Steps by rank; None for a rank that died."""
    staleness: float | None = None
    """Mean staleness of the stalest neighbour since the last evaluation; None: not counted."""
    accuracy: float | None = None
    """Accuracy of the mean of all ranks' models. `_min` and `_max` are of single ranks' models, and
    only in the last evaluation."""
    accuracy_min: float | None = None
    accuracy_max: float | None = None
    accuracy_top5: float | None = None
    """Share of samples whose class is among the best five; None for five classes or fewer."""
    train_loss: float | None = None
    """Mean over all ranks' steps since the last evaluation; None at the first evaluation."""
    loss: float | None = None
    """Test loss of the mean of all ranks' models."""
    loss_min: float | None = None
    loss_max: float | None = None
    consensus_distance: float | None = None

    @property
    def mean_steps(self) -> float:
        """Mean number of steps of the ranks that did not die."""
        counts = [count for count in self.steps if count is not None]
        return sum(counts) / len(counts)


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """Steps and samples of a rank, and the time that they took."""

    steps: int
    samples: int
    elapsed_s: float

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.elapsed_s


@dataclass(frozen=True, kw_only=True)
class Learning:
    """One repeat of a training trial."""

    evaluations: list[Evaluation]
    ranks: list[RankPace | None]
    """Pace by rank; None for a rank that died."""
    seed: int
    """Seed of the data's order, the initial weights and dropout."""

    @property
    def lost(self) -> list[int]:
        """Ranks that died while the others went on."""
        return [rank for rank, pace in enumerate(self.ranks) if pace is None]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training and test data of a trial."""

    name: str
    train: int
    test: int
    split: str | None
    """Name of the data set that was split; None: the data set has separate test samples."""

    @property
    def title(self) -> str:
        """Description of the data, as a part of a sentence."""
        if self.split is None:
            return f"{self.train:,} training images of {self.name}, judged by {self.test:,} others"
        return f"{self.train:,} of {self.split}, judged by the other {self.test:,}"
