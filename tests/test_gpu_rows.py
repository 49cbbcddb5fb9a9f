"""Rows of bench/gpu.py that need no kernels, rehearsed on the CPU: what they call is still there, and `correct` can fail."""

import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

pytest.importorskip("transformers")

import torch

from gpu_cache import cache_rows
from gpu_clock import Figure
from gpu_diffusion import diffusion_rows
from gpu_llama import FULL, PEERS, Llama, agree, train_step
from gpu_memo import memory_rows, step_rows
from gpu_moe import (
    build_layer,
    compare_gradients,
    compare_overlap,
    count_movable_s,
    is_near,
    make_states,
)
from gpu_report import claim_run
from lancet import Op

pytestmark = pytest.mark.unchecked  # models are trained
TOKENS = 64


@pytest.fixture(scope="module")
def llama():
    return Llama("cpu")


@pytest.fixture(scope="module")
def full(llama):
    model = llama.shell()
    return llama.outcome(partial(train_step, model, llama.batch(TOKENS), PEERS[FULL](model)))


def test_rows_of_memo_are_rehearsed(llama):
    rows = step_rows(llama, TOKENS, FULL, 1.22)
    assert [row.package for row in rows] == ["memo"] * 3
    assert all(row.correct for row in rows)
    assert all(row.correct for row in memory_rows("cpu", 1 << 16, TOKENS))


def test_rows_of_diffusionpipe_are_rehearsed():
    pytest.importorskip("diffusers")
    (row,) = diffusion_rows("cpu", 2, 2)
    assert row.package == "diffusionpipe"
    assert row.correct
    assert row.ours > 0


def test_rows_of_heta_are_rehearsed():
    rows = cache_rows("cpu", 80, 0.001, 16, [3, 3], 3)
    assert [row.name for row in rows][:2] == [
        "gather of pinned rows",
        "step with a cache by knapsack",
    ]
    assert {row.package for row in rows} == {"heta"}
    assert all(row.correct for row in rows)


def test_copies_beside_experts_are_rehearsed():
    layer = build_layer("cpu")
    row = compare_overlap(layer, make_states(layer, TOKENS)["inputs_embeds"], 2, "a layer")
    assert row.package == "lancet"
    assert row.correct
    assert row.ratio > 0


# In a process of its own, as no compiler captures checks of shapes.
@pytest.mark.slow
def test_rows_of_lancet_are_rehearsed():
    command = [sys.executable, str(BENCH / "gpu.py"), "--rehearse", "--only", "lancet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "captured by lancet" in done.stdout


def test_gradients_are_near_only_if_all_of_them_are():
    layer, other = build_layer("cpu"), build_layer("cpu")
    batch = make_states(layer, TOKENS)
    assert is_near(layer, other, batch)
    with torch.no_grad():
        other.model.layers[0].mlp.experts.down_proj[0] *= 1.5
    assert not is_near(layer, other, batch)
    layer.lm_head.weight.grad[0, 0] = float("nan")
    assert not compare_gradients(layer, layer) < 1


def test_operators_are_movable_beside_exchanges_that_neither_follow_nor_feed_them():
    ops = [
        Op("input's gradient", "compute", 1.0),
        Op("rows back", "all_to_all", 2.0, after=("input's gradient",)),
        Op("weights' gradient", "compute", 4.0, after=("input's gradient",)),
        Op("attention", "compute", 8.0, after=("rows back",)),
        Op("rows on", "all_to_all", 16.0, after=("attention",)),
        Op("sum over ranks", "all_reduce", 32.0, after=("weights' gradient",)),
        Op("mean", "compute", 64.0, after=("sum over ranks",)),
        Op("first layer", "compute", 128.0, after=("rows on",)),
    ]
    assert count_movable_s(ops) == 4.0
    assert count_movable_s(ops[:1]) == 0.0


def test_a_step_agrees_with_another_way_only_if_it_trains_the_same_within_the_limit(llama, full):
    model, batch = llama.shell(), llama.batch(TOKENS)
    plain = llama.outcome(partial(train_step, model, batch, nullcontext()))
    assert agree(plain, full, plain.peak_bytes)
    assert not agree(plain, full, plain.peak_bytes - 1), "over its limit"
    idle = llama.outcome(lambda: torch.tensor(full.loss))
    assert not agree(idle, full, full.peak_bytes * 2), "does nothing"
    assert not agree(idle, idle, full.peak_bytes * 2), "nobody trains"
    other = {**batch, "input_ids": batch["input_ids"].flip(1), "labels": batch["labels"].flip(1)}
    found = llama.outcome(partial(train_step, model, other, nullcontext()))
    assert not agree(found, full, found.peak_bytes), "trains other data"


def test_where_no_plan_fits_no_ratio_is_claimed(llama, monkeypatch):
    def refuse(*_, **__):
        raise memo.DoesNotFit("expected less")

    import memo

    monkeypatch.setattr("gpu_memo.memo.autotune", refuse)
    (row,) = step_rows(llama, TOKENS, FULL, 1.22)
    assert isinstance(row, Figure)
    assert (row.ours, row.ratio, row.correct, row.aim) == (None, None, False, 1.22)
    told = dict.fromkeys(("command", "commit", "machine"), "") | {"revision": 1, "versions": {}}
    claim = claim_run(row, {**told, "date": "2026-01-02T03:04+00:00"}, "gpu-nvidia-h200")
    assert (claim.package, claim.ratio, claim.correct) == ("memo", None, False)
    assert not claim.is_aim_met
