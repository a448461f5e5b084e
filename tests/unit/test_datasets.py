"""Tests of data sets: CIFAR's files, folders of images, texts; and what is none of that."""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import struct
import subprocess
from collections import Counter

import numpy as np
import pytest
import torch

from common.models import datasets
from common.models.datasets import mnist
from common.models.datasets.cifar import MEAN, STD, crop_and_flip
from common.models.datasets.tensors import split
from dear.errors import UserError
from tests.system.made import write_cifar, write_images, write_mnist

NAMES = ["CIFAR_DIR", "IMAGE_DIR", "TEXT_FILE"]


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "train", "classes"), [("cifar10", 200, 10), ("cifar100", 40, 100)]
)
def test_cifar_is_read_from_its_own_files(tmp_path, monkeypatch, name, train, classes):
    folder = write_cifar(tmp_path, name=name)
    monkeypatch.setenv("CIFAR_DIR", str(folder))
    parts = datasets.load(name, None, 32)
    assert (len(parts.train), len(parts.test), parts.classes) == (train, 40, classes)
    assert parts.split is None, "it has training images and others to judge by"
    images, labels = parts.test.batch([0, 39], None)
    assert images.shape == (2, 3, 32, 32) and images.dtype == torch.float32
    assert labels.tolist() == [0, 39 % classes]
    ours = next(folder.iterdir())
    held = pickle.loads(next(ours.glob("test*")).read_bytes())["data"][39].reshape(3, 32, 32)
    mean, std = (torch.tensor(result[name]).view(3, 1, 1) for result in (MEAN, STD))
    assert torch.allclose(255 * (images[1] * std + mean), torch.from_numpy(held).float(), atol=1e-3)


def _by_python_2(pixels: bytes) -> bytes:
    """Pickle of two images and their labels as Python 2 and its numpy wrote the published files."""
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    shape, code = b"K\x02M\x00\x0c\x86", b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    facts = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    held = b"T" + struct.pack("<i", len(pixels)) + pixels
    state = b"(K\x01" + shape + code + facts + b"\x89" + held + b"tb"
    return b"\x80\x02}(U\x04data" + array + state + b"U\x06labels](K\x03K\x04eu."


def test_the_published_pickles_are_of_python_2(tmp_path):
    folder = write_cifar(tmp_path)
    pixels = np.random.default_rng(2).integers(0, 256, (2, 3072), dtype=np.uint8)
    (next(folder.iterdir()) / "test_batch").write_bytes(_by_python_2(pixels.tobytes()))
    images, labels = datasets.load("cifar10", folder, 32).test.batch([0, 1], None)
    mean, std = (torch.tensor(result["cifar10"]).view(3, 1, 1) for result in (MEAN, STD))
    read = (255 * (images * std + mean)).round().to(torch.uint8)
    assert torch.equal(read, torch.from_numpy(pixels).view(2, 3, 32, 32))
    assert labels.tolist() == [3, 4]


