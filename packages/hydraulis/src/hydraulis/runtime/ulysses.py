"""Ulysses: ranks exchange some tokens of all heads for all tokens of some heads, and back.

DeepSpeed-Ulysses (arXiv 2309.14509). Between the two exchanges any attention may compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.comms import Group, all_to_all_v
from shared.errors import ConfigError

__all__ = ["check_heads", "gather_tokens", "repeat_keys", "scatter_tokens"]


def check_heads(num_heads: int, num_kv_heads: int, size: int) -> None:
    """Refuses heads that cannot be dealt to so many ranks.

    Raises:
        ConfigError: the degree does not divide the query heads, or neither divides the key heads nor
            is a multiple of them.
    """
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ConfigError(
            f"Ulysses: expected a degree that divides {num_heads} query heads, and divides or is a "
            f"multiple of {num_kv_heads} key heads, got {size}; take a smaller one, or ring attention"
        )


def repeat_keys(keys: Tensor, size: int) -> Tensor:
    """Key heads [heads, tokens, dim] repeated as little as needed for one a rank."""
    return keys if keys.shape[0] % size == 0 else keys.repeat_interleave(size // keys.shape[0], 0)


def gather_tokens(x: Tensor, tokens: list[int], group: Group) -> Tensor:
    """All ranks' tokens of this rank's heads; differentiable.

    Args:
        x: [heads, own tokens, dim], heads a multiple of the ranks.
        tokens: tokens of each rank.
        group: the ranks.

    Returns:
        [heads / ranks, all tokens, dim].
    """
    return _Exchange.apply(x, tokens, group, True)


def scatter_tokens(x: Tensor, tokens: list[int], group: Group) -> Tensor:
    """The inverse of `gather_tokens`: this rank's tokens of all heads; differentiable."""
    return _Exchange.apply(x, tokens, group, False)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: list[int], group: Group, gathers: bool) -> Tensor:
        ctx.tokens, ctx.group, ctx.gathers = tokens, group, gathers
        return _exchange(x, tokens, group, gathers=gathers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _exchange(grads[0], ctx.tokens, ctx.group, gathers=not ctx.gathers), None, None, None


def _exchange(x: Tensor, tokens: list[int], group: Group, *, gathers: bool) -> Tensor:
    size, rank = group.world_size, group.rank
    if gathers:
        sends = [part.contiguous() for part in x.chunk(size, 0)]
        received = [x.new_empty(x.shape[0] // size, count, x.shape[2]) for count in tokens]
        all_to_all_v(group, sends, received, "Ulysses")
        return torch.cat(received, 1)
    sends = [part.contiguous() for part in x.split(tokens, 1)]
    received = [x.new_empty(x.shape[0], tokens[rank], x.shape[2]) for _ in range(size)]
    all_to_all_v(group, sends, received, "Ulysses")
    return torch.cat(received, 0)
