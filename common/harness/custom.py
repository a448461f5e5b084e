"""Models from outside the repository, and their profiles on GPUs.

Models are named `file:PATH`, `hf:TYPE`, `timm:NAME`, or as in the registry. If the user also names
a GPU, the model does not compute but replays (waits for) the layer times of this GPU. A profile is
a file with these times. New profiles are computed once and kept in the user's cache,
`$XDG_CACHE_HOME/dear-bench/profiles` (`~/.cache/...`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from common.machine import version
from common.models import profile as profiles
from common.models import registry
from common.models.profile import Profile
from common.models.registry import FILE, Brought
from common.profiling import gpus
from dear.errors import UserError

HERE = "here"
"""Name that means this machine's GPU, on which the model is measured."""
_LIBRARIES = ("torch", "torchvision", "timm", "transformers")
_LEAST_S = 1e-6
_PROFILERS = Path(__file__).parents[1] / "profiling"
"""Folder of the programs that write profiles."""


def bring_model(
    name: str, batch_size: int | None, sentence_len: int | None, gpu: str | None
) -> tuple[str, int | None, int | None]:
    """Adds a model to the registry of this process, for a GPU together with its profile.

    Returns:
        The model's name in trials and tables, its batch size and its sentence length. Sizes that
        were not given may be None; the registry then has the defaults.

    Raises:
        UserError: the model or the GPU does not exist, the file lacks a function, or the model
            fails.
    """
    name, brought = registry.register(name)
    if brought is not None and brought.source.startswith(FILE):
        from common.models import user_file  # imports torch

        # Imported before anything is counted on `meta`, where its tensors would have no values.
        user_file.check(Path(brought.source.removeprefix(FILE)))
    if gpu is None:
        return name, batch_size, sentence_len
    if "@" in name:
        raise UserError(f"gpu: {name} names its GPU already, after the @; leave `gpu` out")
    plain = re.sub(r"[^\w.+-]", "-", name)
    if brought is not None:
        size = batch_size or registry.model_entry(name).batch_size
        recorded = profiles.path_of(plain, gpu, size)
        if recorded.exists():  # by hand, with `common.profiling.layers`
            if profiles.load(recorded).model_digest not in (None, brought.digest):
                raise UserError(
                    f"{recorded}: was recorded with another version of {name}; record it again, or "
                    "remove it"
                )
            replayed = f"{name}@{gpu}"
            registry.bring(replayed, dataclasses.replace(brought, profile=str(recorded)))
            return replayed, size, registry.sentence_len(replayed, sentence_len, size)
    device, profile_model = _profiler(gpu)
    replayed = f"{name}@{device}"
    sizes = profiles.batch_sizes().get(replayed, [])
    if brought is None and sizes and batch_size in (None, *sizes):
        shipped = registry.profile_of(
            replayed, batch_size or registry.model_entry(replayed).batch_size
        )
        if sentence_len in (None, shipped.sentence_len):
            return replayed, batch_size, shipped.sentence_len
    entry = registry.model_entry(name)
    batch_size = entry.batch_size if batch_size is None else batch_size
    sentence_len = registry.sentence_len(name, sentence_len)
    brought = brought or Brought(source=name)
    key = _key(brought, device, gpu, batch_size, sentence_len)
    path = cache() / device / f"{plain}-bs{batch_size}-{key}.json"
    if not path.exists():
        _keep(profile_model(name, batch_size, sentence_len), path)
    registry.bring(replayed, dataclasses.replace(brought, profile=str(path)))
    return replayed, batch_size, sentence_len


def cache() -> Path:
    """Returns the folder of profiles that do not come with the project."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "dear-bench" / "profiles"


def _profiler(gpu: str) -> tuple[str, Callable[[str, int, int | None], Profile]]:
    if gpu != HERE:
        choice = gpus.find(gpu)
        return choice.folder_name, lambda *model: _modelled(choice, *model)
    if not gpu_available():
        raise UserError(
            f"gpu: torch finds no GPU {HERE}; name a GPU whose times can be calculated: "
            + ", ".join(gpus.table())
        )
    import torch

    from common.profiling.layers import folder_name

    return folder_name(torch.cuda.get_device_name()), _measured


def gpu_available() -> bool:
    """Returns True if torch can use a GPU of this machine."""
    devices = (*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd"))
    if not devices:  # the import of torch takes seconds
        return False
    import torch

    return torch.cuda.is_available()


def _modelled(gpu: gpus.Choice, name: str, batch_size: int, sentence_len: int | None) -> Profile:
    from common.profiling import modelled  # imports torch

    return modelled.profile_on(gpu, name, batch_size, sentence_len)


def _measured(name: str, batch_size: int, sentence_len: int | None) -> Profile:
    from common.profiling import layers
    from common.profiling.recorder import failing

    words = ["--model", name, "--batch", str(batch_size), "--device", "cuda"]
    words += [] if sentence_len is None else ["--sentence-len", str(sentence_len)]
    try:
        return layers.record_profile(layers.parse(words))
    except UserError:
        raise
    except Exception as error:
        raise failing(name, error) from error


def _keep(profile: Profile, path: Path) -> None:
    """Writes a profile atomically.

    Raises:
        UserError: the file cannot be written, or the times are too short to be replayed.
    """
    if profile.step_s < _LEAST_S:
        raise UserError(
            f"model {profile.model}: takes less than a microsecond for {profile.batch_size} "
            f"samples on {profile.device_name}, too little to be replayed; use a larger batch"
        )
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        profile.save(partial)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(
            f"profile {path}: {error.strerror}; XDG_CACHE_HOME says where profiles are kept"
        ) from None
    print(
        f"{profile.model} {profile.kind} for {profile.device_name}: forward "
        f"{profile.forward_s * 1e3:.1f} ms, backward {profile.backward_s * 1e3:.1f} ms "
        f"({profile.batch_size} samples); kept as {path}",
        file=sys.stderr,
    )


def _key(brought: Brought, device: str, gpu: str, batch_size: int, sentence_len: int | None) -> str:
    """Returns a digest of all that a profile depends on: the model, the GPU, and the programs and
    libraries that compute the profile."""
    programs = b"\0".join(path.read_bytes() for path in sorted(_PROFILERS.glob("*.py")))
    facts = [
        hashlib.sha256(programs).hexdigest(),
        brought.digest or brought.source,
        device,
        device if gpu == HERE else vars(gpus.find(gpu).gpu),
        batch_size,
        sentence_len,
        {name: version(name) for name in _LIBRARIES},
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
