"""One thread of torch: other tests run beside these, and threads that wait for each other spin."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
