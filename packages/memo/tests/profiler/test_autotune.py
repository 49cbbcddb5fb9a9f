"""Measured profiles and the plans that follow, on small real models: bytes against real ones, seconds by their sums."""

import errno
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import memo
from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan
from memo.planner.placement import fits, place
from memo.planner.profile import PassBytes
from memo.profiler.autotune import measure_profile
from memo.profiler.calls import capture_call, capture_calls, shortened
from memo.profiler.head import count_outside, loss_of
from memo.profiler.layer_bytes import LayerBytes, count_bytes, count_passes
from memo.profiler.timing.layer_tiles import tile_rows_of
from memo.profiler.timing.layer_times import LayerTimes, longer_s
from memo.profiler.untouched import untouched
from memo.runtime.attention import offer_attention
from memo.runtime.block_loss import offer_block_loss
from memo.runtime.device_memory import peak_bytes, resident_bytes
from memo.runtime.layers import find_layers
from memo.runtime.stores import FileStore
from memo.runtime.tiling.row_locality import Proofs
from memo.simulator import simulate
from shared.errors import ConfigError, DataError

from ..runtime.models import Block, Stack, make_input, make_model, train
from .inputs import batch_of

pytestmark = pytest.mark.unchecked  # layers are run by many tiles

CPU = torch.device("cpu")
UNIT = 1 << 20
ROOM = 1 << 34


@pytest.fixture(scope="module")
def profile(model):
    return measure_profile(model, batch_of(512), None, optimizer_bytes=0)


PLANS = {
    "plain": LayerPlan(),
    "input": LayerPlan(mode="restore", resident=frozenset([INPUT])),
    "input, attention": LayerPlan(mode="restore", resident=frozenset([INPUT, ATTENTION])),
    "tiles, input": LayerPlan(mode="tiles", tile_rows=64, resident=frozenset([INPUT])),
    "tiles": LayerPlan(mode="tiles", tile_rows=64, resident=frozenset([INPUT, ATTENTION])),
}


@pytest.fixture(scope="module")
def counts(model):
    """Bytes of one layer's passes under each plan: as they run, and counted on fake tensors."""
    undo = offer_attention("sdpa")
    layer = model.model.layers[0]
    args, kwargs = capture_call(model, list(model.model.layers), batch_of(256))
    for one in layer.parameters():
        one.grad = torch.zeros_like(one)
    proofs, found = Proofs(), {}
    for name, plan in PLANS.items():
        real = count_passes(layer, args, kwargs, plan, proofs)
        found[name] = real, count_bytes(layer, args, kwargs, plan, proofs)
    undo()
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", PLANS)
def test_bytes_on_fake_tensors_are_those_of_a_real_layer(counts, name):
    real, fake = counts[name]
    # What a real record has beside items: fingerprints of each tile, or the state of torch's generator.
    tiles_bytes, state_bytes = 832 * 256 // 64, torch.get_rng_state().nbytes
    beside_bytes = {"plain": 0, "tiles, input": tiles_bytes, "tiles": tiles_bytes}
    kept_bytes = real.held_bytes - beside_bytes.get(name, state_bytes)
    assert fake.held_bytes == pytest.approx(kept_bytes, rel=0.01)
    assert fake.passes.forward == pytest.approx(real.passes.forward, rel=0.01)
    assert fake.passes.backward == pytest.approx(real.passes.backward, rel=0.01)
    assert fake.item_bytes.keys() == real.item_bytes.keys()


def test_tiles_take_less_than_a_whole_layer_and_the_input_alone_least(counts):
    held = {name: fake for name, (_, fake) in counts.items()}
    assert held["tiles"].passes.backward < 0.5 * held["input"].passes.backward
    assert held["tiles, input"].held_bytes < held["tiles"].held_bytes
    assert held["tiles, input"].held_bytes == held["input"].held_bytes == 256 * 64 * 4


