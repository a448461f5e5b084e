"""Facts about this Python and torch for the build of the comm core.

Prints NAME=VALUE lines for CMake. With --identity, prints what the extension is built for
as JSON: an import with another torch, Python or sources is refused. With --found, prints what
torch contains.
"""

from __future__ import annotations

import json
import runpy
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed
from torch.utils import cpp_extension

_NONE = "none in this torch"


def facts() -> dict[str, str]:
    """Returns CMake variables: torch's headers and libraries, and the suffix of an extension."""
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    return {
        "COMM_CORE_TORCH_INCLUDES": ";".join(includes),
        "COMM_CORE_TORCH_LIB": cpp_extension.library_paths()[0],
        "COMM_CORE_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        "COMM_CORE_DEFINITIONS": f"_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    }


def identity() -> dict[str, str]:
    """Returns what must be the same at the import of the extension as at its build."""
    folder = Path(__file__).resolve().parents[1] / "common" / "comm_core"
    return {
        "torch": torch.__version__,
        "python": sysconfig.get_config_var("EXT_SUFFIX"),
        "sources": runpy.run_path(str(folder / "built.py"))["sources"](folder),
    }


def parts() -> dict[str, str]:
    """Returns a description of the parts that torch contains."""
    cuda = torch.version.cuda
    return {
        "torch": torch.__version__,
        "CUDA": f"{cuda}: CUDA tensors are staged through pinned memory" if cuda else _NONE,
        "NCCL": "torch brings it" if torch.distributed.is_nccl_available() else _NONE,
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--identity"]:
        print(json.dumps(identity()))
    elif sys.argv[1:] == ["--found"]:
        for name, value in parts().items():
            print(f"   {name:<9} {value}")
    else:
        for name, value in facts().items():
            print(f"{name}={value}")
