"""`lancet.fuse` on dense gradients beside fixed buckets: measured on two hosts, and simulated to 64 ranks.

Three small models; a hook on each parameter says when its gradient is ready. Sums over ranks are timed on two
hosts at 100 Mbit/s and 1 Gbit/s, to which a latency and a rate are fitted. Measured: computation sleeps, sums
are real, ways take turns. Simulated: a ring on 2 to 64 ranks with the fitted latency and rate. Beside ours are
buckets of 1, 4 and 25 MB in the order in which gradients are ready, one bucket, and none.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch

import lancet
from lancet.runtime.reduction import PendingSum
from lancet.simulator import simulate
from shared.claims import Claim, pair_turns
from shared.comms import Group, NetLab, barrier, netlab
from shared.comms.handicap import handicap
from shared.topology import Link, fit_link

sys.path.insert(0, str(Path(__file__).parent))

from moe_jobs import Job, build, collect, typical

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

PEERS = [
    {
        "peer": "fixed buckets",
        "setting": "1, 4 and 25 MB, one bucket, and one a gradient; in the order in which gradients are ready",
        "why": "25 MB is DDP's default, 1 MB its first bucket; that order starts each as early as it can",
    },
]
RATES, TURNS, NUM_RANKS = ("100mbit", "1gbit"), 9, (2, 4, 8, 16, 32, 64)
BUCKETS_MB = (1, 4, 25)
PROBES = (4 << 10, 64 << 10, 512 << 10, 2 << 20)
"""Bytes of the sums by which a link is fitted."""
OURS, AGAIN, ONE, NONE = "ours", "ours again", "one bucket", "no buckets"
NOTABLE = 1.01
"""A gain worth counting."""
COMMAND = "hatch run bench lancet/fuse"

Groups = list[list[int]]


class Gradient(NamedTuple):
    """A gradient of a backward pass: seconds of computing that lead to it, and its bytes."""

    compute_s: float
    num_bytes: int


def build_gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 256, "n_embd": 192, "n_layer": 4, "n_head": 6, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def build_bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 256, "hidden_size": 192, "num_hidden_layers": 6}
    return BertForMaskedLM(BertConfig(**sizes, num_attention_heads=6, intermediate_size=768))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "Qwen3-MoE without experts": partial(build, Job(num_layers=4, expert_width=256)),
    "GPT-2": build_gpt2,
    "BERT": build_bert,
}


def list_gradients(name: str, num_passes: int = 5) -> list[Gradient]:
    """Gradients in the order in which they are ready; medians over passes."""
    torch.manual_seed(0)
    model = MODELS[name]()
    ready: list[tuple[str, float]] = []
    numbers = {n: w.numel() * 4 for n, w in model.named_parameters() if "experts" not in n}
    for key, weight in model.named_parameters():
        if key in numbers:
            weight.register_post_accumulate_grad_hook(
                lambda _w, key=key: ready.append((key, time.perf_counter()))
            )
    tokens = torch.randint(256, (4, 128))
    intervals: list[list[float]] = []
    for _ in range(1 + num_passes):
        loss = model(input_ids=tokens, labels=tokens).loss
        ready.clear()
        began = time.perf_counter()
        loss.backward()
        times = [began, *(seconds for _, seconds in ready)]
        intervals.append([b - a for a, b in pairwise(times)])
    typical_s = map(median, zip(*intervals[1:], strict=True))
    return [Gradient(s, numbers[key]) for s, (key, _) in zip(typical_s, ready, strict=True)]


def measure_link(group: Group, num_calls: int = 7) -> Link:
    """Latency and rate of a round of a ring over two ranks."""
    samples = []
    for num_bytes in PROBES:
        tensor, seconds = torch.zeros(num_bytes // 4), []
        for _ in range(num_calls):
            barrier(group)
            began = time.perf_counter()
            PendingSum(group, tensor, "probe").wait()
            seconds.append(time.perf_counter() - began)
        samples.append((num_bytes, median(seconds)))
    sum_link = fit_link(samples, is_quiet=True).link
    # A sum over two ranks has two rounds of half of the bytes.
    return Link(alpha_s=sum_link.alpha_s / 2, beta_s_per_byte=sum_link.beta_s_per_byte)


def list_ops(gradients: Sequence[Gradient], link: Link, num_ranks: int) -> list[lancet.Op]:
    """The backward pass as operations: computing, then the sum over a ring, for each gradient."""
    ops = []
    for i, gradient in enumerate(gradients):
        round_s = link.time_s(gradient.num_bytes / num_ranks)
        ops.append(lancet.Op(f"compute {i}", "compute", gradient.compute_s))
        ops.append(
            lancet.Op(f"sum {i}", "all_reduce", 2 * (num_ranks - 1) * round_s, (f"compute {i}",))
        )
    return ops


def cut_buckets(gradients: Sequence[Gradient], limit_bytes: float) -> Groups:
    """Buckets of neighbours of up to so many bytes, of one gradient at least."""
    groups: Groups = []
    filled_bytes = 0.0
    for i, gradient in enumerate(gradients):
        if not groups or filled_bytes + gradient.num_bytes > limit_bytes:
            groups.append([])
            filled_bytes = 0.0
        groups[-1].append(i)
        filled_bytes += gradient.num_bytes
    return groups


def list_rivals(gradients: Sequence[Gradient]) -> dict[str, Groups]:
    rivals = {f"buckets of {mb} MB": cut_buckets(gradients, mb * 1e6) for mb in BUCKETS_MB}
    return rivals | {ONE: [list(range(len(gradients)))], NONE: [[i] for i in range(len(gradients))]}


def fuse(gradients: Sequence[Gradient], link: Link, num_ranks: int) -> tuple[Groups, float]:
    """Our groups of sums and their replayed seconds."""
    latency_s = 2 * (num_ranks - 1) * float(link.alpha_s)
    fusion = lancet.fuse(list_ops(gradients, link, num_ranks), latency_s=latency_s)
    sums = [group for group in fusion.groups if group[0].startswith("sum")]
    return [[int(name.split()[1]) for name in group] for group in sums], fusion.makespan_s


def replay(gradients: Sequence[Gradient], groups: Groups, link: Link, num_ranks: int) -> float:
    """Seconds of a backward pass with these groups of sums."""
    own = list_ops(gradients, link, num_ranks)
    latency_s = 2 * (num_ranks - 1) * float(link.alpha_s)
    ops, computed = [], 0
    for number, group in enumerate(groups):
        stop = max(group) + 1
        ops += [own[2 * i] for i in range(computed, stop)]
        computed = max(computed, stop)
        seconds = sum(own[2 * i + 1].time_s for i in group) - latency_s * (len(group) - 1)
        after = tuple(f"compute {i}" for i in group)
        ops.append(lancet.Op(f"group {number}", "all_reduce", seconds, after))
    return simulate(ops).makespan_s


def run_groups(gradients: Sequence[Gradient], groups: Groups, group: Group) -> tuple[float, bool]:
    """Seconds of a backward pass that sleeps and really sums, and whether the sums are right."""
    buckets = [torch.ones(sum(gradients[i].num_bytes for i in own) // 4) for own in groups]
    last = {max(own): number for number, own in enumerate(groups)}
    pending = []
    barrier(group)
    began = now = time.perf_counter()
    for i, gradient in enumerate(gradients):
        now += gradient.compute_s
        # Sleeps end late, so each lasts until a time that does not move.
        time.sleep(max(now - time.perf_counter(), 0.0))
        if i in last:
            pending.append(PendingSum(group, buckets[last[i]], f"bucket {last[i]}"))
    sums = [each.wait() for each in pending]
    seconds = time.perf_counter() - began
    is_right = len(sums) == len(groups) and all(
        bool((each == group.world_size).all()) for each in sums
    )
    return seconds, is_right


class Measured(NamedTuple):
    """One rank's results; seconds by model, way and turn."""

    link: Link
    gradients: dict[str, list[Gradient]]
    seconds: dict[str, dict[str, list[float]]]
    is_right: bool


