"""Gates with capacity: which experts a token goes to, and which slots of their buffers it takes.

An expert has a number of slots that the whole batch shares. Slots are taken tokens in order and a
token's choices in order, so that a batch that is cut into parts drops the tokens of the whole: each
part gets the whole batch's capacity and the slots that the parts before it have used (after
"Lancet", arXiv 2404.19429, with top-k in token-major order, as choice-major cannot be cut).

switch: Switch Transformers, arXiv 2101.03961. top_k: as in GShard, arXiv 2006.16668, and Mixtral.
hash: Hash Layers, arXiv 2106.04426. batch_prioritized: V-MoE, arXiv 2106.05974. expert_choice: arXiv
2202.09368.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from shared.errors import ConfigError, DataError
from shared.kernels.philox import philox, stream_key
from shared.kernels.route import route
from shared.registry import Registry

__all__ = [
    "GATES",
    "Gate",
    "Routing",
    "assign_slots",
    "balance_loss",
    "capacity",
    "slots_per_token",
]


def capacity(num_tokens: int, num_experts: int, factor: float, k: int = 1) -> int:
    """Slots of each expert: k * factor * num_tokens / num_experts, rounded up.

    Computed in integers from the decimal digits of `factor`: 1.1 is 11/10. Parts of a batch get the
    capacity of the whole batch; a rank's batch gets its own.

    Args:
        num_tokens: Tokens of the rank's whole batch.
        num_experts: Number of experts.
        factor: Slots for each choice, on average; 1.0 suffices if all experts get equally many.
        k: Experts that a token chooses.

    Raises:
        ConfigError: `num_tokens` is negative, another argument is not positive, or `factor` is
            infinite or NaN.
    """
    if num_tokens < 0:
        raise ConfigError(f"expected num_tokens of 0 or more, got {num_tokens}; count them")
    share = slots_per_token(num_experts, factor, k)
    return -(-share.numerator * num_tokens // share.denominator)


def slots_per_token(num_experts: int, factor: float, k: int = 1) -> Fraction:
    """An expert's slots for each token of the batch, before rounding; see `capacity`.

    Raises:
        ConfigError: An argument is not positive, or `factor` is infinite or NaN.
    """
    if num_experts < 1 or k < 1 or not 0 < factor < float("inf"):
        raise ConfigError(
            f"expected num_experts and k of 1 or more and a finite factor above 0, got num_experts "
            f"{num_experts}, k {k}, factor {factor}; 1.25 is a usual factor"
        )
    return Fraction(str(factor)) * k / num_experts


def assign_slots(
    experts: Int[Tensor, "tokens k"],
    num_experts: int,
    capacity: int,
    used: Int64[Tensor, " num_experts"] | None = None,
) -> tuple[Int64[Tensor, "tokens k"], Int64[Tensor, " num_experts"]]:
    """Gives each choice the next free slot of its expert, while there are any.

    Args:
        experts: Experts that each token chose, each in [0, num_experts).
        num_experts: Number of experts.
        capacity: Slots of each expert, those in `used` included.
        used: Slots of each expert that earlier parts of the batch have used; None: none are.

    Returns:
        The slots, -1 for a choice that is dropped, and the slots used afterwards.

    Raises:
        DataError: A shape or type does not fit, an expert lies outside its range, or more slots are
            used than there are.
    """
    if used is None:
        used = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    elif used.shape != (num_experts,):
        raise DataError(
            f"expected used slots of {num_experts} experts, got shape {list(used.shape)}; give what "
            f"the part before has returned"
        )
    return _assign_slots(experts, used, capacity)


# One operator of the graph, which a cut along the batch can give `used` as a chain.
@torch.library.custom_op("lancet::assign_slots", mutates_args=())
def _assign_slots(experts: Tensor, used: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    # On a GPU the check would make the host wait for the device.
    if used.device.type == "cpu" and len(used):
        low, high = (int(bound) for bound in used.aminmax())
        if low < 0 or high > capacity:
            raise DataError(
                f"expected used slots of 0 to the capacity of {capacity}, got {low} to {high}; give "
                f"every part the whole batch's capacity"
            )
    slots, totals = route(experts, len(used), used)
    return slots.masked_fill_(slots >= capacity, -1), totals.clamp_(max=capacity)


@_assign_slots.register_fake
def _(experts: Tensor, used: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    return experts.new_empty(experts.shape, dtype=torch.int64), torch.empty_like(used)


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        experts: Expert of each choice [tokens, choices].
        slots: Its slot in the expert's buffer [tokens, choices]; -1: the choice is dropped.
        weights: Factor of the expert's output in the token's [tokens, choices].
    """

    experts: Tensor
    slots: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Gate:
    """A rule by which tokens choose experts, or experts tokens.

    Attributes:
        route: Function of logits [tokens, num_experts], ids [tokens], k and the experts' capacity;
            returns a `Routing`. A gate without a router gets logits of zeros.
        has_router: Whether it reads the logits.
        needs_ids: Whether it reads the tokens' ids.
        is_whole: Whether a token's slots depend on later tokens, so that only what follows the gate
            can be cut along the batch.
        max_k: Most experts that a token may choose; None: all.
        has_balance_loss: Whether `balance_loss` of its choices trains the router towards even ones.
    """

    route: Callable[[Tensor, Tensor, int, int], Routing]
    has_router: bool = True
    needs_ids: bool = False
    is_whole: bool = False
    max_k: int | None = None
    has_balance_loss: bool = True


