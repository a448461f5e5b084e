"""The backend that `dear.init()` takes where the script names none."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import socket
import subprocess
import sys
import sysconfig
import types
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import dear.comm.backends
from comm_core import built
from dear.comm import runtime
from dear.comm.backends import default_backend
from dear.comm.environment import RankFacts
from dear.errors import Unavailable, UserError


def _facts(rank: int = 0, world_size: int = 2, local_world_size: int = 2) -> RankFacts:
    return RankFacts(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size,
        local_world_size=local_world_size,
    )


@pytest.mark.parametrize(
    ("own_gpus", "core", "wanted"),
    [
        (False, True, "comm_core"),
        (True, True, "cpu:comm_core,cuda:nccl"),
        (True, False, "cpu:gloo,cuda:nccl"),
        (False, False, "gloo"),
    ],
)
def test_tensors_on_gpus_go_by_nccl_where_every_rank_has_one_and_rank_0_says_what_is_missing(
    monkeypatch, caplog, own_gpus, core, wanted
):
    def prepare(backend: str) -> str:
        if not core:
            raise Unavailable("the comm core is not built")
        return backend

    monkeypatch.setattr(dear.comm.backends, "prepare", prepare)
    with caplog.at_level(logging.WARNING, "dear"):
        assert default_backend(_facts(rank=1), own_gpus) == wanted
        assert not caplog.records
        assert default_backend(_facts(), own_gpus) == wanted
    assert ("using gloo: the comm core is not built" in caplog.text) == (not core)


class Store(dict):
    """Store whose keys all ranks have set already."""

    def set(self, key: str, value: str) -> None:
        assert self[key] == value.encode()

    def get(self, key: str) -> bytes:
        return self[key]


@pytest.fixture
def machine(monkeypatch):
    """`machine(seen)`: ranks of a host each see GPUs by these names."""

    def make(seen: list[list[str]]) -> list[tuple[int | None, str | None]]:
        """Returns each rank's GPU number, and why the ranks do not have one each."""
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        store, facts = Store(), [_facts(rank, len(seen), len(seen)) for rank in range(len(seen))]
        for rank, names in enumerate(seen):
            gpu = f"{socket.gethostname()} {names[rank % len(names)]}" if names else ""
            store[f"gpu{rank}"] = gpu.encode()
        choices = []
        for place, names in zip(facts, seen, strict=True):
            monkeypatch.setattr(torch.cuda, "device_count", lambda names=names: len(names))
            of = lambda i, names=names: types.SimpleNamespace(uuid=names[i])  # noqa: E731
            monkeypatch.setattr(torch.cuda, "get_device_properties", of)
            choices.append(
                (runtime.gpu(place) if names else None, runtime._gpu_clash(place, store))
            )
        return choices

    return make


def test_ranks_tell_each_other_which_gpu_they_take(machine):
    assert machine([["a", "b"], ["a", "b"]]) == [(0, None), (1, None)]
    # Slurm and containers show each task its own GPU alone.
    assert machine([["a"], ["b"]]) == [(0, None), (0, None)]
    shared = "ranks 0 and 1 have the same"
    assert machine([["a"], ["a"]]) == [(0, shared), (0, shared)]
    assert {why for _, why in machine([["a", "b"]] * 3)} == {"ranks 0 and 2 have the same"}
    assert {why for _, why in machine([["a"], []])} == {"rank 1 sees none"}


def test_without_cuda_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert runtime._gpu_clash(_facts(), Store()) == "this torch is built without CUDA"


