"""Small models from configurations, and training steps on them: what plain autograd does is the reference."""

from functools import cache

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
)

VOCAB = 96
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def make_model(name, dtype=torch.float32, *, num_layers=3, attention="sdpa", **settings):
    """A causal LM in train mode, always with the same weights."""
    if name == "gpt2":
        config = GPT2Config(
            n_embd=64,
            n_layer=num_layers,
            n_head=4,
            vocab_size=VOCAB,
            bos_token_id=0,
            eos_token_id=1,
        )
    else:
        extra = {
            "llama": (LlamaConfig, {}),
            "qwen3": (Qwen3Config, {"head_dim": 16}),
            "mistral": (MistralConfig, {"sliding_window": 24}),
            "mixtral": (MixtralConfig, {"num_local_experts": 4}),
        }
        kind, own = extra[name]
        config = kind(**_SIZES, num_hidden_layers=num_layers, **own, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.train()


def make_batch(number=0, rows=2, length=48):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCAB, (rows, length), generator=generator)


def train(model, *, num_batches=3, rows=2, length=48):
    """Losses, and gradients accumulated over batches."""
    model.zero_grad()
    torch.manual_seed(1)
    losses = []
    for number in range(num_batches):
        ids = make_batch(number, rows, length)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


@cache
def plain_step(name, dtype=torch.float32, *, attention="sdpa", num_layers=3, **settings):
    """What plain training of a new model gives, see `train`: the same for all who compare with it."""
    return train(make_model(name, dtype, num_layers=num_layers, attention=attention), **settings)


def gradients(model):
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def same_bits(left, right):
    """Whether two tensors hold the same bits, NaNs included."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    pair = [one.detach().contiguous().view(torch.uint8) for one in (left, right)]
    return torch.equal(*pair)


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    assert expected
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []


def assert_same_step(found, expected):
    """Losses and gradients of two calls of `train`."""
    assert found[0] == expected[0]
    assert_same_gradients(found[1], expected[1])


class Block(nn.Module):
    """A layer of one's own, without transformers' attention."""

    def __init__(self, width=32, inner=nn.GELU):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.act, self.down = inner(), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers in a row, between two projections."""

    def __init__(self, layers, width=32):
        super().__init__()
        self.first, self.layers, self.last = (
            nn.Linear(width, width),
            nn.ModuleList(layers),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def make_stack(make=Block, *, num_layers=3):
    torch.manual_seed(0)
    return Stack([make() for _ in range(num_layers)])


def make_input(number=0, rows=64, width=32):
    return torch.randn(2, rows, width, generator=torch.Generator().manual_seed(number))


def train_stack(model, *, num_batches=2, **settings):
    model.zero_grad()
    torch.manual_seed(1)
    losses = []
    for number in range(num_batches):
        loss = model(make_input(number, **settings))
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)
