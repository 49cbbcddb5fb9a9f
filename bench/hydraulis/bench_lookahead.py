"""How much of a training step planning takes: one step ahead in a thread, and in line.

Two ranks with DDP train a Llama of 4 layers, hidden size 192, on Python's own source files, every 16th byte a
token, 4,096 tokens a rank at once, one thread a rank. What counts is how long the loop waits for its
next step; the first one has nothing to hide behind and is left out.
"""

import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import hydraulis as hy
from shared.claims import Claim
from shared.comms import Group, RankPool
from shared.comms.handicap import handicap

sys.path.insert(0, str(Path(__file__).parent))

from small_model import documents, make_model

CAP, TOKENS, STEPS = 4096, 32_768, 6
COMMAND = "hatch run bench hydraulis -k lookahead"
PEERS = [
    {
        "peer": "planning in line",
        "setting": "the same planner, called before each step",
        "why": "what looking ahead is there to hide",
    },
]


def run_steps():
    """Seconds of waiting for each step, of the loop's whole steps, of planning in line; losses; whether it learned."""
    torch.set_num_threads(1)
    texts = documents(CAP)
    lengths = np.array([len(text) for text in texts])
    model = make_model(CAP)
    engine = hy.Engine(model, partial(torch.optim.SGD, lr=1e-3), max_tokens=CAP)
    loader = hy.StepLoader(texts, engine, tokens_per_step=TOKENS, seed=Group.world().world_size)
    waited, spent, losses, plans = [], [], [], loader.steps(0)[1 : STEPS + 1]
    before = [one.detach().clone() for one in model.parameters()]
    steps = iter(loader)
    engine.step(next(steps))
    for _ in range(STEPS):
        begun = time.perf_counter()
        step = next(steps)
        middle = time.perf_counter()
        losses.append(engine.step(step).loss)
        waited.append(middle - begun)
        spent.append(time.perf_counter() - begun)
    in_line = []
    for indices in plans:
        begun = time.perf_counter()
        engine.plan(lengths[indices])
        in_line.append(time.perf_counter() - begun)
    has_learned = not any(map(torch.equal, before, model.parameters()))
    return waited, spent, in_line, losses, has_learned


@pytest.fixture(scope="module")
def two():
    with RankPool(2, prefix=[handicap(cores=[0]), handicap(cores=[1])]) as pool:
        yield pool


def bench_lookahead(two, benchmark, record_claim):
    results = benchmark.pedantic(
        lambda: two.run(run_steps, timeout=timedelta(minutes=10)).results, rounds=1
    )
    *timed, has_learned = results[0]
    waited, spent, in_line, losses = map(np.array, timed)
    shares, before = 100 * waited / spent, 100 * in_line / spent
    claims = (("the aim", 1.0, 1.0), ("planning in line", float(np.median(before)), None))
    for name, baseline, aim in claims:
        record_claim(
            Claim(
                name="share of a step that waits for its plan, one step ahead",
                unit="%",
                ours=float(np.median(shares)),
                baseline=baseline,
                baseline_name=name,
                higher_is_better=False,
                correct=bool(
                    has_learned and len(set(losses.tolist())) == STEPS and (waited >= 0).all()
                ),
                detail=f"{STEPS} steps of {TOKENS} tokens, {np.median(spent):.2f} s each; largest "
                f"{shares.max():.3g} %",
                source=COMMAND,
            ),
            aim=aim,
            spread=(baseline / float(shares.max()), baseline / max(float(shares.min()), 1e-9)),
        )
