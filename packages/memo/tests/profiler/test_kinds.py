"""Layers of several kinds, and models whose layers return or are called otherwise: all are measured and promised."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import memo
from memo.planner.layer_plan import INPUT, LayerPlan
from memo.profiler.autotune import measure_profile
from memo.profiler.calls import LayerCall, capture_calls, structure_of
from memo.profiler.kinds import LayerKind, find_kinds
from memo.profiler.layer_bytes import count_bytes
from memo.profiler.storage_meter import StorageMeter
from memo.profiler.untouched import untouched
from memo.runtime.layers import kind_of
from memo.simulator import simulate
from shared.errors import ConfigError

from ..runtime.models import Block, Stack, make_input, make_model
from .inputs import batch_of

pytestmark = pytest.mark.unchecked  # layers are run often

BUDGET = memo.Budget(device="1TiB")
AGAIN = LayerPlan(mode="restore", resident=frozenset({INPUT}))


class Wide(Block):
    """A layer with an inner width of its own."""

    def __init__(self, inner, width=32):
        super().__init__(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)


class Numbered(Wide):
    """Chooses by its number what it saves."""

    def __init__(self, layer_idx):
        super().__init__(64)
        self.layer_idx = layer_idx

    def forward(self, x):
        return super().forward(x.tanh() if self.layer_idx == 1 else x)


class Several(nn.Module):
    """Returns a tuple, and takes its input by name alone."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, *, x):
        out = self.block(x)
        return out, out.mean(), None


class SeveralStack(Stack):
    def forward(self, x):
        x, losses = self.first(x), 0.0
        for layer in self.layers:
            x, loss, _ = layer(x=x)
            losses = losses + loss
        return self.last(x).square().mean() + losses


def counted_bytes(model, batch, plan):
    """Most bytes of a step's storages, beyond those before it."""
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    with memo.apply(model, plan), StorageMeter() as meter:
        model(**batch).backward()
    return meter.peak_bytes


@pytest.mark.parametrize(
    ("inners", "way"),
    [
        ([16, 512, 512, 512], AGAIN),
        ([512, 16, 16, 16], LayerPlan()),
        pytest.param([16, 16, 16, 512], AGAIN, marks=pytest.mark.slow),
        pytest.param([16, 512, 64, 16, 512], LayerPlan(), marks=pytest.mark.slow),
    ],
)
def test_what_is_promised_holds_whichever_layers_are_wide(inners, way):
    model = Stack([Wide(inner) for inner in inners]).train()
    batch = {"x": make_input(rows=512)}
    profile = measure_profile(model, batch, None, optimizer_bytes=0)
    assert len(profile.kinds) == len(set(inners))
    plan = memo.Plan(layers=(way,) * len(inners))
    predicted = simulate(plan, profile).peak_bytes - profile.fixed_bytes
    counted = counted_bytes(model, batch, plan)
    assert counted <= predicted * 1.01
    assert predicted == pytest.approx(counted, rel=0.05)


def kinds_of(model, batch):
    layers = list(model.layers)
    with untouched(model, batch):
        return find_kinds(layers, capture_calls(model, layers, batch))


def test_layers_that_choose_by_their_number_are_of_kinds_of_their_own():
    _, numbers = kinds_of(Stack([Numbered(0), Numbered(1), Numbered(2)]), {"x": make_input()})
    assert numbers == [0, 1, 0]


class Repeated(Block):
    """Uses one weight twice."""

    def forward(self, x):
        return super().forward(x + self.up(x)[..., : x.shape[-1]].tanh())


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: make_model("llama", num_layers=1).model.layers[0], torch.float32),
        pytest.param(
            lambda: make_model("llama", num_layers=1).model.layers[0],
            torch.bfloat16,
            marks=pytest.mark.slow,
        ),
        (Repeated, torch.float32),
    ],
)
def test_bytes_of_each_number_of_items_are_those_of_a_run_with_these(make, dtype):
    """They are derived from few runs, also where products copy their arguments, or a weight has several."""
    layer = make()
    width = 32 if isinstance(layer, Repeated) else 64
    x = make_input(rows=48, width=width).requires_grad_()
    call = LayerCall(
        (x,), {}, None, ("cpu", dtype, dtype != torch.float32), structure_of(layer), None
    )
    if not isinstance(layer, Repeated):
        angles = torch.ones(1, 48, layer.self_attn.head_dim)
        call = replace(call, kwargs={"position_embeddings": (angles, angles)})
    kind = LayerKind.of(0, layer, call)
    first, *others = kind.item_bytes
    names = [first, *others[::-1]]  # attention's place among them is another one in each order
    kept = [frozenset(names[: num + 1]) for num in range(len(names))]
    with call.settings():
        counted = [
            count_bytes(layer, call.args, call.kwargs, LayerPlan(mode="restore", resident=one))
            for one in kept
        ]
    assert kind.levels(names) == [one.passes for one in counted]
    assert kind.item_bytes == counted[-1].item_bytes
    num_bytes = sum(kind.item_bytes.values())
    assert counted[-1].held_bytes - counted[0].held_bytes == num_bytes - x.nbytes


