"""BERT pre-training (masked words and next sentence), Base and Large, built by transformers."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configurations only; nothing is downloaded

import torch
from torch.nn import functional

from common.models import torchvision_cpu  # noqa: F401  (transformers imports torchvision)
from common.models.workload import Workload

from transformers import BertConfig, BertForPreTraining  # isort: skip

# 30522 word pieces, padded to a multiple of 8 for GPU matrix units.
VOCABULARY = 30528
_TOKEN_IDS = 2000  # the reference suites draw random ids below this
_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_SIZES = {"bert_base": (768, 12, 12, 3072), "bert": (1024, 24, 16, 4096)}


def build(
    name: str, batch_size: int, sentence_len: int | None, generator: torch.Generator
) -> Workload:
    """Returns BERT with random weights and random int64 tokens `[batch_size, sentence_len]`.

    The loss covers every token, not only masked ones.
    """
    sizes = dict(zip(_KEYS, _SIZES[name], strict=True))
    model = BertForPreTraining(BertConfig(vocab_size=VOCABULARY, **sizes))
    shape = (batch_size, sentence_len)
    tokens = torch.randint(_TOKEN_IDS, shape, generator=generator)
    words = torch.randint(_TOKEN_IDS, shape, generator=generator)
    follows = torch.randint(2, (batch_size,), generator=generator)
    return Workload(
        model=model,
        inputs={
            "input_ids": tokens,
            "token_type_ids": torch.zeros_like(tokens),
            "attention_mask": torch.ones_like(tokens),
        },
        targets=(words, follows),
        criterion=_loss,
    )


def _loss(output: object, words: torch.Tensor, follows: torch.Tensor) -> torch.Tensor:
    word_scores = output.prediction_logits.view(-1, VOCABULARY)
    return functional.cross_entropy(word_scores, words.view(-1)) + functional.cross_entropy(
        output.seq_relationship_logits, follows
    )
