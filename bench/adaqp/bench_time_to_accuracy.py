"""Seconds of training until a validation accuracy, at 100 Mbit/s: adaptive widths against the best rest.

A block model of 8,000 nodes, half of whose edges lead to other blocks, cut at random over four hosts.
The accuracy is what exact training reaches at two thirds of its epochs, less half a point. Policies
take turns epoch by epoch in one run; evaluation, exact for all, is not on the clock. Training on
local neighbours alone is the control: no row is correct if it reaches the accuracy too.
"""

import time
from datetime import timedelta
from statistics import median

import pytest
import torch

import adaqp
from shared.claims import Claim
from shared.comms import Group, NetLab, all_reduce, barrier, netlab

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

CONTROL = "all dropped"
POLICIES = {
    "exact": adaqp.Exact(),
    "stale": adaqp.Stale(),
    "4 bits for all": adaqp.Fixed(4),
    "2 bits for all": adaqp.Fixed(2),
    "adaptive": adaqp.Adaptive(),
    "adaptive with lam 0.2": adaqp.Adaptive(lam=0.2),
    CONTROL: adaqp.Drop(),
}
RIVALS = ("exact", "stale", "4 bits for all", "2 bits for all")
PEERS = [
    {
        "peer": "exact",
        "setting": "float32, ring rounds, hidden behind the aggregation of local edges",
        "why": "never slower than without overlap; links are probed before the clock starts",
    },
    {
        "peer": "stale",
        "setting": "exact rows and gradients of the step before (PipeGCN), without smoothing",
        "why": "hides all sending; its gradients are biased, and it may not reach the accuracy",
    },
    {
        "peer": "4 and 2 bits for all",
        "setting": "stochastic rounding, overlapped, parameters in bfloat16, as for adaptive widths",
        "why": "the same code and wire format; the fastest of all rivals is the baseline",
    },
]
EPOCHS, EVERY, SEEDS = 45, 3, 3


def bench_time_to_accuracy(benchmark, record_claim, tmp_path):
    adaqp.partition(adaqp.data.hard_sbm(8_000), 4, method="random", out=tmp_path / "parts")
    with NetLab(hosts=4, rate="100mbit") as lab, lab.pool(timeout=timedelta(minutes=28)) as pool:
        curves = benchmark.pedantic(
            lambda: pool.run(train_in_rank, str(tmp_path / "parts")).results[0], rounds=1
        )
    reached = {name: [] for name in POLICIES}
    for seed in range(SEEDS):
        exact = curves["exact"][seed]
        target = exact[2 * len(exact) // 3][1] - 0.005
        for name in POLICIES:
            hits = [s for s, accuracy in curves[name][seed] if accuracy >= target]
            reached[name].append(min(hits, default=float("inf")))
    for name, seconds in reached.items():
        best = max(accuracy for curve in curves[name] for _, accuracy in curve)
        benchmark.extra_info[name] = (
            f"{median(seconds):.1f} s ({min(seconds):.1f} - {max(seconds):.1f}), best {best:.4f}"
        )
    rival = min(RIVALS, key=lambda name: median(reached[name]))
    told = ", ".join(f"{name} {median(reached[name]):.1f} s" for name in RIVALS)
    is_needed = min(reached[CONTROL]) == float("inf")
    for name in ("adaptive", "adaptive with lam 0.2"):
        ratios = [b / a for a, b in zip(reached[name], reached[rival], strict=True)]
        record_claim(
            Claim(
                name=f"100mbit, 4 hosts: time to equal validation accuracy, {name}",
                unit="s",
                ours=median(reached[name]),
                baseline=median(reached[rival]),
                baseline_name=f"the best of {', '.join(RIVALS)}",
                higher_is_better=False,
                correct=max(reached[name]) < float("inf") and is_needed,
                detail=f"{SEEDS} seeds, every one reached the accuracy, and none that dropped all "
                f"messages; {told}",
            ),
            aim=1.2,
            spread=(min(ratios), max(ratios)),
        )


def train_in_rank(folder):
    """{policy: [curve of each seed]}, a curve being (seconds trained, validation accuracy)."""
    dg = adaqp.load(folder)
    links = dg.probe_links()
    curves = {name: [] for name in POLICIES}
    for seed in range(SEEDS):
        runs = {}
        for name, policy in POLICIES.items():
            torch.manual_seed(seed)
            model = adaqp.nn.gcn(dg, [dg.feat.shape[1], 128, 128, dg.num_classes])
            messages = adaqp.Messages(dg, policy, seed=seed, links=links)
            with dg.using(messages):
                optimizer = torch.optim.Adam(model.parameters(), 1e-2)
                trainer = adaqp.Trainer(dg, model, optimizer, seed=seed)
            runs[name] = (trainer, messages, [0.0], [])
        for _ in range(0, EPOCHS, EVERY):
            for name, (trainer, messages, clock, curve) in runs.items():
                with dg.using(messages):
                    barrier(Group.world())
                    start = time.perf_counter()
                    trainer.fit(EVERY)
                    messages.settle()
                    spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                    all_reduce(Group.world(), spent, "max")
                    clock[0] += float(spent)
                    # The control is tested without messages too, as it was trained.
                    widths = (0, 32) if name == CONTROL else (32,)
                    curve.append((clock[0], max(accuracy(dg, trainer, bits) for bits in widths)))
        for name, (_, _, _, curve) in runs.items():
            curves[name].append(curve)
    return curves


def accuracy(dg, trainer, bits):
    """Share of all ranks' validation nodes that are labelled right with messages of `bits` bits."""
    right = trainer.predict(bits=bits)[dg.val_mask].argmax(1) == dg.label[dg.val_mask]
    counts = torch.tensor([float(right.sum()), float(right.numel())], dtype=torch.float64)
    all_reduce(Group.world(), counts)
    return float(counts[0] / counts[1])
