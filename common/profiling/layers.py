"""Records the layer times of a model on this machine's device, or reads them from a trace.

`python -m common.profiling.layers --model resnet50 --batch 64` writes
`configs/profiles/<device>/resnet50-bs64.json`, which `model: resnet50@<device>` replays.
With `--from-trace trace.json.gz`, the times are those in a trace of torch.profiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from common.models import registry
from common.models.profile import Profile, path_of
from common.profiling import gpus
from dear.errors import UserError, unknown
from dear.options import at_least, positive

if TYPE_CHECKING:
    from common.models.workload import Workload
    from common.profiling.traces.traced import Traced

SEED = 1
_WARMUP, _STEPS = 5, 20
_RECORDER = ("device", "dtype", "tf32", "warmup", "steps")
"""Options of the recorder only."""


def record_profile(options: argparse.Namespace) -> Profile:
    """Times the model's layers; raises `UserError` if that is impossible here."""
    import torch

    from common.machine import machine_card
    from common.profiling.recorder import memory_bytes_per_s, record

    entry, batch_size, sentence_len = _sizes(options)
    model, dtype = options.model, options.dtype or "float32"
    warmup = _WARMUP if options.warmup is None else options.warmup
    steps = _STEPS if options.steps is None else options.steps
    if dtype not in registry.DTYPES:
        raise unknown("dtype", dtype, registry.DTYPES)
    at_least("--warmup", warmup, 0)
    at_least("--steps", steps, 1)
    if options.memory_gb_per_s is not None:
        raise UserError("--memory-gb-per-s: needs --from-trace; otherwise it is measured")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu")
    tf32 = options.tf32 is True
    if tf32 and (device, dtype) != ("cuda", "float32"):
        raise UserError("--tf32: is for float32 on a GPU; leave it out")
    if device == "cuda":
        # As in a trial. By default, torch multiplies in float32, but convolves in TF32.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.manual_seed(SEED)
    torch_device = torch.device(device)
    workload = registry.build(model, batch_size, sentence_len, torch.Generator().manual_seed(SEED))
    workload = workload.to(torch_device, *registry.precision(dtype))
    workload.model.train()
    layers, overhead = record(workload, torch_device, warmup=warmup, steps=steps)
    name = torch.cuda.get_device_name() if device == "cuda" else machine_card()["cpu"]
    return Profile(
        model=model,
        device=options.name or folder_name(name) + _suffix(dtype, tf32),
        device_name=name,
        memory_bytes_per_s=round(memory_bytes_per_s(torch_device)),
        kind="measured",
        batch_size=batch_size,
        sentence_len=sentence_len,
        sample_unit=entry.sample_unit,
        dtype=gpus.DTYPES["tf32"] if tf32 else dtype,
        rule=(
            f"medians of {steps} steps after {warmup}, torch {torch.__version__}, "
            f"{'CUDA events' if device == 'cuda' else f'{torch.get_num_threads()} threads'}; "
            f"shares from as many steps with hooks, which were {overhead:.3f} times as long, "
            "scaled to the plain steps' forward and backward"
        ),
        **layers.fields(),
    )


def _sizes(options: argparse.Namespace) -> tuple[registry.ModelEntry, int, int | None]:
    options.model, _ = registry.register(options.model)
    entry = registry.model_entry(options.model)
    batch_size = options.batch if options.batch is not None else entry.batch_size
    if registry.is_replay(options.model):
        raise UserError(f"--model {options.model}: a replayed model has no compute to time")
    at_least("--batch", batch_size, 1)
    return entry, batch_size, registry.sentence_len(options.model, options.sentence_len)


def _suffix(dtype: str, tf32: bool) -> str:
    """Returns the end of a device's name: one device has several sets of profiles."""
    return "-tf32" if tf32 else "" if dtype == "float32" else f"-{dtype}"


