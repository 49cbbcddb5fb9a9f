"""Micro-batches by number of tokens, and a model's outputs for each token of a sequence.

The output for token t comes from the hidden state before it: log-probabilities and values are
stored at the token's own position, and only where a mask selects it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from hybridflow.models.decoder import Decoder
from shared.kernels.token_log_probs.autograd import token_log_probs

__all__ = ["generated_mask", "log_probs", "micro_batches", "scores", "select_asked", "values"]


def generated_mask(
    prompt_lengths: Int64[Tensor, " rows"], lengths: Int64[Tensor, " rows"], width: int
) -> Bool[Tensor, "rows width"]:
    """The mask of generated tokens."""
    at = torch.arange(width, device=lengths.device)
    return (at >= prompt_lengths[:, None]) & (at < lengths[:, None])


def micro_batches(lengths: Int64[Tensor, " rows"], max_tokens: int) -> Iterator[Tensor]:
    """Groups rows of similar length, with at most `max_tokens` tokens including padding.

    A longer row is a micro-batch of its own.

    Yields:
        Indices of rows; each row once.
    """
    order = torch.argsort(lengths, stable=True, descending=True)
    start = 0
    while start < len(order):
        width = max(1, int(lengths[order[start]]))
        stop = min(len(order), start + max(1, max_tokens // width))
        yield order[start:stop]
        start = stop


def select_asked(tokens: Int64[Tensor, "rows width"], mask: Bool[Tensor, "rows width"]) -> Tensor:
    """The tokens that a model has to read: all before the last masked one."""
    columns = torch.nonzero(mask.any(0))
    return tokens[:, : max(1, int(columns[-1]))] if len(columns) else tokens[:, :1]


def log_probs(
    model: Decoder,
    hidden: Float[Tensor, "rows states dim"],
    tokens: Int64[Tensor, "rows width"],
    mask: Bool[Tensor, "rows width"],
    temperature: float = 1.0,
) -> tuple[Float[Tensor, "rows width"], Float[Tensor, "rows width"]]:
    """Log-probability of each masked token given those before it, and the entropy there.

    Args:
        model: decoder whose head is applied.
        hidden: hidden states of the tokens that `select_asked` returns.
        tokens, mask: whole rows.
        temperature: divides the logits.

    Returns:
        Both, 0 elsewhere. The mask of the first token is ignored, as no state precedes it.
    """
    wanted = mask[:, 1 : hidden.shape[1] + 1]
    found = token_log_probs(
        hidden[wanted],
        model.head_weight,
        tokens[:, 1 : hidden.shape[1] + 1][wanted],
        temperature=temperature,
        group=model.shard.group,
    )
    log_p, entropy = (_spread(values, wanted, tokens.shape[1]) for values in found)
    return log_p, entropy


def values(
    model: Decoder,
    hidden: Float[Tensor, "rows states dim"],
    tokens: Int64[Tensor, "rows width"],
    mask: Bool[Tensor, "rows width"],
) -> Float[Tensor, "rows width"]:
    """The scalar head's output before each masked token, else 0; arguments as in `log_probs`."""
    wanted = mask[:, 1 : hidden.shape[1] + 1]
    return _spread(hidden[wanted] @ model.head_weight[0], wanted, tokens.shape[1])


def scores(
    model: Decoder,
    hidden: Float[Tensor, "rows states dim"],
    lengths: Int64[Tensor, " rows"],
) -> Float[Tensor, " rows"]:
    """The scalar head's output at each sequence's last token, as in a sequence classifier."""
    last = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    return last @ model.head_weight[0]


def _spread(values: Tensor, wanted: Tensor, width: int) -> Tensor:
    """Puts values at their tokens' positions, one to the right of their hidden states'."""
    where = torch.nn.functional.pad(wanted, (1, width - 1 - wanted.shape[1]))
    return values.new_zeros(where.shape).masked_scatter(where, values)
