"""Installation by pip from an sdist, with and without a compiler, used outside of the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from common.emulation import sandbox
from tests.system.processes import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
EXPERIMENT = """
algorithms: [ddp, dear]
models: [{name: mnist_cnn, batch_size: 8}]
baseline: false
measure: {repeats: 1, warmup_steps: 0, check_steps: 1, steps_per_iter: 3}
"""
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
MEETING = """
import torch, torch.distributed as dist, comm_core, dear
dist.init_process_group("comm_core", store=dist.HashStore(), rank=0, world_size=1)
value = torch.ones(3)
dist.all_reduce(value)
print(dist.get_backend(), value.tolist())
"""
# The library needs none of these.
LIBRARY_ALONE = """
import sys
for name in ("yaml", "psutil", "rich", "scipy", "pandas", "matplotlib", "jinja2", "torchvision"):
    sys.modules[name] = None
import torch, dear
from dear import topology
dear.init()
model = torch.nn.Linear(2, 1)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = dear.DistributedOptimizer(plain, model, algorithm="dear")
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print(len(topology.ring(4)), torch.distributed.get_backend())
"""


class Environment:
    """New virtual environment that has all packages of this one except for the project's own."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv")
        self.folder, self.bin = folder, folder / "venv" / "bin"
        self.site = Path(self.run("python", "-c", "import site; print(site.getsitepackages()[0])"))
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if "dear_bench" not in entry.name and entry.name not in ("comm_core", "__pycache__"):
                (self.site / entry.name).symlink_to(entry)
        self.before = {entry.name for entry in self.site.iterdir()}

    def run(self, program: str, *words: object, status: int = 0, **options: str) -> str:
        """Returns what the program prints on both streams, and checks its exit status."""
        hidden = {"PYTHONPATH", "VIRTUAL_ENV"}
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        done = subprocess.run(
            [self.bin / program, *map(str, words)],
            cwd=self.folder,
            env={**env, "PATH": f"{self.bin}:{os.environ['PATH']}", **options},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        assert done.returncode == status, done.stdout
        return done.stdout.strip()

    def install(self, sdist: Path, **options: str) -> None:
        flags = ("--no-build-isolation", "--no-deps", "--no-index", "-q")
        self.run("python", "-m", "pip", "install", *flags, sdist, **options)

    def records(self, name: str) -> list[dict]:
        lines = (self.folder / "logs" / name / "records.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist of a copy of the files that git would track."""
    folder = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).exists() and not name.startswith(("tests/", "docs/")):
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name)
    subprocess.run(
        [sys.executable, "-c", SDIST, str(folder)],
        cwd=folder / "tree",
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return next(folder.glob("dear_bench-*.tar.gz"))


def test_with_a_compiler_everything_works_from_any_folder(tmp_path, sdist):
    here = Environment(tmp_path)
    here.install(sdist)
    added = {entry.name for entry in here.site.iterdir()} - here.before
    assert {name for name in added if not name.endswith(".dist-info")} == {
        "dear",
        "comm_core",
        "dear_bench",
    }
    for source in (ROOT / "dear", ROOT / "common" / "comm_core"):
        modules = {path.relative_to(source.parent) for path in source.rglob("*.py*")}
        modules -= {path for path in modules if path.suffix == ".pyc"}
        assert [path for path in sorted(modules) if not (here.site / path).exists()] == []
    assert here.run("python", "-c", MEETING).split("\n")[0] == "comm_core [1.0, 1.0, 1.0]"
    assert here.run("python", "-c", LIBRARY_ALONE).split() == ["4", "comm_core"]
    assert "emulated-quick" in here.run("dear-bench", "list")
    assert "12 trials, 12 to run (at least " in here.run("dear-bench", "run", "quick", "--dry-run")
    (tmp_path / "my.yaml").write_text(EXPERIMENT)
    shown = here.run("dear-bench", "run", "my.yaml")
    assert "dear-bench report my" in shown and "over gloo" not in shown
    assert [record["trial"]["backend"] for record in here.records("my")] == ["comm_core"] * 2
    assert (tmp_path / "logs/my/figures/throughput.png").exists()
    here.run("dear-bench", "report", "my")
    if sandbox.unable() is None:
        here.run("dear-bench", "run", "my.yaml", "--set", "name=virtual", "--hosts", "2")
        assert {record["status"] for record in here.records("virtual")} == {"ok"}


def test_a_users_modules_keep_their_names(tmp_path, sdist):
    here = Environment(tmp_path)
    here.install(sdist, PATH=str(here.bin))
    for name in ("common", "plots", "bench"):
        (tmp_path / f"{name}.py").write_text("mine = True\n")
    here.run("python", "-c", "import dear, common, plots, bench; common.mine, plots.mine")
    assert "algorithms:" in here.run("dear-bench", "list")
    (tmp_path / "net.py").write_text("import common\n")
    model = ("--model-file", "net.py", "--batch", "2")
    message = here.run("dear-bench", "run", "quick", *model, "--dry-run", status=2)
    assert message.startswith("error: ") and "\n" not in message
    assert "`import common` finds" in message


def test_without_a_compiler_trials_run_over_gloo_and_say_so(tmp_path, sdist):
    here = Environment(tmp_path)
    here.install(sdist, PATH=str(here.bin))
    reason = "the comm core is not built: no C++ compiler (c++) was found"
    assert reason in here.run("python", "-c", "import comm_core", status=1)
    assert here.run("python", "-c", LIBRARY_ALONE).split()[-1] == "gloo"
    (tmp_path / "my.yaml").write_text(EXPERIMENT)
    assert f"{reason}: trials run over gloo" in here.run("dear-bench", "run", "my.yaml")
    for record in here.records("my"):
        assert record["trial"]["backend"] == "gloo" and record["status"] == "ok"
        assert {"kind": "no comm core", "text": f"over gloo: {reason}"} in record["notes"]