def balance_loss(
    logits: Float[Tensor, "tokens num_experts"], experts: Int64[Tensor, "tokens k"]
) -> Float[Tensor, ""]:
    """Switch Transformers' auxiliary loss: 1 if all experts get equally many tokens, else more.

    The sum over experts of their share of choices, dropped ones included, times their mean
    probability, times the number of experts.
    """
    num_experts = logits.shape[1]
    counts = torch.zeros(num_experts, dtype=torch.float32, device=logits.device)
    ones = torch.ones(experts.numel(), device=logits.device)
    shares = counts.index_add(0, experts.reshape(-1), ones) / experts.numel()
    return num_experts * (shares * _probabilities(logits).mean(0)).sum()


def _probabilities(logits: Tensor) -> Tensor:
    """Each token's probabilities of the experts, in float32 or wider."""
    return logits.softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _choose(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest experts of each token, and their weights, which add up to 1 for k above 1."""
    # A single weight of 1 would leave the router without a gradient.
    weights, experts = _probabilities(logits).topk(k, dim=1)
    return experts, weights if k == 1 else weights / weights.sum(1, keepdim=True)


def _route_in_order(logits: Tensor, ids: Tensor, k: int, capacity: int) -> Routing:
    experts, weights = _choose(logits, k)
    return Routing(experts, assign_slots(experts, logits.shape[1], capacity)[0], weights)


def _route_by_priority(logits: Tensor, ids: Tensor, k: int, capacity: int) -> Routing:
    """Tokens with a higher largest probability take slots first."""
    experts, weights = _choose(logits, k)
    largest = _probabilities(logits).amax(1)
    order = largest.argsort(descending=True, stable=True)
    slots, _ = assign_slots(experts[order], logits.shape[1], capacity)
    return Routing(experts, slots[order.argsort()], weights)


def _route_by_experts(logits: Tensor, ids: Tensor, k: int, capacity: int) -> Routing:
    """Each expert chooses the tokens that it is likeliest for; k enters by the capacity only."""
    weights = _probabilities(logits)
    num_tokens, num_experts = weights.shape
    chosen = weights.t().topk(min(capacity, num_tokens), dim=1).indices
    ranks = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    slots = chosen.new_full((num_experts, num_tokens), -1).scatter(1, chosen, ranks)
    experts = torch.arange(num_experts, device=chosen.device).expand(num_tokens, -1)
    return Routing(experts, slots.t(), weights)


def _route_by_hash(logits: Tensor, ids: Tensor, k: int, capacity: int) -> Routing:
    return _route_by_draw(logits, ids, torch.zeros_like(ids[:1]), k, capacity)


def _route_at_random(logits: Tensor, ids: Tensor, k: int, capacity: int) -> Routing:
    """New experts in every call: one number is drawn, the rest follows from tokens' positions."""
    positions = torch.arange(len(logits), device=logits.device)
    call = torch.randint(1, 1 << 32, (1,), device=logits.device)
    return _route_by_draw(logits, positions, call, k, capacity)


_DRAWS = stream_key(0x6C616E636574)


def _route_by_draw(logits: Tensor, ids: Tensor, call: Tensor, k: int, capacity: int) -> Routing:
    """k different experts a token, all alike weighted, as a pure function of its id and the call.

    Robert Floyd's draw: the j-th is drawn from the first E - k + j + 1 experts, and is the last of
    these where that expert is drawn already.
    """
    num_experts = logits.shape[1]
    low, high, stream = ids & 0xFFFFFFFF, (ids >> 32) & 0xFFFFFFFF, call.expand_as(ids)
    words = [
        philox(torch.stack([low, high, stream, torch.full_like(ids, block)], 1), _DRAWS)
        for block in range((k + 3) // 4)
    ]
    chosen: list[Tensor] = []
    for word, last in zip(
        torch.cat(words, 1).unbind(1), range(num_experts - k, num_experts), strict=False
    ):
        expert = word * (last + 1) >> 32
        for other in chosen:
            expert = torch.where(expert == other, last, expert)
        chosen.append(expert)
    experts = torch.stack(chosen, 1)
    weights = torch.full(experts.shape, 1 / k, device=logits.device)
    return Routing(experts, assign_slots(experts, num_experts, capacity)[0], weights)


GATES: Registry[str, Gate] = Registry("gate")
"""The gates by name."""
GATES.add("switch", Gate(_route_in_order, max_k=1), "the likeliest expert")
GATES.add("top_k", Gate(_route_in_order), "the k likeliest experts")
GATES.add(
    "random",
    Gate(_route_at_random, has_router=False, has_balance_loss=False),
    "k random experts, new in every call",
)
GATES.add(
    "hash",
    Gate(_route_by_hash, has_router=False, needs_ids=True, has_balance_loss=False),
    "k experts by a hash of the token's id",
)
GATES.add(
    "batch_prioritized",
    Gate(_route_by_priority, is_whole=True),
    "the k likeliest experts, tokens with the highest probabilities first",
)
GATES.add(
    "expert_choice",
    Gate(_route_by_experts, is_whole=True, has_balance_loss=False),
    "each expert takes its likeliest tokens",
)
