"""Models and algorithms of the user's own: names, profiles, digests, and one line for a mistake."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from common.harness import cli, custom
from common.harness.experiment_file import CommandLine, load
from common.harness.trial import Trial
from common.harness.verbs.list import listing
from common.models import profile as profiles
from common.models import registry, user_file
from common.models.registry import Brought
from common.models.replay.model import Replay
from common.profiling import gpus, layers, modelled
from common.results.timed import rows
from dear.errors import UserError
from dear.training import algorithm as algorithms
from dear.training import files
from dear.training.algorithm import Plugin
from dear.training.files import digest_of
from tests.unit.made_record import record

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODEL, ALGORITHM = EXAMPLES / "bring_your_own_model.py", EXAMPLES / "bring_your_own_algorithm.py"

TINY = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(256, 999), torch.nn.ReLU(), torch.nn.Linear(999, 4))

def batch(batch_size):
    return torch.randn(batch_size, 256), torch.randint(4, (batch_size,))
"""
EXPERIMENT = {
    "algorithms": ["ddp", "dear"],
    "models": [{"name": "file:mine.py", "gpu": "v100", "batch_size": 4}],
    "cluster": {"hosts": 2, "network": "10gbe"},
    "baseline": False,
}


@pytest.fixture(autouse=True)
def nothing_brought(tmp_path, monkeypatch):
    """Gives the test the state of a new process, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def forget():
        monkeypatch.setattr(registry, "_brought", {})
        monkeypatch.setattr(algorithms, "_plugins", {})
        for name in [*sys.modules]:
            if name.startswith(("user_models.", "dear_plugins.")) or name == "near_by":
                del sys.modules[name]

    forget()
    yield forget
    forget()


@pytest.fixture
def mine(tmp_path):
    """`mine(text)` is the file of a small model that says so."""

    def write(text: str = TINY, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def trial(tmp_path, mine, nothing_brought):
    """`trial()` is the first of a small experiment, read as in a new process."""
    mine()

    def read(**changed) -> Trial:
        nothing_brought()
        path = tmp_path / "demo.yaml"
        path.write_text(yaml.safe_dump(EXPERIMENT | changed))
        return load(path).trials()[0]

    return read


def one_line(call) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def bring(path: Path, batch_size: int = 4, gpu: str = "rtx2080ti") -> profiles.Profile:
    name, size, length = custom.bring_model(f"file:{path}", batch_size, None, gpu)
    return registry.profile_of(name, size, length)


# GPUs


def test_the_table_has_many_gpus_with_a_source_and_numbers_that_can_be():
    result = gpus.table()
    assert len(result) >= 12 and gpus.DEFAULT in result
    for gpu in result.values():
        assert re.match(
            r"(NVIDIA|AMD) .*(data sheet|architecture|product specifications)", gpu.source
        ), gpu
        assert gpu.name.split()[0] in gpu.source
        assert 4 < gpu.fp32_tflops < 200 and 200 <= gpu.memory_gb_per_s < 10_000
        faster = [rate for rate in (gpu.tf32_tflops, gpu.fp16_tflops) if rate is not None]
        assert sorted(faster) == faster and all(rate >= gpu.fp32_tflops for rate in faster)


def test_a_gpu_is_found_with_its_precision():
    result = gpus.find("a100-40g-tf32")
    assert (result.device.flops, result.device.bandwidth) == (156e12, 1555e9)
    assert result.folder_name == "a100-40g-tf32-modelled"
    assert gpus.find("rtx2080ti").device == modelled.RTX_2080_TI
    assert gpus.find("rtx2080ti").folder_name == modelled.FOLDER_NAME == "rtx2080ti-modelled"
    assert "did you mean 'rtx3090'" in one_line(lambda: gpus.find("rtx3080"))
    assert "v100 has no units for tf32" in one_line(lambda: gpus.find("v100-tf32"))
    assert "p40 has no units for fp16" in one_line(lambda: gpus.find("p40-fp16"))


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "float32", False, 19.5),
        ("NVIDIA A100-SXM4-80GB", "float32", True, 156),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", False, 312),
        ("NVIDIA A100 SXM4 80 GB", "float32 (tf32)", False, 156),
        ("NVIDIA H100 80GB HBM3", "amp-bf16", True, 989),
        ("Tesla T4", "float32", True, 8.1),  # no units for it
        ("Tesla T4", "amp-fp16", False, 65),
        ("Tesla T4", "bfloat16", False, None),
        ("Tesla P40", "float16", False, None),
        ("NVIDIA A100-SXM4-80GB", "float64", False, None),
        ("NVIDIA H100", "float32", False, None),  # of which there are several
    ],
)
def test_the_peak_of_a_device_is_that_of_its_type(name, dtype, tf32, tflops):
    assert gpus.peak_flops(name, dtype, tf32=tf32) == (tflops and pytest.approx(tflops * 1e12))


# Models


def test_a_module_has_the_same_profile_through_a_file_as_through_the_registry(mine):
    text = """
