"""Sequences as they are trained on: micro-batches by tokens, and what a model says of each token.

What a model says of token t comes from the state before it: log-probabilities and values stand at
the token's own position, and only where a mask asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from hybridflow.models.decoder import Decoder
from hybridflow.models.log_probs import token_log_probs

__all__ = ["generated_mask", "log_probs", "micro_batches", "scores", "values"]


def generated_mask(
    prompt_lengths: Int64[Tensor, " rows"], lengths: Int64[Tensor, " rows"], width: int
) -> Bool[Tensor, "rows width"]:
    """Where tokens were generated."""
    at = torch.arange(width, device=lengths.device)
    return (at >= prompt_lengths[:, None]) & (at < lengths[:, None])


def micro_batches(lengths: Int64[Tensor, " rows"], max_tokens: int) -> Iterator[Tensor]:
    """Rows that go together: of like lengths, at most so many tokens with what fills them up.

    A row longer than that goes alone.

    Yields:
        Positions of rows; each row once.
    """
    order = torch.argsort(lengths, stable=True, descending=True)
    start = 0
    while start < len(order):
        width = max(1, int(lengths[order[start]]))
        stop = min(len(order), start + max(1, max_tokens // width))
        yield order[start:stop]
        start = stop


def log_probs(
    model: Decoder,
    tokens: Int64[Tensor, "rows width"],
    mask: Bool[Tensor, "rows width"],
    temperature: float = 1.0,
) -> tuple[Float[Tensor, "rows width"], Float[Tensor, "rows width"]]:
    """Log-probability of each masked token given those before it, and the entropy there.

    Returns:
        Both 0 elsewhere. The first token has nothing before it: its mask is not looked at.
    """
    states, asked, width = _states(model, tokens, mask)
    found = token_log_probs(
        states,
        model.head_weight,
        tokens[:, 1:width][asked],
        temperature=temperature,
        group=model.shard.group,
    )
    spread = (tokens.new_zeros(tokens.shape, dtype=found[0].dtype) for _ in found)
    where = torch.nn.functional.pad(asked, (1, tokens.shape[1] - width))
    log_p, entropy = (
        empty.masked_scatter(where, of) for empty, of in zip(spread, found, strict=True)
    )
    return log_p, entropy


def values(
    model: Decoder, tokens: Int64[Tensor, "rows width"], mask: Bool[Tensor, "rows width"]
) -> Float[Tensor, "rows width"]:
    """The scalar head before each masked token; 0 elsewhere."""
    states, asked, width = _states(model, tokens, mask)
    found = states @ model.head_weight[0]
    where = torch.nn.functional.pad(asked, (1, tokens.shape[1] - width))
    return found.new_zeros(tokens.shape).masked_scatter(where, found)


def scores(
    model: Decoder, tokens: Int64[Tensor, "rows width"], lengths: Int64[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """The scalar head at each sequence's last token, as a sequence classifier's."""
    hidden = model(tokens[:, : int(lengths.max())])
    last = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    return last @ model.head_weight[0]


def _states(model: Decoder, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """States before masked tokens, the mask from the second token on, and its width plus one."""
    columns = torch.nonzero(mask.any(0))
    width = max(2, int(columns[-1]) + 1) if len(columns) else 2
    hidden = model(tokens[:, : width - 1])
    asked = mask[:, 1:width]
    return hidden[asked], asked, width
