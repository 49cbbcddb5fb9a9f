"""GPTQ beside the textbook's one-column-at-a-time elimination, and its effect on outputs."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from llmpq.evaluation import kl_divergence
from llmpq.integrations import export
from llmpq.planner.plan import Plan, Stage
from llmpq.runtime.gptq import (
    find_matrices,
    fit_ranges,
    gptq,
    read_codes,
    round_model,
    write_codes,
)
from llmpq.runtime.loader import load, round_for
from llmpq.runtime.pipeline import Pipeline
from shared.comms import RankPool
from shared.errors import ConfigError, DataError
from shared.kernels import weight_matmul

CONFIGS = {
    "llama": {"intermediate_size": 80, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 80, "num_key_value_heads": 2, "head_dim": 16},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "bloom": {},
}


def make(family):
    names = {"num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "bloom":
        names = {"n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=96, hidden_size=32, **names, **CONFIGS[family])
    return AutoModelForCausalLM.from_config(config).eval()


def correlated(rows, columns):
    torch.manual_seed(1)
    return torch.randn(rows, columns) @ (torch.eye(columns) + torch.randn(columns, columns) / 3)


def eliminate(weight, gram, grid, bits, group_size, damping=0.01):
    """Optimal brain quantization in a fixed order, in float64: after each column, the best change
    of the others by solving for them, without any factorisation."""
    gram = gram.double()
    order = gram.diagonal().argsort(descending=True).tolist()
    gram = gram + damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    rest, codes = weight.double(), torch.zeros(weight.shape)
    for place, column in enumerate(order):
        scale = grid.scale[:, column // group_size].double()
        zero = grid.zero[:, column // group_size].double()
        codes[:, column] = ((rest[:, column] / scale).round() + zero).clamp(0, 2**bits - 1)
        error = rest[:, column] - (codes[:, column] - zero) * scale
        left = order[place + 1 :]
        if left:
            change = torch.linalg.solve(gram[left][:, left], gram[left][:, [column]])
            rest[:, left] += error[:, None] * change.t()
    return codes.to(torch.uint8)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("columns", "group_size"), [(40, 16), (150, 64)])
def test_codes_are_those_of_solving_for_each_column(bits, columns, group_size):
    x = correlated(300, columns)
    weight, gram = torch.randn(9, columns), x.t() @ x
    packed = gptq(weight, gram, bits, group_size=group_size)
    found = weight_matmul.codes(packed)
    expected = eliminate(weight, gram, packed, bits, group_size)
    # A value halfway between two codes may fall either way.
    assert (found != expected).float().mean() < 0.02


def test_outputs_change_less_than_by_rounding_to_nearest():
    x = correlated(500, 96)
    weight = torch.randn(64, 96)
    nearest = weight_matmul.unpack(weight_matmul.pack(weight, 3, group_size=32))
    ours = weight_matmul.unpack(gptq(weight, x.t() @ x, 3, group_size=32))
    assert (x @ (ours - weight).t()).norm() < 0.7 * (x @ (nearest - weight).t()).norm()


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("columns", [32, 40])
def test_fitted_ranges_lower_each_groups_weighted_error(bits, columns):
    torch.manual_seed(4)
    weight, importance = torch.randn(20, columns) ** 3, torch.rand(columns) ** 2
    weight[3, 16:32] = 0
    fitted = weight_matmul.unpack(fit_ranges(weight, importance, bits, group_size=16))
    nearest = weight_matmul.unpack(weight_matmul.pack(weight, bits, group_size=16))
    errors = []
    for found in (fitted, nearest):
        squares = (found - weight).double().square() * importance
        errors.append(torch.stack([part.sum(1) for part in squares.split(16, 1)], 1))
    assert (errors[0] <= errors[1] * 1.000001).all()
    assert bits == 8 or errors[0].sum() < 0.95 * errors[1].sum()
    assert (fitted[3, 16:32] == 0).all()


def test_inputs_that_are_always_zero_do_not_matter():
    x = correlated(200, 32)
    x[:, 5:9] = 0
    weight = torch.randn(8, 32)
    found = weight_matmul.unpack(gptq(weight, x.t() @ x, 4, group_size=16))
    assert found.isfinite().all()
    error = x @ (found - weight).t()
    assert error.norm() < 0.2 * (x @ weight.t()).norm()
    nearest = weight_matmul.unpack(weight_matmul.pack(weight, 4, group_size=16))
    still = gptq(weight, torch.zeros(32, 32), 4, group_size=16)
    assert torch.equal(weight_matmul.unpack(still), nearest)


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(DataError, match="finite weights, got nan in row 0, column 1"):
        gptq(torch.tensor([[1.0, float("nan")]]), torch.eye(2), 4)
    with pytest.raises(DataError, match="finite gram"):
        gptq(torch.ones(2, 2), torch.full((2, 2), float("inf")), 4)
    with pytest.raises(ConfigError, match="damping: expected more than 0, got 0"):
        gptq(torch.ones(2, 2), torch.eye(2), 4, damping=0.0)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_rounded_model_holds_its_codes(family, tmp_path):
    model = make(family)
    before = [m.weight.clone() for m in find_matrices(model)[1]]
    packed = round_model(model, [torch.randint(96, (2, 24))], (4, 16), group_size=16)
    modules = dict(model.named_modules())
    assert {modules[name] for name in packed} == set(find_matrices(model)[0])
    for name, weight in packed.items():
        assert torch.equal(modules[name].weight, weight_matmul.unpack(weight))
    for module, weight in zip(find_matrices(model)[1], before, strict=True):
        assert torch.equal(module.weight, weight)
    write_codes(tmp_path / "codes.safetensors", packed)
    name = next(iter(packed))
    with safe_open(tmp_path / "codes.safetensors", framework="pt") as file:
        again = read_codes(file, name, 4, group_size=16)
        assert torch.equal(weight_matmul.unpack(again), weight_matmul.unpack(packed[name]))
        with pytest.raises(DataError, match="round the model again"):
            read_codes(file, "lm_head", 4, group_size=16)
        with pytest.raises(DataError, match=rf"{name}: expected scale"):
            read_codes(file, name, 4, group_size=8)


def test_later_layers_see_what_rounded_ones_produce():
    model, other = make("llama"), make("llama")
    text = torch.randint(96, (2, 24))
    both = round_model(model, [text], (3, 3), group_size=16)
    first = round_model(other, [text], (3, 16), group_size=16)
    second = round_model(other, [text], (16, 3), group_size=16)
    for name, weight in (first | second).items():
        assert torch.equal(weight.data, both[name].data)


def test_a_width_for_each_layer_and_some_text_are_needed():
    with pytest.raises(ConfigError, match="one of each of 2 layers, got 1"):
        round_model(make("llama"), [torch.ones(1, 4, dtype=torch.int64)], (4,))
    with pytest.raises(DataError, match="batches with tokens"):
        round_model(make("llama"), [], (4, 4))


def generated(plan, folder, ids):
    with Pipeline(plan, folder) as pipe:
        return pipe.generate(ids, max_new_tokens=5), pipe.read_bytes


def test_a_plan_rounded_by_gptq_runs_as_one_process_and_exports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = make("llama")
    model.save_pretrained("model")
    text = torch.randint(96, (16, 24))
    stages = Stage(rank=1, layers=(0, 1)), Stage(rank=0, layers=(1, 2))
    nearest = Plan(
        stages=stages, bits=(3, 4), group_size=16, prefill_size=1, decode_size=2, folder="model"
    )
    seen = []
    plan = round_for(nearest, "model", [text], "codes.safetensors", on_layer=seen.append)
    assert seen == [0, 1]
    # Files move together: the plan names them relative to itself.
    plan.save("plan.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    plan = Plan.load("../plan.json")
    folder = plan.folder
    whole = load(folder, plan)
    expected = round_model(make("llama"), [text], plan.bits, group_size=16)
    for name, packed in expected.items():
        assert torch.equal(whole.get_submodule(name).data, packed.data)
    unrounded = AutoModelForCausalLM.from_pretrained(folder)
    assert kl_divergence(whole, unrounded, [text]) < 0.8 * kl_divergence(
        load(folder, nearest), unrounded, [text]
    )
    ids = text[:3, :6]
    answers = ids
    for _ in range(5):
        answers = torch.cat([answers, whole(answers).logits[:, -1:].argmax(-1)], 1)
    here = replace(plan, folder=str(tmp_path / "model"), codes=str(tmp_path / "codes.safetensors"))
    with RankPool(2) as pool:
        (found, read), (_, other) = pool.run(generated, here, here.folder, ids).results
    assert found.tolist() == answers[:, 6:].tolist()
    # Codes instead of weights: a byte each, with scales and zeros of groups of 16.
    matrices = sum(module.weight.numel() for module in find_matrices(model)[0])
    norms = 2 * 32 * 4
    assert read - norms == pytest.approx(matrices * (1 + 3 / 16), rel=0.02)
    # The first stage has embedding, head and the last norm too.
    assert other == read + (2 * 96 + 1) * 32 * 4
    export(plan, "compressed-tensors", folder, "out")
    loaded = AutoModelForCausalLM.from_pretrained("out")
    torch.testing.assert_close(loaded(ids).logits, whole(ids).logits, rtol=2e-5, atol=2e-5)


def test_a_plan_without_its_codes_is_refused(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path / "model")
    shape = {
        "stages": (Stage(rank=0, layers=(0, 2)),), "bits": (3, 4), "group_size": 16,
        "prefill_size": 1, "decode_size": 1,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="expected a file of codes for the method gptq"):
        Plan(method="gptq", **shape)
    with pytest.raises(ConfigError, match=r"codes for the method gptq alone.*with nearest"):
        Plan(codes="a.safetensors", **shape)
    plan = Plan(method="gptq", codes=str(tmp_path / "none"), **shape)
    with pytest.raises(ConfigError, match="none: expected the codes of a plan rounded by GPTQ"):
        load(tmp_path / "model", plan)
    # Codes of another plan: other widths.
    text = [torch.randint(96, (2, 8))]
    other = Plan(**{**shape, "bits": (3, 3)})
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="expected a place outside the model's folder"):
        round_for(other, tmp_path / "model", text, tmp_path / "model" / "model.safetensors")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights
    rounded = round_for(other, tmp_path / "model", text, tmp_path / "codes.safetensors")
    with pytest.raises(DataError, match=r"layers\.1\..*expected codes of 4 bits, got 3"):
        load(tmp_path / "model", replace(rounded, bits=(3, 4)))
    with pytest.raises(DataError, match=r"layers\.0\..*in groups of 32, got \[32, 2\]"):
        load(tmp_path / "model", replace(rounded, group_size=32))
    unrounded = Plan(**{**shape, "bits": (16, 16)})
    assert round_for(unrounded, tmp_path / "model", text, tmp_path / "no") is unrounded


def test_layers_are_calibrated_under_their_own_masks():
    """Of Qwen2's layers the first sees all and the second a window: each has its own mask."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=3,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    text, grams = torch.randint(64, (2, 12)), []
    seen = {}
    output = model.model.layers[1].self_attn.o_proj
    hook = output.register_forward_pre_hook(lambda _, given: seen.setdefault("x", given[0]))
    with torch.no_grad():
        model(text)
    hook.remove()
    rows = seen["x"].reshape(-1, 32)

    def keep(weight, gram, bits, *, group_size):
        grams.append(gram)
        return weight_matmul.pack(weight, 8, group_size=group_size)

    with mock.patch("llmpq.runtime.gptq.gptq", keep):
        round_model(model, [text], (16, 8), group_size=16)
    torch.testing.assert_close(grams[3], rows.T @ rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group_size", [-1, 10**9])
def test_a_group_is_a_row_at_most(group_size):
    torch.manual_seed(0)
    weight, x = torch.randn(8, 48), torch.randn(64, 48)
    for found in (
        gptq(weight, x.T @ x, 4, group_size=group_size),
        fit_ranges(weight, torch.ones(48), 4, group_size=group_size),
    ):
        assert found.scale.shape == (8, 1)
