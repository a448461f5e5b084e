"""Records the layer times of a model on this machine's device.

`python -m common.profiling.layers --model resnet50 --batch 64` writes
`configs/profiles/<device>/resnet50-bs64.json`, which `model: resnet50@<device>` replays.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from common.models import registry
from common.models.profile import Profile, path_of
from dear.errors import UserError, unknown
from dear.options import at_least

SEED = 1


def record_profile(options: argparse.Namespace) -> Profile:
    """Times the model's layers; raises `UserError` if that is impossible here."""
    import torch

    from common.machine import machine_card
    from common.profiling.recorder import memory_bytes_per_s, record

    model, dtype, warmup, steps = options.model, options.dtype, options.warmup, options.steps
    entry = registry.model_entry(model)
    batch_size = options.batch if options.batch is not None else entry.batch_size
    if registry.is_replay(model):
        raise UserError(f"--model {model}: a replayed model has no compute to time")
    if dtype not in registry.DTYPES:
        raise unknown("dtype", dtype, registry.DTYPES)
    at_least("--batch", batch_size, 1)
    at_least("--warmup", warmup, 0)
    at_least("--steps", steps, 1)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu")
    sentence_len = registry.sentence_len(model, options.sentence_len)
    torch.manual_seed(SEED)
    torch_device = torch.device(device)
    workload = registry.build(model, batch_size, sentence_len, torch.Generator().manual_seed(SEED))
    workload = workload.to(torch_device, *registry.precision(dtype))
    workload.model.train()
    layers, overhead = record(workload, torch_device, warmup=warmup, steps=steps)
    name = torch.cuda.get_device_name() if device == "cuda" else machine_card()["cpu"]
    return Profile(
        model=model,
        device=options.name or folder_name(name),
        device_name=name,
        memory_bytes_per_s=round(memory_bytes_per_s(torch_device)),
        kind="measured",
        batch_size=batch_size,
        sentence_len=sentence_len,
        sample_unit=entry.sample_unit,
        dtype=dtype,
        rule=(
            f"medians of {steps} steps after {warmup}, torch {torch.__version__}, "
            f"{'CUDA events' if device == 'cuda' else f'{torch.get_num_threads()} threads'}; "
            f"shares from as many steps with hooks, which were {overhead:.3f} times as long, "
            "scaled to the plain steps' forward and backward"
        ),
        **layers.fields(),
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
    parser.add_argument("--model", required=True, help="a model from `benchmarks.py list`")
    parser.add_argument("--batch", type=int, help="samples (default: the model's)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if available")
    parser.add_argument("--sentence-len", type=int, help="tokens, for models of sentences")
    parser.add_argument(
        "--dtype", default="float32", help=f"one of {', '.join(registry.DTYPES)} (float32)"
    )
    parser.add_argument("--warmup", type=int, default=5, help="steps before the timed ones (5)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps, twice (20)")
    parser.add_argument("--name", help="name of the device (default: derived from its full name)")
    parser.add_argument("--out", type=Path, help="output file (default: in configs/profiles)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    try:
        options = parse(arguments)
        profile = record_profile(options)
        path = options.out or path_of(profile.model, profile.device, profile.batch_size)
        profile.save(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{path}: {profile.device_name}, forward {profile.forward_s * 1e3:.2f} ms, backward "
        f"{profile.backward_s * 1e3:.2f} ms, {profile.batch_size / profile.step_s:.1f} "
        f"{profile.sample_unit}/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
