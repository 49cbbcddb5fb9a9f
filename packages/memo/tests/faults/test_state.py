"""Layers that depend on more than their arguments and parameters: gradients are plain autograd's, or an error says why."""

import random
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from memo import Plan, apply
from memo.planner.layer_plan import LayerPlan
from shared.errors import ConfigError

from ..runtime.models import Stack, assert_same_gradients, gradients, make_input

pytestmark = pytest.mark.unchecked  # models are trained

PLANS = pytest.mark.parametrize(
    "plan",
    [Plan.fixed(alpha=0.0), Plan.fixed(alpha=0.5), Plan.fixed(alpha=1.0)],
    ids=["none", "half", "all"],
)
FACTOR = ContextVar("FACTOR", default=1.0)


class Layer(nn.Module):
    """Two products, and something between that the layers below change."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.factor = 1.0

    def between(self, x):
        return x * self.factor

    def forward(self, x):
        return x + self.down(torch.tanh(self.between(self.up(x))))


def build(make):
    torch.manual_seed(0)
    return Stack([make() for _ in range(3)], width=16)


def seed_all():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


@contextmanager
def nothing(_):
    yield


def steps(model, around=nothing, num_steps=3):
    """Losses and gradients of steps whose forwards alone run within a context."""
    seed_all()
    losses = []
    for number in range(num_steps):
        x = make_input(number, width=16)
        with around(model):
            loss = model(x)
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


def numbers_of(model):
    """What a model has of its own beside parameters."""
    return [
        {name: value for name, value in vars(one).items() if isinstance(value, float | int)}
        for one in model.modules()
    ], {name: value.clone() for name, value in model.named_buffers()}


def check_equal(make, around, plan):
    plain, model = build(make), build(make)
    expected = steps(plain, around)
    with apply(model, plan):
        found = steps(model, around)
    assert found[0] == expected[0]
    assert_same_gradients(found[1], expected[1])
    (numbers, buffers), (wanted, others) = numbers_of(model), numbers_of(plain)
    assert numbers == wanted
    assert all(torch.equal(value, others[name]) for name, value in buffers.items())


@contextmanager
def factor_of_layers(model):
    for layer in model.layers:
        layer.factor = 3.0
    yield
    for layer in model.layers:
        layer.factor = 1.0


@contextmanager
def factor_of_submodules(model):
    """An attribute that is there for the time of the forward alone."""
    for layer in model.layers:
        layer.up.factor = torch.linspace(0, 2, 16)
    yield
    for layer in model.layers:
        del layer.up.factor


@contextmanager
def hooks(model):
    handles = [one.up.register_forward_hook(lambda *given: given[2] * 2) for one in model.layers]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def submodules(model):
    before = [layer.up for layer in model.layers]
    for layer in model.layers:
        layer.up = nn.Sequential(layer.up, nn.Hardtanh())
    yield
    for layer, up in zip(model.layers, before, strict=True):
        layer.up = up


@contextmanager
def context_variable(_):
    token = FACTOR.set(3.0)
    yield
    FACTOR.reset(token)


@contextmanager
def default_dtype(_):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def attention_backend(_):
    with sdpa_kernel([SDPBackend.MATH]):
        yield


@contextmanager
def evaluation_before_backward(model):
    model.train()
    yield
    model.eval()


def with_between(between):
    return type("Changed", (Layer,), {"between": between})


def count(layer, x):
    layer.factor += 0.5
    return x * layer.factor


def replace_buffer(layer, x):
    layer.scale = layer.scale * 1.5  # a new tensor, and not the old one written to
    return x * layer.scale


class Buffered(Layer):
    between = replace_buffer

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(16))


def leave_result(layer, x):
    layer.result = x.sigmoid()
    return x * layer.result


EQUAL = {
    "an attribute of layers": (Layer, factor_of_layers),
    "an attribute of submodules": (
        with_between(lambda layer, x: x * getattr(layer.up, "factor", 1.0)),
        factor_of_submodules,
    ),
    "hooks of submodules": (Layer, hooks),
    "submodules": (Layer, submodules),
    "a context variable": (with_between(lambda _, x: x * FACTOR.get()), context_variable),
    "the default dtype": (
        with_between(lambda _, x: (x * torch.linspace(0.0, 1.0, 16)).float()),
        default_dtype,
    ),
    "attention's backend": (
        with_between(lambda _, x: functional.scaled_dot_product_attention(x, x, x)),
        attention_backend,
    ),
    "training mode": (
        with_between(lambda layer, x: functional.dropout(x, 0.3, layer.training)),
        evaluation_before_backward,
    ),
    "a counter": (with_between(count), nothing),
    "a buffer that is replaced": (Buffered, nothing),
    "a result that is left behind": (with_between(leave_result), nothing),
    "numpy's mask": (
        with_between(lambda _, x: x * torch.from_numpy(np.random.rand(64, 16) > 0.3)),
        nothing,
    ),
    "numpy's order": (
        with_between(lambda _, x: x[:, torch.from_numpy(np.random.permutation(64))]),
        nothing,
    ),
    "Python's choice": (with_between(lambda _, x: x * random.choice([0.5, 1, 2])), nothing),
}


@PLANS
@pytest.mark.parametrize("case", EQUAL)
def test_what_the_first_forward_saw_the_second_one_sees(case, plan):
    check_equal(*EQUAL[case], plan)


class Elsewhere:
    """What no module has: a global's or a closure's value."""

    factor = 1.0
    row = None


def use_elsewhere(_, x):
    return x * Elsewhere.factor


def use_row_elsewhere(_, x):
    if Elsewhere.row is None:
        return x
    return x.index_fill(1, torch.tensor([Elsewhere.row]), 0.5)


@contextmanager
def elsewhere(_):
    Elsewhere.factor = 3.0
    yield
    Elsewhere.factor = 1.0


@contextmanager
def little_elsewhere(_):
    Elsewhere.factor = 1.0 + 2**-20
    yield
    Elsewhere.factor = 1.0


@contextmanager
def row_elsewhere(_):
    Elsewhere.row = 37
    yield
    Elsewhere.row = None


class OwnGenerator(Layer):
    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(0)

    def between(self, x):
        return x * torch.from_numpy(self.random.random((64, 16)) > 0.3)


class OwnDictionary(Layer):
    def __init__(self):
        super().__init__()
        self.counts = {"calls": 1}

    def between(self, x):
        self.counts["calls"] += 1
        return x * self.counts["calls"]


class Recurrent(Layer):
    def __init__(self):
        super().__init__()
        self.memory = torch.ones(16)

    def between(self, x):
        self.memory = 0.9 * self.memory + x.detach().mean((0, 1))
        return x * self.memory


class WritesToAttribute(Layer):
    def __init__(self):
        super().__init__()
        self.memory = torch.ones(16)

    def between(self, x):
        self.memory.mul_(0.5)
        return x * self.memory


@contextmanager
def other_weights(model):
    yield
    for layer in model.layers:
        layer.up.weight = nn.Parameter(layer.up.weight.detach() * 2)


@contextmanager
def data_of_weights(model):
    yield
    for layer in model.layers:
        layer.up.weight.data = layer.up.weight.data * 2


@contextmanager
def table(model):
    for layer in model.layers:
        layer.counts["calls"] = 5
    yield
    for layer in model.layers:
        layer.counts["calls"] = 1


class ReadsDictionary(OwnDictionary):
    def between(self, x):
        return x * self.counts["calls"]


REFUSED = {
    "a global": (with_between(use_elsewhere), elsewhere, "such as a global"),
    "a global, a little": (with_between(use_elsewhere), little_elsewhere, "such as a global"),
    "a global, in one row": (with_between(use_row_elsewhere), row_elsewhere, "such as a global"),
    "a generator of its own": (OwnGenerator, nothing, "as random changed since"),
    "a dictionary of its own": (OwnDictionary, nothing, "as counts changed since"),
    "a dictionary from outside": (ReadsDictionary, table, "as counts changed since"),
    "a tensor that it replaces": (Recurrent, nothing, "as memory changed since"),
    "a tensor that it writes to": (WritesToAttribute, nothing, "writes to memory in place"),
    "data of parameters": (Layer, data_of_weights, "computes other values"),
}


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("case", REFUSED)
def test_what_the_second_forward_cannot_see_is_refused_by_name(case, alpha):
    make, around, text = REFUSED[case]
    model = build(make)
    with (
        apply(model, Plan.fixed(alpha=alpha)),
        pytest.raises(ConfigError, match=rf"^layers\.\d \({make.__name__}\): .*{text}"),
    ):
        steps(model, around)


def test_parameters_that_are_replaced_before_the_backward_are_refused():
    model = build(Layer)
    with (
        apply(model, Plan.fixed(alpha=0.5)),
        pytest.raises(RuntimeError, match=r"up\.weight is at"),
    ):
        steps(model, other_weights)


def test_all_is_equal_where_what_changes_is_kept():
    """What is not computed again cannot differ: no such model is refused."""
    plan = Plan(layers=(LayerPlan(mode="whole"),))
    for make, around, _ in (REFUSED["a global"], REFUSED["a generator of its own"]):
        check_equal(make, around, plan)


@pytest.mark.parametrize("number", [3, 7])
def test_a_single_step_that_differs_is_noticed(number):
    model, seen = build(with_between(use_elsewhere)), []

    @contextmanager
    def around(_):
        seen.append(1)
        Elsewhere.factor = 1.5 if len(seen) == number else 1.0
        yield
        Elsewhere.factor = 1.0

    with apply(model, Plan.fixed(alpha=0.5)):
        with pytest.raises(ConfigError, match="computes other values"):
            steps(model, around, num_steps=9)
        assert len(seen) == number


def test_a_single_row_that_differs_is_noticed_within_sixteen_steps():
    model, seen = build(with_between(use_row_elsewhere)), []

    @contextmanager
    def around(_):
        seen.append(1)
        Elsewhere.row = 37 if len(seen) > 2 else None
        yield
        Elsewhere.row = None

    with (
        apply(model, Plan.fixed(alpha=0.0)),
        pytest.raises(ConfigError, match="computes other values"),
    ):
        steps(model, around, num_steps=2 + 16)


def test_a_layer_that_is_called_twice_sees_each_time_what_it_saw():
    def step(model):
        layer, x = model.layers[0], make_input(width=16)
        layer.factor = 2.0
        y = layer(x)
        layer.factor = 3.0
        z = layer(y)
        layer.factor = 1.0
        z.sum().backward()
        return {name: one.grad.clone() for name, one in layer.named_parameters()}

    expected = step(build(Layer))
    with apply(model := build(Layer), Plan.fixed(alpha=0.5)):
        assert_same_gradients(step(model), expected)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_layers_inside_of_a_checkpoint_see_what_they_saw(is_reentrant):
    def step(model):
        x = make_input(width=16).requires_grad_()

        def run(x):
            seed_all()
            for layer in model.layers:
                x = layer(x)
            return x

        out = checkpoint(run, x, use_reentrant=is_reentrant, preserve_rng_state=False)
        out.sum().backward()
        return {name: one.grad.clone() for name, one in model.layers.named_parameters()}

    make = EQUAL["numpy's mask"][0]
    expected = step(build(make))
    with apply(model := build(make), Plan.fixed(alpha=0.5)):
        assert_same_gradients(step(model), expected)


def test_an_error_of_the_second_forward_says_that_it_is_one():
    def fail(_, x):
        if Elsewhere.factor == 1.0:
            raise KeyError("nothing")
        return x * 2

    model = build(with_between(fail))
    with apply(model, Plan.fixed(alpha=0.5)), pytest.raises(KeyError) as caught:
        steps(model, elsewhere)
    assert caught.value.__notes__ == [
        "memo: raised while layers.2 (Changed) ran again for its backward"
    ]