@pytest.mark.slow
def test_profiles_at_a_part_of_the_length_leave_the_model_as_it_was(model):
    """A plain layer takes more than there is room for at 256 tokens, and less at 128."""
    batch = batch_of(256)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    for number, one in enumerate(model.parameters()):  # of some of them gradients are there
        one.grad = torch.randn_like(one) if number % 2 else None
    gradients = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    state = torch.get_rng_state()
    told = measure_profile(model, batch, None, room_bytes=2 * UNIT)
    for before_it, one in zip(gradients, model.parameters(), strict=True):
        assert one.grad is None if before_it is None else torch.equal(before_it, one.grad)
    model.zero_grad()
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all("forward" not in vars(one) for one in model.modules())
    assert told.num_tokens == 256
    assert told.details["seconds"] == "measured at 128 tokens"
    undo = offer_block_loss(model)
    whole = head_bytes(model, batch, is_real=True)
    undo()
    assert told.block_head_bytes == pytest.approx(whole, rel=0.1)


def test_a_profile_has_items_levels_tiles_and_both_heads(profile):
    layer = profile.layers[0]
    assert {INPUT, ATTENTION, "mlp.up_proj.weight"} <= {item.name for item in layer.items}
    assert all(low.backward >= high.backward for low, high in pairwise(layer.levels))
    assert layer.kept.backward < layer.levels[0].backward
    assert layer.tiles is not None
    assert layer.tiles.tile_rows == 128
    assert layer.tiles.backward_s > 0
    assert profile.block_head_bytes is not None
    assert profile.details["seconds"] == "measured at 512 tokens"


@pytest.mark.slow
def test_without_room_seconds_are_measured_at_fewer_tokens(model):
    told = measure_profile(model, batch_of(512), None, room_bytes=2 * UNIT)
    assert told.details["seconds"] == "measured at 128 tokens"
    assert told.num_tokens == 512
    whole = measure_profile(model, batch_of(512), None, room_bytes=ROOM)
    assert told.layers[0].saved_bytes == whole.layers[0].saved_bytes
    for at in (0, -1):  # between them items come in the order of seconds
        assert told.layers[0].levels[at] == whole.layers[0].levels[at]
    assert told.layers[0].tiles.levels == whole.layers[0].tiles.levels
    assert told.head_bytes == whole.head_bytes
    assert told.block_head_bytes == pytest.approx(whole.block_head_bytes, rel=0.1)


@pytest.mark.slow
def test_measuring_keeps_to_its_room(model):
    room = 20 * UNIT
    measure_profile(model, batch_of(1024), None, room_bytes=8 * UNIT)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident_bytes(CPU)
    told = measure_profile(model, batch_of(8192), None, room_bytes=room)
    assert told.layers[0].saved_bytes > 1.9 * room, "or the task proves nothing"
    assert peak_bytes(CPU) - before < 1.25 * room


@pytest.mark.slow
def test_steps_keep_to_the_budget_that_they_were_planned_for(tmp_path):
    model = make_model("llama", num_layers=8)
    batch, room = batch_of(8192), 130 * UNIT
    model(**batch_of(64)).loss.backward()  # gradients are there from now on
    model.zero_grad(set_to_none=False)
    measure_profile(model, batch_of(64), None)
    before = resident_bytes(CPU)
    budget = memo.Budget(before + room, store="1GiB", store_at=f"file:{tmp_path}")
    plan = memo.autotune(model, batch, budget, optimizer_bytes=0)
    assert plan.prediction["saved_bytes"] * 8 > 2 * room, "or the task proves nothing"
    with memo.apply(model, plan):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        for _ in range(2):
            model(**batch).loss.backward()
        assert peak_bytes(CPU) - before < 1.08 * room
    model.zero_grad()


ALONE = LayerTimes(
    forward_s=1.0,
    backward_s=2.0,
    replay_s=0.1,
    attention_backward_s=0.5,
    call_s={},
    can_replay=False,
)


def test_longer_sequences_take_linear_and_square_seconds():
    assert longer_s(3.0, 1.0, 4) == 2 * 4 + 1 * 16
    times = LayerTimes(
        forward_s=3.0, backward_s=5.0, replay_s=0.5, attention_backward_s=2.0,
        call_s={ATTENTION: 1.0, "up": 0.25}, can_replay=True,
    ).scaled(2)  # fmt: skip
    assert times.forward_s == 2 * 2 + 4
    assert times.backward_s == 3 * 2 + 2 * 4
    assert times.replay_s == 1.0
    assert times.attention_backward_s == 8.0
    assert times.call_s == {ATTENTION: 4.0, "up": 0.5}
    assert times.scaled(1) == times


