"""The models: complete, of the right shapes, and listed without a wait."""

from __future__ import annotations

import pytest
import torch

from common.models import registry
from common.models.architectures import lstm
from common.models.architectures.cifar import CifarResNet, Residual
from dear.errors import UserError


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def shapes_only(name, batch_size=2):
    """The workload without memory or arithmetic."""
    with torch.device("meta"):
        return registry.build(name, batch_size, registry.sentence_len(name, None), generator())


def parameters(workload):
    return sum(param.numel() for param in workload.model.parameters())


@pytest.fixture
def small_bert(monkeypatch):
    """bert_base with two thin layers, at its full vocabulary."""
    from common.models.architectures import bert

    monkeypatch.setitem(bert._SIZES, "bert_base", (16, 2, 2, 32))
    return registry.build("bert_base", 16, 64, generator())


def test_every_classifier_of_torchvision_is_listed_and_nothing_else():
    import common.models.torchvision_cpu  # noqa: F401  (before torchvision)
    import torchvision  # isort: skip

    theirs = torchvision.models.list_models(module=torchvision.models)
    builder = "common.models.architectures.cnn:build_torchvision"
    ours = [name for name, entry in registry.MODELS.items() if entry.builder == builder]
    assert sorted(ours) == sorted(theirs)


@pytest.mark.parametrize(
    ("name", "count", "shape"),
    [
        ("resnet50", 25_557_032, (3, 224, 224)),
        ("densenet201", 20_013_928, (3, 224, 224)),
        ("inception_v3", 23_834_568, (3, 227, 227)),
        ("inceptionv4", 42_679_816, (3, 224, 224)),
        ("mnist_cnn", 1_199_882, (1, 28, 28)),
        ("bert_base", 110_111_042, None),
        ("bert", 336_232_258, None),
    ],
)
def test_parameter_counts_and_a_batch_of_images(name, count, shape):
    workload = shapes_only(name)
    assert parameters(workload) == count
    if shape:
        (images,), (labels,) = workload.inputs, workload.targets
        assert images.shape == (2, *shape)
        assert (labels.shape, labels.dtype) == ((2,), torch.int64)


def test_bert_takes_sentences_of_token_ids_below_2000(small_bert):
    words, follows = small_bert.targets
    assert set(small_bert.inputs) == {"input_ids", "token_type_ids", "attention_mask"}
    assert {value.shape for value in small_bert.inputs.values()} == {(16, 64)}
    assert words.shape == (16, 64)
    assert set(follows.tolist()) == {0, 1}
    for ids in (small_bert.inputs["input_ids"], words):
        assert ids.min() >= 0
        assert 1000 < ids.max() < 2000
    assert small_bert.inputs["attention_mask"].all()
    # The vocabulary is padded to a multiple of eight.
    assert small_bert.model.get_input_embeddings().num_embeddings == 30528
    assert small_bert.model.get_output_embeddings().out_features == 30528


def test_bert_trains_all_its_parameters(small_bert):
    loss = small_bert.loss()
    loss.backward()
    assert 9 < loss.item() < 14  # ln 30528 for the words and ln 2 for the next sentence are 11.0
    idle = [name for name, p in small_bert.model.named_parameters() if p.grad is None]
    assert idle == []


def test_workload_casts_what_is_floating_point_only(small_bert):
    workload = registry.build("mnist_cnn", 2, None, generator())
    cast = workload.to(torch.device("cpu"), torch.float64)
    assert {param.dtype for param in cast.model.parameters()} == {torch.float64}
    assert cast.inputs[0].dtype == torch.float64
    assert cast.targets[0].dtype == torch.int64
    assert cast.loss().dtype == torch.float64
    tokens = small_bert.to(torch.device("cpu"), torch.float64).inputs["input_ids"]
    assert tokens.dtype == torch.int64


def test_the_batch_is_that_of_the_generator():
    first, again, other = (
        registry.build("mnist_cnn", 4, None, generator(seed)).inputs[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sentence_length_is_for_sentence_models():
    assert registry.sentence_len("bert_base", None) == 64
    assert registry.sentence_len("bert", 128) == 128
    assert registry.sentence_len("resnet50", None) is None
    with pytest.raises(UserError, match="sentence_len: model resnet50 has no sentences"):
        registry.sentence_len("resnet50", 64)


@pytest.mark.parametrize(
    ("name", "batch_size", "sentence_len"),
    [
        ("resnet50", 32, None),
        ("bert_base", 8, 64),
        ("bert", 8, 64),
        ("lstm", 20, 35),
        ("resnet20", 128, None),
    ],
)
def test_each_kind_of_model_has_its_usual_batch_by_default(name, batch_size, sentence_len):
    entry = registry.model_entry(name)
    assert (entry.batch_size, entry.sentence_len) == (batch_size, sentence_len)


@pytest.mark.parametrize(("name", "spread"), [("lstm_small", 0.1), ("lstm", 0.04)])
def test_weights_of_the_language_models_begin_as_in_their_paper(monkeypatch, name, spread):
    monkeypatch.setitem(lstm._SIZES, name, (32, 0.0))
    torch.manual_seed(1)
    model = registry.build(name, 1, 2, generator()).model
    for param in model.parameters():
        assert 0.9 * spread < param.abs().max() <= spread


def test_a_cifar_resnet_has_the_layers_of_its_name():
    model = CifarResNet(20, classes=10)
    assert sum(isinstance(module, Residual) for module in model) == 9
    assert 0.26e6 < sum(param.numel() for param in model.parameters()) < 0.28e6
