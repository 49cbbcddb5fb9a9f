"""Small Mixture-of-Experts models, their batches, and their training in one process or on ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


def make_config(family: str = "qwen3", **settings: Any) -> Any:
    """The configuration of a two-layer model with 8 experts, of which each token takes 2."""
    from transformers import MixtralConfig, Qwen3MoeConfig

    moe = {"num_experts_per_tok": 2, "output_router_logits": False}
    if family == "mixtral":
        return MixtralConfig(**{**_SIZES, **moe, "num_local_experts": 8, **settings})
    sizes = {"moe_intermediate_size": 24, "num_experts": 8, "norm_topk_prob": True}
    return Qwen3MoeConfig(**{**_SIZES, **moe, **sizes, **settings})


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
