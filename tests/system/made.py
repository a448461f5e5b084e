"""Trials, a folder of MNIST and a small profile, made up for tests."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.emulation.config import Fault
from common.harness.settings import MeasureConfig, OptimizerConfig
from common.harness.trial import Sources, Trial, options_of
from common.models.profile import Call, Profile, ProfiledParameter
from common.models.replay import model as replay
from common.models.workload import Workload


def make_trial(algorithm: str, world: int = 4, **more: Any) -> Trial:
    """A small trial; `more` are fields that differ, options and fault as an experiment has them."""
    fields = {
        "model": "mnist_cnn",
        "batch_size": 8,
        "sentence_len": None,
        "launcher": "local",
        "backend": "gloo",
        "device": "cpu",
        "dtype": "float32",
        "seed": 1,
        "threads_per_rank": 1,
        "optimizer": OptimizerConfig(),
        "measure": MeasureConfig(),
        "label": algorithm,
    }
    options = options_of(algorithm, more.pop("options", {}))
    fault = Fault(**more.pop("fault")) if more.get("fault") else None
    sources = {key: more.pop(key) for key in vars(Sources()) if key in more}
    return Trial(
        algorithm=algorithm,
        world_size=world,
        options=options,
        fault=fault,
        sources=Sources(**sources),
        **{**fields, **more},
    )


def idx(array: np.ndarray) -> bytes:
    """The array as an IDX file of bytes."""
    header = struct.pack(">HBB", 0, 0x08, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_cifar(folder: Path, *, name: str = "cifar10", images: int = 40) -> Path:
    """Files as those of CIFAR-10 or CIFAR-100, for training and to judge by; what an image shows
    goes with its label. Returns the folder that holds their own."""
    fine = name == "cifar100"
    inner = folder / ("cifar-100-python" if fine else "cifar-10-batches-py")
    inner.mkdir(parents=True)
    random, classes = np.random.default_rng(1), 100 if fine else 10
    key, names = ("fine_labels", "fine_label_names") if fine else ("labels", "label_names")
    parts = ["train", "test"] if fine else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for part in parts:
        labels = (np.arange(images) % classes).tolist()
        pixels = random.integers(0, 60, (images, 3072)) + 15 * (np.array(labels)[:, None] % 13)
        held = {"data": pixels.astype(np.uint8), key: labels}
        (inner / part).write_bytes(pickle.dumps(held))
    meta = {names: [f"class {i}" for i in range(classes)]}
    (inner / ("meta" if fine else "batches.meta")).write_bytes(pickle.dumps(meta))
    return folder


def write_images(folder: Path, *, classes: int = 3, images: int = 4, test: str = "val") -> Path:
    """An image folder; those of a class are of one colour, and of different sizes."""
    for part in ("train", test):
        for label in range(classes):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True)
            for number in range(images):
                pixels = np.full((40 + number, 50, 3), 60 * label + 20, np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


def write_mnist(folder: Path, *, zipped: bool = False, images: int = 10, shift: int = 0) -> Path:
    """Test images with the labels 0, 1, 2, ...; `shift` changes every pixel."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = (np.arange(images * 28 * 28).reshape(images, 28, 28) + shift) % 256
    for name, array in (("images-idx3", pixels), ("labels-idx1", np.arange(images) % 10)):
        data = idx(array)
        path = folder / f"t10k-{name}-ubyte{'.gz' if zipped else ''}"
        path.write_bytes(gzip.compress(data) if zipped else data)
    return folder


_SHAPES = {
    "scale": (3,),
    "stem.weight": (600, 500),
    "stem.bias": (600,),
    "block.gain": (7,),
    "block.inner.weight": (9, 9),
    "block.inner.bias": (9,),
    "head.bias": (600,),
}
# In the order in which gradients come; milliseconds from the start of the backward pass.
_READY_MS = {
    "head.bias": 0.5,
    "block.inner.weight": 1.0,
    "block.inner.bias": 1.0,
    "block.gain": 1.5,
    "scale": 2.0,
    "stem.bias": 2.5,
    "stem.weight": 3.0,
}
_CALLS_MS = (
    ("relu", 0.1, 0.0),
    ("stem", 1.0, 1.5),
    ("relu", 0.2, 0.3),
    ("block", 0.1, 0.1),
    ("block.inner", 0.5, 0.6),
    ("block", 0.2, 0.1),
    ("head", 0.4, 0.6),
)


def profile() -> Profile:
    """Nested modules, a shared weight, a parameter of the root, and no time in `scale`'s owner."""
    order = list(_READY_MS)
    return Profile(
        model="tiny",
        device="test",
        device_name="none",
        memory_bytes_per_s=100e9,
        kind="modelled",
        batch_size=2,
        sentence_len=None,
        sample_unit="img",
        dtype="float32",
        rule="made up",
        modules=("", "relu", "stem", "block", "block.inner", "head"),
        calls=tuple(
            Call(module=name, forward_s=forward / 1e3, backward_s=backward / 1e3)
            for name, forward, backward in _CALLS_MS
        ),
        parameters=tuple(
            ProfiledParameter(
                name=name,
                shape=shape,
                position=order.index(name),
                ready_s=_READY_MS[name] / 1e3,
            )
            for name, shape in _SHAPES.items()
        ),
        shared={"head.weight": "stem.weight"},
    )


def workload(rank: int) -> Workload:
    """The same weights on all ranks, and gradients of this rank."""
    torch.manual_seed(5)
    return replay.workload(profile(), torch.Generator().manual_seed(rank))
