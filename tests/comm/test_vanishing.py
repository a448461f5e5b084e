"""Hosts that vanish without a word, and ranks that stop, are heard of by all the others."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.comm import worlds
from tests.comm.operations import me
from tests.system.processes import ROOT
from tests.system.sandboxes import Outside, needs_sandbox, start

PROGRAM = str(ROOT / "tests" / "comm" / "vanishing.py")


@needs_sandbox
@pytest.mark.full
@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_a_host_that_vanishes_is_named_on_all_others_before_their_time_is_out(hosts, tmp_path):
    outside = Outside()
    outside.environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'common'}"
    running = []
    for victim in range(hosts):
        folder = tmp_path / str(victim)
        folder.mkdir()
        running.append(start(outside, "me", PROGRAM, str(hosts), str(victim), str(folder)))
    try:
        ended = [process.communicate(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for victim, (output, errors) in enumerate(ended):
        assert output, errors
        heard = json.loads(output)
        print(f"{hosts} hosts, {victim} vanishes:", {r: round(s, 1) for r, (s, _) in heard.items()})
        assert set(heard) == {str(rank) for rank in range(hosts) if rank != victim}
        for after_s, text in heard.values():
            assert "timed out after" not in text and f"rank {victim} (host h{victim}" in text, text
            assert after_s < 30


def _aborts_beside_a_stopped_one(stopped: int, folder: Path) -> str:
    """The first of the others stops it, and then gives up."""
    rank, n = me()
    (folder / str(rank)).write_text(str(os.getpid()))
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    dist.barrier()
    (folder / f"past{rank}").touch()
    first = min(r for r in range(n) if r != stopped)
    if rank == stopped:
        while not (folder / "over").exists():
            time.sleep(0.01)
        return ""
    if rank == first:
        while not all((folder / f"past{r}").exists() for r in range(n)):
            time.sleep(0.01)
        os.kill(int((folder / str(stopped)).read_text()), signal.SIGSTOP)
        time.sleep(0.3)
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        return "aborted"
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(tensor)
    return str(caught.value)


@pytest.mark.parametrize("stopped", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
@pytest.mark.parametrize("name", ["shm4", "tcp4", "hosts0011"])
def test_who_gives_up_is_heard_of_by_all_though_a_rank_is_stopped(name, stopped, tmp_path):
    with worlds.pool(name) as ranks:
        for pipe in ranks.pipes.values():
            pipe.send((_aborts_beside_a_stopped_one, (stopped, tmp_path)))
        first = min(rank for rank in range(4) if rank != stopped)
        try:
            for rank, pipe in ranks.pipes.items():
                if rank == stopped:
                    continue
                assert pipe.poll(20), f"rank {rank} has heard nothing"
                ok, text = pipe.recv()
                assert ok and (rank == first or f"aborted on rank {first}" in text), text
        finally:
            (tmp_path / "over").touch()
            os.kill(int((tmp_path / str(stopped)).read_text()), signal.SIGCONT)
        assert ranks.pipes[stopped].poll(20)
