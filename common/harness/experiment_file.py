"""Reader of experiment files: the YAML, `--set`, and models and plugins of the command line."""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from common.emulation import sandbox
from common.emulation.links.switched import PROGRAM
from common.harness import custom
from common.harness.experiment import MEASURED_ONLY, Experiment
from common.machine.yaml_files import StrictLoader, read_mapping
from common.models.registry import FILE, names_gpu
from common.paths import BUILD, EXPERIMENTS
from common.profiling import gpus
from dear.algorithms.aliases import ALIASES
from dear.errors import UserError, one_of
from dear.options import at_least, build_options
from dear.training.algorithm import load_plugin


def find_experiment(given: str | Path) -> Path:
    """Returns the path of an experiment file.

    Args:
        given: a path, or the name of a file in configs/experiments, with or without `.yaml`.

    Raises:
        UserError: there is no such file.
    """
    path = Path(given)
    if path.exists() or path.parent != Path():
        return path
    known = {path.stem: path for path in EXPERIMENTS.rglob("*.yaml")}
    return one_of("experiment", path.name.removesuffix(".yaml"), known)


def default_experiment() -> Path:
    """Returns the experiment of a command without a verb: on virtual hosts if possible."""
    reason = None if sandbox.inside() else unable_to_emulate()
    if reason:
        print(f"no virtual hosts here ({reason}): runs quick.yaml instead", file=sys.stderr)
    return EXPERIMENTS / ("quick.yaml" if reason else "emulated-quick.yaml")


def unable_to_emulate() -> str | None:
    """Returns why the default sweep cannot run on virtual hosts here, or None if it can."""
    return sandbox.unable() if PROGRAM.exists() else f"the link switch is not built: {BUILD}"


NOTHING_RUNS = ("measure={}", "launcher_options={}", "hostfile=null")
NOTHING_RUNS += ("backend=null", "device=cpu", "tf32=false", "cudnn_benchmark=false")
NOTHING_RUNS += tuple(
    f"{field.name}={json.dumps(field.default)}"
    for field in fields(Experiment)
    if field.name in MEASURED_ONLY
)
"""Overrides of an experiment's keys about how and where its trials run, for predictions."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """Models and plugins that the user gave on the command line.

    The models replace those of the experiment file; the plugins are added.
    """

    name: str | None = None
    """Name of the sweep; None: the experiment's."""
    models: tuple[str, ...] = ()
    batch_size: int | None = None
    gpu: str | None = None
    plugins: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: argparse.Namespace) -> CommandLine:
        """Reads the flags of `run`. Without an experiment the sweep is named after its models.

        Raises:
            UserError: `--batch` or `--gpu` without a model.
        """
        files = [f"{FILE}{Path(file).absolute()}" for file in options.model_file]
        models = [*(_absolute_name(name, Path()) for name in options.model), *files]
        for flag in ("batch", "gpu"):
            if getattr(options, flag) is not None and not models:
                raise UserError(f"--{flag}: needs --model or --model-file")
        if options.batch is not None:
            at_least("--batch", options.batch, 1)
        name = None
        if models and options.experiment is None:
            last = [model.rpartition("/")[2].rpartition(":")[2] for model in models]
            name = "-".join(part.removesuffix(".py") for part in last)
        return cls(
            name=name,
            models=tuple(models),
            batch_size=options.batch,
            gpu=options.gpu,
            plugins=tuple(str(Path(file).absolute()) for file in options.plugin),
        )

    def apply(self, values: dict[str, object]) -> None:
        """Replaces the models and the name in an experiment's values, and adds the plugins."""
        if self.models:
            size = {} if self.batch_size is None else {"batch_size": self.batch_size}
            values["models"] = [{"name": name, **size} for name in self.models]
        if self.name is not None:
            values |= {"name": self.name, "description": "models of the command line"}
        if self.plugins:
            values["plugins"] = [*_as_list(values.get("plugins")), *self.plugins]
            algorithms = _as_list(values.get("algorithms"))
            named = [item.get("name") if isinstance(item, dict) else item for item in algorithms]
            added = [name for name in map(algorithm_of, self.plugins) if name not in named]
            values["algorithms"] = [*algorithms, *added]

    def choose_gpus(self, values: dict[str, object]) -> None:
        """Sets the GPU of the command line's models, except where `--set` has set it.

        On virtual hosts, models are always replayed: this machine would compute at another speed.
        On a predicted cluster, those of the experiment are replayed, too. Elsewhere, models
        compute, unless `--gpu` names a GPU.
        """
        cluster = values.get("cluster")
        predicted = isinstance(cluster, dict) and cluster.get("kind") == "predicted"
        models = _as_list(values.get("models"))
        if predicted and models:
            models = [{"name": model} if isinstance(model, str) else model for model in models]
            values["models"] = models
        for model in models:
            if not isinstance(model, dict) or not isinstance(model.get("name"), str):
                continue
            if model["name"] not in self.models and not predicted:
                continue
            if self.gpu is not None and model["name"] in self.models:
                model["gpu"] = self.gpu
            elif values.get("cluster") and not names_gpu(model["name"]) and "gpu" not in model:
                model["gpu"] = custom.HERE if custom.gpu_available() else gpus.DEFAULT

    def print_assumption(self, experiment: Experiment) -> None:
        """Prints the line of `assumption`, if there is one."""
        line = self.assumption([model.name for model in experiment.models])
        if line is not None:
            print(line)

    def assumption(self, names: Sequence[str]) -> str | None:
        """Returns a line that names the default GPU if it was chosen; otherwise None.

        Args:
            names: models by their names in trials.
        """
        named = self.gpu is not None or any(map(names_gpu, self.models))
        device = gpus.find(gpus.DEFAULT).folder_name
        if named or not self.models or not any(name.endswith(f"@{device}") for name in names):
            return None
        return f"no GPU here: times are modelled for {gpus.DEFAULT} (--gpu names another)"


