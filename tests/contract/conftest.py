"""Serial references are computed beside the ranks: one thread is enough for them."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
