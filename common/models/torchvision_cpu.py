"""Makes the published torchvision wheel importable together with a CPU build of torch.

That wheel is built for CUDA. With a CPU torch its C++ operators do not load, and its import fails
when it registers a fake kernel for `nms` and `qnms`. It suffices to declare these two operators,
which the classification models do not use. This module does nothing if the operators exist.
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
