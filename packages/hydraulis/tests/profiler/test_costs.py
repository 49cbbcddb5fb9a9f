"""Costs from a model's shape and from measured micro-batches."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hydraulis.config import Cost, training_operations
from hydraulis.profiler import timings
from hydraulis.profiler.analytic import degree_cost, read_config
from hydraulis.profiler.timings import measure_cost
from shared.errors import ConfigError, DataError

from ..runtime.test_attention import make_model

GIVEN = {
    "device": "H100", "efficiency": 0.5, "max_tokens": 8192, "num_ranks": 16, "ranks_per_node": 8,
    "node_bytes_per_s": 2e11, "network_bytes_per_s": 2e10, "fixed_s": 0.01,
}  # fmt: skip


def test_operations_of_a_published_model():
    squared, linear = training_operations(read_config("llama-7b"))
    # 6.74 billion weights, of which the embedding's 0.13 are looked up.
    assert linear == pytest.approx(6 * (6.738e9 - 32000 * 4096), rel=2e-3)
    # 32 layers, two products of 2 operations, half of the pairs, 3.5 passes.
    assert squared == pytest.approx(3.5 * 32 * 2 * 2 * 4096 / 2)


def test_attention_counts_query_heads_and_projections_count_key_heads_too():
    shape = {**vars(read_config("llama-7b")), "num_hidden_layers": 1, "vocab_size": 1}
    every = training_operations(SimpleNamespace(**shape))
    few = training_operations(SimpleNamespace(**{**shape, "num_key_value_heads": 8}))
    assert few[0] == every[0], "scores are of query heads, whichever keys they share"
    # Keys and values of 24 heads fewer, forward and backward.
    assert every[1] - few[1] == pytest.approx(3 * 2 * 2 * 4096 * 24 * 128, rel=1e-6)
    wide = training_operations(SimpleNamespace(**{**shape, "head_dim": 256}))
    assert wide[0] == 2 * every[0]


def test_families_name_their_sizes_differently():
    gpt = SimpleNamespace(n_head=4, n_embd=32, n_layer=2, n_inner=None, vocab_size=97)
    llama = SimpleNamespace(
        num_attention_heads=4, hidden_size=32, num_hidden_layers=2, intermediate_size=128,
        vocab_size=97,
    )  # fmt: skip
    assert training_operations(gpt) == training_operations(llama)
    with pytest.raises(ConfigError, match=r"num_attention_heads, got SimpleNamespace .*=hy\.Cost"):
        training_operations(SimpleNamespace(hidden_size=32))


def test_a_fit_weighs_every_timing_by_its_own_seconds():
    # No three coefficients fit the long ones; the least error in seconds makes the shortest 7 times as long.
    timings = [([n], 1e-3 * n) for n in (10, 20, 40, 80)]
    timings += [([4000], 5.0), ([8000], 7.0), ([10_000], 11.0)]
    cost = Cost.fit(timings)
    assert cost.largest_error is not None
    for lengths, seconds in timings[:4]:
        assert cost.micro_batch_s(lengths) == pytest.approx(seconds, rel=0.02)


def test_groups_cost_operations_and_bytes():
    found = degree_cost(read_config("llama-7b"), **GIVEN)
    assert found.cost.b == pytest.approx(6 * (6.738e9 - 32000 * 4096) / (0.5 * 989.5e12), rel=2e-3)
    assert found.cost.c == 0.01
    token_bytes = 3 * 2 * 2 * 32 * 4096
    assert found.message_s[2] == pytest.approx(token_bytes / 2 / 2e11)
    assert found.message_s[16] == pytest.approx(token_bytes * 15 / 16 / 2e10)
    assert set(found.message_s) == {2, 4, 8, 16}


def test_a_model_is_a_name_a_folder_or_a_file(tmp_path):
    tree = {**vars(read_config("llama-7b")), "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    for given in (tmp_path, tmp_path / "config.json"):
        assert read_config(given).num_hidden_layers == 2
    del tree["intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="of the Llama kind, got no 'intermediate_size'"):
        read_config(tmp_path)
    with pytest.raises(DataError, match=r"expected a model's folder with config\.json, or one of"):
        read_config("llama-8b")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"device": "H1000"}, "device: expected one of H200"),
        ({"efficiency": 0.0}, r"efficiency: expected a share in \(0, 1\], got 0"),
        ({"efficiency": 1.5}, "efficiency"),
        ({"num_ranks": 0}, "ranks: expected more than 0"),
        ({"network_bytes_per_s": -1.0}, "network_bytes_per_s: expected more than 0"),
    ],
)
def test_bad_settings_are_named(changed, told):
    with pytest.raises(ConfigError, match=told):
        degree_cost(read_config("llama-7b"), **{**GIVEN, **changed})


def test_a_measured_cost_fits_and_leaves_the_model_alone():
    model = make_model("llama").float()
    (first, *_) = model.parameters()
    first.grad = torch.ones_like(first)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cost = measure_cost(model, 1024)
    assert isinstance(cost, Cost)
    # On a busy machine a fit may give all growth to one of the two terms.
    assert cost.a > 0 or cost.b > 0
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # A micro-batch of fewer tokens takes longer, after one turn of which only the start is looked at.
    clock = [0.0] * 8 + [time for at in range(8) for time in (0.0, 1.0 + at)]
    with (
        mock.patch.object(timings, "perf_counter", side_effect=clock),
        pytest.raises(ConfigError, match=r"seconds that grow with tokens, got from 1 to 8 s; meas"),
    ):
        measure_cost(model, 64, repeats=1)
    with pytest.raises(ConfigError, match="at least 16 tokens, got 15"):
        measure_cost(model, 15)


def test_a_cost_is_measured_on_micro_batches_like_those_to_come():
    model = make_model("llama").float()
    rows, seen = [(40, 3), (7,), (1, 1, 30)], []
    model.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["packing"].lengths), with_kwargs=True
    )
    # Each turn's seconds are exactly those of a cost; the clock is read before and after each.
    known = Cost(a=1e-4, b=1e-2, c=0.5)
    taken = [known.micro_batch_s(row) for row in rows]
    clock = [0.0, *([0.0] * 2)] + [time for one in taken for time in (0.0, one)]
    with mock.patch.object(timings, "perf_counter", side_effect=clock):
        found = measure_cost(model, 64, repeats=1, micro_batches=rows)
    assert seen == 2 * rows
    assert (found.a, found.b, found.c) == pytest.approx((known.a, known.b, known.c))
    with pytest.raises(ConfigError, match="expected at most 64 tokens in each, got 65"):
        measure_cost(model, 64, micro_batches=[(60, 5)])
    with pytest.raises(ConfigError, match=r"micro_batches\[1\]: expected a whole number .* got 0"):
        measure_cost(model, 64, micro_batches=[(60, 0)])
