"""The backend's groups of all-reduces beside fixed buckets: measured on two hosts, and simulated to 64 ranks.

Three small models; a hook on each parameter says when its gradient is ready. Measured at 100 Mbit/s and 1 Gbit/s:
a graph whose computation sleeps until each gradient is there, and then really packs, sums and averages. The
package's executor runs it in all ways, which take turns; ours is planned with the times of its first run.
Simulated: `lancet.fuse` for a ring on 2 to 64 ranks, with a latency and a rate fitted to sums on the two hosts.
Beside ours are buckets of 1, 4 and 25 MB in the order in which gradients are ready, one bucket, and none.
"""

import math
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
from torch import fx

import lancet
from lancet.graph.capture import CapturedGraph
from lancet.graph.fused_sums import list_sum_dtypes
from lancet.graph.operations import LaunchOrder
from lancet.graph.rewrite import average_outputs
from lancet.planner.all_reduces import list_averages_last
from lancet.planner.groups import contract_groups
from lancet.planner.plan import Sums, make_plan
from lancet.runtime.executor import PLANNED, GraphExecutor
from lancet.runtime.reduction import PendingSum
from lancet.simulator import simulate
from shared.claims import Claim, pair_turns
from shared.comms import Group, NetLab, barrier, netlab
from shared.comms.handicap import handicap
from shared.topology import Link, fit_link

sys.path.insert(0, str(Path(__file__).parent))

from moe_jobs import Job, build, collect, share_ops, typical

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

Groups = tuple[tuple[str, ...], ...]
"""Names of the sums of each group of two or more."""


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


def cut_buckets(gradients: Sequence[Gradient], sums: Sequence[str], limit_bytes: float) -> Groups:
    """Buckets of neighbours of up to so many bytes, of one gradient at least."""
    buckets: list[list[str]] = []
    filled_bytes = 0.0
    for gradient, name in zip(gradients, sums, strict=True):
        if not buckets or filled_bytes + gradient.num_bytes > limit_bytes:
            buckets.append([])
            filled_bytes = 0.0
        buckets[-1].append(name)
        filled_bytes += gradient.num_bytes
    return tuple(tuple(bucket) for bucket in buckets if len(bucket) > 1)


def list_rivals(gradients: Sequence[Gradient], sums: Sequence[str]) -> dict[str, Groups]:
    sizes = {f"buckets of {mb} MB": mb * 1e6 for mb in BUCKETS_MB} | {ONE: math.inf, NONE: 0.0}
    return {way: cut_buckets(gradients, sums, limit_bytes) for way, limit_bytes in sizes.items()}


class SleepingPass:
    """A backward pass that the package's executor runs: computing sleeps, all-reduces and averages are real."""

    def __init__(self, gradients: Sequence[Gradient], group: Group) -> None:
        self._group = group
        self._values = [torch.full((g.num_bytes // 4,), 1.0 + group.rank) for g in gradients]
        self._late_s = 0.0
        graph = fx.Graph()
        previous = graph.placeholder("start")
        results = []
        for i, gradient in enumerate(gradients):
            previous = graph.call_function(self._compute, (i, gradient.compute_s, previous))
            previous.meta["val"] = self._values[i]
            results.append(previous)
        graph.output(tuple(results))
        name = group.checked().group_name
        average_outputs(graph, range(len(gradients)), group.world_size, name)
        self._dtypes = list_sum_dtypes(graph, name)
        captured = CapturedGraph(fx.GraphModule({}, graph), "backward", {})
        self._executor = GraphExecutor(
            captured, group, "sleeping", lambda _: None, lambda _: None, self._plan, lambda *_: True
        )
        self.run(PLANNED)
        order = tuple(op.name for op in list_averages_last(self._executor.list_ops()))
        for way, groups in list_rivals(gradients, list(self._dtypes)).items():
            self._executor.add_order(way, LaunchOrder(order, groups))

    def run(self, way: str) -> tuple[float, bool]:
        """Seconds of a pass, and whether its averages are right."""
        self._executor.order_name = way
        barrier(self._group)
        began = time.perf_counter()
        means = self._executor.run([torch.zeros(1)])
        seconds = time.perf_counter() - began
        return seconds, all(bool((m == (1 + self._group.world_size) / 2).all()) for m in means)

    def _compute(self, i: int, seconds: float, _previous: torch.Tensor) -> torch.Tensor:
        # Sleeps end late: the next one is as much shorter.
        self._late_s = self._late_s if i else 0.0
        began = time.perf_counter()
        time.sleep(max(seconds - self._late_s, 0.0))
        self._late_s += time.perf_counter() - began - seconds
        return self._values[i]

    def _plan(self, executor: GraphExecutor) -> LaunchOrder:
        """The groups that the backend would choose, those of rank 0."""
        latency_s = min(collect(executor.sum_latency_s))
        sums = Sums(latency_s=latency_s, dtypes=self._dtypes, num_ranks=self._group.world_size)
        plan = make_plan("backward", "", torch.__version__, share_ops(executor), [], None, sums)
        launches = collect(plan.launches)[0]
        for way in (OURS, AGAIN):
            executor.add_order(way, launches)
        return launches


def fuse(ops: Sequence[lancet.Op], link: Link, num_ranks: int) -> tuple[Groups, float]:
    """Our groups of sums and their replayed seconds."""
    latency_s = 2 * (num_ranks - 1) * float(link.alpha_s)
    fusion = lancet.fuse(ops, latency_s=latency_s)
    return tuple(group for group in fusion.groups if len(group) > 1), fusion.makespan_s


def replay(ops: Sequence[lancet.Op], groups: Groups, link: Link, num_ranks: int) -> float:
    """Seconds of a backward pass with these groups of sums."""
    latency_s = 2 * (num_ranks - 1) * float(link.alpha_s)
    launches = LaunchOrder(tuple(op.name for op in ops), groups)
    return simulate(contract_groups(ops, launches, latency_s)).makespan_s


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
        backward = SleepingPass(gradients[name], group)
        seconds[name] = {way: [] for way in (OURS, AGAIN, *list_rivals([], []))}
        for turn in range(1 + num_turns):
            for way, own in seconds[name].items():
                took_s, is_mean = backward.run(way)
                is_right = is_right and is_mean
                if turn:
                    own.append(took_s)
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
            ops = list_ops(gradients, first.link, num_ranks)
            sums = [op.name for op in ops if op.kind == "all_reduce"]
            groups, makespan_s = fuse(ops, first.link, num_ranks)
            ours_s = replay(ops, groups, first.link, num_ranks)
            is_right = is_right and abs(ours_s - makespan_s) < 1e-9
            for way, own in list_rivals(gradients, sums).items():
                gain = replay(ops, own, first.link, num_ranks) / ours_s
                gains.setdefault(way, []).append(gain)
            num_sums = len(sums) - sum(len(group) - 1 for group in groups)
            rows.append(f"{name} on {num_ranks}: {num_sums} sums, {ours_s:.3f} s")
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
