"""What the GPU check runs, most valuable first."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.harness.budget import Ended, Step, Verdict, by_exit_status
from dear.training.algorithm import algorithm_class, algorithm_names

ROOT = Path(__file__).parents[2]
EXPERIMENT = "configs/experiments/gpu.yaml"
SHARED_NAME = "gpu-2-ranks-"
PROFILES = (
    ("resnet50", 64),
    ("bert_base", 64),
    ("bert", 8),
    ("vgg16", 64),
    ("densenet201", 32),
    ("inceptionv4", 64),
    ("bert", 32),
)
_LIBRARIES = {"bert": ("transformers",), "bert_base": ("transformers",), "inceptionv4": ("timm",)}
_SWEEP = ("numpy", "scipy", "rich", "PyYAML", "torchvision")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the check runs and writes."""

    python: str
    venv: Path
    out: Path
    gpus: int
    device: str = "cuda"
    env: Mapping[str, str]

    @property
    def sweeps(self) -> Path:
        return self.out / "sweeps"

    @property
    def tests_report(self) -> Path:
        return self.out / "cuda-tests.xml"


def plan(place: Place) -> list[Step]:
    """The steps after the environment is made."""
    build = Step(
        name="build the comm core",
        command=[str(ROOT / "scripts" / "build.sh"), str(place.venv)],
        expected_s=10,
        limit_s=240,
        needs=("c++", "cmake", "ninja"),
        env=place.env,
    )
    return [
        build,
        _tests(place),
        _shared(place, "comm_core", after=(build.name,)),
        _shared(place, "gloo", after=()),
        *(_over_nccl(place, model) for model in ("resnet50", "bert_base")),
        *(_profile(place, model, batch_size) for model, batch_size in PROFILES),
    ]


def _tests(place: Place) -> Step:
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_cuda*.py"))
    report = f"--junitxml={place.tests_report}"
    return Step(
        name="CUDA tests",
        command=[place.python, "-m", "pytest", "-q", "-rs", "-k", "not on_cpu", report, *files],
        expected_s=40,
        limit_s=180,
        needs=("pytest",),
        env=place.env,
        judge=partial(judge_tests, place.tests_report),
    )


def _shared(place: Place, backend: str, after: tuple[str, ...]) -> Step:
    how = "sharing the GPU" if place.gpus == 1 else "on a GPU each"
    name = SHARED_NAME + backend
    settings = {
        "name": name,
        "backend": backend,
        "world_sizes": [2],
        "models": [{"name": "resnet18", "batch_size": 8}],
        "baseline": False,
        "measure": {"repeats": 1, "warmup_steps": 2, "check_steps": 3, "min_iter_s": 0.2},
    }
    return _sweep(place, f"2 ranks {how}, over {backend}", name, settings, [], after, 25, 120)


def _over_nccl(place: Place, model: str) -> Step:
    ranks = f"{place.gpus} rank{'s' if place.gpus > 1 else ''}"
    settings = {"world_sizes": [place.gpus]}
    title = f"{model}, {ranks} over NCCL"
    return _sweep(place, title, "gpu", settings, [f"model={model}"], (), 30, 150)


def _sweep(
    place: Place,
    title: str,
    folder: str,
    settings: Mapping[str, Any],
    filters: Sequence[str],
    after: tuple[str, ...],
    expected_s: float,
    limit_s: float,
) -> Step:
    settings = {"algorithms": algorithms(place.device), "device": place.device, **settings}
    command = [place.python, "benchmarks.py", "run", EXPERIMENT, "--logs", str(place.sweeps)]
    command += ["--rerun", "all", "--no-plot", "--quiet"]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    models = filters or [f"model={model['name']}" for model in settings["models"]]
    names = {text.partition("=")[2] for text in models}
    for text in filters:
        command += ["-k", text]
    return Step(
        name=title,
        command=command,
        expected_s=expected_s,
        limit_s=limit_s,
        needs=(*_SWEEP, *(lib for name in names for lib in _LIBRARIES.get(name, ()))),
        after=after,
        env=place.env,
        judge=partial(judge_sweep, place.sweeps / folder, names),
    )


def _profile(place: Place, model: str, batch_size: int) -> Step:
    command = [place.python, "-m", "common.profiling.layers", "--model", model]
    return Step(
        name=f"profile {model}-bs{batch_size}",
        command=[*command, "--batch", str(batch_size), "--device", place.device],
        expected_s=10,
        limit_s=60,
        needs=("numpy", *_LIBRARIES.get(model, ("torchvision",))),
        env=place.env,
    )


def algorithms(device: str) -> list[str]:
    """Every algorithm that can run on `device`."""
    return [n for n in algorithm_names() if device in algorithm_class(n).capabilities.devices]


def judge_tests(report: Path, ended: Ended) -> Verdict:
    """From pytest's report: `failed` also if no test ran at all."""
    if not report.exists():
        return by_exit_status(ended)
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skips = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(bad) - len(skips)
    text = f"{passed} passed"
    if skips:
        reasons = {(skip.get("message") or "").strip() for skip in skips}
        text += f", {len(skips)} skipped ({'; '.join(sorted(reasons))})"
    if bad:
        names = ", ".join(str(case.get("name")) for case in bad[:5])
        return Verdict(status="failed", reason=f"{len(bad)} failed ({names}), {text}")
    if not passed:
        return Verdict(status="failed", reason=f"no test ran: {text}")
    return Verdict(status="ok", reason=text) if ended.code == 0 else by_exit_status(ended)


def judge_sweep(folder: Path, models: set[str], ended: Ended) -> Verdict:
    """From the sweep's records of `models`: every trial must be right, not only finish."""
    from common.results import records

    newest = records.latest(records.load(folder / "records.jsonl")).values()
    mine = [record for record in newest if record["trial"]["model"] in models]
    good, bad, without = [], [], []
    for record in mine:
        label = record["trial"]["label"]
        check = record["check"] or {}
        if record["status"] == "unsupported":
            without.append(f"{label}: {record['error']['message']}")
        elif record["status"] != "ok":
            bad.append(f"{label}: {record['status']}: {record['error']['message']}")
        elif not check["replicas_agree"]:
            bad.append(f"{label}: the replicas differ by {check['replica_spread']}")
        elif not check["matches_reference"]:
            bad.append(f"{label}: off plain training by {check['reference_error']}")
        else:
            good.append(label)
    text = f"{len(good)} right" + (f"; unsupported: {'; '.join(without)}" if without else "")
    if bad:
        return Verdict(status="failed", reason=f"{'; '.join(bad)[:600]} ({text})")
    if ended.code != 0 or not good:
        return by_exit_status(ended) if ended.code else Verdict(status="failed", reason=text)
    return Verdict(status="ok", reason=text)
