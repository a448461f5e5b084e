"""Ranks of torchrun: a store that outlives groups, and scripts that just end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.launch.ranks import Ranks, rank_env

ROOT = Path(__file__).parents[2]
AGAIN = """
import sys
from tests.comm.test_torchrun import end_and_begin

end_and_begin(int(sys.argv[1]))
"""
LEAVES = """
import sys
import torch
import dear

dear.init()
model = torch.nn.Linear(300, 300)
optimizer = dear.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model=model, algorithm=sys.argv[1]
)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 300)).sum().backward()
    optimizer.step()
print("done", flush=True)
"""


def _torchrun(folder: Path, script: str, *arguments: str, limit_s: float) -> str:
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", path, *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'common'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _used() -> tuple[int, int, int]:
    """Returns this process's numbers of open files and threads, and its memory in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    descriptors, threads = (len([*Path("/proc/self", of).iterdir()]) for of in ("fd", "task"))
    return descriptors, threads, kib


def end_and_begin(times: int) -> None:
    """Makes the world and ends it, and says by how much that has made the process grow."""
    import comm_core

    before = (0, 0, 0)
    for time in range(times):
        dist.init_process_group("comm_core")
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.all_reduce(tensor := torch.full((1000,), float(time)))
        assert (tensor == time * size).all()
        if time % 3 == rank:  # they end, and begin again, at different times
            dist.all_reduce(comm_core.empty(100_000), group=dist.new_group([rank]))
        dist.destroy_process_group()
        if time == times // 10:
            gc.collect()
            before = _used()
    descriptors, threads, kib = (now - then for now, then in zip(_used(), before, strict=True))
    print(f"grown by {descriptors} descriptors, {threads} threads, {kib} KiB", flush=True)
    assert descriptors <= 3 and threads <= 1, (descriptors, threads)
    assert kib < 4096 + 8 * times, kib  # torch keeps a little of each group


def test_groups_of_the_world_end_and_begin_in_one_process(tmp_path):
    """Forked ranks, which cost no start of Python, and a store as torchrun's agent serves one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    meeting["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    logs = [tmp_path / f"rank{rank}" for rank in range(2)]
    with Ranks() as ranks:
        for rank, log in enumerate(logs):
            ranks.function(end_and_begin, 12, env={**meeting, **rank_env(rank, 2)}, log=log)
        in_time = ranks.wait(72.0)
    output = "".join(log.read_text() for log in logs)
    assert in_time and ranks.codes == {0: 0, 1: 0}, output
    assert output.count("grown by") == 2


@pytest.mark.full
@pytest.mark.timeout(1100)
def test_groups_of_torchrun_end_and_begin_a_thousand_times(tmp_path):
    output = _torchrun(tmp_path, AGAIN, "1000", limit_s=1060)
    assert output.count("grown by") == 2


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["dear", "wfbp", "dadt"])
def test_a_script_may_end_without_shutdown_on_a_machine_with_other_work(algorithm, tmp_path):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        for _ in range(4):
            assert _torchrun(tmp_path, LEAVES, algorithm, limit_s=180).count("done") == 2
    finally:
        for process in busy:
            process.kill()
            process.wait()
