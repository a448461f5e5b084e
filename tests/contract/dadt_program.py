"""A script as DADT's users write it: `dadt_program.py EXECUTOR FILE`; rank 0 reports into FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import dear.dadt as dadt


def main(executor: str, report: Path) -> None:
    dadt.init(cycle_duration_ms=1, executor_type=executor)
    rank, size = dadt.rank(), dadt.size()
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2)
    optimizer = dadt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), avg=True)
    start = model.bias.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(1, 3)).sum() * (rank + 1)).backward()
        optimizer.step()
    held_back = (start - model.bias).tolist()
    optimizer.flush()
    coo = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
    facts = {
        "summed": dadt.all_reduce(0, torch.ones(2)).tolist(),
        "sparse": dadt.coo_all_reduce(0, coo).to_dense().tolist(),
        "moved": [held_back, (start - model.bias).tolist()],
        "spread": (dadt.all_reduce(1, model.weight) - size * model.weight).abs().max().item(),
    }
    dadt.local_barrier()
    dadt.shutdown()
    if rank == 0:
        report.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
