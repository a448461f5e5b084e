"""Use of a device by the timed steps: peak memory, operations of the model, and the peak rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import dear
from common.harness.trial import Trial
from common.models import registry
from common.models.workload import Workload
from common.profiling import gpus
from common.results.records import DeviceUse
from dear.errors import UserError

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_CLEAR_PEAK = "5"


class PeakMemory:
    """Peak memory of this process since the object was created.

    On a GPU, it is the peak of torch's allocator, without buffers of other libraries. On a CPU, it
    is the peak of resident memory, which the kernel can reset (unlike `ru_maxrss`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._known = device, True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            _CLEAR.write_text(_CLEAR_PEAK, encoding="ascii")
        except OSError:  # not Linux's own kernel, or built without page monitoring
            self._known = False

    def read(self) -> int | None:
        """Returns the peak in bytes; None: this kernel cannot reset or report it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        if self._known:
            for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
        return None


def memory(trial: Trial, peaks: list[int | None]) -> DeviceUse:
    """Returns the peaks of all ranks, unless the trial's model is replayed."""
    if registry.is_replay(trial.model):
        return DeviceUse(unknown="memory: compute is replayed, without the model's activations")
    if None in peaks:
        return DeviceUse(unknown=f"memory: the kernel does not reset a peak by {_CLEAR}")
    return DeviceUse(memory_bytes=peaks)


def arithmetic(trial: Trial, gather: Callable[[float | None], list[float | None]]) -> DeviceUse:
    """Returns the operations of a step, which rank 0 counts, and the peak of the ranks' device.

    All ranks call this after the training. A replayed model has both from its profile.

    Args:
        gather: returns the values of all ranks.
    """
    if registry.is_replay(trial.model):
        profile = registry.profile_of(trial.model, trial.batch_size, trial.sentence_len)
        peak_flops = gpus.peak_flops(profile.device_name, profile.dtype)
        if profile.flops is None or peak_flops is None:
            return DeviceUse(unknown="MFU: the profile has no operations, or no known peak")
        return DeviceUse(flops=profile.flops, peak_flops=peak_flops)
    if trial.device != "cuda":
        return DeviceUse(unknown="MFU: no peak of a CPU is known")
    name = torch.cuda.get_device_name()
    peaks = set(gather(gpus.peak_flops(name, trial.dtype, tf32=trial.cuda.tf32)))
    (peak_flops, *others) = peaks
    if others or peak_flops is None:
        return DeviceUse(unknown=f"MFU: no peak of {name} for {trial.dtype} in {gpus.TABLE.name}")
    if dear.rank() > 0:
        return DeviceUse()
    from common.profiling.modelled import step_flops

    def build() -> Workload:
        generator = torch.Generator().manual_seed(trial.seed)
        return registry.build(trial.model, trial.batch_size, trial.sentence_len, generator)

    try:
        return DeviceUse(flops=step_flops(trial.model, build), peak_flops=peak_flops)
    except UserError as error:
        return DeviceUse(unknown=f"MFU: {error}")
