"""A GRPO step of 256 responses with two updates, beside TRL's trainer on the same model.

Both begin each turn from the same weights, in turns, on one thread; TRL generates once for its two
optimizer steps, as we do. Both must learn.
"""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import mean, median, quantiles

import torch

from hybridflow.roles.state.export import export
from hybridflow.training.config import read_recipe
from hybridflow.training.runtime import Run
from hybridflow.workers.controller import Workers
from shared.claims import Claim

TURNS, STEPS, WARM_UP, LR = 3, 40, 5, 1e-3
PEERS = [
    {
        "peer": "TRL's GRPOTrainer",
        "setting": "gradient_checkpointing=False",
        "why": "on by default, it runs each forward pass twice, for memory that is not short here",
    },
    {
        "peer": "TRL's GRPOTrainer",
        "setting": "steps_per_generation=2, per_device_train_batch_size=128, num_iterations=1",
        "why": "256 responses are generated at once for two optimizer steps, as in ours",
    },
    {
        "peer": "TRL's GRPOTrainer",
        "setting": "beta=0, no evaluation, saving, completions' log or logging, nor its NaN filter",
        "why": "no reference model, and nothing between the steps; rewards are kept as it scores",
    },
    {
        "peer": "TRL's GRPOTrainer",
        "setting": "float32, SDPA, dynamic cache, fused AdamW, no loader's processes, not compiled",
        "why": "static cache and for-each AdamW took the same time, eager attention and torch.compile "
        "no less, continuous batching 80 times as long; Liger's kernels and vLLM want a GPU",
    },
]


def ours(recipe):
    with Workers.inline() as workers:
        told = list(Run.set_up(recipe, workers).steps())
    return [step["seconds"] for step in told][WARM_UP:], [step["reward"] for step in told]


def bench_grpo_against_trl(peer, benchmark, record_claim, tmp_path):
    torch.set_num_threads(1)
    recipe = read_recipe("grpo-sort", {"optimizer.schedule": "linear", "optimizer.lr": str(LR)})
    recipe = replace(recipe, steps=STEPS, optimizer=replace(recipe.optimizer, warmup_share=0.0))
    with Workers.inline() as workers:
        export(Run.set_up(recipe, workers).algorithm.actor, tmp_path / "model")
    asked = {"folder": str(tmp_path / "model"), "steps": STEPS, "lr": LR}
    taken, rewards = {"ours": [], "trl": []}, {"ours": [], "trl": []}

    def turns(it):
        for _ in range(TURNS):
            seconds, told = ours(recipe)
            taken["ours"].append(seconds)
            rewards["ours"] = told
            answer = it.ask(asked)
            taken["trl"].append(answer["seconds"][WARM_UP:])
            rewards["trl"] = answer["rewards"]

    with peer("trl", Path(__file__).with_name("trl_grpo.py")) as it:
        it.ask({**asked, "steps": 3})
        benchmark.pedantic(turns, args=(it,), rounds=1)
    ours_s, trl_s = (median(chain(*taken[name])) for name in ("ours", "trl"))
    ratios = [median(b) / median(a) for a, b in zip(taken["ours"], taken["trl"], strict=True)]
    low, _, high = quantiles(chain(*taken["ours"]), n=4)
    gains = {name: mean(told[-5:]) - mean(told[:2]) for name, told in rewards.items()}
    record_claim(
        Claim(
            name="samples a second in GRPO, 2 x 64 Llama, 256 responses and two updates a step",
            unit="1/s",
            ours=256 / ours_s,
            baseline=256 / trl_s,
            baseline_name="TRL 1.16",
            higher_is_better=True,
            correct=min(gains.values()) > 0.05,
            detail=f"{TURNS} turns of {STEPS} steps, one thread; quartiles of ours "
            f"{1e3 * low:.0f} and {1e3 * high:.0f} ms a step, TRL's median "
            f"{1e3 * trl_s:.0f} ms; rewards rose by {gains['ours']:.2f} and "
            f"{gains['trl']:.2f}",
            source="hatch run bench hybridflow -k grpo",
        ),
        aim=2.0,
        spread=(min(ratios), max(ratios)),
    )
