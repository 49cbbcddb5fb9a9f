"""Degrees that follow the documents, beside one degree for all, on two hosts of an emulated network.

A sixth of the tokens lie in documents that one rank cannot hold: with one degree for all, every document lies
over both ranks, by ring attention that overlaps its messages, or by Ulysses; with degrees by micro-batch
only those do. Documents are Python's own source files, every 16th byte a token; a rank holds 2,048 of
them. The model is a Llama of 4 layers, hidden size 192, float32, one thread a rank. All compute the same
steps in turns, with the same weights; gradients go over the same network in each.
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
from shared.comms import Group, NetLab, barrier, netlab
from shared.comms.handicap import handicap

sys.path.insert(0, str(Path(__file__).parent))

from small_model import agreed_cost, documents, make_model

CAP, TOKENS, STEPS, TURNS = 2048, 24_576, 2, 3
HIDDEN, LAYERS = 192, 4
LONG_SHARE = 1 / 6
COMMAND = "hatch run bench hydraulis -k context"
PEERS = [
    {
        "peer": "ring",
        "setting": "every document over both ranks, head and tail of each on one; messages behind "
        "computation; the same engine",
        "why": "the only degree that holds all documents, as Megatron's static context parallelism",
    },
    {
        "peer": "Ulysses",
        "setting": "every document over both ranks, heads exchanged for tokens; the same engine",
        "why": "fewer bytes than a ring here, though nothing hides them",
    },
]


def thinned():
    """All that two ranks hold, long ones thinned to a sixth of the tokens."""
    texts = documents(2 * CAP)
    long = [text for text in texts if len(text) > CAP]
    short = [text for text in texts if len(text) <= CAP]
    room = sum(map(len, short)) * LONG_SHARE / (1 - LONG_SHARE)
    kept = np.cumsum([len(text) for text in long]) <= room
    return short + [text for text, is_kept in zip(long, kept, strict=True) if is_kept]


def run_all(bytes_per_s):
    """Seconds and losses by strategy and step, tokens, and the share of them in long documents."""
    torch.set_num_threads(1)
    group, texts = Group.world(), thinned()
    lengths = np.array([len(text) for text in texts])
    # A ring of two sends keys and values forward, those and their gradients backward, of half the tokens.
    message_s = LAYERS * 6 * HIDDEN * 4 / 2 / bytes_per_s
    settings = {"max_tokens": CAP, "cost": agreed_cost(CAP), "message_s": message_s}
    sgd = partial(torch.optim.SGD, lr=0.0)  # all see the same weights
    engines = {
        "hydraulis": hy.Engine(make_model(2 * CAP), sgd, **settings),
        "ring": hy.Engine(make_model(2 * CAP), sgd, strategy="cp2", **settings),
        "Ulysses": hy.Engine(make_model(2 * CAP), sgd, strategy="ulysses2", **settings),
    }
    loader = hy.StepLoader(texts, engines["hydraulis"], tokens_per_step=TOKENS, seed=0)
    steps = loader.steps(0)[:STEPS]
    seconds = {name: [] for name in engines}
    losses = {name: [] for name in engines}
    names = list(engines)
    for turn in range(TURNS + 1):
        for indices in steps:
            own = [torch.frombuffer(bytearray(texts[i]), dtype=torch.uint8) for i in indices]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                barrier(group)
                begun = time.perf_counter()
                loss = engines[name].step(own).loss
                barrier(group)
                if turn:
                    seconds[name].append(time.perf_counter() - begun)
                    losses[name].append(loss)
    taken = lengths[np.concatenate(steps)]
    return seconds, losses, int(taken.sum()), float(taken[taken > CAP].sum() / taken.sum())


@pytest.mark.parametrize(
    ("rate", "bytes_per_s", "aim"),
    [("100mbit", 12.5e6, 2.0), ("200mbit", 25e6, 1.4), ("1gbit", 125e6, 1.0)],
    ids=["100 Mbit/s", "200 Mbit/s", "1 Gbit/s"],
)
def bench_context_degrees(benchmark, record_claim, request, rate, bytes_per_s, aim):
    if reason := netlab.available():
        pytest.skip(reason)
    words = [handicap(cores=[0]), handicap(cores=[1])]
    with (
        NetLab(hosts=2, rate=rate) as lab,
        lab.pool(handicaps=words, timeout=timedelta(minutes=10)) as pool,
    ):
        results = benchmark.pedantic(
            lambda: pool.run(run_all, bytes_per_s, timeout=timedelta(minutes=20)).results, rounds=1
        )
    seconds, losses, tokens, long_share = results[0]
    turns = {
        name: np.array(values).reshape(TURNS, STEPS).sum(1) for name, values in seconds.items()
    }
    known = np.array(losses["hydraulis"])
    for name in ("ring", "Ulysses"):
        ratios = turns[name] / turns["hydraulis"]
        is_right = bool(np.allclose(losses[name], known, rtol=1e-4) and known.std() > 0)
        record_claim(
            Claim(
                name=f"tokens/s of training, 2 hosts, {request.node.callspec.id}: degrees by micro-batch",
                unit="tokens/s",
                ours=tokens / float(np.median(turns["hydraulis"])),
                baseline=tokens / float(np.median(turns[name])),
                baseline_name=f"{name} of two ranks for all documents",
                higher_is_better=True,
                correct=is_right,
                detail=f"{STEPS} steps, {tokens} tokens, {long_share:.0%} of them in documents that one "
                f"rank cannot hold, {TURNS} turns; losses equal to 1e-4",
                source=COMMAND,
            ),
            aim=aim,
            spread=(float(ratios.min()), float(ratios.max())),
        )
