"""What `memo fit` says: the rows, the longest length, the words."""

import json

import pytest
from llama_shape import LAYERS, SHAPE, H

from memo.cli import main
from memo.config import Budget
from memo.planner.layer_plan import LayerPlan
from memo.profiler.analytic.fit import describe, fit
from shared.errors import ConfigError
from shared.topology.device import PRESETS

pytestmark = pytest.mark.unchecked  # many plans are looked at: checks would take minutes


@pytest.mark.slow
def test_longer_sequences_pay_until_nothing_fits_and_the_longest_is_told(analysis):
    budget = Budget(device="500MiB", store="60MiB")
    found = fit(analysis, budget, [1024, 1 << 20])
    short, long = found.rows
    assert describe(short.plan.layers) == f"{LAYERS} x keep all that autograd saves"
    assert short.plan.prediction["store_bytes"] == 0
    assert long.plan is None
    assert long.to_json() == {"num_tokens": 1 << 20, "fits": False, "missing": long.missing}
    assert found.longest > 16_384
    unit = 16
    beyond = (found.longest + found.longest // 16) // unit * unit
    edges = fit(analysis, budget, [found.longest, beyond]).rows
    assert edges[0].plan is not None
    assert 0.9 * budget.device_bytes < edges[0].plan.prediction["peak_bytes"] <= budget.device_bytes
    assert 0 < edges[0].plan.prediction["store_bytes"] <= budget.store_bytes
    assert edges[1].plan is None


def test_a_store_makes_longer_sequences_fit(analysis):
    without = fit(analysis, Budget(device="500MiB"), [4096]).longest
    assert fit(analysis, Budget(device="500MiB", store="1GiB"), [4096]).longest > 1.2 * without


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
    placeless = LayerPlan(mode="restore", stored={"attention": 1.0})
    layers = [swap] * 29 + [again] * 2 + [some] + [placeless] + [whole] * 2 + [keep] * 3
    assert describe(layers) == (
        "29 x store input, attention, gate_proj 40%, then 2 x keep input, then 1 x keep input, attention, then "
        "1 x keep input; store attention, then "
        "2 x store all that autograd saves, then 3 x keep all that autograd saves"
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
        "500MiB",
        "--store",
        "60MiB",
        "--ranks",
        "2",
    ]
    argv += ["--tokens", "1024", "1048576"]
    assert main([*argv, "--link", "25GB/s", "--optimizer", "sgd"]) == 0
    text = capsys.readouterr().out
    assert "simulated from the data sheet" in text
    assert "1K" in text
    assert f"{LAYERS} x keep all that autograd saves" in text
    assert "does not fit" in text
    assert "longest: " in text
    assert main([*argv, "--json", "--device", "A800", "--dtype", "float32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["fits"] for row in found["rows"]] == [True, False]
    assert found["rows"][0]["tokens_per_s"] == 1024 / found["rows"][0]["step_s"]
    assert found == fit(analysis, Budget("500MiB", "60MiB"), [1024, 1 << 20]).to_json()
    plain = {"dtype": "bfloat16", "ranks": 2, "optimizer": "adamw", "link_bytes_per_s": None}
    assert asked == [
        (H, LAYERS, "H100", {**plain, "optimizer": "sgd", "link_bytes_per_s": 25e9}),
        (H, LAYERS, "A800", {**plain, "dtype": "float32"}),
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--model", "DIR/missing"], "or one of llama-7b, llama-8b, llama-1b, there is nothing;"),
        (["--device", "H1000"], "T4, L4, CPU, got 'H1000'; take the nearest"),
        (["--store", "banana"], "budget.store: expected a size such as"),
        (["--memory", "0"], "budget.device: expected more than 0 bytes, got 0;"),
        (["--link", "banana"], "link: expected a rate such as"),
        (["--ranks", "0"], "ranks: expected at least 1, got 0; count the devices"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_a_line(options, text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    argv = [
        "fit",
        "--model",
        str(tmp_path),
        *(one.replace("DIR", str(tmp_path)) for one in options),
    ]
    assert main(argv) == 1
    said = capsys.readouterr().err
    assert said.startswith("memo: ")
    assert text in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (0, "tokens: expected at least one a rank, got 0 for 1; ask for a longer sequence"),
        (-8, "tokens: expected at least one a rank, got -8 for 1; ask for a longer sequence"),
    ],
)
def test_lengths_that_are_none_are_refused(analysis, tokens, text):
    with pytest.raises(ConfigError) as caught:
        fit(analysis, Budget(device="500MiB"), [tokens])
    assert str(caught.value) == text


def test_the_help_names_every_device(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    said = capsys.readouterr().out
    assert [name for name in PRESETS if name not in said] == []