@pytest.mark.parametrize(
    ("num_rows", "device_type", "tile_rows"),
    [
        (100, "cpu", 64),
        (1000, "cpu", 250),
        (4096, "cpu", 512),
        (100_000, "cpu", 1562),
        (1 << 20, "cuda", 8192),
        (1 << 21, "cuda", 16_384),
    ],
)
def test_tiles_are_neither_short_nor_many(num_rows, device_type, tile_rows):
    assert tile_rows_of(num_rows, device_type) == tile_rows


def test_batches_are_shortened_where_all_tensors_are_tokens():
    batch = batch_of(100, rows=2)
    short = shortened(batch, 4)
    assert short["input_ids"].shape == (2, 25)
    assert torch.equal(short["labels"], batch["labels"][:, :25])
    assert short["use_cache"] is False
    assert shortened(batch, 128) is None
    assert shortened({**batch, "attention_mask": torch.zeros(2, 1, 100, 100)}, 2) is None


def head_bytes(model, batch, **settings):
    """Most bytes outside of the layers while the loss is computed and run backward."""
    layers = find_layers(model)
    with untouched(model, batch):
        calls = capture_calls(model, layers, batch)
        return count_outside(model, layers, calls, batch, **settings).head_bytes


def test_a_loss_in_blocks_counts_no_logits():
    model = make_model("llama", num_layers=2)
    model.resize_token_embeddings(20_000)
    batch = batch_of(512)
    logits = 512 * 20_000 * 4
    assert head_bytes(model, batch) > 2 * logits
    undo = offer_block_loss(model)
    taken = head_bytes(model, batch, is_real=True)
    undo()
    # A block of logits, and the gradient of the head's weight.
    assert 20_000 * 64 * 4 < taken < logits


def trained(model, plan, length):
    with memo.apply(model, plan):
        return train(model, num_batches=2, rows=1, length=length)


def least_plan(profile):
    """The plan of the smallest budget, in steps of a tenth, that any plan fits."""
    room = UNIT
    while True:
        try:
            budget = memo.Budget(device=profile.fixed_bytes + room)
            return place(profile, budget, "memory", predict=simulate)
        except memo.DoesNotFit:
            room = int(room * 1.1)


@pytest.mark.slow
def test_tiles_come_where_nothing_else_fits_and_the_plan_says_what_is_given_up():
    model = make_model("llama", num_layers=2)
    plain_losses, plain = train(model, num_batches=2, rows=1, length=2048)
    model.zero_grad()
    plan = least_plan(measure_profile(model, batch_of(2048), None))
    assert {layer.mode for layer in plan.layers} == {"tiles"}
    text = plan.explain()
    assert "512 rows at a time" in text
    assert "not plain training's bits" in text
    losses, found = trained(model, plan, 2048)
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    for name, gradient in plain.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-6), name


def test_with_room_nothing_that_rounds_otherwise_is_chosen(model, profile):
    expected = train(model, num_batches=2, rows=1, length=512)
    budget = memo.Budget(device=profile.fixed_bytes + 64 * UNIT)
    plan = place(profile, budget, "memory", predict=simulate)
    assert not plan.has_block_loss
    assert all(layer.mode != "tiles" for layer in plan.layers)
    losses, found = trained(model, plan, 512)
    model.zero_grad()
    assert losses == expected[0]
    assert all(torch.equal(found[name], one) for name, one in expected[1].items())


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_whichever_items_are_there_all_that_is_saved_is_there_in_the_backward(name):
    """What `least_layer` is made of."""
    model = make_model(name, num_layers=1)
    (layer,) = find_layers(model)
    undo = offer_attention("sdpa")
    args, kwargs = capture_call(model, [layer], batch_of(64))

    def count(names):
        return count_bytes(layer, args, kwargs, LayerPlan(mode="restore", resident=names))

    weights = [one for one, parameter in layer.named_parameters() if parameter.ndim > 1]
    items = count(frozenset([INPUT, ATTENTION, *weights])).item_bytes
    saved = count_bytes(layer, args, kwargs, LayerPlan()).held_bytes
    for kept in ([], [ATTENTION], weights[::2], weights, [ATTENTION, *weights]):
        names = frozenset([INPUT, *kept])
        there = sum(num_bytes for one, num_bytes in items.items() if one in names)
        assert there + count(names).passes.backward >= saved
    undo()


