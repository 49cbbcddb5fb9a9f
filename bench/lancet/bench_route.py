"""Slots of tokens within their experts on one core, against torch: a sort by expert.

Ours and its rivals run in turns on the same input, results compared in the same function. The
calling thread's own processor time is counted, so that other programs change nothing.
"""

import time
from itertools import pairwise
from statistics import median

import pytest
import torch

from shared.claims import Claim
from shared.kernels.route import route

PEERS = [
    {
        "peer": "torch, slots of tokens",
        "setting": "stable sort of 8-bit keys, then positions less each expert's start; "
        "and the same of 64-bit keys",
        "why": "the narrowest keys sort fastest; one-hot rows and their sums took a hundred times as long",
    },
]
NUM_TOKENS, K, NUM_EXPERTS = 64 << 10, 2, 64
TURNS, CALLS = 15, 20


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def slots_by_sort(experts, keys):
    """Slots and counts: what torch's own operations need, in the fewest passes that we know."""
    order = torch.sort(keys, stable=True).indices
    counts = torch.bincount(experts.view(-1), minlength=NUM_EXPERTS)
    starts = counts.cumsum(0) - counts
    slots = torch.empty(len(keys), dtype=torch.int64)
    slots[order] = torch.arange(len(keys)) - starts.repeat_interleave(counts)
    return slots.view(experts.shape), counts


def seconds_of(function):
    start = time.thread_time()
    for _ in range(CALLS):
        function()
    return (time.thread_time() - start) / CALLS


def skewed_experts(skew):
    """Choices of experts: of a random router, or of one that prefers few experts."""
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=g)
    scores += skew * torch.rand(NUM_EXPERTS, generator=g)
    return scores.topk(K).indices


@pytest.mark.parametrize(("kind", "skew"), [("even", 0.0), ("skewed", 1.0)])
def bench_route(benchmark, record_claim, kind, skew):
    experts = skewed_experts(skew)
    ways = {
        "ours": lambda: route(experts, NUM_EXPERTS),
        "8-bit keys": lambda: slots_by_sort(experts, experts.view(-1).to(torch.uint8)),
        "64-bit keys": lambda: slots_by_sort(experts, experts.view(-1)),
    }
    results = [way() for way in ways.values()]
    correct = all(
        torch.equal(ours, theirs)
        for first, second in pairwise(results)
        for ours, theirs in zip(first, second, strict=True)
    )
    seconds = {name: [] for name in ways}

    def turn():
        for name, way in ways.items():
            seconds[name].append(seconds_of(way))

    benchmark.pedantic(turn, rounds=TURNS, warmup_rounds=1)
    times = {name: each[1:] for name, each in seconds.items()}
    rival = min(("8-bit keys", "64-bit keys"), key=lambda name: median(times[name]))
    ratios = sorted(theirs / ours for ours, theirs in zip(times["ours"], times[rival], strict=True))
    ours, baseline = (median(times[name]) * 1e3 for name in ("ours", rival))
    counts = results[0][1]
    record_claim(
        Claim(
            name=f"slots of tokens, {kind} routing, one core",
            unit="ms",
            ours=ours,
            baseline=baseline,
            baseline_name="torch, stable sort by expert",
            higher_is_better=False,
            correct=correct,
            detail=f"{NUM_TOKENS:,} tokens, k = {K}, {NUM_EXPERTS} experts with {int(counts.min()):,} to "
            f"{int(counts.max()):,} choices; {rival} sorted fastest; all ways' slots equal",
            source="hatch run bench lancet -k route",
        ),
        aim=5.0,
        spread=(ratios[0], ratios[-1]),
    )
