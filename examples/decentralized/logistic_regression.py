"""Logistic regression by neighbour averaging; each rank has its own data.

    torchrun --standalone --nproc-per-node 8 examples/decentralized/logistic_regression.py \\
        --out logs/curves

The loss is not quadratic, unlike that of `linear_regression.py`: the answers are yes or no. Each
rank has a different rule for the answers, and large weights are penalised.
"""

from __future__ import annotations

import torch
from curves import arguments, compare, run
from torch import nn
from torch.nn import functional

import dear.bluefog as bf

ROWS, FEATURES = 100, 10
PENALTY = 0.1
"""Factor of the penalty, which is half the squared norm of the weights."""
TOLERANCE = 1e-12


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's features `[ROWS, FEATURES]` and answers `[ROWS]`, 1 or -1."""
    common = torch.Generator().manual_seed(seed)
    local = torch.Generator().manual_seed(seed + 1 + bf.rank())
    rule = torch.randn(FEATURES, generator=common, dtype=torch.float64)
    rule += torch.randn(FEATURES, generator=local, dtype=torch.float64)
    features = torch.randn(ROWS, FEATURES, generator=local, dtype=torch.float64)
    chance = torch.rand(ROWS, generator=local, dtype=torch.float64)
    answers = torch.where(torch.sigmoid(features @ rule) > chance, 1.0, -1.0)
    return features, answers.double()


def newton(features: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Returns the weights that minimise the mean loss with penalty (gradient below TOLERANCE)."""
    weights = torch.zeros(features.shape[1], dtype=features.dtype)
    for _ in range(50):
        probability = torch.sigmoid(-answers * (features @ weights))
        gradient = PENALTY * weights - features.T @ (answers * probability) / len(answers)
        if gradient.norm() <= TOLERANCE:
            return weights
        curvature = (probability * (1 - probability) / len(answers)).unsqueeze(1)
        hessian = features.T @ (curvature * features) + PENALTY * torch.eye(len(weights)).double()
        weights = weights - torch.linalg.solve(hessian, gradient)
    raise RuntimeError(f"Newton's method did not converge: gradient {gradient.norm():.1e}")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], iterations=300)
    parser.add_argument("--lr", type=float, default=0.5)
    options = parser.parse_args()
    bf.init()
    features, answers = data(options.seed)

    def loss(model: nn.Linear) -> torch.Tensor:
        losses = functional.softplus(-answers * model(features).flatten())
        return losses.mean() + PENALTY / 2 * model.weight.square().sum()

    optimum = newton(bf.allgather(features), bf.allgather(answers))
    compare("Logistic regression", loss, optimum, options)
    bf.shutdown()


if __name__ == "__main__":
    run(main)