def traced_profile(options: argparse.Namespace) -> Profile:
    """Reads the model's layers from a trace; raises `UserError` if they are not in it."""
    for name in _RECORDER:
        if getattr(options, name) is not None:
            raise UserError(f"--{name}: has no effect with --from-trace; leave it out")
    import torch

    from common.profiling import modelled
    from common.profiling.traces import kineto
    from common.profiling.traces.traced import Traced

    entry, batch_size, sentence_len = _sizes(options)
    trace = kineto.load(options.from_trace)
    inputs: list[tuple[int, ...]] = []

    def build() -> Workload:
        torch.manual_seed(SEED)
        generator = torch.Generator().manual_seed(SEED)
        workload = registry.build(options.model, batch_size, sentence_len, generator)
        values = workload.inputs
        tensors = values.values() if isinstance(values, dict) else values
        inputs[:] = [tuple(tensor.shape) for tensor in tensors]
        return workload

    counted = modelled.counted(options.model, build)
    traced = Traced(trace, counted, inputs, options.model)
    name = trace.device_name or "CPU"
    bandwidth, source = _bandwidth(options, traced, name)
    return Profile(
        model=options.model,
        device=options.name or (folder_name(name) if trace.device_name else "cpu"),
        device_name=name,
        memory_bytes_per_s=round(bandwidth),
        kind="measured",
        batch_size=batch_size,
        sentence_len=sentence_len,
        sample_unit=entry.sample_unit,
        dtype=traced.dtype,
        rule=(
            f"medians of {len(traced.steps)} steps in a trace of torch.profiler, "
            f"{'kernels' if trace.device_name else 'operations of the CPU'} by the module that "
            f"launched them; memory bandwidth: {source}"
        ),
        **traced.layers().fields(),
    )


def _bandwidth(options: argparse.Namespace, traced: Traced, device_name: str) -> tuple[float, str]:
    """Returns the bytes per second of the device's memory, and how they were obtained."""
    if options.memory_gb_per_s is not None:
        positive("--memory-gb-per-s", options.memory_gb_per_s)
        return options.memory_gb_per_s * 1e9, "given"
    updated = traced.updated_bytes_per_s()
    if updated is not None:
        return updated, f"from an update of {traced.update_s * 1e3:.4f} ms"
    key = gpus.key_of(device_name)
    if key is not None:
        return gpus.table()[key].memory_gb_per_s * 1e9, "the GPU's peak"
    raise UserError(
        f"trace {options.from_trace}: has no update of SGD, Adam or AdamW, and the memory "
        f"bandwidth of {device_name} is not known; give --memory-gb-per-s"
    )


def folder_name(device_name: str) -> str:
    """Returns a folder name such as `rtx-2080-ti` for `NVIDIA GeForce RTX 2080 Ti`."""
    short = re.sub(r"\b(nvidia|geforce|tesla|cpu)\b|\(r\)|\(tm\)|@.*", " ", device_name.lower())
    return re.sub(r"[^a-z0-9]+", "-", short).strip("-") or "unknown"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m common.profiling.layers", allow_abbrev=False)
    parser.description = __doc__.partition("\n")[0]
    parser.add_argument(
        "--model", required=True, help="from `benchmarks.py list`, file:, hf: or timm:"
    )
    parser.add_argument("--batch", type=int, help="samples (default: the model's)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if available")
    parser.add_argument("--sentence-len", type=int, help="tokens, for models of sentences")
    parser.add_argument("--dtype", help=f"one of {', '.join(registry.DTYPES)} (float32)")
    parser.add_argument(
        "--tf32",
        action="store_true",
        default=None,
        help="multiply float32 in TensorFloat-32 on a GPU",
    )
    parser.add_argument("--warmup", type=int, help=f"steps before the timed ones ({_WARMUP})")
    parser.add_argument("--steps", type=int, help=f"timed steps, twice ({_STEPS})")
    parser.add_argument("--from-trace", type=Path, help="trace of torch.profiler to read")
    parser.add_argument(
        "--memory-gb-per-s",
        type=float,
        help="memory bandwidth of a trace's device (default: from its update, or the GPU's peak)",
    )
    parser.add_argument("--name", help="name of the device (default: derived from its full name)")
    parser.add_argument("-o", "--out", type=Path, help="output file (default: in configs/profiles)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    try:
        options = parse(arguments)
        brought = registry.register(options.model)[1]
        profile = (traced_profile if options.from_trace else record_profile)(options)
        profile = dataclasses.replace(profile, model_digest=brought and brought.digest)
        path = options.out or path_of(
            profile.model.replace(":", "-"), profile.device, profile.batch_size
        )
        profile.save(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    jitter = profile.jitter
    spread = f", jitter {jitter.relative_std:.1%} over {jitter.steps} steps" if jitter else ""
    print(
        f"{path}: {profile.device_name}, forward {profile.forward_s * 1e3:.2f} ms, backward "
        f"{profile.backward_s * 1e3:.2f} ms, {profile.batch_size / profile.step_s:.1f} "
        f"{profile.sample_unit}/s{spread}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
