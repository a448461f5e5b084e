"""Workaround: makes torchvision's published wheel importable with a CPU build of torch.

The wheel is built for CUDA. With a CPU build of torch, the wheel's C++ operators do not load, and
`import torchvision` fails at the fake kernels of `nms` and `qnms`. This module declares these two
operators, which classification models do not use. It does nothing if the operators exist.
"""

from __future__ import annotations

import torch

_SIGNATURES = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


try:
    import torchvision  # noqa: F401
except RuntimeError as error:
    if "torchvision::nms does not exist" not in str(error):
        raise
    # The library object must live as long as the operators do.
    _library = torch.library.Library("torchvision", "DEF")
    for _name, _signature in _SIGNATURES.items():
        if not hasattr(torch.ops.torchvision, _name):
            _library.define(_signature)
