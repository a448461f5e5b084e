"""What users bring from outside the repository: models with their profiles, and algorithms.

Models are named `file:PATH`, `hf:TYPE`, `timm:NAME`, or as in the registry; with a GPU beside the
name, the times that they take on it are replayed. Profiles that do not come with the project are
made once and kept in the user's cache, `$XDG_CACHE_HOME/dear-bench/profiles` (`~/.cache/...`),
never in the repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from common.models import profile as profiles
from common.models import registry
from common.models.profile import Profile
from common.models.registry import FILE, HF, TIMM, Brought
from common.profiling import gpus
from dear.algorithms.aliases import ALIASES
from dear.errors import UserError
from dear.files import digest_of
from dear.options import at_least
from dear.training.algorithm import load_plugin

HERE = "here"
"""As a GPU: that of this machine, measured."""
_SEED = 1
_LIBRARIES = ("torch", "torchvision", "timm", "transformers")
_LEAST_S = 1e-6
_MAKERS = Path(__file__).parents[1] / "profiling"
"""The programs that make profiles."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the command line says of them, in place of what the experiment says."""

    name: str | None = None
    """Of the sweep; None: that of the experiment."""
    models: tuple[str, ...] = ()
    batch_size: int | None = None
    gpu: str | None = None
    plugins: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: argparse.Namespace) -> Given:
        """From the flags of `run`. Without an experiment the sweep is named after its models.

        Raises:
            UserError: `--batch` or `--gpu` without a model.
        """
        files = [f"{FILE}{Path(one).absolute()}" for one in options.model_file]
        models = [*(absolute(one, Path()) for one in options.model), *files]
        for flag in ("batch", "gpu"):
            if getattr(options, flag) is not None and not models:
                raise UserError(f"--{flag}: goes with --model or --model-file")
        if options.batch is not None:
            at_least("--batch", options.batch, 1)
        name = None
        if models and options.experiment is None:
            last = [one.rpartition("/")[2].rpartition(":")[2] for one in models]
            name = "-".join(one.removesuffix(".py") for one in last)
        return cls(
            name=name,
            models=tuple(models),
            batch_size=options.batch,
            gpu=options.gpu,
            plugins=tuple(str(Path(one).absolute()) for one in options.plugin),
        )

    def into(self, values: dict[str, Any]) -> None:
        """Takes the place of what an experiment's values say; algorithms are added to its own."""
        if self.models:
            size = {} if self.batch_size is None else {"batch_size": self.batch_size}
            values["models"] = [{"name": name, **size} for name in self.models]
        if self.name is not None:
            values |= {"name": self.name, "description": "models of the command line"}
        if self.plugins:
            values["plugins"] = [*_several(values.get("plugins")), *self.plugins]
            chosen = _several(values.get("algorithms"))
            named = {one.get("name") if isinstance(one, dict) else one for one in chosen}
            added = [name for name in map(algorithm_of, self.plugins) if name not in named]
            values["algorithms"] = [*chosen, *added]

    def choose_gpus(self, values: dict[str, Any]) -> None:
        """For the models of the command line: on virtual hosts they are replayed, as their compute
        would be that of this machine; elsewhere they compute, unless a GPU is named."""
        for model in _several(values["models"]) if self.models else ():
            if not isinstance(model, dict) or model.get("name") not in self.models:
                continue  # by --set
            if self.gpu is not None:
                model["gpu"] = self.gpu
            elif values.get("cluster") and "@" not in model["name"] and "gpu" not in model:
                model["gpu"] = HERE if _gpu_here() else gpus.DEFAULT

    def assumed(self, names: Sequence[str]) -> str | None:
        """What is said of models, by their names in trials, for whose GPU nobody has asked."""
        asked = self.gpu is not None or any("@" in name for name in self.models)
        device = gpus.find(gpus.DEFAULT).folder_name
        if asked or not self.models or not any(name.endswith(f"@{device}") for name in names):
            return None
        return f"no GPU here: times are modelled for {gpus.DEFAULT} (--gpu names another)"


def locate(values: dict[str, Any], folder: Path) -> None:
    """Loads the plugins of an experiment's values, and makes paths of models absolute.

    Args:
        folder: that relative paths are tried from, before the current one.

    Raises:
        UserError: a plugin is none, or has the name of another algorithm.
    """
    if "plugins" in values:
        values["plugins"] = load_plugins(_several(values["plugins"]), folder)
    if "models" not in values:
        return
    models = _several(values["models"])
    for place, one in enumerate(models):
        if isinstance(one, dict) and "name" in one:
            models[place] = {**one, "name": absolute(one["name"], folder)}
        else:
            models[place] = absolute(one, folder)
    values["models"] = models


def _several(value: Any) -> list[Any]:
    """Of a key of an experiment that may have one value or a list."""
    return [] if value is None else [*value] if isinstance(value, list) else [value]


def algorithm_of(path: str | Path) -> str:
    """The algorithm's name, which is its file's."""
    return Path(path).stem.replace("_", "-")


def load_plugins(paths: Sequence[Any], folder: Path) -> tuple[str, ...]:
    """Loads algorithms from files; their absolute paths.

    Args:
        folder: that relative paths are tried from, before the current one.

    Raises:
        UserError: one of them is none, or has the name of another.
    """
    found = []
    for path in paths:
        if not isinstance(path, str):
            raise UserError(f"plugins: must be names of files, got {path!r}")
        file = _absolute(path, folder)
        if algorithm_of(file) in ALIASES:
            raise UserError(f"{file}: {file.stem} is another name of an algorithm; rename the file")
        load_plugin(file)
        found.append(str(file))
    return tuple(found)