def test_what_no_plan_can_do_is_told_before_anything_is_measured(model, tmp_path, monkeypatch):
    def measure(*_):
        raise AssertionError("measured")

    monkeypatch.setattr("memo.profiler.autotune.measure_layer", measure)
    budget = memo.Budget("1MiB", store="1GiB", store_at=f"file:{tmp_path}")
    with pytest.raises(memo.DoesNotFit, match=r"expected at most 1.00 MiB .* got at least .*shard"):
        memo.autotune(model, batch_of(64), budget)
    with pytest.raises(AssertionError, match="measured"):
        memo.autotune(model, batch_of(64), memo.Budget("1TiB"))
    assert all("forward" not in vars(one) for one in model.modules())


def test_tiles_are_not_measured_where_something_fits_without(model, monkeypatch):
    """All but the decision itself is answered in place of what measures."""
    counted, autotune = [], "memo.profiler.autotune"
    monkeypatch.setattr(f"{autotune}.count_tiles", lambda *_: counted.append(1))
    held = LayerBytes(PassBytes(forward=UNIT, backward=UNIT), UNIT, {INPUT: 4096})
    monkeypatch.setattr("memo.profiler.kinds.count_bytes", lambda *_, **__: held)
    monkeypatch.setattr(f"{autotune}.has_block_loss", lambda *_: False)
    monkeypatch.setattr(f"{autotune}.measure_head", lambda *_: 0.1)
    batch = batch_of(16)
    profile = measure_profile(model, batch, None, budget=memo.Budget("1TiB"))
    assert profile.layers[0].tiles is None
    assert counted == []
    rooms = (profile.fixed_bytes + number * UNIT for number in range(1000))
    least = next(room for room in rooms if fits(profile, memo.Budget(room)))
    # What is resident may differ a little between two looks: near the limit they are counted.
    measure_profile(model, batch, None, budget=memo.Budget(least + UNIT))
    assert counted


def test_what_does_not_fit_raises_before_any_step(model, profile, monkeypatch):
    monkeypatch.setattr("memo.profiler.autotune.measure_profile", lambda *_, **__: profile)
    with pytest.raises(memo.DoesNotFit, match="expected at most"):
        memo.autotune(model, batch_of(64), memo.Budget(device=profile.fixed_bytes + 4096))


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            [torch.zeros(1, 8, dtype=torch.int64)],
            "batch: expected the model's arguments by name, got list",
        ),
        (
            {"input_ids": torch.zeros(1, 8, device="meta")},
            "batch['input_ids']: expected a tensor on the model's device, cpu, got one on meta; move it by .to('cpu')",
        ),
        (
            {"input_ids": torch.zeros(1, 0, dtype=torch.int64), "use_cache": False},
            "batch['input_ids']: expected tokens, got a tensor of shape [1, 0]; give the longest batch that will come",
        ),
        (
            {"input_ids": torch.zeros(0, 8, dtype=torch.int64)},
            "batch['input_ids']: expected tokens, got a tensor of shape [0, 8]; give the longest batch that will come",
        ),
        (
            {"input_ids": torch.zeros(8, dtype=torch.int64), "use_cache": False},
            "batch: expected arguments that LlamaDecoderLayer runs on, got: The size of tensor",
        ),
        (
            {
                "input_ids": torch.zeros(1, 8, dtype=torch.int64),
                "labels": torch.zeros(1, 5, dtype=torch.int64),
            },
            "batch: expected arguments that LlamaForCausalLM runs on, got: Expected input batch_size (8) to match",
        ),
        (
            {"tokens": torch.zeros(1, 8, dtype=torch.int64), "pixels": torch.zeros(0)},
            (
                "batch: expected arguments that LlamaForCausalLM runs on, got: You must specify exactly one of input_ids "
                "or inputs_embeds; give the batch that your loop gives"
            ),
        ),
    ],
)
def test_batches_that_are_none_or_elsewhere_are_refused(model, batch, text):
    budget = memo.Budget(device="1TiB")
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        memo.autotune(model, batch, budget)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"budget": "6GiB"},
            (
                "budget: expected a memo.Budget, got '6GiB'; give one, such as "
                'memo.Budget(device="6GiB", store="40GiB")'
            ),
        ),
        (
            {"model": "gpt2"},
            "model: expected a torch.nn.Module, got 'gpt2'; build the model, and give it first",
        ),
        (
            {"optimizer_bytes": "much"},
            "optimizer_bytes: expected a size such as '64KiB' or '1.5GB', got 'much'; write a number and a unit",
        ),
        (
            {"optimizer_bytes": -1},
            (
                "optimizer_bytes: expected a size in bytes, zero or more and finite, got -1.0; write for example '64KiB' "
                "or '1.5GB'"
            ),
        ),
        (
            {"layers": "model.layers"},
            "layers: expected a list of submodules, got 'model.layers'; give what model.get_submodule returns, in a list",
        ),
        (
            {"layers": 3},
            "layers: expected a list of submodules, got 3; give what model.get_submodule returns, in a list",
        ),
    ],
)
def test_arguments_of_other_kinds_are_refused(model, changes, text):
    given = {"model": model, "batch": batch_of(16), "budget": memo.Budget(device="1TiB")}
    with pytest.raises(ConfigError) as caught:
        memo.autotune(**{**given, **changes})
    assert str(caught.value) == text


