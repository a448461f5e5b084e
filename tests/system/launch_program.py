"""Runs one job on virtual hosts and prints its outcome; started in a sandbox by the tests.

launch_program.py FOLDER JSON   with keys launcher, options, hosts, slots, world_size, mode
(of a stub; null: the real worker)
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from common.emulation.cluster import EmulatedCluster  # noqa: E402
from common.emulation.config import network_profile  # noqa: E402
from common.launch.hosts import Host  # noqa: E402
from common.launch.job import Job, make_launcher  # noqa: E402
from tests.system.launch_stub import stub_job  # noqa: E402


def main(folder: Path, given: dict) -> None:
    profile = network_profile("1gbit")
    size = given["world_size"]
    with EmulatedCluster(hosts=given["hosts"], profile=profile) as cluster:
        launcher = make_launcher(
            given["launcher"],
            hosts=[
                Host(name=host.name, slots=given["slots"], address=host.address, virtual=host)
                for host in cluster.hosts
            ],
            world_size=size,
            options=given["options"],
        )
        if given["mode"] is None:
            job = Job(
                folder=folder,
                repeat=0,
                world_size=size,
                timeout_s=300,
                worker_module="common.harness.worker",
            )
        else:
            job = stub_job(folder, given["mode"], world_size=size, timeout_s=given["timeout_s"])
        launcher.check()
        outcome = launcher.run(dataclasses.replace(job, env={"EXTRA": "yes"}))
    print(json.dumps(dataclasses.asdict(outcome)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
