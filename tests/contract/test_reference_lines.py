"""Command lines of the references' pages, word for word: each runs, or says in a line why not.

docs/references.md has them in a table. Their scripts are those of `test_reference_scripts`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.contract import test_reference_scripts as scripts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/references.md").read_text(encoding="utf-8")
ROWS = [
    (line, None if here == "runs" else re.fullmatch("refused: `(.*)`", here)[1])
    for line, here in re.findall(
        r"^\| [\w-]+ \| `(.*)` \| (runs|refused: `[^`]+`)(?:[., ].*)? \|$", PAGE, re.M
    )
]
LAUNCHERS = ("mpirun", "torchrun", "bfrun", "horovodrun", "python -m torch", "bash mnist.sh")

HEAD = "import torch\nfrom torch import nn\n"
NCCL = scripts.DADT.replace("init(", "init(broad_cast_executor='nccl', ")
MPI = NCCL.replace("nccl', ", "mpi', all_reduce_executor='mpi', ")
DDP = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
"""
OWN_TOPOLOGY = """
from dear.decentralized import DecentralizedDataParallel, Edge, Topology, TopologyReg
from dear.decentralized import initialize_dist, optim_fn_adam
@TopologyReg.register("custom")
class CustomTopology(Topology):
    def _get_topo_edges(self):
        ...
rank, world_size = initialize_dist()
model = DecentralizedDataParallel(model, optim_fn_adam, topology="custom")
"""
CONSENSUS = """
import dear.bluefog as bf
bf.init()
x = torch.tensor([float(bf.rank())])
for _ in range(50):
    x = bf.neighbor_allreduce(x)
assert abs(x.item() - (bf.size() - 1) / 2) < 1e-3
"""
DYNAMIC = """
import dear.bluefog as bf
from dear.bluefog import topology_util
bf.init()
peers = topology_util.GetInnerOuterExpo2DynamicSendRecvRanks(bf.size(), bf.local_size(), bf.rank())
send, receive = next(peers)
"""
FILES = {
    "mnist.py": MPI,
    "mnist_nccl.py": NCCL,
    "train_dear.py": scripts.DEAR,
    "train_ddp.py": DDP,
    "train.py": scripts.HOROVOD,
    "decent.py": scripts.DECENT_DP,
    "custom.py": OWN_TOPOLOGY,
    "static.py": scripts.BLUEFOG,
    "consensus.py": CONSENSUS,
    "dynamic.py": DYNAMIC,
}


@pytest.fixture
def folder(tmp_path):
    """A folder with the scripts, the project's files beside them, and the commands on the PATH."""
    for name, script in FILES.items():
        (tmp_path / name).write_text(HEAD + scripts.SETTING + script + "\nprint('done')\n")
    for name in ("common", "configs", "dear", "examples", "scripts", "mnist.sh", "benchmarks.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = tmp_path / "bin"
    commands.mkdir()
    python = f'#!/bin/sh\nexec "{sys.executable}"'
    for name, words in (
        ("python", ""),
        ("torchrun", "-m torch.distributed.run"),
        ("bfrun", "-m dear.bluefog.run"),
        ("ibfrun", '-c "import sys; from dear.bluefog.run import interactive as i; sys.exit(i())"'),
    ):
        (commands / name).write_text(f'{python} {words} "$@"\n')
    (commands / "make").write_text('#!/bin/sh\necho done "$@"\n')
    for path in commands.iterdir():
        path.chmod(0o755)
    return tmp_path


def _run(line: str, folder: Path) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if "COMM_CORE" not in name}
    env["PATH"] = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'common'}", "OMP_NUM_THREADS": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    where = folder / "dear" if line.endswith("./horovod_mpi_cj.sh") else folder
    if line == "python benchmarks.py":
        line += " run --dry-run"  # a whole sweep takes minutes
    how = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 200}
    return subprocess.run(["bash", "-c", line], cwd=where, env=env, **how)


def _case(line: str, refusal: str | None):
    ranks = any(launcher in line for launcher in LAUNCHERS)
    return pytest.param(line, refusal, id=line, marks=pytest.mark.full if ranks else ())


@pytest.mark.parametrize(("line", "refusal"), [_case(*row) for row in ROWS])
def test_a_line_runs_or_says_why_not(folder, line, refusal):
    if line.startswith(("mpirun", "horovodrun")) and shutil.which(line.split()[0]) is None:
        pytest.skip(f"no {line.split()[0]} here")
    if refusal and "nccl" in refusal and dist.is_nccl_available():
        pytest.skip("this torch has NCCL")
    done = _run(line, folder)
    if refusal is None:
        assert done.returncode == 0, done.stderr[-3000:]
        return
    assert done.returncode != 0
    assert any(refusal in text for text in done.stderr.splitlines()), done.stderr[-3000:]


def test_every_script_stands_in_a_line():
    lines = " ".join(line for line, _ in ROWS)
    assert len(ROWS) >= 15 and [name for name in FILES if name not in lines] == []
