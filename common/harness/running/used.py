"""Facts on which a trial's results depend: hardware, packages, code, environment variables.

An interrupted trial continues only if all these facts are the same, because its repeats form one
sample. Facts that only other trials use may change.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dear
from common.harness.trial import Trial
from common.models.registry import FILE, model_entry
from common.paths import ROOT

_MACHINE = ("cpu", "cores", "cpus", "core_limit", "kernel", "sysctl", "python")
"""Fields of the machine card on which every trial depends."""
_ALWAYS = ("torch", "numpy")
_UNUSED = (
    *("common/comm_core", "common/gpu_check", "common/harness/verbs", "common/results"),
    *("common/virtual", "dear/bluefog", "dear/dadt", "dear/decentralized"),
)
"""Folders that are left out: no worker runs their code, or (comm core) the card has a digest."""
_CHOICES = re.compile(r"(dear/algorithms/\w+|common/models/architectures)/(?!__init__)\w+\.py")
"""Files that only trials of one algorithm or model use."""


def used(trial: Trial, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts on which a trial depends, as JSON values by name.

    Args:
        machine: the machine card.
    """
    texts = _texts(trial)
    words = set(re.findall(r"\w+", "".join(texts.values())))
    packages = machine["packages"]
    if trial.sources.brought is None or not trial.sources.brought.source.startswith(FILE):
        packages = {name: packages[name] for name in packages if name in {*_ALWAYS, *words}}
    facts = {name: machine[name] for name in _MACHINE}
    facts |= {f"package {name}": version for name, version in packages.items()}
    if trial.device == "cuda":
        facts["gpus"] = machine["gpus"]
    if trial.backend == "comm_core":
        facts["comm core"] = machine["comm_core"]
    # A library's variables are included only if the trial uses the library.
    idle = [
        *([] if "horovod" in packages else ["HOROVOD_"]),
        *([] if trial.device == "cuda" else ["NCCL_", "CUDA_"]),
        *([] if trial.backend == "comm_core" else ["COMM_CORE_"]),
    ]
    facts |= {
        f"variable {name}": value
        for name, value in machine["environment"].items()
        if not name.startswith(tuple(idle))
    }
    everywhere = {name: text for name, text in code().items() if not _CHOICES.fullmatch(name)}
    digest = hashlib.sha256(json.dumps(everywhere | texts, sort_keys=True).encode())
    return json.loads(json.dumps({**facts, "code": digest.hexdigest()[:12]}))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the names of facts that differ between two results of `used`, with short values."""
    texts = []
    for name in dict.fromkeys((*before, *now)):
        values = [facts.get(name) for facts in (before, now)]
        if values[0] != values[1]:
            short = all(isinstance(value, str | int | float | None) for value in values)
            texts.append(f"{name} ({values[0]} before, {values[1]} now)" if short else name)
    return texts


@functools.cache
def code() -> dict[str, str]:
    """Returns the texts of the Python and C++ files that workers may use, by path."""
    tops = [ROOT / "common", Path(dear.__file__).parent]  # installed, these are no neighbours
    files = [(top.parent, path) for top in tops for path in top.rglob("*")]
    names = {str(path.relative_to(up)): path for up, path in files if path.suffix in (".py", ".cc")}
    return {
        name: names[name].read_text(encoding="utf-8")
        for name in sorted(names)
        if not name.startswith(tuple(f"{folder}/" for folder in _UNUSED))
    }


@functools.cache
def _imported(text: str) -> list[str]:
    """Returns the paths of the modules that a Python file may import."""
    paths = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            paths += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            paths += [alias.name for alias in node.names]
    return [f"{path.replace('.', '/')}.py" for path in paths]


def _texts(trial: Trial) -> dict[str, str]:
    """Returns the code of the trial's algorithm and model, by path."""
    known, plugin = code(), trial.sources.plugin
    # `auto` chooses from other algorithms, and imports them by their names.
    names = (trial.algorithm, *getattr(trial.options, "candidates", ()))
    stems = {name.replace("-", "_") for name in names}
    texts = {name: text for name, text in known.items() if Path(name).stem in stems}
    texts |= {} if plugin is None else {plugin.path: Path(plugin.path).read_text(encoding="utf-8")}
    entry = model_entry(trial.model)
    builder = f"{entry.module.replace('.', '/')}.py"
    texts |= {builder: known[builder]} if builder in known else {}
    if trial.learn is not None:
        texts |= {name: known[name] for name in known if "/datasets/" in name}
    unread = list(texts.values())
    while unread:
        for name in _imported(unread.pop()):
            if name not in texts and name in known and _CHOICES.fullmatch(name):
                texts[name] = known[name]
                unread.append(known[name])
    return texts
