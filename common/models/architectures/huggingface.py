"""Architectures of transformers by model type (`hf:gpt2`), with default sizes and random weights.

Nothing is downloaded: the default configuration of the type gives the sizes. The batch is random:
images with class labels, or tokens with one target token each.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only configurations are used

import torch
from torch.nn import functional

from common.models import torchvision_cpu  # noqa: F401  (transformers imports torchvision)
from common.models.architectures.cnn import images_for
from common.models.registry import HF, ModelEntry
from common.models.workload import Workload
from dear.errors import UserError, unknown

import transformers  # isort: skip
from transformers.models.auto import modeling_auto as auto  # isort: skip
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # isort: skip

_BUILDER = "common.models.architectures.huggingface:build"
_SENTENCE_LEN = 64
_IMAGE_SIZE = 224
_HEADS = {
    "AutoModelForImageClassification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForMaskedLM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
"""Training tasks (auto classes), each with the model types that support it, by preference."""


def entry(name: str) -> ModelEntry:
    """Returns the registry entry of `hf:TYPE`.

    Raises:
        UserError: transformers has no such type, or the type is neither an image classifier nor a
            language model.
    """
    kind = name.removeprefix(HF)
    if _head(kind) == "AutoModelForImageClassification":
        return ModelEntry(builder=_BUILDER)
    longest = getattr(_config(kind), "max_position_embeddings", None)
    return ModelEntry(
        builder=_BUILDER,
        sample_unit="sen",
        batch_size=8,
        sentence_len=min(_SENTENCE_LEN, longest or _SENTENCE_LEN),
        longest=longest,
    )


def build(
    name: str, batch_size: int, sentence_len: int | None, generator: torch.Generator
) -> Workload:
    """Returns the model with random weights and one random batch: images `[batch_size, 3, side,
    side]`, or token ids `[batch_size, sentence_len]`."""
    kind = name.removeprefix(HF)
    head, config = _head(kind), _config(kind)
    model = getattr(transformers, head).from_config(config)
    if head == "AutoModelForImageClassification":
        side = getattr(config, "image_size", None) or _IMAGE_SIZE
        side = side if isinstance(side, int) else side[0]
        images = images_for(model, batch_size, side, config.num_labels, generator)
        images.criterion = _of_classes
        return images
    shape = (batch_size, sentence_len)
    words = torch.randint(config.vocab_size, shape, generator=generator)
    targets = torch.randint(config.vocab_size, shape, generator=generator)
    inputs = {"input_ids": words}
    if head == "AutoModelForSeq2SeqLM":
        inputs["decoder_input_ids"] = words
    return Workload(model=model, inputs=inputs, targets=(targets,), criterion=_of_words)


def _head(kind: str) -> str:
    if kind not in CONFIG_MAPPING:
        where = "the keys of its CONFIG_MAPPING"
        raise unknown("model type of transformers", kind, CONFIG_MAPPING, where)
    for head, kinds in _HEADS.items():
        if kind in kinds:
            return head
    raise UserError(
        f"{HF}{kind}: transformers has no image classifier and no language model of this type"
    )


def _config(kind: str) -> Any:
    return CONFIG_MAPPING[kind]()


def _of_classes(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits, labels)


def _of_words(output: Any, words: torch.Tensor) -> torch.Tensor:
    scores = output.logits
    return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), words.view(-1))
