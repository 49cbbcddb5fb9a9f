"""Where adaptive widths pay: an epoch's seconds and what is learnt, beside 4 and 2 bits for all.

Four hosts at 100 Mbit/s, a block model of 20,000 nodes cut at random, a 3-layer GCN of width 64. The
cases are even links; one thin pair of hosts, which get a tenth of the rate between them; all layers in
one problem (`scope="global"`), whose rounds share the time; and rows of uneven range, from a block
model with degrees over two decades and no normalisation between layers. Policies take turns in one
run; then each is trained to the end, over links without a limit, with the costs of these links, from
eight seeds; 2 bits and no messages from five. Adaptive widths pay where an epoch is shorter than with
4 bits and accuracy stays, or where accuracy is higher than with 2 bits at little more time. A row is correct where dropping all
messages loses 3 points or more, and accuracy with adaptive widths stays within 0.3 points of exact
messages by its 95 % interval; a row that says "accuracy not kept" promises no more than to lose less
than dropped messages by 3 points.
"""

import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import adaqp
from adaqp.training.comparison import compare_in_rank
from adaqp.training.config import ModelConfig, PolicyConfig
from shared.claims import Claim
from shared.comms import NetLab, RankPool, netlab

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from held_out_scores import gap, score_in_rank

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

PEERS = [
    {
        "peer": "4 and 2 bits for all",
        "setting": "stochastic rounding, overlapped, parameters in bfloat16, as for adaptive widths",
        "why": "the same code and wire format: only the choice of widths differs",
    },
]
HOSTS, RATE, THIN_RATE = 4, "100mbit", "10mbit"
EPOCHS, SEEDS, BLOCKS, LIMIT = 40, 8, 5, timedelta(minutes=28)
CONTROL = "all dropped"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is uneven, and how the planner is asked."""

    is_thin: bool = False
    scope: str = "layer"
    norm: str = "layer"
    keeps_accuracy: bool = True


CASES = {
    "even links": Case(),
    "one thin pair": Case(is_thin=True),
    "layers share a round": Case(scope="global", keeps_accuracy=False),
    "rows of uneven range": Case(norm="none"),
}


def uneven_sbm(num_nodes=20_000, blocks=20, degree=16, seed=0):
    """A block model whose nodes draw neighbours in proportion to log-normal activities."""
    rng = np.random.default_rng(seed)
    block = rng.permutation(num_nodes) % blocks
    share = rng.lognormal(0, 1.2, num_nodes)
    share /= share.sum()
    one, other = rng.choice(num_nodes, (2, num_nodes * degree // 2), p=share)
    is_inside = rng.random(len(one)) < 0.5
    for number in range(blocks):
        members = np.flatnonzero(block == number)
        wanted = np.flatnonzero(is_inside & (block[one] == number))
        weight = share[members] / share[members].sum()
        other[wanted] = rng.choice(members, len(wanted), p=weight)
    low, high = np.minimum(one, other), np.maximum(one, other)
    low, high = np.divmod(np.unique((low * num_nodes + high)[low < high]), num_nodes)
    centroids = rng.standard_normal((blocks, 64))
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    features = rng.standard_normal((num_nodes, 64)) + centroids[block]
    split = rng.random(num_nodes)
    return adaqp.from_edge_index(
        np.concatenate([low, high]),
        np.concatenate([high, low]),
        num_nodes,
        torch.from_numpy(features.astype(np.float32)),
        torch.from_numpy(block),
        *(
            torch.from_numpy(mask)
            for mask in (split < 0.6, split >= 0.8, (split >= 0.6) & (split < 0.8))
        ),
    )


@pytest.fixture(scope="module")
def task_of(tmp_path_factory):
    """Folder of a cut, and scores on it that no link changes, by norm; each is made once."""
    made = {}

    def make(norm):
        if norm not in made:
            graph = adaqp.data.hard_sbm(20_000) if norm == "layer" else uneven_sbm()
            folder = str(tmp_path_factory.mktemp(norm) / "parts")
            adaqp.partition(graph, HOSTS, method="random", out=folder)
            policies = {"exact": adaqp.Exact(), "2 bits for all": adaqp.Fixed(2)}
            made[norm] = folder, score(folder, norm, {**policies, CONTROL: adaqp.Drop()})
        return made[norm]

    return make


def score(folder, norm, policies, links=None):
    with RankPool(HOSTS, timeout=LIMIT) as pool:
        args = (folder, policies, EPOCHS, model_of(norm), SEEDS, links)
        return pool.run(score_in_rank, *args).results[0]


def model_of(norm):
    return ModelConfig(hidden=64, norm=norm)


@pytest.mark.parametrize("case", CASES)
def bench_adaptivity(benchmark, record_claim, task_of, case):
    setting = CASES[case]
    folder, scores = task_of(setting.norm)
    timed = {
        "4 bits for all": PolicyConfig(name="fixed", width=4),
        "2 bits for all": PolicyConfig(name="fixed", width=2),
        "adaptive": PolicyConfig(name="adaptive", scope=setting.scope),
    }
    with NetLab(hosts=HOSTS, rate=RATE) as lab:
        if setting.is_thin:
            make_thin(lab, 0, 1)
            make_thin(lab, 1, 0)
        with lab.pool(timeout=LIMIT) as pool:
            links = pool.run(links_in_rank, folder).results[0]
            args = (folder, model_of(setting.norm), list(timed.values()), BLOCKS, 1)
            found = benchmark.pedantic(
                lambda: pool.run(compare_in_rank, *args).results[0], rounds=1
            )
    timings = dict(zip(timed, found, strict=True))
    policy = timed["adaptive"].build()[0]
    scores = scores | score(folder, setting.norm, {"adaptive": policy}, links)
    told = {name: str(gap(scores, name)) for name in scores}
    for name, one in timings.items():
        benchmark.extra_info[f"{name}, an epoch"] = (
            f"{one.median_s:.3f} s ({min(one.epoch_s):.3f} - {max(one.epoch_s):.3f}), "
            f"{one.num_bytes / 1e6:.1f} MB"
        )
    benchmark.extra_info |= {f"{name}, accuracy less exact": text for name, text in told.items()}
    learnt, dropped = gap(scores, "adaptive"), gap(scores, CONTROL)
    is_kept = learnt.is_kept if setting.keeps_accuracy else learnt.mean > dropped.mean + 3
    mine = timings["adaptive"]
    for rival in ("4 bits for all", "2 bits for all"):
        theirs = timings[rival]
        ratios = [b / a for a, b in zip(mine.epoch_s, theirs.epoch_s, strict=True)]
        record_claim(
            Claim(
                name=f"{case}: adaptive epoch beside that of {rival}"
                + ("" if setting.keeps_accuracy else ", accuracy not kept"),
                unit="s an epoch",
                ours=mine.median_s,
                baseline=theirs.median_s,
                baseline_name=rival,
                higher_is_better=False,
                correct=is_kept and dropped.is_lost,
                detail="held-out accuracy less that of exact messages: adaptive "
                f"{told['adaptive']}, 2 bits for all {told['2 bits for all']}, {CONTROL} "
                f"{told[CONTROL]}",
            ),
            spread=(min(ratios), max(ratios)),
        )


def make_thin(lab, host, other):
    """Limits what a host sends to another one to the thin rate, beside the rate for all else."""
    limit = "burst 64kb latency 50ms"
    for line in (
        "qdisc replace dev veth0 root handle 1: htb default 10",
        "class add dev veth0 parent 1: classid 1:10 htb rate 1gbit",
        "class add dev veth0 parent 1: classid 1:20 htb rate 1gbit",
        f"qdisc add dev veth0 parent 1:10 handle 10: tbf rate {RATE} {limit}",
        f"qdisc add dev veth0 parent 1:20 handle 20: tbf rate {THIN_RATE} {limit}",
        f"filter add dev veth0 parent 1: protocol ip u32 match ip dst {lab.address(other)} flowid 1:20",
    ):
        subprocess.run([*lab.command(host), "tc", *line.split()], check=True, capture_output=True)


def links_in_rank(folder):
    """What the links cost, as a training run probes them."""
    return adaqp.load(folder).probe_links()
