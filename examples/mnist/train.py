"""Trains a small network on MNIST: an ordinary script, plus the lines marked `dear`.

    python examples/mnist/train.py                                        one process
    torchrun --standalone --nproc-per-node 2 examples/mnist/train.py      two processes
    mpirun -np 2 python examples/mnist/train.py --algorithm wfbp

`--data-dir` is a folder with MNIST's IDX files (gzipped or not). With the test files alone, 9 in 10
images are used for training. Without `--data-dir`, the script uses the 1,797 digits of
scikit-learn. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dear  # dear

sys.path.insert(0, str(Path(__file__).parents[2]))

from common.models.datasets.digits import load_digits
from common.models.datasets.mnist import load_mnist


class Net(nn.Module):
    """Two convolutions and two linear layers for images `[n, 1, 28, 28]`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.relu(functional.max_pool2d(self.conv1(images), 2))
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2))
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, device: torch.device
) -> float:
    """Trains on this rank's share of the images once; returns the mean loss."""
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def accuracy(model: nn.Module, test: Dataset, device: torch.device) -> float:
    """Returns the share of right answers on all test images; each rank evaluates a part of them."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64)
    part = torch.utils.data.Subset(test, range(dear.rank(), len(test), dear.size()))
    with torch.no_grad():
        for images, labels in DataLoader(part, batch_size=256):
            right = (model(images.to(device)).argmax(dim=1).cpu() == labels).sum()
            counts += torch.tensor([right, len(labels)], dtype=torch.float64)
    right, seen = dear.allreduce(counts.to(device), average=False).tolist()  # dear
    return right / seen


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and prints the results; `arguments` defaults to the command line."""
    parser = argparse.ArgumentParser(description="MNIST with a data-parallel algorithm")
    parser.add_argument("--algorithm", default="dear", help="a name of `benchmarks.py list`")
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's IDX files")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)

    dear.init()  # dear
    device = dear.device()  # dear
    torch.manual_seed(options.seed)
    train, test = load_mnist(options.data_dir) if options.data_dir else load_digits()
    train_set, test_set = TensorDataset(*train), TensorDataset(*test)
    if dear.rank() == 0:
        names = f"MNIST of {options.data_dir}" if options.data_dir else "scikit-learn's 8x8 digits"
        more = "" if options.data_dir else " (not MNIST; --data-dir FOLDER trains on its IDX files)"
        print(f"data: {names}, {len(train_set)} images to train on, {len(test_set)} to test{more}")

    most = len(train_set) // dear.size()
    if not 1 <= options.batch_size <= most:
        raise dear.UserError(f"--batch-size must be from 1 to {most}, got {options.batch_size}")
    if not (options.lr >= 0 and options.momentum >= 0):
        raise dear.UserError("--lr and --momentum must be at least 0")

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.6)
    optimizer = dear.DistributedOptimizer(optimizer, model, algorithm=options.algorithm)  # dear
    dear.broadcast_parameters(model.state_dict(), root_rank=0)  # dear

    sampler = DistributedSampler(train_set, dear.size(), dear.rank(), seed=options.seed)
    loader = DataLoader(train_set, options.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        began = time.perf_counter()
        loss = train_epoch(model, optimizer, loader, device)
        scheduler.step()
        spent_s = time.perf_counter() - began
        score = accuracy(model, test_set, device)
        if dear.rank() == 0:
            print(
                f"epoch {epoch + 1}/{options.epochs}  loss {loss:.4f}  test accuracy {score:.4f}  "
                f"{len(loader) * options.batch_size * dear.size() / spent_s:.0f} img/s on "
                f"{dear.size()} process(es), {options.algorithm}",
                flush=True,
            )
    optimizer.close()  # dear
    dear.shutdown()  # dear


if __name__ == "__main__":
    try:
        main()
    except dear.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
