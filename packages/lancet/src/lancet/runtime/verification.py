"""Compares a graph's outputs in two orders, and replicated parameters on all ranks, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lancet.runtime.agreement import share_texts
from shared.comms import Group
from shared.errors import DataError
from shared.kernels.digest import digest

__all__ = ["NUM_ROUNDINGS", "check_replicas", "find_difference"]

NUM_ROUNDINGS = 200
"""What sums in another order may differ by, relative to a tensor's largest element, as a multiple of its
type's precision."""
# The largest difference that counts as rounding: in bfloat16, the multiple alone would accept anything.
_LARGEST_SHARE = 0.05


def check_replicas(parameters: Mapping[str, Tensor], group: Group) -> None:
    """Checks that the ranks hold the same parameters; each calls it at the same step.

    Args:
        parameters: replicated ones, by name.
        group: a gloo group of the ranks, which exchange 64 bits each.

    Raises:
        DataError: a parameter differs; names it.
        CommError: a rank died or the timeout passed.
    """
    if len({*share_texts(group, str(digest(parameters.values())))}) == 1:
        return
    own = {name: digest(tensor) for name, tensor in parameters.items()}
    on_ranks = [json.loads(text) for text in share_texts(group, json.dumps(own))]
    differing = [name for name in own if len({rank.get(name) for rank in on_ranks}) > 1]
    raise DataError(
        f"expected the same replicated parameters on all ranks, got others on some in "
        f"{', '.join(differing[:3])} ({len(differing)} in all); change gradients and parameters the "
        f"same way on every rank, and clip with lancet.clip_grad_norm_"
    )


def find_difference(
    expected: Sequence[Any], outputs: Sequence[Any], num_roundings: int = 0
) -> int | None:
    """Position of the first output that differs, None if all are equal.

    Args:
        expected: tensors and other values.
        outputs: as many.
        num_roundings: how far floating-point tensors may differ, relative to their largest finite
            element, as a multiple of their type's precision, a twentieth at most, where infinities and
            NaNs stay what they are; 0: not in a bit.
    """
    for position, (one, other) in enumerate(zip(expected, outputs, strict=True)):
        if not _equal(one, other, num_roundings):
            return position
    return None


def _equal(one: Any, other: Any, num_roundings: int) -> bool:
    if not isinstance(one, Tensor):
        return one == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if num_roundings and one.is_floating_point():
        # Masks hold infinities, whose difference is no number.
        differing = (one != other) & ~(one.isnan() & other.isnan())
        finite = one[one.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        bound = min(num_roundings * torch.finfo(one.dtype).eps, _LARGEST_SHARE) * largest
        return bool(((one.double() - other.double())[differing].abs() <= bound).all())
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
