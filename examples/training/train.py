"""Trains on CIFAR, image folders or a text: an ordinary script, plus the lines marked `dear`.

    torchrun --standalone --nproc-per-node 2 examples/training/train.py \\
        --data cifar10 --data-dir DIR --model resnet20 --amp bf16 --epochs 100 --warmup-epochs 5

`--data-dir` is the folder with CIFAR's unpacked files, a folder with `train/CLASS` and `val/CLASS`,
or a text file. Nothing is downloaded. During the warm-up, the learning rate rises to the given rate
times the number of processes (Goyal et al. 2017, arXiv 1706.02677); then it falls like a cosine.
After each epoch, the script evaluates all test samples: top-1 accuracy, and top-5 accuracy or, for
a text, perplexity.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.optim import lr_scheduler

import dear  # dear

sys.path.insert(0, str(Path(__file__).parents[2]))

from common.models import datasets, registry
from common.models.datasets.batches import Batches
from common.models.workload import Workload

PRECISIONS = {"none": "float32", "bf16": "amp-bf16", "fp16": "amp-fp16"}


def rates(
    optimizer: torch.optim.Optimizer, warmup_steps: int, steps: int
) -> lr_scheduler.LRScheduler:
    """Returns the schedule: a warm-up to the rate times the number of processes, then down to 0."""
    size = dear.size()
    for group in optimizer.param_groups:
        group["lr"] *= size
    if not warmup_steps:
        return lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rising = lr_scheduler.LinearLR(optimizer, 1 / size, total_iters=warmup_steps)
    falling = lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup_steps)
    return lr_scheduler.SequentialLR(optimizer, [rising, falling], [warmup_steps])


@torch.inference_mode()
def evaluate(workload: Workload, test: datasets.Samples, batch_size: int) -> tuple[float, ...]:
    """Returns top-1 accuracy, top-5 accuracy and loss over all test samples, on all ranks.

    Each rank evaluates a part of the samples.
    """
    workload.model.eval()
    sums = torch.zeros(4, dtype=torch.float64)
    indices = range(dear.rank(), len(test), dear.size())
    for start in range(0, len(indices), batch_size):
        workload.feed(*test.batch(indices[start : start + batch_size], None))
        (targets,) = workload.targets
        scores = workload.model(*workload.inputs)
        hits = scores.topk(min(5, scores.shape[-1]), dim=-1).indices == targets.unsqueeze(-1)
        loss = workload.criterion(scores, targets) * targets.numel()
        sums += torch.tensor([hits[..., 0].sum(), hits.sum(), loss, targets.numel()])
    workload.model.train()
    top1, top5, loss, count = dear.allreduce(sums, average=False).tolist()  # dear
    return top1 / count, top5 / count, loss / count


def train_epoch(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    schedule: lr_scheduler.LRScheduler,
    batches: Batches,
) -> float:
    """Trains on this rank's batches of one epoch; returns the mean loss."""
    total = torch.zeros((), device=dear.device())  # dear
    for _ in range(batches.per_round):
        workload.feed(*next(batches))
        optimizer.zero_grad()
        loss = workload.loss()
        workload.backward(loss)
        if workload.scaler is not None:
            optimizer.synchronize()  # dear: a GradScaler reads the averages
        workload.update(optimizer)
        schedule.step()
        total += loss.detach()
    return float(total) / batches.per_round


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options; `arguments` defaults to the command line."""
    parser = argparse.ArgumentParser(description="real data with a data-parallel algorithm")
    parser.add_argument("--algorithm", default="dear", help="a name of `benchmarks.py list`")
    parser.add_argument("--data", default="cifar10", help=", ".join(datasets.SOURCES))
    parser.add_argument("--data-dir", help="location of the files")
    parser.add_argument("--model", default="resnet20", help="a name of `benchmarks.py list`")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per process and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one process")
    parser.add_argument("--warmup-epochs", type=float, default=0.0)
    parser.add_argument("--amp", choices=PRECISIONS, default="none", help="mixed precision")
    parser.add_argument("--workers", type=int, default=0, help="processes that read data ahead")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and prints the results."""
    options = parse(arguments)
    dear.init()  # dear
    torch.manual_seed(options.seed)
    length = registry.sentence_len(options.model, None)
    size = registry.sample_size(options.model, length)
    parts = datasets.load(options.data, options.data_dir, size)
    generator = torch.Generator().manual_seed(options.seed)
    workload = registry.build(options.model, options.batch_size, length, generator, parts.classes)
    workload = workload.to(dear.device(), *registry.precision(PRECISIONS[options.amp]))  # dear
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = dear.DistributedOptimizer(  # dear
        optimizer, workload.model, algorithm=options.algorithm
    )
    dear.broadcast_parameters(workload.model.state_dict(), root_rank=0)  # dear

    batches = Batches(
        parts.train,
        batch_size=options.batch_size,
        sampler="shared",
        seed=options.seed,
        rank=dear.rank(),
        size=dear.size(),
        workers=options.workers,
    )
    warmup_steps = round(options.warmup_epochs * batches.per_round)
    schedule = rates(optimizer, warmup_steps, options.epochs * batches.per_round)
    for epoch in range(options.epochs):
        began = time.perf_counter()
        loss = train_epoch(workload, optimizer, schedule, batches)
        elapsed_s = time.perf_counter() - began
        optimizer.synchronize()  # dear
        top1, top5, test_loss = evaluate(workload, parts.test, options.batch_size)
        if dear.rank() == 0:
            samples = batches.per_round * options.batch_size * dear.size()
            text = options.data == "text"
            extra = f"perplexity {math.exp(test_loss):.1f}" if text else f"top-5 {top5:.4f}"
            print(
                f"epoch {epoch + 1}/{options.epochs}  loss {loss:.4f}  "
                f"test loss {test_loss:.4f}  top-1 {top1:.4f}  {extra}  "
                f"{samples / elapsed_s:.0f} {registry.model_entry(options.model).sample_unit}/s on "
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