class Evil:
    """Object whose pickle calls a function when it is read."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("place", ["data_batch_1", "data_batch_5", "test_batch", "batches.meta"])
@pytest.mark.parametrize(
    "call",
    [(os.system, "touch {}"), (exec, "open('{}', 'w')"), (eval, "open('{}', 'w')"),
     (subprocess.Popen, ["touch", "{}"]), (open, "{}", "w"), (getattr, "{}", "upper"),
     (functools.partial, os.remove, "{}"), (np.save, "{}", 1), (np.load, "{}"),
     (importlib.import_module, "antigravity")],
    ids=lambda call: call[0].__name__,
)  # fmt: skip
def test_a_file_of_cifar_runs_no_program(tmp_path, monkeypatch, place, call):
    folder, mark = write_cifar(tmp_path / "data"), tmp_path / "mark"
    filled = [
        [part.format(mark) for part in item] if isinstance(item, list)
        else item.format(mark) if isinstance(item, str) else item
        for item in call[1:]
    ]  # fmt: skip
    path = next(folder.iterdir()) / place
    held = {**pickle.loads(path.read_bytes()), "more": Evil(call[0], *filled)}
    path.write_bytes(pickle.dumps(held))
    with pytest.raises(UserError, match=r"no cifar10: it refers to .*, which is no array"):
        datasets.load("cifar10", folder, 32)
    assert not mark.exists()


def test_colours_of_cifar_are_normalized_by_the_values_in_common_use():
    """Values in 255ths as in fb.resnet.torch and in the code of wide ResNets (arXiv 1605.07146)."""
    means = {"cifar10": (125.3, 123.0, 113.9), "cifar100": (129.3, 124.1, 112.4)}
    deviations = {"cifar10": (63.0, 62.1, 66.7), "cifar100": (68.2, 65.4, 70.4)}
    for values, published in ((MEAN, means), (STD, deviations)):
        assert values.keys() == published.keys()
        for name, shares in values.items():
            assert [255 * share for share in shares] == pytest.approx(published[name], abs=0.06)


def test_training_images_are_moved_and_mirrored_and_those_to_judge_by_are_not(tmp_path):
    parts = datasets.load("cifar10", write_cifar(tmp_path), 32)
    places = list(range(40))
    drawn = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    first, again, other = (parts.train.batch(places, item)[0] for item in drawn)
    assert torch.equal(first, again) and not torch.equal(first, other)
    plain = parts.train.batch(places, None)[0]
    assert not torch.equal(first, plain)

    # Each image is one of the 9 x 9 pieces of its frame, as it is or mirrored.
    pixels = torch.arange(3 * 8 * 8).view(1, 3, 8, 8).repeat(500, 1, 1, 1)
    framed = torch.nn.functional.pad(pixels[0], [4] * 4, value=128)
    pieces = {}
    for top in range(9):
        for left in range(9):
            piece = framed[:, top : top + 8, left : left + 8]
            pieces[_key(piece)] = (top, left, False)
            pieces[_key(piece.flip(-1))] = (top, left, True)
    result = Counter(pieces[_key(item)] for item in crop_and_flip(pixels, drawn[0]))
    assert len({key[0] for key in result}) == len({key[1] for key in result}) == 9
    mirrored = sum(count for key, count in result.items() if key[2])
    assert 200 < mirrored < 300


def _key(piece):
    return tuple(piece.flatten().tolist())


def test_images_are_read_from_folders_by_class_and_cut_to_the_models_size(tmp_path):
    parts = datasets.load("imagefolder", write_images(tmp_path), 24)
    assert (len(parts.train), len(parts.test), parts.classes) == (12, 12, 3)
    images, labels = parts.train.batch([0, 5, 11], torch.Generator().manual_seed(1))
    assert images.shape == (3, 3, 24, 24) and labels.tolist() == [0, 1, 2]
    again, _ = parts.train.batch([0, 5, 11], torch.Generator().manual_seed(1))
    assert torch.equal(images, again)
    before = torch.random.get_rng_state()
    images, _ = parts.test.batch([3], None)
    assert torch.equal(torch.random.get_rng_state(), before), "masks of dropout stay the same"
    grey = (20 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(images[0], grey.view(3, 1, 1).expand(3, 24, 24), atol=1e-5)


def test_words_of_a_text_are_foretold_from_those_before(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("the cat sat\n" * 50)  # 200 words with the ends of lines
    parts = datasets.load("text", path, 7)
    assert parts.classes == 4
    assert (len(parts.train), len(parts.test)) == (179 // 7, 19 // 7)
    assert parts.split == "27 samples of words.txt"
    words, following = parts.train.batch([0, 1], None)
    assert words.shape == following.shape == (2, 7)
    assert torch.equal(words.flatten()[1:], following.flatten()[:-1])
    # The most frequent is 0; of equals the first. Lines end with a word of their own.
    assert words[0].tolist() == [0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("cifar10", lambda folder: write_cifar(folder)),
        ("imagefolder", lambda folder: write_images(folder)),
        ("text", lambda folder: _text(folder, "a b c")),
    ],
)
def test_another_text_or_image_is_another_digest(tmp_path, name, make):
    first, other = make(tmp_path / "a"), make(tmp_path / "b")
    assert datasets.digest(name, first) == datasets.digest(name, other)
    changed = other if other.is_file() else sorted(p for p in other.rglob("*") if p.is_file())[0]
    changed.write_bytes(changed.read_bytes() + b"x")
    moved = tmp_path / "moved"
    other.rename(moved)  # what was read before may be remembered
    assert datasets.digest(name, first) != datasets.digest(name, moved)


def _text(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "words.txt"
    path.write_text(text)
    return path


def _cifar(folder, file, content=None):
    """CIFAR-10 with another file in one's place, or none."""
    path = write_cifar(folder) / "cifar-10-batches-py" / file
    path.unlink() if content is None else path.write_bytes(content)
    return folder


def _other_classes(folder):
    write_images(folder)
    (folder / "val" / "class2").rename(folder / "val" / "class9")
    return folder


def _binary(folder):
    path = _text(folder, "")
    path.write_bytes(b"\xff\xfe\x00\x80")
    return path


@pytest.mark.parametrize(
    ("name", "make", "text"),
    [
        ("cifar10", lambda folder: folder.mkdir() or folder, "has no cifar10; it needs the folder"),
        ("cifar100", lambda folder: write_cifar(folder), "has no cifar100; it needs"),
        ("cifar10", lambda at: _cifar(at, "data_batch_3", b"no pickle"), "no cifar10: "),
        ("cifar10", lambda at: _cifar(at, "test_batch"), "no cifar10: "),
        ("imagefolder", lambda folder: folder.mkdir() or folder, "train/CLASS/ and val/CLASS/"),
        ("imagefolder", _other_classes, "train and val have different classes"),
        ("imagefolder", lambda at: write_images(at, images=0), "Found no valid file"),
        ("text", _binary, "is no text file: "),
        ("text", lambda at: _text(at, "too short"), "3 words are too few for samples of 24"),
        ("text", lambda folder: folder.mkdir() or folder, "there is no file "),
        ("imagefolder", lambda folder: folder, "there is no folder "),
    ],
)
def test_a_place_without_such_data_is_said_in_a_line(tmp_path, name, make, text):
    with pytest.raises(UserError) as caught:
        datasets.load(name, make(tmp_path / "place"), 24)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("cifar10", "data_dir=FOLDER or CIFAR_DIR"), ("text", "data_dir=FILE or TEXT_FILE")],
)
def test_where_it_is_must_be_said(name, text):
    with pytest.raises(UserError, match=text):
        datasets.path_of(name, None)
    with pytest.raises(UserError, match=r"unknown learn\.data 'cifar'"):
        datasets.path_of("cifar", None)


def test_mnist_is_scaled_to_one_and_always_divided_in_the_same_way(tmp_path):
    (pixels, _), _ = mnist.load_mnist(write_mnist(tmp_path))
    grey = pixels * mnist.STD + mnist.MEAN
    assert 0.5 < grey.max() <= 1.0 + 1e-6 and grey.min() >= -1e-6
    _, (test, _) = split(torch.arange(20), torch.arange(20))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(test, order[:2])