def load(
    path: Path, overrides: Sequence[str] = (), command_line: CommandLine | None = None
) -> Experiment:
    """Reads an experiment file.

    Relative paths of models and plugins are searched in the folder of the experiment file, then in
    the current folder.

    Args:
        overrides: texts `key=value`, such as `measure.repeats=5` or `models.0.batch_size=8`.
        command_line: models and plugins of the command line; overrides apply to them, too.

    Raises:
        UserError: the file does not exist or is no YAML, a key is unknown, or a value is wrong.
    """
    values = _read(path)
    command_line = command_line or CommandLine()
    command_line.apply(values)
    for override in overrides:
        _override(values, override)
    _fix_repeats(values, overrides)
    command_line.choose_gpus(values)
    values.setdefault("name", path.stem)
    if "plugins" in values:
        values["plugins"] = load_plugins(_as_list(values["plugins"]), path.parent)
    if "models" in values:
        models = _as_list(values["models"])
        values["models"] = [_absolute_model(model, path.parent) for model in models]
    return build_options(Experiment, values, "experiment key")


def _read(path: Path) -> dict[str, object]:
    values = read_mapping(path, "experiment")
    # A key that begins with a dot is no setting: it holds values for YAML aliases.
    return {key: value for key, value in values.items() if not str(key).startswith(".")}


def _override(values: dict[str, object], text: str) -> None:
    key, equals, value_text = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text!r}: must be key=value, e.g. --set measure.repeats=5")
    try:
        value = yaml.load(value_text, StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f"--set {text!r}: the value is not valid YAML") from None
    *path, last = key.split(".")
    node: dict[str, object] | list[object] = values
    for part in path:
        inner = node[_index(node, part, text)] if isinstance(node, list) else node.get(part, {})
        if not isinstance(inner, (dict, list)):
            raise UserError(f"--set {text!r}: {part!r} is a value, not a mapping or a list")
        inner = copy.copy(inner)  # a YAML alias or `<<` may have put it elsewhere, too
        node[int(part) if isinstance(node, list) else part] = inner
        node = inner
    if isinstance(node, list):
        node[_index(node, last, text)] = value
    else:
        node[last] = value


def _fix_repeats(values: dict[str, object], overrides: Sequence[str]) -> None:
    """Drops the file's `precision` if `--set` gives a single number of repeats, not a range."""
    measure = values.get("measure")
    keys = {text.partition("=")[0] for text in overrides}
    asked = "measure.repeats" in keys and not {"measure", "measure.precision"} & keys
    if asked and isinstance(measure, dict) and not isinstance(measure["repeats"], list):
        measure.pop("precision", None)


def _index(node: list[object], part: str, text: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise UserError(f"--set {text!r}: {part!r} is no index of a list of {len(node)}")
    return int(part)


def _as_list(value: object) -> list[object]:
    return [] if value is None else [*value] if isinstance(value, list) else [value]


def algorithm_of(path: str | Path) -> str:
    """Returns the name of a plugin's algorithm, which is the file's name."""
    return Path(path).stem.replace("_", "-")


def load_plugins(paths: Sequence[object], folder: Path) -> tuple[str, ...]:
    """Loads algorithms from plugins (Python files), and returns the absolute paths.

    Args:
        folder: folder in which relative paths are searched, before the current folder.

    Raises:
        UserError: a file is no plugin, or has the name of another algorithm.
    """
    files = []
    for path in paths:
        if not isinstance(path, str):
            raise UserError(f"plugins: must be names of files, got {path!r}")
        file = _absolute(path, folder)
        if algorithm_of(file) in ALIASES:
            raise UserError(f"{file}: {file.stem} is an alias of an algorithm; rename the file")
        load_plugin(file)
        files.append(str(file))
    return tuple(files)


def _absolute_model(model: object, folder: Path) -> object:
    if isinstance(model, str):
        return _absolute_name(model, folder)
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        return {**model, "name": _absolute_name(model["name"], folder)}
    return model


def _absolute_name(name: str, folder: Path) -> str:
    if not name.startswith(FILE):
        return name
    return f"{FILE}{_absolute(name.removeprefix(FILE), folder)}"


def _absolute(path: str, folder: Path) -> Path:
    near = folder / Path(path).expanduser()
    return (near if near.exists() else Path(path).expanduser()).absolute()
