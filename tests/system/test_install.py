"""Installation by pip, with and without a compiler, used outside of the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
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
    """New virtual environment; it has all packages of this one except for the project's own."""

    def __init__(self, folder: Path, bare: bool = False) -> None:
        """Makes it; a bare one has pip alone."""
        venv.create(folder / "venv", with_pip=bare)
        self.folder, self.bin = folder, folder / "venv" / "bin"
        self.site = Path(self.run("python", "-c", "import site; print(site.getsitepackages()[0])"))
        for entry in () if bare else Path(sysconfig.get_path("purelib")).iterdir():
            if "dear_bench" not in entry.name and entry.name not in ("comm_core", "__pycache__"):
                (self.site / entry.name).symlink_to(entry)
        self.before = {entry.name for entry in self.site.iterdir()}

    def run(self, program: str, *words: object, status: int | set[int] = 0, **options: str) -> str:
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
        assert done.returncode in ({status} if isinstance(status, int) else status), done.stdout
        return done.stdout.strip()

    def install(self, archive: Path, **options: str) -> None:
        flags = ("--no-build-isolation", "--no-deps", "--no-index", "-q")
        self.run("python", "-m", "pip", "install", *flags, archive, **options)

    def records(self, name: str) -> list[dict]:
        lines = (self.folder / "logs" / name / "records.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the files that git would track."""
    folder = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).exists() and not name.startswith(("tests/", "docs/")):
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name)
    return folder / "tree"


def build(tree: Path, kind: str, out: Path, **options: str) -> Path:
    """Returns the sdist or the wheel of a copy."""
    program = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    command = [sys.executable, "-c", program, str(out)]
    env = {**os.environ, **options}
    subprocess.run(command, cwd=tree, env=env, check=True, stdout=subprocess.DEVNULL)
    return next(out.glob("dear_bench-*"))


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory):
    return build(tree, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel of the sdist, with the compiled parts."""
    out = tmp_path_factory.mktemp("wheel")
    flags = ("--no-build-isolation", "--no-deps", "--no-index", "-q", "-w", out)
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, sdist], check=True)
    return next(out.glob("dear_bench-*.whl"))


def test_the_sdist_has_all_that_the_wheel_of_the_tree_has(tree, wheel, tmp_path):
    plain = build(tree, "wheel", tmp_path, PATH=str(tmp_path))  # nothing there compiles
    names, built = (set(zipfile.ZipFile(path).namelist()) for path in (plain, wheel))
    compiled = {name for name in built if re.search(r"/(_core\.cpython.*\.so|link_switch)$", name)}
    assert len(compiled) == 2 and built - compiled == names
    tracked = {str(path.relative_to(tree)) for path in (tree / "dear").rglob("*.py")}
    assert tracked <= names


def test_what_an_earlier_build_has_left_does_not_stop_a_build(tree, tmp_path):
    """pip's isolated environment, with its ninja, is gone at the next build."""
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns("build"))
    names = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    left = copy / "build" / f"temp.{names}" / "comm_core"
    left.mkdir(parents=True)
    (left / "CMakeCache.txt").write_text(
        f"CMAKE_MAKE_PROGRAM:FILEPATH=/gone/ninja\nCMAKE_HOME_DIRECTORY:INTERNAL={copy}\n"
    )
    wheel = build(copy, "wheel", tmp_path / "out")
    assert any("_core.cpython" in name for name in zipfile.ZipFile(wheel).namelist())
    (copy / "common" / "comm_core" / "src" / "net").mkdir(exist_ok=True)
    broken = next((copy / "common" / "comm_core" / "src").rglob("*.cc"))
    broken.write_text("#error broken\n")
    with pytest.raises(subprocess.CalledProcessError):
        build(copy, "wheel", tmp_path / "again")


def test_a_new_environment_gets_all_that_the_wheel_needs(tmp_path, wheel):
    here = Environment(tmp_path, bare=True)
    index = [here.bin / "python", "-m", "pip", "download", "-q", "--no-deps", "rich"]
    if subprocess.run(index, cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("no package index can be reached")
    here.run("python", "-m", "pip", "install", "--no-compile", "-q", wheel)
    assert "usage: dear-bench" in here.run("dear-bench", "--help")
    here.folder = tmp_path / "empty"
    here.folder.mkdir()
    changed = (
        "models=[{name: mnist_cnn, batch_size: 8}]",
        "algorithms=[ddp, dear]",
        "baseline=false",
    )
    changed += ("measure.repeats=1", "measure.min_iter_s=0.1")
    words = [word for change in changed for word in ("--set", change)]
    assert "dear-bench report quick" in here.run("dear-bench", "run", "quick", *words)
    assert {record["status"] for record in here.records("quick")} == {"ok"}
    assert [entry.name for entry in here.folder.iterdir()] == ["logs"]


def test_with_a_compiler_everything_works_from_any_folder(tmp_path, wheel):
    here = Environment(tmp_path)
    here.install(wheel)
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
    # Status 4: a busy machine leaves no valid result, and the report says so.
    here.run("dear-bench", "report", "my", status={0, 4})
    assert (tmp_path / "logs/my/report.html").exists()
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
    assert f"trials run over gloo: {reason}; install dear-bench again with pip" in here.run(
        "dear-bench", "run", "my.yaml"
    )
    for record in here.records("my"):
        assert record["trial"]["backend"] == "gloo" and record["status"] == "ok"
        assert {"kind": "no comm core", "text": f"over gloo: {reason}"} in record["notes"]
