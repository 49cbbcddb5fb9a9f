"""What `memo fit` says: the rows, the longest length, the words."""

import json

import pytest
from transformers import LlamaConfig

from memo.cli import main
from memo.config import Budget
from memo.planner.layer_plan import LayerPlan
from memo.profiler.analytic.analysis import Analysis
from memo.profiler.analytic.fit import describe, fit

pytestmark = pytest.mark.unchecked  # many plans are looked at: checks would take minutes

SHAPE = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 12, "num_attention_heads": 4,
    "vocab_size": 1000,
}  # fmt: skip


@pytest.fixture(scope="module")
def analysis():
    return Analysis(LlamaConfig(**SHAPE), "H100", ranks=2)


def test_longer_sequences_pay_until_nothing_fits_and_the_longest_is_told(analysis):
    budget = Budget(device="400MiB", store="60MiB")
    found = fit(analysis, budget, [2048, 8192, 1 << 20])
    short, *_, long = found.rows
    assert describe(short.plan.layers) == "keep 12 layers"
    assert short.plan.prediction["store_bytes"] == 0
    assert long.plan is None
    assert long.to_json() == {"num_tokens": 1 << 20, "fits": False, "missing": long.missing}
    fitting = [row for row in found.rows if row.plan is not None]
    for row in fitting:
        assert row.plan.prediction["peak_bytes"] <= budget.device_bytes
        assert row.plan.prediction["store_bytes"] <= budget.store_bytes
    assert found.longest >= fitting[-1].num_tokens
    unit = 32
    beyond = (found.longest + found.longest // 16) // unit * unit
    edges = fit(analysis, budget, [found.longest, beyond]).rows
    assert edges[0].plan is not None
    assert edges[1].plan is None


def test_a_store_makes_longer_sequences_fit(analysis):
    without = fit(analysis, Budget(device="400MiB"), [4096]).longest
    assert fit(analysis, Budget(device="400MiB", store="1GiB"), [4096]).longest > 1.2 * without


def test_where_nothing_fits_the_longest_is_none(analysis):
    found = fit(analysis, Budget(device="1MiB"), [4096])
    assert found.longest == 0
    assert "shard them" in found.rows[0].missing


def test_plans_are_said_in_words():
    keep = LayerPlan()
    swap = LayerPlan(
        mode="restore", stored={"input": 1.0, "mlp.gate_proj.weight": 0.4, "attention": 1.0}
    )
    again = LayerPlan(mode="restore", resident=frozenset({"input"}))
    some = LayerPlan(mode="restore", resident=frozenset({"input", "attention"}))
    whole = LayerPlan(mode="whole")
    layers = [swap] * 29 + [again] * 2 + [some] + [whole] * 2 + [keep] * 3
    assert describe(layers) == (
        "swap 29 layers: input, attention, gate 40%; recompute 2 layers; "
        "keep of 1 layer: input, attention; swap 2 layers whole; keep 3 layers"
    )


def test_the_command_prints_a_table_or_json(analysis, tmp_path, capsys, monkeypatch):
    """Of the model, the device and the limits that it was given."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    asked = []

    def analyse(config, device, **settings):
        asked.append((config.hidden_size, config.num_hidden_layers, device, settings))
        return analysis

    monkeypatch.setattr("memo.profiler.analytic.analysis.Analysis", analyse)
    argv = [
        "fit",
        "--model",
        str(tmp_path),
        "--memory",
        "400MiB",
        "--store",
        "60MiB",
        "--ranks",
        "2",
    ]
    argv += ["--tokens", "2048", "1048576"]
    assert main([*argv, "--link", "25GB/s", "--optimizer", "sgd"]) == 0
    text = capsys.readouterr().out
    assert "simulated from the data sheet" in text
    assert "2K" in text
    assert "keep 12 layers" in text
    assert "does not fit" in text
    assert "longest: " in text
    assert main([*argv, "--json", "--device", "A800", "--dtype", "float32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["fits"] for row in found["rows"]] == [True, False]
    assert found["rows"][0]["tokens_per_s"] == 2048 / found["rows"][0]["step_s"]
    assert found == fit(analysis, Budget("400MiB", "60MiB"), [2048, 1 << 20]).to_json()
    plain = {"dtype": "bfloat16", "ranks": 2, "optimizer": "adamw", "link_bytes_per_s": None}
    assert asked == [
        (128, 12, "H100", {**plain, "optimizer": "sgd", "link_bytes_per_s": 25e9}),
        (128, 12, "A800", {**plain, "dtype": "float32"}),
    ]


def test_a_model_that_is_none_fails_with_status_1(tmp_path, capsys):
    assert main(["fit", "--model", str(tmp_path / "missing")]) == 1
    assert "memo: " in capsys.readouterr().err