def test_the_device_of_a_rank(monkeypatch):
    monkeypatch.setattr(runtime, "facts", lambda: _facts(rank=1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert runtime.device() == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert runtime.device() == torch.device("cuda", 0), "shared, or the only one that it sees"


def test_a_group_that_a_script_has_made_without_a_name_tells_what_moves_its_bytes(tmp_path):
    script = """
import os, torch.distributed as dist, dear
from dear.comm import runtime
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group(init_method="file://" + os.environ["DEAR_STORE"], rank=0, world_size=1)
assert dist.get_backend() == "undefined"
dear.init()
print(runtime.communicator().backend)
"""
    env = {**os.environ, "DEAR_STORE": str(tmp_path / "store"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "gloo", done.stderr


@pytest.mark.parametrize(
    ("host", "given", "wanted"),
    [
        ("192.0.2.2", "", "192.0.2.2"),
        ("192.0.2.2", "192.0.2.9", "192.0.2.2"),
        ("localhost", "192.0.2.9", "192.0.2.9"),
        ("127.0.0.1", "", "127.0.0.1"),
        (None, "192.0.2.9", "192.0.2.9"),
        (None, "", ""),
    ],
)
def test_ranks_listen_towards_the_host_of_their_store(monkeypatch, host, given, wanted):
    """`init_method="tcp://HOST:PORT"` sets no variable."""
    comm_core = pytest.importorskip("comm_core")
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv("MASTER_ADDR", given)
    store = SimpleNamespace() if host is None else SimpleNamespace(host=host)
    assert comm_core._rendezvous_host(SimpleNamespace(underlying_store=store)) == wanted


def test_a_missing_comm_core_names_the_command_that_builds_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "comm_core", None)
    with pytest.raises(Unavailable, match="make core"):
        dear.comm.backends.prepare("comm_core")


def test_the_comm_core_is_for_torch_whatever_the_name_of_its_package(monkeypatch):
    # The package of a wheel with CUDA is "2.11.0", and its torch.__version__ "2.11.0+cu130".
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "2.11.0" if name == "torch" else version(name)
    )
    assert dear.comm.backends.missing_comm_core() is None
    monkeypatch.setattr(dear.comm.backends, "torch_version", lambda: "2.10.0+cu130")
    text = dear.comm.backends.missing_comm_core()
    assert f"built for torch {torch.__version__}, but this is torch 2.10.0+cu130" in text


@pytest.mark.parametrize("backend", ["nccl", "ucc", "foo", "", "cpu:foo,cuda:gloo", "gloo,"])
def test_a_backend_that_torch_does_not_have_is_one_line(monkeypatch, backend):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(dist, "is_ucc_available", lambda: False, raising=False)
    name = {"cpu:foo,cuda:gloo": "foo", "gloo,": ""}.get(backend, backend)
    words = f"^unknown backend of this torch '{name}'.*allowed: comm_core, .*gloo, mpi"
    with pytest.raises(UserError, match=words) as caught:
        dear.comm.backends.prepare(backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"torch": "1.0"}, "was built for torch 1.0, but this is torch"),
        ({"python": ".cpython-310.so"}, "was built for another Python"),
        ({"sources": "0"}, "the sources of the comm core have changed since it was built"),
        ({"missing": "no compiler"}, "is not built: no compiler"),
    ],
)
def test_a_build_for_something_else_is_not_used(tmp_path, change, words):
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (tmp_path / "src").mkdir()
    (tmp_path / "CMakeLists.txt").write_text("project(x)")
    (tmp_path / "src" / "a.cc").write_text("int a;")
    facts = {"torch": "2.13.0", "python": suffix, "sources": built.sources(tmp_path)}
    (tmp_path / built.FACTS).write_text(json.dumps(facts | change))
    if words is None:  # the extension itself is missing
        assert "another Python" in built.problem(tmp_path, "2.13.0")
    (tmp_path / f"_core{suffix}").touch()
    reason = built.problem(tmp_path, "2.13.0")
    assert reason is None if words is None else words in reason
    assert f"scripts/build.sh {sys.prefix}" in built.remedy(tmp_path)
    if words is None:
        (tmp_path / "src" / "a.cc").write_text("int b;")
        assert "have changed" in built.problem(tmp_path, "2.13.0")
        (tmp_path / "CMakeLists.txt").unlink()
        assert "with pip" in built.remedy(tmp_path)
        assert built.problem(tmp_path, "2.13.0") is None, "an installed one has no sources"