def test_layers_that_do_not_read_their_number_are_counted_once(monkeypatch):
    counted = []
    monkeypatch.setattr(
        "memo.profiler.kinds.count_bytes",
        lambda layer, *args, **given: counted.append(layer) or count_bytes(layer, *args, **given),
    )
    layers = [Block() for _ in range(3)]
    for number, layer in enumerate(layers):
        layer.layer_idx = number
    kinds, numbers = kinds_of(Stack(layers), {"x": make_input()})
    assert numbers == [0, 0, 0]
    assert not kinds[0].reads_number
    assert set(counted) == {layers[0]}
    assert all(type(one) is Block for one in layers)


def test_layers_are_alike_whatever_they_count():
    layers = [Block() for _ in range(3)]
    for number, layer in enumerate(layers):
        layer.layer_idx, layer.norm.calls = number, 3
    _, numbers = kinds_of(Stack(layers), {"x": make_input()})
    assert numbers == [0, 0, 0]


def test_frozen_layers_save_nothing_and_are_kept():
    model = Stack([Block() for _ in range(3)])
    for one in (*model.first.parameters(), *model.layers[0].parameters()):
        one.requires_grad_(False)
    profile = measure_profile(model, {"x": make_input()}, None)
    first, second, third = profile.layers
    assert first.saved_bytes == 0
    assert second.saved_bytes > 0
    assert third.saved_bytes > 0
    plan = memo.autotune(model, {"x": make_input()}, BUDGET)
    assert plan.layers[0].mode == "keep"


class Twice(Stack):
    def forward(self, x):
        return super().forward(x) + super().forward(x)


def test_a_layer_that_is_called_again_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"layer 0 \(Block\): expected a layer that a forward"):
        memo.autotune(Twice([Block(), Block()]), {"x": make_input()}, BUDGET)


class Indices(Block):
    def forward(self, x):
        return super().forward(x).argmax(-1)


def test_a_layer_that_returns_no_floats_is_refused_by_name():
    model = Stack([Block(), Indices()])
    with pytest.raises(ConfigError, match=r"layer 1 \(Indices\): expected a layer that returns a"):
        memo.autotune(model, {"x": make_input()}, BUDGET, layers=list(model.layers))


def test_a_plan_belongs_to_the_layers_and_the_batch_that_it_was_made_for():
    model, batch = Stack([Wide(64), Wide(128)]), {"x": make_input()}
    plan = memo.autotune(model, batch, BUDGET)
    assert plan.layer_kinds == tuple(map(kind_of, model.layers))
    assert plan.input_shape == tuple(batch["x"].shape)
    with pytest.raises(ConfigError, match="layer 0 of them Wide"):
        memo.apply(Stack([Wide(128), Wide(64)]), plan)


def test_masks_that_a_real_step_does_without_are_not_promised():
    model, batch = make_model("llama"), batch_of(2048)
    profile = measure_profile(model, batch, None, budget=BUDGET)
    assert profile.outer_bytes < 2048**2, "a byte for each pair of tokens"


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_cache_with_a_prefix_is_refused_by_name(is_planned):
    model, prefix = make_model("llama"), DynamicCache()
    keys = torch.randn(2, 1, 2, 3, 16)
    for number in range(len(model.model.layers)):
        prefix.update(*keys, number)
    batch = {**batch_of(64), "use_cache": True, "past_key_values": prefix}
    run = None if is_planned else memo.apply(model, memo.Plan.fixed(alpha=0.0))
    call = partial(memo.autotune, model, batch, BUDGET) if is_planned else partial(model, **batch)
    with pytest.raises(ConfigError, match="LlamaDecoderLayer: expected a cache of keys"):
        call()
    if run is not None:
        run.close()


class Skips(Stack):
    def forward(self, x):
        return self.last(self.layers[0](self.first(x))).square().mean()


def test_a_layer_that_no_batch_reaches_is_promised_only_if_it_is_like_another():
    assert len(memo.autotune(Skips([Block(), Block()]), {"x": make_input()}, BUDGET).layers) == 2
    with pytest.raises(ConfigError, match=r"layer 1 \(Wide\): expected a layer that the model"):
        memo.autotune(Skips([Wide(64), Wide(128)]), {"x": make_input()}, BUDGET)


class Adapted(nn.Module):
    """A frozen product, and two small ones beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted():
    model = make_model("llama").requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model, batch_of(64)


def cached():
    return make_model("gpt2"), {**batch_of(64), "use_cache": True}


def several():
    return SeveralStack([Several() for _ in range(3)]), {"x": make_input()}


@pytest.mark.parametrize("make", [adapted, cached, several])
def test_adapters_caches_and_layers_that_return_several_are_planned(make):
    model, batch = make()
    plain = copy.deepcopy(model)
    plan = memo.autotune(model, batch, BUDGET)
    # A loss in blocks sums in another order, and is planned where it measured faster.
    plan = replace(plan, layers=(AGAIN,) * len(plan.layers), has_block_loss=False)
    for one, context in ((plain, None), (model, plan)):
        torch.manual_seed(0)
        if context is None:
            out = one(**batch)
            (out if isinstance(out, torch.Tensor) else out.loss).backward()
        else:
            with memo.apply(one, context):
                out = one(**batch)
                (out if isinstance(out, torch.Tensor) else out.loss).backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(a.grad is None if b.grad is None else torch.equal(a.grad, b.grad) for a, b in pairs)