import torch, torchvision
def model(): return torchvision.models.resnet50(weights=None)
def batch(n): return torch.randn(n, 3, 224, 224), torch.randint(1000, (n,))
"""
    built = bring(mine(text), batch_size=64)
    wanted = registry.profile_of("resnet50@rtx2080ti-modelled", 64)
    assert (built.model, built.device, built.kind) == ("mine.py", "rtx2080ti-modelled", "modelled")
    assert built.step_s == pytest.approx(wanted.step_s, rel=1e-3)
    assert built.parameters == tuple(
        dataclasses.replace(ours, ready_s=pytest.approx(ours.ready_s, rel=1e-3))
        for ours in wanted.parameters
    )
    assert [call.module for call in built.calls] == [call.module for call in wanted.calls]
    assert "resnet50-bs64" in built.rule and "data sheet" not in built.rule
    assert "Turing" in built.rule, "where the peaks are from"


def test_half_the_bytes_and_faster_matrices_take_less_time(mine):
    path = mine()
    times = [bring(path, 4096, gpu).step_s for gpu in ("a100-40g", "a100-80g", "a100-40g-fp16")]
    assert times[0] > times[1] > times[2] > 0


def test_the_example_is_a_model():
    built = bring(MODEL, batch_size=2)
    assert (built.parameter_bytes, built.sample_unit) == (4 * 25_442_916, "sample")


def test_gpt2_by_its_type_has_its_parameters_and_downloads_nothing():
    name, size, length = custom.bring_model("hf:gpt2", None, None, None)
    assert (name, size, length) == ("hf:gpt2", None, None)
    entry = registry.model_entry(name)
    assert (entry.sample_unit, entry.batch_size, entry.sentence_len) == ("sen", 8, 64)
    with torch.device("meta"):
        built = registry.build(name, 2, 16, torch.Generator())
        loss = built.loss()
    assert sum(param.numel() for param in built.model.parameters()) == 124_439_808
    assert built.inputs["input_ids"].shape == (2, 16) and loss.shape == ()


def test_a_classifier_of_timm_is_a_model_with_images_of_its_size():
    for name, side in (("hf:textnet", 640), ("timm:convnextv2_atto", 224)):
        custom.bring_model(name, None, None, None)
        with torch.device("meta"):
            built = registry.build(name, 2, None, torch.Generator())
        assert built.inputs[0].shape == (2, 3, side, side) and built.loss().shape == ()
    assert sum(param.numel() for param in built.model.parameters()) == 3_708_400
    text = one_line(lambda: custom.bring_model("timm:resnet50dd", None, None, None))
    assert "did you mean 'resnet50d'" in text and "timm.list_models()" in text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gtp2", "unknown model type of transformers 'gtp2'; did you mean 'gpt2'"),
        ("wav2vec2", "no image classifier and no language model"),
    ],
)
def test_a_type_that_is_none_is_one_line(kind, words):
    assert words in one_line(lambda: custom.bring_model(f"hf:{kind}", None, None, None))


def test_a_class_without_arguments_is_a_model_too(mine):
    built = bring(
        mine(
            "import torch\n"
            "class Net(torch.nn.Linear):\n"
            "    def __init__(self): super().__init__(999, 999)\n"
            "def batch(n): return {'input': torch.randn(n, 999)}, torch.randn(n, 999)\n"
            "def loss(output, wanted): return (output - wanted).square().mean()\n"
        )
    )
    assert [param.name for param in built.parameters] == ["weight", "bias"]


def test_a_model_that_looks_at_values_is_counted_with_values(mine):
    text = TINY.replace("torch.nn.ReLU()", "Odd()").replace(
        "def model",
        "class Odd(torch.nn.Module):\n"
        "    def forward(self, x): return x * float(x.sum().item() > 1e9)\n\ndef model",
    )
    assert bring(mine(text)).step_s > 0


WRONG_MODELS = {
    "raises": ("x = 1\n1 / 0\n", ["cannot be imported: ZeroDivisionError", "(line 2)"]),
    "ends": ("import sys\nsys.exit('no GPU')\n", ["cannot be imported: SystemExit: no GPU"]),
    "no Python": ("def model(:\n", ["cannot be imported: SyntaxError", "line 1"]),
    "nothing": ("import torch\n", ["must have a function model()", "(it has: none)"]),
    "two classes": (
        "from torch import nn\nclass A(nn.Module): pass\nclass B(nn.Module): pass\n",
        ["must have a function model()", "(it has: A, B)"],
    ),
    "a class with arguments": (
        "from torch import nn\nclass A(nn.Module):\n    def __init__(self, width): pass\n",
        ["A needs arguments (width)", "write a function model()"],
    ),
    "made already": ("import torch\nmodel = torch.nn.Linear(2, 2)\n", ["write a function model()"]),
    "no model": (TINY + "def model(): return 3\n", ["must return a torch.nn.Module, got int"]),
    "no batch": ("import torch\ndef model(): return torch.nn.ReLU()\n", ["batch(batch_size)"]),
    "no pair": (TINY + "def batch(n): return torch.ones(n)\n", ["a pair (inputs, targets)"]),
    "other samples": (
        TINY + "def batch(n): return torch.ones(8, 999), torch.ones(8, 999)\n",
        ["batch(4) must return 4 samples, but no tensor has this size as its first", "(8, 999)"],
    ),
    "other samples, and a side of that size": (
        TINY + "def batch(n): return torch.ones(8, 3, 4, 4), torch.ones(8)\n",
        ["batch(4) must return 4 samples", "(8, 3, 4, 4)"],
    ),
    "no tensors": (TINY + "def batch(n): return [1], None\n", ["must return tensors, got int"]),
    "fails to be made": (TINY + "def model(): {}['k']\n", ["model() failed: KeyError: 'k'"]),
    "fails in forward": (
        TINY.replace("Linear(999, 4)", "Linear(998, 4)"),
        ["model mine.py: fails in its forward or backward pass: RuntimeError", "998"],
    ),
    "no scalar": (TINY + "def loss(output, labels): return output\n", ["fails in its", "scalar"]),
    "too little": (
        TINY.replace("256, 999", "256, 1").replace("999, 4", "1, 4"),
        ["takes less than a microsecond"],
    ),
    "frozen": (
        TINY + "m = model\ndef model(): return m().requires_grad_(False)\n",
        ["no parameters to train"],
    ),
}


def test_a_part_that_is_not_trained_has_no_gradient(mine):
    frozen = TINY.replace("def model():\n    return", "def model():\n    m =").replace(
        "Linear(999, 4))", "Linear(999, 4))\n    m[0].requires_grad_(False)\n    return m"
    )
    profile = bring(mine(frozen))
    assert profile.frozen == ("0.weight", "0.bias")
    saved = profiles.load(_saved(profile, mine().parent))
    assert saved == profile and saved.digest != dataclasses.replace(profile, frozen=()).digest
    model = Replay(profile, torch.Generator())
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {"2.weight", "2.bias"}
    plain = bring(mine(name="plain.py"))
    assert plain.frozen == () and "frozen" not in _saved(plain, mine().parent).read_text()


def _saved(profile: profiles.Profile, folder: Path) -> Path:
    path = folder / "saved.json"
    profile.save(path)
    return path


@pytest.mark.parametrize(
    "text",
    [
        TINY.replace("999", "int(torch.tensor(999).item())", 1),
        TINY + "offset = torch.ones(1)\ndef batch(n):\n    x = torch.from_numpy("
        "__import__('numpy').ones((n, 256), 'float32'))\n"
        "    return x + offset, torch.randint(4, (n,))\n",
    ],
    ids=["in model()", "in batch()"],
)
def test_what_makes_a_model_may_look_at_values(mine, text):
    assert bring(mine(text)).parameter_bytes == bring(mine(name="plain.py")).parameter_bytes


def test_a_mask_of_the_users_own_model_is_passed_on(mine):
    text = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(256, 999)

    def forward(self, x, attention_mask):
        return self.line(x * attention_mask)

def batch(n):
    return {"x": torch.randn(n, 256), "attention_mask": torch.ones(n, 1)}, torch.randint(9, (n,))
"""
    assert bring(mine(text)).step_s > 0


