"""What differs between the versions of Open MPI, and its settings for a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dear.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """An installed mpirun."""

    path: str
    major: int

    @property
    def placement(self) -> list[str]:
        """Ranks fill the hosts in their order, may be more than cores, and are not pinned."""
        if self.major >= 5:
            return ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
        return ["--oversubscribe", "--map-by", "slot", "--bind-to", "none"]

    @property
    def agent_setting(self) -> str:
        """The setting that names the remote shell."""
        return "plm_ssh_agent" if self.major >= 5 else "plm_rsh_agent"

    def flag(self, setting: str) -> str:
        """The option by which a setting is given: from 5 on, the starter has its own."""
        starter = ("plm_", "prte_", "oob_", "ras_", "rmaps_")
        return "--prtemca" if self.major >= 5 and setting.startswith(starter) else "--mca"


def find_mpirun(prefix: str = "") -> Mpirun:
    """Open MPI's mpirun below `prefix`, or on the PATH if that is empty.

    Raises:
        UserError: there is none, or it is another MPI's or too old.
    """
    path = shutil.which(str(Path(prefix, "bin", "mpirun")) if prefix else "mpirun")
    if path is None:
        where = f"in {prefix}/bin (MPIPATH of envs.conf)" if prefix else "on the PATH"
        raise UserError(
            f"launcher mpirun: no mpirun {where}; install Open MPI or use launcher=local"
        )
    done = subprocess.run([path, "--version"], capture_output=True, text=True)
    first = (done.stdout or done.stderr).strip().partition("\n")[0]
    found = re.search(r"Open MPI\D*(\d+)\.", first)
    if found is None or int(found[1]) < 4:
        raise UserError(f"launcher mpirun: {path} must be Open MPI 4 or 5, it is {first!r}")
    return Mpirun(path=path, major=int(found[1]))


def settings(mpirun: Mpirun, rdma: int, include: str) -> dict[str, str]:
    """Settings for MPI's own messages between hosts.

    Args:
        rdma: 0 or 2 for TCP, 1 for InfiniBand (UCX; an Open MPI without it then refuses to run).
        include: interfaces or subnets for TCP; empty: all.
    """
    shared_memory = "sm" if mpirun.major >= 5 else "vader"
    if rdma == 1:
        chosen = {"pml": "ucx"}
    else:
        chosen = {"pml": "ob1", "btl": f"tcp,{shared_memory},self"}
        if include:
            chosen["btl_tcp_if_include"] = include
    if include:
        chosen["prte_if_include" if mpirun.major >= 5 else "oob_tcp_if_include"] = include
    return chosen
