"""A Mixture-of-Experts layer with capacity, for models that do not come from transformers.

Tokens that find no slot at an expert get nothing from it: the caller adds the layer's output to its
input. `lancet.parallelize` divides the experts over ranks, as those of transformers' models. Capacity
stays that of a rank's own batch, as in GShard (arXiv 2006.16668) and DeepSpeed: each rank counts its
tokens and gives them slots before it sends them, so that it drops what a process alone would drop, and
an expert gets at most the sum of the ranks' capacities.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from lancet.moe.gates import GATES, balance_loss, slots_per_token
from shared.errors import ConfigError

__all__ = ["ExpertLayers", "Layer"]


class ExpertLayers(nn.Module):
    """Two linear layers with a GELU between them for each expert, in transformers' form.

    Args:
        dim: Width of a token.
        hidden_dim: Width between the layers.
        num_experts: Number of experts.
    """

    # What transformers' grouped products ask of a module.
    has_gate = has_bias = has_post_expert_norm = is_transposed = _is_expert_parallel = False

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up_proj = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.down_proj = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.act_fn = nn.GELU()
        # As nn.Linear's.
        for weight in self.parameters():
            nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)

    def forward(self, rows: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """The experts' weighted outputs [n, dim], summed over a row's choices.

        Args:
            rows: Tokens [n, dim].
            expert_ids: Experts of each [n, k].
            weights: Factors of their outputs [n, k].
        """
        if rows.dtype == torch.float64:  # which torch's grouped products do not take
            return self._multiply_by_expert(rows, expert_ids, weights)
        return grouped_mm_experts_forward(self, rows, expert_ids, weights)

    def _multiply_by_expert(self, rows: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """As `forward`, by one product after another."""
        flat = expert_ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int32, device=flat.device)
        counts = counts.index_add(0, flat, torch.ones_like(flat, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        inner = product(rows[order // weights.shape[1]], self.up_proj.transpose(1, 2), ends)
        outer = product(self.act_fn(inner), self.down_proj.transpose(1, 2), ends)
        choices = torch.zeros_like(outer).index_copy(0, order, outer)
        return (choices.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Layer(nn.Module):
    """A router, a gate and experts.

    Args:
        dim: Width of a token, a multiple of 8.
        hidden_dim: Width between an expert's two linear layers, a multiple of 8.
        num_experts: Number of experts.
        gate: A name in `GATES`.
        k: Experts that a token chooses.
        capacity_factor: Slots for each choice of a rank's own batch, on average; see `capacity`.

    Raises:
        ConfigError: The gate is unknown, or a width, k or the factor lies outside its range.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        gate: str = "switch",
        k: int = 1,
        capacity_factor: float = 1.25,
    ) -> None:
        super().__init__()
        # torch's grouped products need rows of a multiple of 16 bytes.
        if dim % 8 or hidden_dim % 8:
            raise ConfigError(
                f"expected dim and hidden_dim to be multiples of 8, got {dim} and {hidden_dim}; round "
                f"them up"
            )
        self.gate = GATES.get(gate)
        share = slots_per_token(num_experts, capacity_factor, k)
        max_k = min(num_experts, self.gate.max_k or num_experts)
        if k > max_k:
            raise ConfigError(
                f"expected k of 1 to {max_k} for the gate {gate!r} and {num_experts} experts, got {k}; "
                f"lower k"
            )
        # Integers, so that a compiler can compute the capacity of a batch of any size.
        self._share = share.numerator, share.denominator
        self.k, self.num_experts = k, num_experts
        self.router = nn.Linear(dim, num_experts, bias=False) if self.gate.has_router else None
        self.experts = ExpertLayers(dim, hidden_dim, num_experts)

    def forward(
        self, hidden: Float[Tensor, "*batch dim"], token_ids: Int64[Tensor, "*batch"] | None = None
    ) -> tuple[Float[Tensor, "*batch dim"], Float[Tensor, ""]]:
        """Returns what the experts add to each token, and the balance loss of this batch.

        Args:
            hidden: This rank's tokens; they take slots in the order of the flattened batch.
            token_ids: Ids of the tokens in the vocabulary, for a gate that hashes them.

        Returns:
            The experts' weighted outputs, and `balance_loss`; 0 for a gate that it cannot train.

        Raises:
            ConfigError: The gate needs ids and got none, or their number is not that of the tokens.
        """
        tokens = hidden.reshape(-1, hidden.shape[-1])
        numerator, denominator = self._share
        capacity = -(-numerator * len(tokens) // denominator)
        logits = self._score(tokens)
        routing = self.gate.route(logits, self._read_ids(tokens, token_ids), self.k, capacity)
        # Kept choices by expert; a choice that is dropped comes last.
        kept = routing.slots >= 0
        ids = routing.experts.masked_fill(~kept, self.num_experts).reshape(-1)
        order = torch.argsort(ids, stable=True)
        num_kept = int(kept.sum())
        torch._check(num_kept >= 0)
        torch._check(num_kept <= len(order))
        choices = order[:num_kept]
        sources, ids = choices // routing.experts.shape[1], ids[choices].unsqueeze(1)
        rows = tokens.index_select(0, sources)
        results = self.experts(rows, ids, torch.ones_like(ids, dtype=rows.dtype))
        weights = routing.weights.reshape(-1).index_select(0, choices)
        results = (results * weights.unsqueeze(1)).to(tokens.dtype)
        sums = torch.zeros_like(tokens).index_add(0, sources, results)
        loss = logits.new_zeros((), dtype=torch.float32)
        if self.gate.has_balance_loss:
            loss = balance_loss(logits, routing.experts)
        return sums.view_as(hidden), loss

    def _score(self, tokens: Tensor) -> Tensor:
        if self.router is None:
            return tokens.new_zeros(1, self.num_experts).expand(len(tokens), -1)
        return self.router(tokens)

    def _read_ids(self, tokens: Tensor, token_ids: Tensor | None) -> Tensor:
        if token_ids is not None:
            if token_ids.numel() != len(tokens):
                raise ConfigError(
                    f"expected the ids of {len(tokens)} tokens, got {token_ids.numel()}; give each "
                    f"token one"
                )
            return token_ids.reshape(-1)
        if self.gate.needs_ids:
            raise ConfigError(
                "expected token_ids for a gate that hashes them, got None; call "
                "layer(hidden, token_ids)"
            )
        return torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
