"""Makes the virtual environment of the GPU check, also where nothing can be downloaded.

`python -m common.harness.gpu_environment .venv`, run by the Python whose torch is to be kept. Needs
the standard library only.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
OLDEST_TORCH = (2, 11)
# A machine without network must not spend the check's minutes on finding that out.
_PIP = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "10", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def main(venv: Path) -> int:
    """Sets `venv` up as far as possible and prints what was left out; returns 0 if it is usable."""
    if (venv / "ready").exists():
        print(f"{venv} is set up already")
        return 0
    python = venv / "bin" / "python"
    if not python.exists():
        create(venv)
    environment = {**os.environ, **_PIP, "PYTHON": sys.executable}
    setup = [str(ROOT / "scripts" / "setup.sh"), str(venv)]
    if subprocess.run(setup, env=environment, cwd=ROOT).returncode == 0:
        return 0
    print("== the requirements were not all installed (no network?): going on with what is there")
    install = [python, "-m", "pip", "install", "-q", "--no-index"]
    install += ["--no-deps", "--no-build-isolation", "-e", "."]
    if subprocess.run(install, env=environment, cwd=ROOT).returncode != 0:
        print("== dear was not installed by pip: linking it")
        link_packages(python)
    return subprocess.run([python, "-c", "import dear, torch"], cwd=venv).returncode


def create(venv: Path, with_pip: bool = True) -> None:
    """Makes an environment in which the torch of this Python is seen, if it is new enough."""
    shared = own_torch()
    options = ["--system-site-packages"] * shared + ["--without-pip"] * (not with_pip)
    subprocess.run([sys.executable, "-m", "venv", *options, str(venv)], check=True)
    if shared and sys.prefix != sys.base_prefix:
        # This Python is a virtual environment's itself. What it has installed is not among the
        # "system's" packages, so name its folders.
        folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (_site(venv / "bin" / "python") / "machine.pth").write_text("\n".join(sorted(folders)))


def own_torch() -> bool:
    """True if this Python has a torch (and torchvision) to keep; as `scripts/setup.sh` sees it."""
    try:
        version = importlib.metadata.version("torch")
        importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return False
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= OLDEST_TORCH


def link_packages(python: Path) -> None:
    """Does what an editable install would, where pip has not got what it needs for one."""
    site = _site(python)
    (site / "dear-bench.pth").write_text(f"{ROOT}\n")
    link = site / "comm_core"
    if not link.is_symlink():
        link.symlink_to(ROOT / "common" / "comm_core")


def _site(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
