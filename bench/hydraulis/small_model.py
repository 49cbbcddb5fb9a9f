"""What the benchmarks of training share: documents, a model, and what one process computes of them."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import hydraulis as hy
from shared.comms import Group, all_reduce

__all__ = [
    "SumOfGradients",
    "agreed_cost",
    "by_one_process",
    "documents",
    "make_model",
    "relative_error",
]

DIVISOR = 16


def documents(most):
    """Python's own source files, every 16th byte a token, of those that have from 2 to `most`."""
    texts = [text[::DIVISOR] for text in hy.data.python_source()]
    return [text for text in texts if 2 <= len(text) <= most]


def make_model(most):
    """A Llama of 4 layers and hidden size 192, float32, the same on every rank."""
    torch.manual_seed(0)
    shape = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": most}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **shape, **heads))


def agreed_cost(most):
    """A cost measured on all ranks at once, their mean: ranks plan alike."""
    cost = hy.measure_cost(make_model(most), most)
    coefficients = torch.tensor([cost.a, cost.b, cost.c], dtype=torch.float64)
    if Group.exists():
        all_reduce(Group.world(), coefficients)
        coefficients /= Group.world().world_size
    a, b, c = coefficients.tolist()
    return hy.Cost(a=a, b=b, c=c)


class SumOfGradients(torch.optim.SGD):
    """Leaves weights as they are, so that all ways see the same, and adds up a step's gradients.

    Attributes:
        weight: of the step's gradients in the sum: what its losses were divided by.
    """

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)
        self.weight = 1.0
        self.totals = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        for total, parameter in zip(self.totals, every, strict=True):
            total.add_(parameter.grad, alpha=self.weight)

    def taken(self):
        """The sums so far, whole and flat, from which it begins anew."""
        found = [getattr(one, "full_tensor", one.clone)().flatten() for one in self.totals]
        for one in self.totals:
            one.zero_()
        return torch.cat(found)


def by_one_process(model: nn.Module, texts):
    """Sum of losses, and its gradients, of each document alone, by transformers' own attention.

    Ranks share the documents, as nothing passes between them.
    """
    world = Group.world() if Group.exists() else None
    rank, size = (0, 1) if world is None else (world.rank, world.world_size)
    total = torch.zeros((), dtype=torch.float64)
    for text in texts[rank::size]:
        ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        loss = nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
        loss.backward()
        total += loss.detach()
    every = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    gradients = torch.cat([one.flatten() for one in every]).double()
    if world is not None:
        all_reduce(world, total)
        all_reduce(world, gradients)
    return float(total), gradients


def relative_error(found, known):
    """Length of the difference over that of what is known."""
    return float((found.double() - known).norm() / known.norm())
