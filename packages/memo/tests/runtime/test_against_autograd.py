"""Losses and gradients of whole models, to the bit those of plain autograd."""

import itertools

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memo import Plan, apply
from memo.planner.layer_plan import LayerPlan

from .models import assert_same_step, make_model, plain_step, train

NAMES = ("llama", "qwen3", "mistral", "gpt2")
DTYPES = (torch.float32, torch.bfloat16)
ALPHAS = (0.0, 0.25, 0.5, 1.0)
# Each model, dtype, fraction and store at least twice, no pair always together.
FEW = [
    (name, DTYPES[(at + turn) % 2], ALPHAS[(at + 2 * turn + turn // 2) % 4], turn % 2)
    for at, name in enumerate(NAMES)
    for turn in range(2)
]
EVERYTHING = list(itertools.product(NAMES, DTYPES, ALPHAS))


def check(name, dtype, alpha, store, attention="sdpa"):
    model = make_model(name, dtype, attention=attention)
    with apply(model, Plan.fixed(alpha=alpha, store=store)) as run:
        found = train(model)
        assert run.num_restored == 3 * len(run.plan.layers)
        assert run.times.sent_bytes == run.times.fetched_bytes > 0
    assert_same_step(found, plain_step(name, dtype, attention=attention))


@pytest.mark.unchecked  # those of every mode, below, are checked
@pytest.mark.parametrize(("name", "dtype", "alpha", "in_file"), FEW)
def test_gradients_are_autograds(name, dtype, alpha, in_file, tmp_path):
    check(name, dtype, alpha, f"file:{tmp_path}" if in_file else "memory")


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("store", ["memory", "file"])
@pytest.mark.parametrize(("name", "dtype", "alpha"), EVERYTHING)
def test_gradients_are_autograds_everywhere(name, dtype, alpha, store, tmp_path):
    store = f"file:{tmp_path}" if store == "file" else store
    check(name, dtype, alpha, store)
    check(name, dtype, alpha, store, attention="eager")


PLANS = {
    "all recomputed": LayerPlan(mode="restore", resident=frozenset({"input"})),
    "attention resident": LayerPlan(mode="restore", resident=frozenset({"input", "attention"})),
    "attention recomputed": LayerPlan(mode="restore", stored={"input": 1.0}, default_fraction=0.5),
    "some resident": LayerPlan(
        mode="restore",
        resident=frozenset({"attention", "mlp.up_proj.weight"}),
        stored={"input": 1.0, "self_attn.q_proj.weight": 1.0, "mlp.gate_proj.weight": 0.5},
    ),
    "whole": LayerPlan(mode="whole"),
    "keep": LayerPlan(),
}


@pytest.mark.parametrize("kind", PLANS)
def test_gradients_are_autograds_under_every_mode(kind):
    model = make_model("llama")
    with apply(model, Plan(layers=(PLANS[kind],))):
        assert_same_step(train(model, num_batches=2), plain_step("llama", num_batches=2))


@pytest.mark.unchecked
def test_layers_may_have_different_modes():
    model = make_model("gpt2", num_layers=6)
    expected = train(model)
    with apply(model, Plan(layers=tuple(PLANS.values()), num_buffers=1, max_sending=1)):
        assert_same_step(train(model), expected)


def test_rows_are_cut_where_the_plan_says(monkeypatch):
    """A fraction keeps a multiple of the cut of a product's rows: no more bytes, no fewer."""
    model = make_model("llama", num_layers=1)
    ids_rows, hidden, inner, kv = 2 * 50, 64, 176, 32
    with apply(model, Plan.fixed(alpha=0.5, cut=16)) as run:
        train(model, num_batches=1, length=50)
    whole = 2 * ids_rows * hidden * 4 + ids_rows * 4 * 4  # input, attention, its log-sum-exp
    rows = 48
    split = rows * (hidden + 2 * kv + hidden + 2 * inner) * 4
    assert run.times.sent_bytes == whole + split


@pytest.mark.unchecked
def test_attention_that_returns_weights_is_run_again():
    model = make_model("llama", attention="eager")
    expected = train(model)
    with apply(model, Plan.fixed(alpha=0.5)):
        assert_same_step(train(model), expected)


def test_hidden_states_and_attentions_come_out_as_without_a_plan():
    model = make_model("llama", attention="eager")
    ids = torch.arange(20)[None]
    wanted = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    expected = model(ids, **wanted)
    with apply(model, Plan.fixed(alpha=0.5)):
        found = model(ids, **wanted)
    for name in ("hidden_states", "attentions"):
        pairs = zip(found[name], expected[name], strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.unchecked
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_recomputed_bit_for_bit(dtype):
    model = make_model("mixtral", dtype)
    expected = train(model)
    with apply(model, Plan.fixed(alpha=0.5)):
        assert_same_step(train(model), expected)


@pytest.mark.unchecked
def test_autocast_rounds_alike():
    model = make_model("llama")

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return train(model)

    expected = step()
    with apply(model, Plan.fixed(alpha=0.5)):
        assert_same_step(step(), expected)


@pytest.mark.unchecked
def test_backward_outside_of_autocast_rounds_alike():
    model = make_model("llama")
    ids = torch.arange(48)[None]

    def step():
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss.item()], {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = step()
    with apply(model, Plan.fixed(alpha=0.25)):
        assert_same_step(step(), expected)


@pytest.mark.unchecked
def test_dropout_draws_alike_and_leaves_the_same_random_numbers():
    model = make_model("gpt2")
    expected, after = train(model), torch.rand(3)
    with apply(model, Plan.fixed(alpha=0.25)):
        found = train(model)
        assert torch.equal(torch.rand(3), after)
    assert_same_step(found, expected)


class SavesElsewhere(torch.autograd.Function):
    """Saves a number on another device, as attention of a GPU saves its seed in RAM, and nothing at all."""

    @staticmethod
    def forward(ctx, out):
        ctx.save_for_backward(torch.empty((), dtype=torch.int64, device="meta"), out.new_empty(0))
        return out.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        seed, nothing = ctx.saved_tensors
        assert seed.device.type == "meta"
        assert nothing.shape == (0,)
        return gradient


@pytest.mark.unchecked
@pytest.mark.parametrize("mode", ["restore", "tiles"])
def test_what_attention_saves_on_another_device_stays_there(mode):
    plan = Plan.fixed(alpha=0.5)
    if mode == "tiles":
        kept = {"input": 1.0, "attention": 1.0}
        plan = Plan(layers=(LayerPlan(mode="tiles", tile_rows=32, stored=kept),))
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(*args, **kwargs):
        out, weights = sdpa(*args, **kwargs)
        return SavesElsewhere.apply(out), weights

    model = make_model("llama", torch.float32)
    try:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
        expected = train(model)
        with apply(model, plan) as run:
            found = train(model)
            assert run.times.sent_bytes == run.times.fetched_bytes > 0
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    if mode == "restore":
        assert_same_step(found, expected)
    for name, one in expected[1].items():
        torch.testing.assert_close(found[1][name], one)


@pytest.mark.unchecked
def test_nan_and_infinity_pass_bit_for_bit():
    model = make_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 5] = torch.nan
        model.model.embed_tokens.weight[7, 9] = torch.inf
        model.model.layers[1].mlp.up_proj.weight[0, 0] = -torch.inf
    expected = train(model)
    assert any(grad.isnan().any() for grad in expected[1].values())
    with apply(model, Plan.fixed(alpha=0.5)):
        found = train(model)
    assert_same_step(([], found[1]), ([], expected[1]))


@pytest.mark.unchecked
def test_optimizer_steps_lead_to_the_same_weights():
    trained = []
    for plan in (None, Plan.fixed(alpha=0.5)):
        model = make_model("qwen3", torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def steps(model=model, optimizer=optimizer):
            for _ in range(3):
                train(model, num_batches=1)
                optimizer.step()

        if plan is None:
            steps()
        else:
            with apply(model, plan):
                steps()
        trained.append(model.state_dict())
    assert all(torch.equal(one, trained[1][name]) for name, one in trained[0].items())
