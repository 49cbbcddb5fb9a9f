"""Count the tokens of each expert, and number them: their slots in the expert's buffer.

A token's k choices take the next free slots of their experts, tokens in order and a token's choices
in order. A batch that is cut into parts gets the slots of the whole, if each part starts from the
slots that the parts before it have used.
"""

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from shared.errors import DataError
from shared.kernels.registry import select

__all__ = ["route"]


def route(
    experts: Int[Tensor, "tokens k"],
    num_experts: int,
    used: Int64[Tensor, " num_experts"] | None = None,
) -> tuple[Int64[Tensor, "tokens k"], Int64[Tensor, " num_experts"]]:
    """Gives every choice of every token its slot within the chosen expert.

    Args:
        experts: Experts that each token chose, int32 or int64, each in [0, num_experts). Checked on
            the CPU only.
        num_experts: Number of experts.
        used: Slots of each expert that are used already; None: none are.

    Returns:
        The slots, from used[expert] upwards, and the slots used afterwards; without `used` these are
        the experts' numbers of choices.

    Raises:
        DataError: A shape or type does not fit, or an expert lies outside its range.
    """
    if experts.dim() != 2 or experts.dtype not in (torch.int32, torch.int64):
        raise DataError(
            f"expected experts to be int32 or int64 [tokens, k], got {experts.dtype} "
            f"{list(experts.shape)}"
        )
    if used is None:
        used = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    if used.dtype != torch.int64 or used.shape != (num_experts,):
        raise DataError(
            f"expected used to be torch.int64 [{num_experts}], got {used.dtype} {list(used.shape)}"
        )
    form = select("route", experts.device)
    slots, totals = form.route(experts.reshape(-1), used)
    return slots.view(experts.shape), totals
