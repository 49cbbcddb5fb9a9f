"""Bytes of a Llama's steps: what plans were predicted to take, and the longest text under a limit.

The model is in float32 and trains on two sequences of bytes of the Bible, each contender in a process of
its own (`contender.py`). What is there before the first step, parameters, gradients and AdamW's states among
it, is left out. Predictions are compared with the bytes of torch's storages, counted during a real
step, and with the growth of VmHWM. Seconds are no part of this.
"""

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent))
from contender import Contender, Ended, Setting, batch_of, make_model

import memo
from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan
from memo.runtime.layers import find_layers
from shared.claims import Claim
from shared.comms import Group, RankPool
from shared.units import format_bytes

COMMAND = "hatch run bench memo/memory"
REVISION = 2
LAST_TOKENS = 16_384
PEERS = [
    {
        "peer": "transformers' full checkpointing",
        "setting": "gradient_checkpointing_enable, use_reentrant False",
        "why": "the least memory that transformers offers, and the variant that torch recommends",
    },
    {
        "peer": "full checkpointing with tiled feed-forward parts",
        "setting": "256 tokens a tile, and the loss without all logits that memo uses",
        "why": "the idea of Arctic Long Sequence Training (arXiv 2506.13996), which is CUDA's only, written "
        "anew for it",
    },
]
SMALL = Setting(way="memo", num_layers=6, hidden_size=128, num_tokens=1024, is_predicted=True)
GATE, UP = "mlp.gate_proj.weight", "mlp.up_proj.weight"


