"""Linear regression by neighbour averaging; each rank has its own data.

    torchrun --standalone --nproc-per-node 8 examples/decentralized/linear_regression.py \\
        --out logs/curves

The data of each rank follow a slightly different relation. The ranks search for the model that fits
all data best. With a constant step size, plain neighbour averaging stops near this model, because
each rank's own gradient pulls it away. Exact diffusion, gradient tracking and push-DIGing correct
this error and converge linearly.
"""

from __future__ import annotations

import torch
from curves import arguments, compare, run
from torch import nn

import dear.bluefog as bf

ROWS, FEATURES = 50, 10


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's features `[ROWS, FEATURES]` and targets `[ROWS]`."""
    common = torch.Generator().manual_seed(seed)
    local = torch.Generator().manual_seed(seed + 1 + bf.rank())
    relation = torch.randn(FEATURES, generator=common, dtype=torch.float64)
    relation += 0.5 * torch.randn(FEATURES, generator=local, dtype=torch.float64)
    features = torch.randn(ROWS, FEATURES, generator=local, dtype=torch.float64)
    noise = 0.1 * torch.randn(ROWS, generator=local, dtype=torch.float64)
    return features, features @ relation + noise


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], iterations=300)
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()
    bf.init()
    features, targets = data(options.seed)

    def loss(model: nn.Module) -> torch.Tensor:
        return (model(features).flatten() - targets).square().mean() / 2

    optimum = torch.linalg.lstsq(
        bf.allgather(features), bf.allgather(targets).unsqueeze(1)
    ).solution.flatten()
    compare("Linear regression", loss, optimum, options)
    bf.shutdown()


if __name__ == "__main__":
    run(main)
