"""`hybridflow demo`: trains a randomly initialised Llama by PPO and GRPO to sort digits.

It also times generation and a whole GRPO step against transformers' `generate` and a plain training
loop around the same Hugging Face model, on the same prompts, alternately.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridflow.training.config import Recipe, read_recipe
from hybridflow.training.runtime import Run
from hybridflow.workers.controller import Workers
from shared.claims import Claim, finish, pair_turns
from shared.training.pictures import new_picture, save_picture
from shared.training.progress import show_progress

__all__ = ["run"]

_SOURCE = "hybridflow demo"
# Okabe and Ito's palette, which colour-blind readers can distinguish too.
_COLOURS = {"PPO": "#0072B2", "GRPO": "#D55E00"}


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json and a picture to `out`.

    Returns:
        Whether every claim's result was correct.
    """
    out.mkdir(parents=True, exist_ok=True)
    digits, factor = ("digit-sort:3", 3) if is_full else ("digit-sort:2", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        curves, claims = {}, []
        for name, steps, least in (("PPO", 70, 0.9), ("GRPO", 100, 0.6)):
            recipe = replace(read_recipe(f"{name.lower()}-sort"), task=digits, steps=steps * factor)
            curves[name], claim = _learnt(name, recipe, least)
            claims.append(claim)
        if importlib.util.find_spec("transformers"):
            with show_progress("hybridflow: the same by transformers, in turns"):
                claims += _against_transformers(repeats=9 if is_full else 3)
        else:
            sys.stderr.write("hybridflow: no claim against transformers, which is not installed\n")
    finally:
        torch.set_num_threads(before)
    _draw(curves, out / "reward.svg", digits.rpartition(":")[2])
    return finish(out, "hybridflow", claims, {"reward": curves})


def _learnt(name: str, recipe: Recipe, least: float) -> tuple[list[float], Claim]:
    """Trains, and compares with the untrained model as a control."""
    rewards, begun = [], time.perf_counter()
    with (
        Workers.inline() as workers,
        show_progress(f"hybridflow: {name} sorts digits", recipe.steps) as progress,
    ):
        trained = Run.set_up(recipe, workers)
        untrained = trained.greedy()
        for told in trained.steps():
            rewards.append(told["reward"])
            progress.advance()
        found = trained.greedy()
    seconds = time.perf_counter() - begun
    return rewards, Claim(
        name=f"digits at the right place after {recipe.steps} steps of {name}",
        unit="of 1",
        ours=statistics.mean(rewards[-5:]),
        baseline=rewards[0],
        baseline_name="the same model untrained",
        higher_is_better=True,
        correct=found >= least and untrained < 0.3,
        detail=f"responses as drawn, {recipe.batch_size} a step, in {seconds:.0f} s on one thread; "
        f"{found:.3f} of the likeliest responses to prompts that training never saw are wholly "
        f"right, {untrained:.3f} before",
        source=_SOURCE,
    )


def _against_transformers(repeats: int) -> list[Claim]:
    """Times generation and a GRPO step, ours and the baseline's, alternately on equal prompts."""
    from hybridflow.demo.baseline import PlainGRPO

    recipe = replace(read_recipe("grpo-sort"), steps=1000)
    with Workers.inline() as workers:
        ours = Run.set_up(recipe, workers)
        plain = PlainGRPO(ours)
        prompts = [ours.prompts(step) for step in range(2 + 2 * repeats)]
        is_same = plain.generates_as(prompts[0])
        drawn_ms = _in_turns(
            [
                lambda k: ours.algorithm.rollout(prompts[k], k).result(),
                lambda k: plain.generate(prompts[k]),
            ],
            repeats,
        )
        is_equal = plain.learns_as(prompts[1])
        step_ms = _in_turns(
            [
                lambda k: dict(ours.algorithm.learn(ours.algorithm.rollout(prompts[k], k))),
                lambda k: plain.step(prompts[k]),
            ],
            repeats,
        )
    common: dict[str, Any] = {"unit": "ms", "source": _SOURCE}
    return [
        Claim(
            name="256 responses to 32 prompts",
            **pair_turns(*drawn_ms),
            baseline_name="transformers' generate, the same model",
            correct=is_same,
            detail="medians in turns, one thread; likeliest tokens are the same",
            **common,
        ),
        Claim(
            name="a GRPO step of 256 responses, two updates",
            **pair_turns(*step_ms),
            baseline_name="a plain loop around the transformers model",
            correct=is_equal,
            detail="medians in turns, one thread; on the same responses both have gradients of the same norms",
            **common,
        ),
    ]


def _in_turns(runs: list[Callable[[int], Any]], repeats: int) -> list[list[float]]:
    """Milliseconds of each function's alternating calls, after one untimed call of each."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for run, taken in zip(runs, times, strict=True):
            begun = time.perf_counter()
            run(turn)
            if turn:
                taken.append(1e3 * (time.perf_counter() - begun))
    return times


def _draw(curves: dict[str, list[float]], path: Path, digits: str) -> None:
    figure = new_picture(3.0)
    axes = figure.subplots()
    for name, rewards in curves.items():
        axes.plot(rewards, color=_COLOURS[name], label=name, linewidth=1.6)
    axes.axhline(0.1, color="#999999", linewidth=0.8, linestyle=":")
    axes.text(25, 0.03, "a digit drawn evenly", color="#666666")
    axes.set_xlabel("training step, 256 responses each")
    axes.set_ylabel("digits at the right place")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path, f"A Llama made from nothing learns to sort {digits} digits")