@pytest.mark.parametrize("out", [None, (), {"text": "none"}])
def test_a_model_that_returns_no_tensor_is_refused(out):
    text = f"returns a loss, logits or another tensor, got {type(out).__name__}; have its forward"
    with pytest.raises(ConfigError, match=text):
        loss_of(out)


class Masked(Stack):
    """The loss of some rows: how many follows from their values."""

    def __init__(self):
        super().__init__([Block(), Block()])

    def forward(self, x):
        rows = self.last(self.layers[1](self.layers[0](self.first(x))))
        return {"loss": rows[x[..., 0] > 0].square().mean()}


def test_a_loss_whose_shapes_follow_from_values_is_counted_as_it_runs():
    model, batch = Masked().train(), {"x": make_input()}
    assert head_bytes(model, batch) == head_bytes(model, batch, is_real=True) > 1000
    assert all(one.grad is None for one in model.parameters())


def test_without_a_loss_or_logits_the_first_tensor_counts():
    states = torch.ones(2, 3)
    assert loss_of({"name": "x", "states": states}) == loss_of((states, None)) == 6


@pytest.mark.slow
def test_seconds_of_long_sequences_are_measured_at_their_first_tokens(model, monkeypatch):
    """Where a forward would take long, and at no fewer than 1,024 tokens for that."""
    autotune = "memo.profiler.autotune"
    monkeypatch.setattr(f"{autotune}.has_block_loss", lambda *_: False)
    monkeypatch.setattr(f"{autotune}.measure_head", lambda *_: 0.1)
    monkeypatch.setattr(f"{autotune}.measure_layer", lambda *_: ALONE)
    measured = []
    for alone_s in (0.001, 0.02, 0.1, 2.0):
        monkeypatch.setattr(f"{autotune}.forward_s", lambda *_, alone_s=alone_s: alone_s)
        profile = measure_profile(model, batch_of(8192), None, budget=memo.Budget("1TiB"))
        assert profile.num_tokens == 8192
        measured.append(profile.details["seconds"])
    assert measured == [
        f"measured at {tokens} tokens" for tokens in ("8,192", "4,096", "2,048", "1,024")
    ]


def test_a_disk_that_is_full_while_it_is_measured_raises_here(model, tmp_path, monkeypatch):
    """What fails in the thread that copies is raised to whoever asked, and the file is closed."""
    closed, close = [], FileStore.close

    def note(store):
        closed.append(store)
        close(store)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileStore, "close", note)
    monkeypatch.setattr("memo.runtime.stores.file.os.pwrite", full)
    monkeypatch.setattr("memo.profiler.autotune.measure_layer", lambda *_: ALONE)
    budget = memo.Budget("1TiB", store="1GiB", store_at=f"file:{tmp_path}")
    with pytest.raises(DataError, match="with room for its activations, got No space left"):
        memo.autotune(model, batch_of(16), budget)
    assert len(closed) == 1
    assert all("forward" not in vars(one) for one in model.modules())
