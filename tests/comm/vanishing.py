"""Run in a sandbox by test_vanishing.py: `vanishing.py HOSTS VICTIM FOLDER`. One rank on each of so
many virtual hosts, of which one's cable is pulled while the others wait for it.

Prints a line of JSON: by rank, after how many seconds it heard of it, and what.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from common.emulation.cluster import EmulatedCluster
from common.emulation.links.profile import network_profile

OPERATION_TIMES_OUT_S = 45.0


def rank_of(rank: int, size: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    import comm_core  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group(
        "comm_core",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=OPERATION_TIMES_OUT_S),
    )
    tensor = torch.ones(100_000)
    if rank % 2 == 0:  # some have connections for data already
        dist.all_reduce(tensor, group=dist.new_group([rank]))
    (folder / f"ready{rank}").touch()
    while not (folder / "cut").exists():
        time.sleep(0.01)
    began = time.monotonic()
    try:
        dist.all_reduce(tensor)
        text = "no error"
    except dist.DistBackendError as error:
        text = str(error)
    (folder / f"heard{rank}").write_text(json.dumps([time.monotonic() - began, text]))
    time.sleep(60)  # the others must not hear of its end


def main() -> None:
    hosts, victim, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    with EmulatedCluster(hosts=hosts, profile=network_profile("1gbit")) as cluster:
        ranks = [
            subprocess.Popen(
                host.command([sys.executable, __file__, "rank", *map(str, (rank, hosts, folder))]),
                env=os.environ | {"COMM_CORE_IFNAME": host.ifname},
            )
            for rank, host in enumerate(cluster.hosts)
        ]
        try:
            _until(lambda: all((folder / f"ready{rank}").exists() for rank in range(hosts)), 100)
            cluster.set_link(victim, up=False)
            (folder / "cut").touch()
            others = [rank for rank in range(hosts) if rank != victim]
            heard = {rank: folder / f"heard{rank}" for rank in others}
            _until(lambda: all(p.exists() for p in heard.values()), OPERATION_TIMES_OUT_S + 20)
            time.sleep(0.1)
            print(json.dumps({rank: json.loads(path.read_text()) for rank, path in heard.items()}))
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _until(condition, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("ranks hang")
        time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank_of(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