def plans(tmp_path, base=SMALL, sizes_mib=(72, 84, 100, 126)):
    """Fixed fractions, items that stay, and budgets for `autotune`, by what they are."""
    store = f"file:{tmp_path}"
    found = {
        f"alpha {alpha}": replace(base, plan=memo.Plan.fixed(alpha=alpha, store=store))
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    for kept in ({INPUT}, {INPUT, ATTENTION}, {INPUT, ATTENTION, GATE, UP}):
        layer = LayerPlan(mode="restore", resident=frozenset(kept))
        found[f"{len(kept)} items stay"] = replace(base, plan=memo.Plan(layers=(layer,)))
    found["all stays"] = replace(base, plan=memo.Plan(layers=(LayerPlan(),)))
    for size in sizes_mib:
        found[f"autotune {size} MiB"] = replace(
            base, allowance_bytes=size << 20, is_limited=False, store=store
        )
    return found


def measured(setting):
    """A plan's predicted and measured bytes, in a process of its own."""
    with Contender(setting) as one:
        one.step()
        grown = one.step().peak_bytes
        counted = one.step(is_counted=True)
        plan = one.plan
        assert plan is not None
        told = plan.prediction
    fixed = told["parts_bytes"]["parameters, gradients, optimizer"]
    return {
        "predicted": told["expected_peak_bytes"] - fixed,
        "predicted_process": told["expected_peak_bytes"],
        "counted": counted.counted_bytes,
        "grown": grown,
        "base": one.base_bytes,
        "store": counted.store_bytes,
        "predicted_store": told["store_bytes"],
        "is_training": len(set(one.losses)) == 3,
    }


def bench_predicted_bytes(tmp_path, benchmark, record_claim):
    """Peaks and store of thirteen plans, beside what was predicted before their first step."""

    def measure():
        return {name: measured(setting) for name, setting in plans(tmp_path).items()}

    found = benchmark.pedantic(measure, rounds=1)
    rows = found.values()
    is_right = len(found) >= 12 and all(row["is_training"] for row in rows)
    wrong_store = [name for name, row in found.items() if row["store"] != row["predicted_store"]]
    told = "; ".join(
        f"{name}: {format_bytes(row['predicted'])} predicted, {format_bytes(row['counted'])} counted, "
        f"{format_bytes(row['predicted_process'] - row['base'])} predicted beyond what was there, "
        f"{format_bytes(row['grown'])} grown, store {format_bytes(row['store'])}"
        for name, row in found.items()
    )
    kinds = (
        ("counted storages", 0.03, [abs(r["predicted"] / r["counted"] - 1) for r in rows]),
        (
            "resident memory of the process",
            0.08,
            [abs(r["predicted_process"] / (r["base"] + r["grown"]) - 1) for r in rows],
        ),
        (
            "growth of resident memory",
            None,
            [abs((r["predicted_process"] - r["base"]) / r["grown"] - 1) for r in rows],
        ),
    )
    for name, aim, errors in kinds:
        record_claim(
            Claim(
                name=f"largest error of a predicted peak, against {name}",
                unit="%",
                ours=100 * max(errors),
                baseline=100 * (aim or 0.08),
                baseline_name="the aim",
                higher_is_better=False,
                correct=is_right and not wrong_store,
                detail=f"median {100 * median(errors):.2g} % of {len(errors)} plans; stores with other "
                f"bytes than predicted: {wrong_store or 'none'}; {told}",
                source=f"{COMMAND} -k predicted",
            ),
            aim=1.0,
        )


def runs(setting):
    """Whether two steps run; None where `autotune` says before that they do not."""
    try:
        with Contender(setting) as one:
            one.step()
            one.step()
    except Ended as error:
        return None if str(error).startswith("DoesNotFit") else False
    return True


def longest(setting, step_tokens):
    """The longest text that runs, in steps of `step_tokens`; 0: none."""
    low, high = 0, LAST_TOKENS // step_tokens + 1
    guess = 4
    while high - low > 1:
        middle = min((low + high) // 2, max(guess, low + 1))
        if runs(replace(setting, num_tokens=middle * step_tokens)):
            low, guess = middle, 2 * middle
        else:
            high = middle
    return low * step_tokens


@pytest.mark.parametrize("num_tokens", [1024, 4096])
def bench_longest_text(num_tokens, tmp_path, benchmark, record_claim):
    """The longest text under one limit, ours beside full checkpointing and no checkpointing."""
    base = Setting(way="checkpoint", hidden_size=128, num_tokens=num_tokens)
    step_tokens = num_tokens // 4

    def measure():
        with Contender(base) as one:
            one.step()
            limit = one.step().peak_bytes
        full = replace(base, allowance_bytes=limit)
        ours = replace(full, way="memo", store=f"file:{tmp_path}")
        ways = (full, replace(full, way="tiled_mlp"), replace(full, way="plain"))
        found = [longest(one, step_tokens) for one in (ours, *ways)]
        beyond = int(found[0] * 1.1) // 16 * 16
        return limit, found, runs(replace(ours, num_tokens=beyond))

    limit, (ours, full, tiled, plain), is_beyond = benchmark.pedantic(measure, rounds=1)
    if not full:
        pytest.fail("full checkpointing ran at no length: no ratio")
    for name, peer, aim in (
        ("transformers' full checkpointing", full, 2.0),
        ("full checkpointing with tiled feed-forward parts", tiled, 1.5),
    ):
        record_claim(
            Claim(
                name=f"longest text under the limit of full checkpointing at {num_tokens:,} tokens",
                unit="tokens",
                ours=ours,
                baseline=peer,
                baseline_name=name,
                higher_is_better=True,
                correct=ours > 0 and is_beyond is None and plain < num_tokens,
                detail="16 layers of hidden size 128, two sequences; "
                f"limit {format_bytes(limit)}, planning included; bisected in steps of {step_tokens} tokens; "
                f"without checkpointing {plain}; at 1.1 times ours autotune says before any step that it does "
                f"not fit: {is_beyond is None}",
                source=f'{COMMAND} -k "longest and {num_tokens}"',
            ),
            aim=aim,
        )


SHARDED_STEPS = 4


def train_sharded(alpha):
    """Losses of a rank of FSDP2, and bytes that memo stored; alpha None: without memo."""
    torch.set_num_threads(1)
    model = make_model(Setting(way="memo", num_layers=4, hidden_size=128))
    mesh = Group.world().device_mesh()
    for layer in find_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = None if alpha is None else memo.apply(model, memo.Plan.fixed(alpha=alpha))
    found = []
    for number in range(SHARDED_STEPS):
        loss = model(**batch_of(256, 2 * number + Group.world().rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if run is not None:
        run.close()
    return found, 0 if run is None else run.store_bytes


def bench_sharded_model(benchmark, record_claim):
    """FSDP2 on two ranks with memo, and without: the same losses to the bit."""

    def measure():
        with RankPool(2) as pool:
            return {
                alpha: pool.run(train_sharded, alpha).results for alpha in (None, 0.0, 0.5, 1.0)
            }

    found = benchmark.pedantic(measure, rounds=1)
    plain = [losses for losses, _ in found.pop(None)]
    equal = [
        sum(
            mine == theirs
            for one, other in zip(ranks, plain, strict=True)
            for mine, theirs in zip(one[0], other, strict=True)
        )
        for ranks in found.values()
    ]
    total = 2 * SHARDED_STEPS
    is_training = (
        all(len(set(losses)) == SHARDED_STEPS for losses in plain) and plain[0] != plain[1]
    )
    record_claim(
        Claim(
            name="losses under FSDP2 on 2 ranks that equal those without memo to the bit",
            unit="losses",
            ours=min(equal),
            baseline=total,
            baseline_name="all of them",
            higher_is_better=True,
            correct=is_training and all(size > 0 for ranks in found.values() for _, size in ranks),
            detail=f"alpha 0, 1/2 and 1, each {total} losses of 4 layers: {equal} equal",
            source=f"{COMMAND} -k sharded",
        ),
        aim=1.0,
    )
