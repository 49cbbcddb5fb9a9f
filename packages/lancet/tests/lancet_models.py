"""Small Mixture-of-Experts models, their batches, and their training in one process or on ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shared.comms import Group

MODULES = (
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.mixtral.modeling_mixtral",
    "torch.distributed.tensor",
    "torch._dynamo.repro.after_dynamo",
    "lancet.runtime.backend",
    "lancet.moe.layer",
)
"""What all ranks import, in one process for all of them."""
VOCABULARY, LENGTH = 96, 12

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_cache": False,
}


# What each family calls its sizes; all have 8 experts, of which each token takes 2.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 24, "num_experts": 8, "norm_topk_prob": True},
    ),
    "qwen2": (
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "num_experts": 8,
            "decoder_sparse_step": 1,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 8}),
    "deepseek": (
        "DeepseekV3Config",
        {
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}
FAMILIES = tuple(_FAMILIES)


def make_config(family: str = "qwen3", **settings: Any) -> Any:
    """The configuration of a model of two layers with 8 experts, of which each token takes 2."""
    import transformers

    name, sizes = _FAMILIES[family]
    common = {**_SIZES, "num_experts_per_tok": 2, "output_router_logits": False}
    return getattr(transformers, name)(**{**common, **sizes, **settings})


def make_model(family: str = "qwen3", **settings: Any) -> nn.Module:
    """A model whose weights do not depend on what was drawn before."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(family, **settings))
    # transformers starts routers near zero, where all tokens would choose alike.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                weight.normal_(std=0.5)
    return model


def make_batch(step: int, num_rows: int = 4) -> Tensor:
    """Token ids [num_rows, LENGTH] of all ranks together."""
    draw = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, VOCABULARY, (num_rows, LENGTH), generator=draw)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights, gathered from all ranks."""
    return {
        name: (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()
        for name, weight in model.named_parameters()
    }


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The parameters' gradients, gathered from all ranks."""
    gradients = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            grad = weight.grad
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            gradients[name] = grad.detach().clone()
    return gradients


def train_alone(num_steps: int = 4, family: str = "qwen3", **settings: Any) -> dict[str, Tensor]:
    """Weights after SGD steps on whole batches, in this process."""
    model = make_model(family, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(num_steps):
        batch = make_batch(step)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest absolute difference of tensors of the same names."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


class SmallModel(nn.Module):
    """A layer of experts without drops between two linear ones: captured in some seconds."""

    def __init__(self) -> None:
        from lancet.moe.layer import Layer

        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(16, 16)
        self.layer = Layer(16, 24, 4, gate="top_k", k=2, capacity_factor=4.0)
        self.last = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of tokens [n, 16]."""
        hidden = self.inner(tokens).relu()
        results, balance = self.layer(hidden)
        return self.last(hidden + results).square().mean() + balance


class RowsModel(nn.Module):
    """Rows that travel between two linear layers, as those of experts do: captured in a second.

    Args:
        group: ranks between which they travel; None: they stay.
    """

    def __init__(self, group: Group | None = None) -> None:
        from lancet.moe.dispatch import TokenDispatch

        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.dispatch = None
        if group is not None:
            self.dispatch = TokenDispatch(group, 2, "rows")

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of tokens [n, 16]."""
        hidden = self.inner(tokens)
        if self.dispatch is None:
            hidden = hidden.relu()
        else:
            # Of two experts a rank, 0 lies on the first rank and 3 on the second.
            ids = 3 * (tokens[:, :1] > 0).long()
            rows = self.dispatch.send(hidden, ids)
            ones = torch.ones_like(tokens[:, :1])
            hidden = self.dispatch.bring_back(rows.values.relu(), rows, ones)
        return self.last(hidden).square().mean()


def divide(kind: type[SmallModel] | type[RowsModel], group: Group) -> nn.Module:
    """A model over the ranks of a group, whose gradients are those of the mean of their losses."""
    import lancet
    from lancet.moe.gradients import average_gradients

    if issubclass(kind, SmallModel):
        return lancet.parallelize(kind(), group)
    model = kind(group)
    average_gradients(model.parameters(), group)
    return model


def small_batch(rank: int, num_tokens: int = 12) -> Tensor:
    """A rank's tokens for a `SmallModel` or a `RowsModel`."""
    return torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(rank))