def run(num_turns: int) -> Measured:
    torch.set_num_threads(1)
    group = Group.world()
    (link, *_), is_right = collect(measure_link(group)), True
    gradients, seconds = {}, {}
    for name in MODELS:
        (gradients[name], *_) = collect(list_gradients(name))
        groups, _ = collect(fuse(gradients[name], link, group.world_size))[0]
        ways = {OURS: groups, AGAIN: groups, **list_rivals(gradients[name])}
        seconds[name] = {way: [] for way in ways}
        for turn in range(1 + num_turns):
            for way, own in ways.items():
                took_s, is_sum = run_groups(gradients[name], own, group)
                is_right = is_right and is_sum
                if turn:
                    seconds[name][way].append(took_s)
    return Measured(link, gradients, seconds, is_right)


@pytest.mark.parametrize("rate", RATES)
def bench_fuse(benchmark, record_claim, rate):
    words = [handicap(cores=[0]), handicap(cores=[1])]
    with (
        NetLab(hosts=2, rate=rate) as lab,
        lab.pool(handicaps=words, timeout=timedelta(minutes=5)) as pool,
    ):
        ranks = benchmark.pedantic(lambda: pool.run(run, TURNS).results, rounds=1)
    first = ranks[0]
    link = first.link
    fitted = f"a round takes {1e3 * link.alpha_s:.2f} ms and {8e-6 * link.bytes_per_s:.0f} Mbit/s, fitted"
    for name in MODELS:
        seconds = {
            way: [max(own) for own in zip(*(r.seconds[name][way] for r in ranks), strict=True)]
            for way in first.seconds[name]
        }
        record_measured(record_claim, name, rate, seconds, first, fitted)
    record_simulated(record_claim, rate, first, fitted)


