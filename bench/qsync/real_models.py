"""The models of the benchmarks with their batches, and plans of mixed precisions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from qsync.data import (
    LabeledBatches,
    ResNet8,
    build_llama,
    classify,
    load_bible_books,
    load_digit_images,
    load_minilm,
    next_token_loss,
)
from qsync.precisions import HIGHEST

__all__ = ["MODELS", "Job", "build_job", "draw_precisions"]

MODELS = ("MiniLM", "ResNet-8", "Llama")


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A model, its training batches and its loss function."""

    model: nn.Module
    batches: list[Any]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]


def build_job(
    name: str, *, num_batches: int, tokens: int = 512, seed: int = 0, dropout: float = 0.0
) -> Job:
    """Builds one of `MODELS`.

    Args:
        name: the model.
        num_batches: training batches.
        tokens: tokens a batch; ResNet-8 reads a fourth of it as images.
        seed: of weights and order.
        dropout: MiniLM's; none unless asked for, so that only rounding is random.
    """
    torch.manual_seed(seed)
    if name == "ResNet-8":
        images, _ = load_digit_images(tokens // 4, seed=seed)
        return Job(model=ResNet8(32), batches=_take(images, num_batches), loss_fn=classify)
    passages, _ = load_bible_books(batch_size=tokens // 128, seed=seed)
    batches = _take(passages, num_batches)
    if name == "MiniLM":
        return Job(model=load_minilm(dropout=dropout), batches=batches, loss_fn=classify)
    vocabulary = 1 + max(int(ids.max()) for ids, _ in batches)
    model = build_llama(vocabulary=vocabulary)
    return Job(model=model, batches=[ids for ids, _ in batches], loss_fn=next_token_loss)


def _take(batches: LabeledBatches, count: int) -> list[Any]:
    return list(islice(batches, count))


def draw_precisions(
    names: Sequence[str], precisions: Sequence[str], generator: torch.Generator
) -> dict[str, str]:
    """Draws a precision for each operator; how many are lowered differs from draw to draw."""
    share = float(torch.rand((), generator=generator))
    lower = [each for each in precisions if each != HIGHEST]
    chosen = {}
    for name in names:
        is_lowered = float(torch.rand((), generator=generator)) < share
        pick = int(torch.randint(len(lower), (), generator=generator))
        chosen[name] = lower[pick] if is_lowered else HIGHEST
    return chosen
