"""Bayesian optimisation of the fusion threshold, from measured step times."""

from __future__ import annotations

import logging
import math
from typing import Any

log = logging.getLogger("dear")

LEAST_MB, MOST_MB = 1.0, 256.0
TRIALS = 10
EXPLORATION = 0.1
# Variance of a measured relative step time, about (1.5 %)^2.
NOISE = 2e-4


class Tuner:
    """Proposes thresholds in MB (2^20 bytes) and learns how long a step takes with each.

    Expected improvement with xi 0.1 on the step time relative to the first trial's, over the
    logarithm of the threshold: twice as much is as far from 2 MB as from 100 MB.

    Args:
        first_mb: what the first trial uses; moved into the bounds.
        trials: how many thresholds are tried before the best of them is taken.
    """

    def __init__(self, *, first_mb: float = 25.0, trials: int = TRIALS, seed: int = 0) -> None:
        self.trials = trials
        self.tried: list[tuple[float, float]] = []
        """Thresholds in MB with their step times in seconds."""
        self._current = min(max(first_mb, LEAST_MB), MOST_MB)
        self._seed = seed
        self._model: Any = None

    def observe(self, step_s: float) -> None:
        """The step time of the threshold proposed last (at first: the first one)."""
        log.info(
            "BO Tuning step [%d], param: %.4f, iteration time: %.4f",
            len(self.tried),
            self._current,
            step_s,
        )
        self.tried.append((self._current, step_s))
        relative = step_s / self.tried[0][1]
        self._optimizer().register(params={"x": math.log2(self._current)}, target=-relative)

    def propose(self) -> float:
        """The threshold to try next, in MB."""
        exponent = float(self._optimizer().suggest()["x"])
        self._current = min(max(2.0**exponent, LEAST_MB), MOST_MB)
        return self._current

    def best(self) -> float:
        """The threshold with the shortest step so far, in MB."""
        threshold_mb, step_s = min(self.tried, key=lambda tried: tried[1])
        log.info("BO Tuning optimal param: %.4f, optimal iteration time %.4f", threshold_mb, step_s)
        return threshold_mb

    def _optimizer(self) -> Any:
        if self._model is None:
            from bayes_opt import BayesianOptimization, acquisition

            self._model = BayesianOptimization(
                f=None,
                pbounds={"x": (math.log2(LEAST_MB), math.log2(MOST_MB))},
                acquisition_function=acquisition.ExpectedImprovement(xi=EXPLORATION),
                random_state=self._seed,
                verbose=0,
                allow_duplicate_points=True,
            )
            self._model.set_gp_params(alpha=NOISE)
        return self._model
