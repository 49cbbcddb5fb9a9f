"""Runs a decoder's micro-batches through the stages of a pipeline, or through a whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hybridflow.models.decoder import Attend, Decoder, attend_causally
from shared.comms import pipeline
from shared.comms.group import Group

__all__ = ["run_forward", "train"]


def train(
    model: Decoder,
    group: Group | None,
    micro_batches: Sequence[Tensor],
    loss_of: Callable[[int, Tensor], Tensor],
) -> None:
    """Forward and backward passes of micro-batches; gradients are added to the parameters'.

    Args:
        model: this rank's stage.
        group: the ranks of all stages, in order; None if there is one stage.
        micro_batches: tokens int64 [rows, width] of each; the same on all stages.
        loss_of: function of a micro-batch's index and hidden states [rows, width, dim] to its
            loss, called on the last stage; the sum over micro-batches is minimised.
    """

    def forward(k: int, x: Tensor | None) -> Tensor:
        out = model(micro_batches[k] if x is None else x)
        return loss_of(k, out) if model.shard.is_last else out

    pipeline.run_1f1b(group, _shapes(model, micro_batches), forward, dtype=model.cos.dtype)


def run_forward(
    model: Decoder,
    group: Group | None,
    micro_batches: Sequence[Tensor],
    use: Callable[[int, Tensor], None],
    attend: Callable[[int], Attend] = lambda k: attend_causally,
) -> None:
    """Forward passes of micro-batches; `use` receives the hidden states on the last stage.

    `attend` returns a micro-batch's attention, by its index.
    """

    def forward(k: int, x: Tensor | None) -> Tensor:
        out = model(micro_batches[k] if x is None else x, attend(k))
        if model.shard.is_last:
            use(k, out)
        return out

    pipeline.run_forward(group, _shapes(model, micro_batches), forward, dtype=model.cos.dtype)


def _shapes(model: Decoder, micro_batches: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [(*tokens.shape, model.config.hidden_size) for tokens in micro_batches]
