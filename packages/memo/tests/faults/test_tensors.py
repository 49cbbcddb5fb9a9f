"""Saved tensors that are no plain stretch of memory: expanded, sparse, and of other classes.

DTensors have ranks of their own: `integrations/test_ranks.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from memo import apply

from ..runtime.models import assert_same_step, make_input, make_stack, train_stack
from ..runtime.test_whole import Expands, Slices, Transposes
from .steps import BOTH

pytestmark = pytest.mark.unchecked  # models are trained


class SparseProduct(nn.Module):
    """Saves a sparse buffer, and activations that it made sparse itself."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)
        graph = torch.rand(128, 128) < 0.05
        self.register_buffer("graph", (graph / 6.0).to_sparse())

    def forward(self, x):
        y = torch.sparse.mm(self.graph, self.up(x).flatten(0, 1)).view_as(x)
        own = (x[0] @ x[0].t()).relu().to_sparse()
        return x + y.sigmoid() + torch.sparse.mm(own, x[1]) / 100


class Tagged(Tensor):
    """A tensor of a class of its own, whose results are of it too."""


class Tags(nn.Module):
    """Saves tensors of another class among plain ones."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        y = self.up(x).as_subclass(Tagged).sigmoid()
        assert type(y * y) is Tagged
        return x + (y * y).as_subclass(Tensor)


class Quantized(Tensor):
    """A frozen weight of 8-bit numbers and a scale, as bitsandbytes and torchao have it."""

    @staticmethod
    def __new__(cls, codes, scale):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args: Any = (), kwargs=None):  # pyrefly: ignore
        if func is torch.ops.aten.detach.default:
            one = args[0]
            return return_and_correct_aliasing(func, args, kwargs, cls(one.codes, one.scale))
        plain = [one.codes * one.scale if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


class QuantizedProduct(nn.Module):
    """A product with a quantized weight, beside a trained one."""

    def __init__(self):
        super().__init__()
        codes = torch.randint(-127, 128, (32, 32), dtype=torch.int8)
        self.base = nn.Parameter(Quantized(codes, torch.tensor(0.01)), requires_grad=False)
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        return x + nn.functional.linear(self.up(x), self.base).sigmoid()


@BOTH
@pytest.mark.parametrize(
    "make", [Transposes, Slices, Expands, SparseProduct, Tags, QuantizedProduct]
)
def test_gradients_are_those_of_plain_autograd(plan, make):
    model = make_stack(make)
    expected = [train_stack(model, num_batches=1), train_stack(model)]
    with apply(model, plan):
        for wanted, num_batches in zip(expected, (1, 2), strict=True):
            assert_same_step(train_stack(model, num_batches=num_batches), wanted)


@BOTH
def test_nan_and_infinity_pass_bit_for_bit(plan):
    """NaNs with a payload too, which no arithmetic makes."""
    model = make_stack(Transposes)
    payload = torch.tensor([0x7FC12345, 0x7F800000, -0x00800000], dtype=torch.int32)
    bits = make_input()
    bits[0, 0, :3] = payload.view(torch.float32)

    def step():
        model.zero_grad()
        source = bits.clone().requires_grad_()
        out = model.layers[0](source)
        out.backward(torch.ones_like(out))
        return [], {
            "source": source.grad,
            **{n: p.grad for n, p in model.layers[0].named_parameters()},
        }

    expected = step()
    assert not all(grad.isfinite().all() for grad in expected[1].values())
    with apply(model, plan):
        assert_same_step(step(), expected)