def record_measured(
    record_claim: Any, name: str, rate: str, seconds: Mapping[str, list[float]], first: Measured, fitted: str
) -> None:  # fmt: skip
    gradients = first.gradients[name]
    rivals = [way for way in seconds if way not in (OURS, AGAIN)]
    best = min(rivals, key=lambda way: median(seconds[way]))
    compute_s = sum(g.compute_s for g in gradients)
    # A pass that neither slept nor sent would be shorter than both.
    sent_s = sum(g.num_bytes for g in gradients) * float(first.link.beta_s_per_byte)
    is_right = first.is_right and min(map(min, seconds.values())) > 0.9 * max(compute_s, sent_s)
    detail = (
        f"{len(gradients)} gradients of {sum(g.num_bytes for g in gradients) / 1e6:.1f} MB, computing sleeps "
        f"{compute_s:.3f} s; {fitted}; {TURNS} turns: "
        + ", ".join(f"{way} {typical(own)}" for way, own in seconds.items())
    )
    for ours, baseline, other in (
        (OURS, f"the fastest of fixed buckets: {best}", best),
        (AGAIN, "itself", OURS),
        *((OURS, way, way) for way in rivals),
    ):
        figures = pair_turns(seconds[ours], seconds[other])
        record_claim(
            Claim(
                name=f"backward pass, computing sleeps, {name}, two hosts, {rate}, {ours}", unit="s",
                baseline_name=baseline, correct=is_right, detail=detail,
                source=f"{COMMAND} -k {rate}", **figures,
            ),
            aim=1.0 if ours == OURS else None, spread=figures["ratio_range"],
        )  # fmt: skip


def record_simulated(record_claim: Any, rate: str, first: Measured, fitted: str) -> None:
    gains: dict[str, list[float]] = {}
    is_right, rows = True, []
    for name, gradients in first.gradients.items():
        for num_ranks in NUM_RANKS:
            groups, makespan_s = fuse(gradients, first.link, num_ranks)
            ours_s = replay(gradients, groups, first.link, num_ranks)
            is_right = is_right and abs(ours_s - makespan_s) < 1e-9
            for way, own in list_rivals(gradients).items():
                gain = replay(gradients, own, first.link, num_ranks) / ours_s
                gains.setdefault(way, []).append(gain)
            rows.append(f"{name} on {num_ranks}: {len(groups)} groups, {ours_s:.3f} s")
    for way, own in gains.items():
        num_faster = sum(gain >= NOTABLE for gain in own)
        record_claim(
            Claim(
                name=f"simulated backward pass on 2 to 64 ranks, {rate}", unit="of ours", ours=1.0,
                baseline=median(own), baseline_name=way, higher_is_better=False,
                correct=is_right and min(own) >= 1 - 1e-9, kind="simulated",
                detail=f"faster by 1 % or more in {num_faster} of {len(own)} cases, never slower: "
                f"{min(own) >= 1 - 1e-9}; {fitted}; " + "; ".join(rows),
                source=f"{COMMAND} -k {rate}",
            ),
            aim=1.0, spread=(min(own), max(own)),
        )  # fmt: skip