def test_each_rank_has_its_own_samples_also_of_numpy(mine):
    path = mine(
        TINY + "import numpy, random\ndef batch(n):\n"
        "    x = numpy.random.rand(n, 256).astype('float32') + random.random()\n"
        "    return torch.from_numpy(x), torch.randint(4, (n,))\n"
    )
    before = random.getstate(), np.random.get_state()[1].tolist()
    first, second, again = (
        user_file.workload(path, 4, torch.Generator().manual_seed(seed)).inputs[0]
        for seed in (1, 2, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_mixed_precision_needs_no_targets_and_casts_those_of_numbers(mine):
    sums = "def batch(n): return torch.randn(n, 256), None\ndef loss(x): return x.sum()\n"
    path = mine(TINY + sums)
    workload = user_file.workload(path, 4, torch.Generator())
    cpu = torch.device("cpu")
    workload.to(cpu, torch.float32, torch.bfloat16).loss().backward()
    regression = mine(
        TINY + "def batch(n): return torch.randn(n, 256), torch.randn(n, 4)\n"
        "loss = torch.nn.functional.mse_loss\n",
        "regression.py",
    )
    workload = user_file.workload(regression, 4, torch.Generator())
    workload.to(cpu, torch.bfloat16).loss().backward()


def test_a_folder_with_an_at_is_no_gpu(tmp_path):
    folder = tmp_path / "ann@corp.org"
    folder.mkdir()
    (folder / "mine.py").write_text(TINY)
    line = CommandLine(models=(f"file:{folder}/mine.py",))
    values = {"cluster": {"hosts": 2}, "models": [{"name": line.models[0]}]}
    line.choose_gpus(values)
    assert values["models"][0]["gpu"] == gpus.DEFAULT


def test_a_profile_that_was_recorded_by_hand_is_replayed(tmp_path, mine, monkeypatch):
    profile = dataclasses.replace(bring(mine()), device="h200-tf32", kind="measured")
    monkeypatch.setattr(profiles, "FOLDER", tmp_path / "profiles")
    profile.save(profiles.path_of("mine.py", "h200-tf32", 4))
    assert bring(mine(), gpu="h200-tf32").kind == "measured"
    assert bring(mine(), 512, gpu="h200-tf32").kind == "modelled"


def test_a_profile_of_another_version_of_the_file_is_not_replayed(
    tmp_path, mine, monkeypatch, nothing_brought
):
    monkeypatch.setattr(profiles, "FOLDER", tmp_path / "profiles")
    path = mine()
    words = ["--model", f"file:{path}", "--batch", "4", "--device", "cpu", "--name", "h200-tf32"]
    assert layers.main([*words, "--steps", "1", "--warmup", "0"]) == 0
    assert bring(path, gpu="h200-tf32").model_digest == digest_of(path)
    path.write_text(path.read_text() + "# another\n")
    nothing_brought()
    assert "another version of mine.py; record it again" in one_line(
        lambda: bring(path, gpu="h200-tf32")
    )


def test_a_sentence_longer_than_the_model_is_refused():
    with pytest.raises(UserError, match="hf:gpt2 has 1024 positions, fewer than 4096"):
        custom.bring_model("hf:gpt2", 1, 4096, "v100")


def test_names_of_modules_are_free(mine):
    text = (
        TINY.replace("torch.nn.Sequential(", "torch.nn.Sequential(OrderedDict(source=")
        .replace("torch.nn.ReLU(), ", "lead=torch.nn.ReLU(), parameter=")
        .replace("Linear(999, 4))", "Linear(999, 4)))")
        .replace("import torch\n", "import torch\nfrom collections import OrderedDict\n", 1)
    )
    for generator in (torch.Generator(), None):
        model = Replay(bring(mine(text)), generator)
        assert {name for name, _ in model.named_children()} >= {"source", "parameter"}


@pytest.mark.parametrize(
    ("case", "gpu"),
    [
        *((case, "rtx2080ti") for case in WRONG_MODELS),
        # Also before it computes in ranks.
        *((case, None) for case in ("raises", "nothing", "no batch", "made already")),
    ],
)
def test_a_wrong_model_is_one_line_and_leaves_nothing(tmp_path, mine, case, gpu):
    text, words = WRONG_MODELS[case]
    path = mine(text)
    output = one_line(lambda: bring(path, gpu=gpu))
    assert [word for word in ["mine.py", *words] if word not in output] == []
    assert not (tmp_path / "cache").exists()


def test_bad_names_are_one_line(tmp_path, mine):
    path = mine()
    assert "No such file" in one_line(lambda: bring(tmp_path / "other.py"))
    assert "ends in .py" in one_line(lambda: bring(mine(name="mine.txt")))
    assert "did you mean 'rtx2080ti'" in one_line(lambda: bring(path, gpu="rtx2080"))
    assert "torch finds no GPU here; name a GPU" in one_line(lambda: bring(path, gpu="here"))
    again = "resnet50@rtx2080ti-modelled"
    assert "names its GPU already" in one_line(lambda: custom.bring_model(again, 64, None, "v100"))
    elsewhere = tmp_path / "elsewhere" / "mine.py"
    elsewhere.parent.mkdir()
    shutil.copy(path, elsewhere)
    elsewhere.write_text(TINY + "# other\n")
    bring(path)
    assert "model mine.py: two models have this name" in one_line(lambda: bring(elsewhere))


def test_a_profile_is_made_once_and_kept_outside_of_the_repository(tmp_path, mine, monkeypatch):
    def state() -> str:
        words = ["git", "status", "--porcelain", "--ignored"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout

    before, path = state(), mine()
    built = bring(path)
    (kept,) = (tmp_path / "cache" / "dear-bench" / "profiles").glob("*/*")
    assert profiles.load(kept) == built and kept.parent.name == "rtx2080ti-modelled"
    assert state() == before
    assert {item.name for item in tmp_path.iterdir()} == {"cache", "mine.py"}
    monkeypatch.setattr(custom, "_modelled", None)
    assert bring(path) == built
    with pytest.raises(TypeError):
        bring(path, batch_size=5)  # another one


def test_a_profile_is_kept_by_the_content_of_the_model_file_and_of_its_maker(tmp_path, monkeypatch):
    def key(digest: str = "1") -> str:
        brought = registry.Brought(source="file:/m.py", digest=digest)
        return custom._key(brought, "device", "rtx2080ti", 4, None)

    assert key() != key("2")
    before, makers = key(), tmp_path / "makers"
    shutil.copytree(custom._PROFILERS, makers)
    monkeypatch.setattr(custom, "_PROFILERS", makers)
    assert key() == before
    (makers / "work.py").write_text("# counts otherwise\n")
    assert key() != before


def test_on_a_machine_with_a_gpu_profiles_are_measured_there(mine, monkeypatch, capsys):
    """The recorder has the CPU in place of the GPU, which is not here."""
    record = layers.record_profile

    def on_cpu(options):
        assert options.device == "cuda"
        options.device, options.warmup, options.steps, options.name = "cpu", 0, 1, "test-9"
        return record(options)

    monkeypatch.setattr(custom, "gpu_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test 9")
    monkeypatch.setattr(layers, "record_profile", on_cpu)
    plan = planned(capsys, "--model-file", mine(), "--batch", 4)
    assert {item["model"] for item in plan} == {"mine.py@test-9"}
    built = registry.profile_of("mine.py@test-9", 4)
    assert built.kind == "measured" and built.parameter_bytes == 4 * (257 * 999 + 1000 * 4)

    def fail(options):
        raise RuntimeError("CUDA error:\nno kernel")

    monkeypatch.setattr(layers, "record_profile", fail)
    text = one_line(lambda: bring(mine(TINY + "# other\n", "new.py"), gpu="here"))
    words = "new.py: fails in its forward or backward pass: RuntimeError: CUDA error: no kernel"
    assert text.endswith(words)


def test_a_shipped_profile_is_taken_where_there_is_one(monkeypatch):
    monkeypatch.setattr(custom, "_modelled", None)
    result = custom.bring_model("resnet50", None, None, "rtx2080ti")
    assert result == ("resnet50@rtx2080ti-modelled", None, None)
    assert registry.brought_of("resnet50@rtx2080ti-modelled", 64) is None


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, mine, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "XDG_CACHE_HOME says where" in one_line(lambda: bring(mine()))


# Digests and trials


@pytest.mark.parametrize("where", ["elsewhere", "beside dear"])
def test_a_digest_is_of_the_file_and_of_what_it_imports_beside_it(
    tmp_path, mine, monkeypatch, where
):
    if where == "beside dear":
        monkeypatch.setattr(files, "_PACKAGES", tmp_path)
        (tmp_path / "plots.py").write_text("import this_is_not_followed\n")
    path = mine("import plots\nfrom near_by import width\n" * (where == "beside dear") + TINY)
    path.write_text("from near_by import width\n" + path.read_text())
    near, far = tmp_path / "near_by.py", tmp_path / "far.py"
    near.write_text("import json, far_away\nwidth = 8\n")
    far.write_text("")
    result = {digest_of(path)}
    far.write_text("x = 1\n")
    assert digest_of(path) in result
    near.write_text("width = 9\n")
    result.add(digest_of(path))
    path.write_text(path.read_text() + "\n")
    result.add(digest_of(path))
    assert len(result) == 3
    assert bring(path).step_s > 0, "what lies beside the file can be imported"


@pytest.mark.parametrize("name", ["common", "plots", "json"])
def test_a_module_in_the_files_folder_that_another_hides_is_refused(tmp_path, mine, name):
    path = mine(f"import {name}\n" + TINY)
    digest_of(path)
    (tmp_path / f"{name}.py").write_text("")
    message = one_line(lambda: digest_of(path))
    assert f"`import {name}` finds" in message and "rename" in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from .sizes import WIDTH", "write `from x import y`, without a dot"),
        ("from common.sizes import WIDTH", "/common comes before other packages called common"),
        ("from plots.sizes import WIDTH", "/plots comes before other packages called plots"),
    ],
)
def test_an_import_that_cannot_be_had_says_what_helps(mine, line, words):
    message = one_line(lambda: bring(mine(f"{line}\n" + TINY)))
    assert "cannot be imported: " in message and words in message


def test_a_trial_changes_with_the_file_and_not_with_its_place(tmp_path, trial, mine):
    first = trial()
    assert first.model == "mine.py@v100-modelled"
    assert first.sources.brought.source.startswith("file:/")
    assert Path(first.sources.brought.profile).is_absolute() and first.sources.profile_digest
    assert trial().hash == first.hash
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(tmp_path / "mine.py", moved)
    there = trial(models=[{**EXPERIMENT["models"][0], "name": f"file:{moved}/mine.py"}])
    assert there.hash == first.hash and there.sources.brought.source != first.sources.brought.source
    mine(TINY + "# another\n")
    assert trial().hash != first.hash
    assert trial(models=[{**EXPERIMENT["models"][0], "batch_size": 5}]).hash != first.hash


def test_a_rank_finds_in_the_trial_what_it_needs(trial, mine, nothing_brought):
    replayed = trial().to_json()
    computed = trial(models=[{"name": "file:mine.py", "batch_size": 4}]).to_json()
    assert "profile" in replayed["brought"] and computed["brought"]["profile"] is None
    nothing_brought()
    loaded = Trial.from_json(json.loads(json.dumps(replayed)))
    assert loaded.to_json() == replayed and registry.is_replay(loaded.model)
    Trial.from_json(computed)
    built = registry.build("mine.py", 4, None, torch.Generator())
    again = registry.build("mine.py", 4, None, torch.Generator().manual_seed(7))
    assert built.inputs[0].shape == (4, 256) and built.loss().shape == ()
    assert not torch.equal(built.inputs[0], again.inputs[0]), "ranks have samples of their own"
    nothing_brought()
    mine(TINY + "# another\n")
    assert "has changed since the sweep began" in one_line(lambda: Trial.from_json(computed))


def test_a_rank_stops_if_its_host_has_another_profile(tmp_path, trial):
    built = trial()
    built.save(tmp_path)
    assert Trial.load(tmp_path) == built
    path = Path(built.sources.brought.profile)
    other = dataclasses.replace(profiles.load(path), memory_bytes_per_s=1.0)
    other.save(path)
    profiles.load.cache_clear()
    assert "start the sweep again" in one_line(lambda: Trial.load(tmp_path))


def test_one_value_is_as_good_as_a_list_of_one(tmp_path, trial):
    shutil.copy(ALGORITHM, tmp_path / "small_ones.py")
    (built,) = [trial(models="file:mine.py", plugins="small_ones.py", algorithms="small-ones")]
    assert (built.model, built.algorithm) == ("mine.py", "small-ones")
    assert built.sources.brought.source == f"file:{tmp_path}/mine.py"
    built = trial(models=[{"name": "hf:gpt2", "batch_size": 1}])
    assert built.id.startswith("hf-gpt2-bs1-n2-ddp-") and built.title.startswith("hf:gpt2 bs=1")


def test_an_algorithm_of_ones_own_is_compared_with_the_others_wherever_files_lie():
    elsewhere = [Brought(source=f"file:/{folder}/mine.py", digest="0") for folder in "ab"]
    plugin = Plugin(path="/a/small_ones.py", digest="0")
    ddp = record("ddp", step_s=0.2, brought=elsewhere[0])
    ours = record("dear", step_s=0.1, brought=elsewhere[1], plugin=plugin)
    assert rows.make_rows([ddp, ours], "ddp")[1].speedup == pytest.approx(2.0)
    changed = dataclasses.replace(elsewhere[1], digest="1")
    other = record("dear", step_s=0.1, brought=changed)
    assert rows.make_rows([ddp, other], "ddp")[1].speedup is None


# Algorithms


def test_an_algorithm_from_a_file_is_one_of_those_there_are(tmp_path, trial):
    text = ALGORITHM.read_text()
    path = tmp_path / "small_ones.py"
    path.write_text(text)
    built = trial(plugins=["small_ones.py"], algorithms=["small-ones", "ddp"])
    assert (built.algorithm, built.label) == ("small-ones", "small-ones")
    assert built.sources.plugin.path == str(path) and built.options.small_kb == 64
    assert "small-ones" in listing()["algorithms"]
    assert built.cell == trial().cell, "they are compared with each other"
    path.write_text(text + "# another\n")
    assert trial(plugins=["small_ones.py"], algorithms=["small-ones"]).hash != built.hash
    output = one_line(lambda: trial(plugins=["small_ones.py"], algorithms=["small-onse"]))
    assert "did you mean 'small-ones'" in output


def test_a_rank_loads_the_algorithm_of_its_trial(tmp_path, trial, nothing_brought):
    path = tmp_path / "small_ones.py"
    path.write_text(ALGORITHM.read_text())
    values = trial(plugins=[str(path)], algorithms=["small-ones"]).to_json()
    nothing_brought()
    assert "small-ones" not in algorithms.algorithm_names()
    assert Trial.from_json(values).to_json() == values
    nothing_brought()
    path.write_text(ALGORITHM.read_text() + "# another\n")
    assert "has changed since" in one_line(lambda: Trial.from_json(values))


EMPTY = "from dear.training.algorithm import Algorithm, Capabilities\n"
WRONG_ALGORITHMS = {
    "raises": ("mine.py", "import nowhere_at_all\n", "ModuleNotFoundError: No module named"),
    "none": ("mine.py", EMPTY, "must define one subclass of dear.training.algorithm.Algorithm"),
    "two": ("mine.py", EMPTY + "class A(Algorithm): pass\nclass B(Algorithm): pass\n", "A, B"),
    "no promise": ("mine.py", EMPTY + "class A(Algorithm): pass\n", "must say what it promises"),
    "own Options": (
        "mine.py",
        EMPTY + "class A(Algorithm):\n"
        ' capabilities = Capabilities(consistency="synchronous")\n class Options: pass\n',
        "A.Options must extend dear.options.Options",
    ),
    "a method of the instance": (
        "mine.py",
        EMPTY + "class A(Algorithm):\n"
        ' capabilities = Capabilities(consistency="synchronous")\n'
        " def traffic(self, options, world_size, local_size): pass\n",
        "A.traffic must be a class method",
    ),
    "no traffic": (
        "mine.py",
        EMPTY + 'class A(Algorithm): capabilities = Capabilities(consistency="decentralized")\n',
        "A must define traffic() (who sends to whom): replicas are decentralized",
    ),
    "dear's own name": ("wfbp.py", EMPTY, "an algorithm 'wfbp' of dear's own; rename the file"),
    "an alias": ("asc.py", EMPTY, "asc is an alias of an algorithm"),
    "a bad name": ("My File.py", EMPTY, "rename the file"),
}


@pytest.mark.parametrize("case", WRONG_ALGORITHMS)
def test_a_wrong_algorithm_is_one_line_and_status_2(tmp_path, capsys, case):
    name, text, words = WRONG_ALGORITHMS[case]
    path = tmp_path / name
    path.write_text(text)
    for verb in (["list"], ["run", "quick", "-n"]):
        assert cli.main([*verb, "--plugin", str(path)]) == 2
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") == 1
        assert words in output.err and str(path) in output.err
    assert path.stem not in algorithms.algorithm_names() or name == "wfbp.py"


# The command line


def planned(capsys, *arguments: object) -> list[dict]:
    assert cli.main(["run", *map(str, arguments), "--dry-run", "--json"]) == 0
    return [entry["trial"] for entry in json.loads(capsys.readouterr().out)]


def test_one_command_from_a_file_to_the_trials_of_a_sweep(capsys, mine, tmp_path):
    path, logs = mine(), tmp_path / "logs"
    flags = ["--model-file", path, "--batch", 4, "--gpu", "rtx3090", "--logs", logs]
    plan = planned(capsys, *flags, "--hosts", 3, "--network", "25gbe", "--plugin", ALGORITHM)
    assert [item["algorithm"] for item in plan] == [
        *("ddp", "wfbp", "dear", "bring-your-own-algorithm")
    ]
    for item in plan:
        assert (item["model"], item["batch_size"]) == ("mine.py@rtx3090-modelled", 4)
        assert (item["world_size"], item["network"]) == (3, "25gbe")
    assert cli.main(["run", *map(str, flags), "-n"]) == 0
    assert f"results in {logs / 'mine'}" in capsys.readouterr().out.replace("\n", "")
    assert not logs.exists()


def test_what_users_files_print_does_not_stand_beside_json(capsys, mine, tmp_path):
    loud = TINY.replace("():\n", "():\n    print('aloud')\n") + "print('aloud')\n"
    plugin = tmp_path / "loud.py"
    plugin.write_text(f"{ALGORITHM.read_text()}\nprint('aloud')\n")
    assert planned(capsys, "--model-file", mine(loud), "--plugin", plugin)
    assert cli.main(["list", "--json", "--plugin", str(plugin)]) == 0
    output = capsys.readouterr()
    assert "loud" in json.loads(output.out)["algorithms"]


def test_without_a_gpu_it_is_replayed_on_virtual_hosts_and_computes_elsewhere(capsys, mine):
    path = mine()
    assert cli.main(["run", "--model-file", str(path), "-n"]) == 0
    assert "no GPU here: times are modelled for rtx2080ti" in capsys.readouterr().err
    assert cli.main(["run", "--model-file", str(path), "--gpu", "rtx2080ti", "-n"]) == 0
    assert "no GPU here" not in capsys.readouterr().err
    here = planned(capsys, "--model-file", path)
    assert {item["model"] for item in here} == {"mine.py@rtx2080ti-modelled"}
    computed = planned(capsys, "quick", "--model-file", path, "--batch", 4)
    assert {(item["model"], item["batch_size"]) for item in computed} == {("mine.py", 4)}
    shipped = planned(capsys, "--model", "resnet50")
    assert {(item["model"], item["batch_size"]) for item in shipped} == {
        ("resnet50@rtx2080ti-modelled", 64)
    }
    both = planned(
        capsys, "quick", "--model", f"file:{path}", "--model", "mnist_cnn@rtx2080ti-modelled"
    )
    assert {item["model"] for item in both} == {"mine.py", "mnist_cnn@rtx2080ti-modelled"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "v100"], "--gpu: needs --model"),
        (["--batch", "3"], "--batch: needs --model"),
        (["--model", "resnet50", "--batch", "0"], "--batch must be at least 1"),
        (["--model", "resnet5"], "did you mean 'resnet5"),
        (["--model", "resnet50", "--gpu", "a100"], "did you mean 'a10'"),
        (["--model-file", "nowhere.py"], "nowhere.py: No such file"),
        (["--plugin", "nowhere.py"], "nowhere.py: No such file"),
        (["--set", "plugins=3"], "plugins: must be names of files, got 3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_and_status_2(capsys, flags, words):
    assert cli.main(["run", "emulated-quick", *flags, "-n"]) == 2
    text = capsys.readouterr()
    assert text.out == "" and text.err.count("\n") == 1
    assert words in text.err
