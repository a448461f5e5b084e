"""bf.suspend and bf.resume: ported scripts may call them, and nothing changes."""

from __future__ import annotations

import torch

import dear.bluefog as bf


def _suspended():
    bf.suspend()
    bf.suspend()
    x = torch.full((3,), float(bf.rank()))
    handle = bf.allreduce_nonblocking(x)
    meanwhile = bf.allreduce(x)[0].item(), bf.synchronize(handle)[0].item()
    bf.resume()
    bf.resume()
    return meanwhile, bf.allreduce(x)[0].item()


def test_everything_goes_on_while_suspended(bluefog_pool):
    assert bluefog_pool.run(_suspended) == [((1.5, 1.5), 1.5)] * 4