def absolute(name: Any, folder: Path) -> Any:
    """The name of a model, with an absolute path if it is a file's."""
    if not isinstance(name, str) or not name.startswith(FILE):
        return name
    return f"{FILE}{_absolute(name.removeprefix(FILE), folder)}"


def _absolute(path: str, folder: Path) -> Path:
    near = folder / Path(path).expanduser()
    return (near if near.exists() else Path(path).expanduser()).absolute()


def bring_model(
    name: str, batch_size: int | None, sentence_len: int | None, gpu: str | None
) -> tuple[str, int | None, int | None]:
    """Makes a model known in this process, and its profile if there is a GPU; it is made, where
    there is none yet.

    Returns:
        The model's name in trials and tables, and its batch size and sentence length: as given
        where the registry knows what they are without.

    Raises:
        UserError: no such model or GPU, a file that says less than it must, or a model that fails.
    """
    name, brought = _known(name)
    if gpu is None and brought is not None and brought.source.startswith(FILE):
        from common.models import user_file  # which imports torch

        user_file.check(Path(brought.source.removeprefix(FILE)))
    if gpu is None:
        return name, batch_size, sentence_len
    if "@" in name:
        raise UserError(f"gpu: {name} is a recorded model already; leave one of the two out")
    device, make = _device(gpu)
    replayed = f"{name}@{device}"
    sizes = profiles.batch_sizes().get(replayed, [])
    if sizes and batch_size in (None, *sizes):
        shipped = registry.profile_of(replayed, batch_size or sizes[0])
        if sentence_len in (None, shipped.sentence_len):
            return replayed, batch_size, sentence_len
    entry = registry.model_entry(name)
    batch_size = entry.batch_size if batch_size is None else batch_size
    sentence_len = registry.sentence_len(name, sentence_len)
    brought = brought or Brought(source=name)
    key = _key(brought, device, gpu, batch_size, sentence_len)
    path = cache() / device / f"{name.replace(':', '-')}-bs{batch_size}-{key}.json"
    if not path.exists():
        _keep(make(name, batch_size, sentence_len), path)
    registry.bring(replayed, dataclasses.replace(brought, profile=str(path)))
    return replayed, batch_size, sentence_len


def cache() -> Path:
    """Where profiles are kept that do not come with the project."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "dear-bench" / "profiles"


def _known(name: str) -> tuple[str, Brought | None]:
    """The name of a model in trials and tables, once the registry knows it."""
    if name.startswith(FILE):
        path = Path(name.removeprefix(FILE))
        if re.fullmatch(r"[\w.+-]+\.py", path.name) is None:
            raise UserError(
                f"{path}: a model's file ends in .py, and its name has letters, digits, '_', '.', "
                "'+' and '-' only"
            )
        brought = Brought(source=f"{FILE}{path}", digest=digest_of(path))
        name = path.name
    elif name.startswith((HF, TIMM)):
        brought = Brought(source=name)
    else:
        return name, None
    registry.bring(name, brought)
    registry.model_entry(name)
    return name, brought


def _device(gpu: str) -> tuple[str, Callable[[str, int, int | None], Profile]]:
    """What the device is called behind the `@`, and what makes a profile for it."""
    if gpu != HERE:
        choice = gpus.find(gpu)
        return choice.folder_name, lambda *model: _modelled(choice, *model)
    if not _gpu_here():
        raise UserError(
            f"gpu: torch sees none {HERE}; name one that the times are modelled for: "
            + ", ".join(gpus.table())
        )
    import torch

    from common.profiling.layers import folder_name

    return folder_name(torch.cuda.get_device_name()), _measured


def _gpu_here() -> bool:
    devices = (*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd"))
    if not devices:  # torch takes seconds to say so
        return False
    import torch

    return torch.cuda.is_available()


def _modelled(gpu: gpus.Choice, name: str, batch_size: int, sentence_len: int | None) -> Profile:
    import torch

    from common.profiling.modelled import profile_of_any

    def build() -> Any:
        torch.manual_seed(_SEED)
        generator = torch.Generator().manual_seed(_SEED)
        return registry.build(name, batch_size, sentence_len, generator)

    return profile_of_any(
        name,
        build,
        gpu,
        batch_size=batch_size,
        sentence_len=sentence_len,
        sample_unit=registry.model_entry(name).sample_unit,
    )


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


def _keep(made: Profile, path: Path) -> None:
    """Writes so that a reader sees all of the profile or nothing.

    Raises:
        UserError: it cannot be written, or there is nothing that could be replayed.
    """
    if made.step_s < _LEAST_S:
        raise UserError(
            f"model {made.model}: takes less than a microsecond for {made.batch_size} samples on "
            f"{made.device_name}: too little to be replayed; take a larger batch"
        )
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        made.save(partial)
        partial.replace(path)
    except OSError as error:
        raise UserError(
            f"profile {path}: {error.strerror}; XDG_CACHE_HOME says where profiles are kept"
        ) from None
    print(
        f"{made.model} {made.kind} for {made.device_name}: forward {made.forward_s * 1e3:.1f} ms, "
        f"backward {made.backward_s * 1e3:.1f} ms ({made.batch_size} samples); kept as {path}",
        file=sys.stderr,
    )


def _key(brought: Brought, device: str, gpu: str, batch_size: int, sentence_len: int | None) -> str:
    """Of all that a profile depends on."""
    entry: Any = device if gpu == HERE else vars(gpus.find(gpu).gpu)
    source = brought.digest or brought.source
    said = [_rule(), source, device, entry, batch_size, sentence_len, _versions()]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]


def _rule() -> str:
    """Of the programs that make profiles, so that none is kept that an earlier one has made."""
    texts = [path.read_bytes() for path in sorted(_MAKERS.glob("*.py"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _versions() -> Mapping[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
