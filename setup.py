"""Build of the wheel: the harness's private folder, the comm core and the link switch.

pyproject.toml has everything else. The comm core is built for the torch of the environment that
pip installs into. Where a tool or torch is missing, the wheel has no comm core, and records the
reason: `dear.init()` and `dear-bench` then use Gloo and show it. A failed build is an error.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

if not sys.platform.startswith("linux"):
    sys.exit(f"dear-bench needs Linux, and this is {sys.platform}")
SOURCE = Path(__file__).resolve().parent
CORE, SWITCH = "common/comm_core", "common/emulation/links/link_switch"
PRIVATE = ("common", "plots", "configs")
# The sources of the two programs, and what needs a checkout.
LEFT_OUT = ("comm_core", "link_switch", "gpu_check", "__pycache__", "*.egg-info")


class NotBuiltError(Exception):
    """Something that the build needs is missing here; the message names it."""


class BuildTree(build_py):
    """Copies the private folder and builds the compiled parts, except for `pip install -e`."""

    def run(self):
        if self.editable_mode:  # scripts/build.sh builds in the checkout
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)  # files of an earlier version
        super().run()
        tree = Path(self.build_lib) / "dear_bench"
        for name in PRIVATE:
            ignored = shutil.ignore_patterns(*LEFT_OUT)
            shutil.copytree(SOURCE / name, tree / name, ignore=ignored)
        shutil.copy2(SOURCE / "benchmarks.py", tree)
        core = Path(self.build_lib) / "comm_core"
        facts = core / "_built_for.json"
        work = Path(self.get_finalized_command("build").build_temp)
        shutil.rmtree(work, ignore_errors=True)  # it names tools of an earlier build's environment
        try:
            identity = build(work, core, tree)
        except NotBuiltError as reason:
            facts.write_text(json.dumps({"missing": str(reason)}) + "\n", encoding="utf-8")
            print(f"dear-bench: no comm core ({reason}); training uses Gloo", file=sys.stderr)
        else:
            facts.write_text(identity, encoding="utf-8")


def build(work, core, tree):
    """Builds the extension into `core` and the switch into `tree`; returns the extension's facts.

    Raises:
        NotBuiltError: a tool or torch is missing.
        SystemExit: the build fails.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise NotBuiltError(f"no C++ compiler ({compiler}) was found")
    if shutil.which("cmake") is None:
        raise NotBuiltError("no cmake was found")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise NotBuiltError("no Python.h was found (Debian: python3-dev, Fedora: python3-devel)")
    environment = environment_with_torch()
    definitions = [f"-D{line}" for line in facts_of_torch(environment).splitlines()]
    cmake(SOURCE / CORE, work / "comm_core", definitions)
    for extension in (work / "comm_core" / "extensions").glob("_core*.so"):
        shutil.copy2(extension, core)
    cmake(SOURCE / SWITCH, work / "link_switch", [])
    (tree / SWITCH).mkdir(parents=True)
    shutil.copy2(work / "link_switch" / "link_switch", tree / SWITCH)
    return facts_of_torch(environment, "--identity")


def environment_with_torch():
    """Returns environment variables with which Python imports torch.

    pip's isolated build environment hides the installed packages by these variables.
    """
    hiding = ("PYTHONPATH", "PYTHONNOUSERSITE")
    visible = {name: value for name, value in os.environ.items() if name not in hiding}
    for environment in (dict(os.environ), visible):
        probe = [sys.executable, "-c", "import torch"]
        if subprocess.run(probe, env=environment, capture_output=True).returncode == 0:
            return environment
    raise NotBuiltError(
        "the build found no torch: install it first; if it is installed, let the build see it by "
        "pip install --no-build-isolation, after pip install setuptools cmake ninja"
    )


def facts_of_torch(environment, *flags):
    """Returns what scripts/build_facts.py prints."""
    command = [sys.executable, str(SOURCE / "scripts" / "build_facts.py"), *flags]
    return subprocess.check_output(command, env=environment, text=True)


def cmake(source, work, definitions):
    """Configures and builds a CMake project in the folder `work`."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (
        ["cmake", "-S", str(source), "-B", str(work), *generator, *definitions],
        ["cmake", "--build", str(work), "--parallel", str(len(os.sched_getaffinity(0)))],
    ):
        if subprocess.run(command).returncode != 0:
            sys.exit(
                f"dear-bench: {' '.join(command[:2])} failed, see above. Without the compiled "
                "parts, training uses Gloo: CXX=none pip install ."
            )


class BinaryDistribution(Distribution):
    """Distribution whose wheel is for one platform and Python version."""

    def has_ext_modules(self):
        return True


setup(
    packages=[
        *find_packages(include=["dear", "dear.*", "dear_bench"]),
        *find_packages("common", include=["comm_core", "comm_core.*"]),
    ],
    package_data={"comm_core": ["*.pyi"]},
    distclass=BinaryDistribution,
    cmdclass={"build_py": BuildTree},
)
