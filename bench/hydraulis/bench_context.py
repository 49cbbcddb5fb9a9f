"""Degrees that follow the documents, beside one degree for all, on two hosts of an emulated network.

A sixth of the tokens lie in documents that one rank cannot hold: with one degree for all, every document lies
over both ranks, by ring attention that overlaps its messages, or by Ulysses; with degrees by micro-batch
only those do. Documents are Python's own source files, every 16th byte a token; a rank holds 2,048 of
them. The model is a Llama of 4 layers, hidden size 192, float32, one thread a rank. All compute the same
step in turns, with the same weights; gradients go over the same network in each.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import hydraulis as hy
from shared.claims import Claim
from shared.comms import Group, NetLab, barrier, netlab
from shared.comms.handicap import handicap

sys.path.insert(0, str(Path(__file__).parent))

from small_model import (
    SumOfGradients,
    agreed_cost,
    by_one_process,
    documents,
    make_model,
    relative_error,
)

CAP, TOKENS, TURNS = 2048, 16_384, 3
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


def a_step(lengths):
    """Documents of a step of a shuffle: the one whose share in long documents is nearest to a sixth."""
    order = np.random.default_rng(0).permutation(len(lengths))
    ends = np.cumsum(lengths[order])
    steps = np.split(order, np.searchsorted(ends, TOKENS * np.arange(1, ends[-1] // TOKENS)) + 1)

    def share(step):
        return lengths[step][lengths[step] > CAP].sum() / lengths[step].sum()

    return min(steps[:-1], key=lambda step: abs(share(step) - LONG_SHARE)).tolist()


def run_all(bytes_per_s):
    """By way: seconds of each turn, largest error; tokens, and the share of them in long documents."""
    torch.set_num_threads(1)
    group, texts = Group.world(), thinned()
    texts = [texts[i] for i in a_step(np.array([len(text) for text in texts]))]
    lengths = np.array([len(text) for text in texts])
    known_loss, known_gradients = by_one_process(make_model(2 * CAP), texts)
    # A ring of two sends keys and values forward, those and their gradients backward, of half the tokens.
    message_s = LAYERS * 6 * HIDDEN * 4 / 2 / bytes_per_s
    settings = {"max_tokens": CAP, "cost": agreed_cost(CAP), "message_s": message_s}
    engines = {
        name: hy.Engine(make_model(2 * CAP), SumOfGradients, strategy=strategy, **settings)
        for name, strategy in (("hydraulis", None), ("ring", "cp2"), ("Ulysses", "ulysses2"))
    }
    seconds = {name: [] for name in engines}
    errors = dict.fromkeys(engines, 0.0)
    names, num_losses = list(engines), int((lengths - 1).sum())
    own = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts]
    for turn in range(TURNS + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            optimizer = engines[name].optimizer
            optimizer.weight = float(num_losses)
            barrier(group)
            begun = time.perf_counter()
            loss = engines[name].step(own).loss
            barrier(group)
            if turn:
                seconds[name].append(time.perf_counter() - begun)
            error = relative_error(optimizer.taken(), known_gradients)
            errors[name] = max(errors[name], error, abs(loss * num_losses / known_loss - 1))
    return seconds, errors, int(lengths.sum()), float(lengths[lengths > CAP].sum() / lengths.sum())


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
    seconds, errors, tokens, long_share = results[0]
    turns = {name: np.array(values) for name, values in seconds.items()}
    for name in ("ring", "Ulysses"):
        ratios = turns[name] / turns["hydraulis"]
        record_claim(
            Claim(
                name=f"tokens/s of training, 2 hosts, {request.node.callspec.id}: degrees by micro-batch",
                unit="tokens/s",
                ours=tokens / float(np.median(turns["hydraulis"])),
                baseline=tokens / float(np.median(turns[name])),
                baseline_name=f"{name} of two ranks for all documents",
                higher_is_better=True,
                correct=max(errors["hydraulis"], errors[name]) <= 1e-4,
                detail=f"a step of {tokens} tokens, {long_share:.0%} of them in documents that one rank cannot "
                f"hold; {TURNS} turns, ours {turns['hydraulis'].min():.2f} to {turns['hydraulis'].max():.2f} s; "
                f"losses and gradients equal those of documents one by one to {max(errors.values()):.1g}",
                source=COMMAND,
            ),
            aim=aim,
            spread=(float(ratios.min()), float(ratios.max())),
        )
