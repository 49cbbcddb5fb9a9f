"""Bytes that a step moves between the optimizer's layout and a strategy's, and how fast.

Four ranks change strategy from step to step. What the ledger counts is compared with what must move, element
by element: a rank's parameters that it does not own, and every addend of a gradient that its owner did not
compute. The peer is gathering all parameters to all ranks and summing all gradients on all of them, as
replicated data parallelism over a sharded optimizer does. The rate is that of two hosts, one rank each, joined
by an emulated link of 1 Gbit/s, whose replicas hold all 58 million parameters each.
"""

import time
from datetime import timedelta
from functools import partial
from statistics import median

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import hydraulis as hy
from hydraulis.planner.replicas import ReplicaLayout, read_strategy
from hydraulis.runtime.replicas.exchange import LayoutExchange, connect_lanes
from hydraulis.runtime.replicas.optimizer_layout import OptimizerLayout
from hydraulis.runtime.replicas.shards import read_placements
from shared.claims import Claim
from shared.comms import Group, NetLab, RankPool, barrier, netlab
from shared.comms.handicap import handicap

STRATEGIES = ("tp2+tp1+tp1", "pp2+tp2", "tp4", "ring2ulysses2", "pp2ulysses2", "tp2+tp1")
LENGTHS = (30, 11, 25, 8, 19, 27)
ROUNDS = 5
COMMAND = "hatch run bench hydraulis -k layouts"
PEERS = [
    {
        "peer": "all parameters to all ranks",
        "setting": "every rank receives what it does not own, and sends owners all gradients; counted, not "
        "run",
        "why": "the bytes of ZeRO-3 with one gather a step, the least that equal replicas can do",
    },
    {
        "peer": "bytes over bandwidth",
        "setting": "1 Gbit/s of the emulated link, no header counted",
        "why": "nothing can be faster",
    },
]


def make_model(hidden, vocab):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=11 * hidden // 4,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def elements(box, shape):
    """Which elements of a tensor a box holds."""
    found = np.zeros(shape, dtype=bool)
    found[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = True
    return found if box.numel else np.zeros(shape, dtype=bool)


def must_move(placements, strategy, num_ranks):
    """Bytes that no exchange is below, parameters' and gradients', by definition, element by element."""
    shapes = read_strategy(strategy, cost=hy.Cost(a=1e-8, b=1e-5), max_tokens=64, num_layers=4)
    layout = ReplicaLayout(placements, shapes, 4, num_ranks)
    parameters = gradients = 0
    for one in placements:
        owned = [elements(box, one.shape) for box in layout.owned(one)]
        assert np.all(sum(mask.astype(int) for mask in owned) == 1)
        held = [elements(box, one.shape) for box in layout.held(one)]
        parameters += sum(int((h & ~o).sum()) for h, o in zip(held, owned, strict=True))
        given = [elements(box, one.shape) for box in layout.given(one)]
        gradients += sum(int((g & ~o).sum()) for g, o in zip(given, owned, strict=True))
    return 4 * parameters, 4 * gradients


def counted():
    """Of every strategy, bytes that this rank was to send and those that the ledger saw, and the loss."""
    torch.set_num_threads(1)
    model = make_model(64, 96)
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 96, (n,), generator=draw) for n in LENGTHS]
    found = []
    for strategy in STRATEGIES:
        engine = hy.Engine(
            make_model(64, 96), partial(torch.optim.SGD, lr=0.0), max_tokens=64, strategy=strategy
        )
        before = engine.group.ledger.snapshot()
        loss = engine.step(texts).loss
        traffic = engine.group.ledger.snapshot().diff(before).by_phase()
        moved = engine.moved_bytes(engine.plan(LENGTHS))
        planned = [of[engine.rank] for of in (moved.parameters, moved.gradients)]
        seen = [
            traffic[phase].sent_bytes if phase in traffic else 0
            for phase in ("parameters", "gradients")
        ]
        found.append((planned, seen, loss))
    return found, read_placements(model)


def bench_layouts_bytes(benchmark, record_claim):
    with RankPool(4, timeout=timedelta(minutes=5)) as pool:
        every = benchmark.pedantic(lambda: pool.run(counted).results, rounds=1)
    placements = every[0][1]
    whole = sum(4 * int(np.prod(one.shape)) for one in placements)
    least = [must_move(placements, one, 4) for one in STRATEGIES]
    seen = [
        [sum(rank[0][at][1][way] for rank in every) for way in range(2)]
        for at in range(len(STRATEGIES))
    ]
    planned = [
        [sum(rank[0][at][0][way] for rank in every) for way in range(2)]
        for at in range(len(STRATEGIES))
    ]
    losses = [rank[0][at][2] for rank in every for at in range(len(STRATEGIES))]
    is_right = (
        planned == seen and np.ptp(losses) < 1e-5 * losses[0] and losses[0] > 0 and min(map(min, seen)) > 0
    )  # fmt: skip
    told = "; ".join(
        f"{name} {sum(of) / 1e3:.0f} kB" for name, of in zip(STRATEGIES, seen, strict=True)
    )
    ours = sum(map(sum, seen))
    for name, baseline, aim in (
        ("what must move, element by element", sum(map(sum, least)), 1.0),
        ("all parameters to all ranks, all gradients to owners", 6 * 2 * 3 * whole, None),
    ):
        record_claim(
            Claim(
                name="bytes moved by steps of six strategies on 4 ranks, by the ledger", unit="kB",
                ours=ours / 1e3, baseline=baseline / 1e3, baseline_name=name, higher_is_better=False,
                correct=bool(is_right and [list(one) for one in least] == seen),
                detail=f"model of {whole / 1e3:.0f} kB; {told}; correct if each strategy's parameters and "
                f"gradients are what was planned and what must move, and all losses are one",
                source=COMMAND,
            ),
            aim=aim,
        )  # fmt: skip


def changed(rounds):
    """Seconds of moving parameters and of summing gradients, bytes that each rank sends, and whether right."""
    torch.set_num_threads(1)
    group = Group.world()
    model = make_model(1024, 8192)
    known = {name: one.detach().clone() for name, one in model.named_parameters()}
    placements = read_placements(model)
    shapes = read_strategy("tp1+tp1", cost=hy.Cost(a=1e-8, b=1e-5), max_tokens=64, num_layers=4)
    exchange = LayoutExchange(ReplicaLayout(placements, shapes, 4, group.world_size), group)
    layout = OptimizerLayout(model, group)
    connect_lanes(group)
    owned = layout.owned()
    gradients = {name: value * (group.rank + 1) for name, value in known.items()}
    moved = exchange.moved
    taken, is_right = {"parameters": [], "gradients": []}, True
    for _ in range(rounds + 1):
        barrier(group)
        begun = time.perf_counter()
        loaded = exchange.load(owned)
        loaded.wait(4)
        barrier(group)
        middle = time.perf_counter()
        sums = exchange.sum_gradients(gradients, owned)
        barrier(group)
        taken["gradients"].append(time.perf_counter() - middle)
        taken["parameters"].append(middle - begun)
        for name, value in known.items():
            is_right &= torch.equal(loaded.values[name], value)
            torch.testing.assert_close(sums[name], 3 * owned[name])
        del loaded, sums
    return {name: values[1:] for name, values in taken.items()}, moved, is_right


@pytest.mark.netns
def bench_layouts_rate(benchmark, record_claim):
    if reason := netlab.available():
        pytest.skip(reason)
    words = [handicap(cores=[0]), handicap(cores=[1])]
    with (
        NetLab(hosts=2, rate="1gbit") as lab,
        lab.pool(handicaps=words, timeout=timedelta(minutes=5)) as pool,
    ):
        before = [one.tx_bytes for one in lab.counters()]
        found = benchmark.pedantic(lambda: pool.run(changed, ROUNDS).results, rounds=1)
        sent = [one.tx_bytes - b for one, b in zip(lab.counters(), before, strict=True)]
        rate = lab.bytes_per_s
    _, moved, _ = found[0]
    total = sum(map(sum, (moved.parameters, moved.gradients))) * (ROUNDS + 1)
    for way in ("parameters", "gradients"):
        seconds = found[0][0][way]
        limit_s = max(getattr(moved, way)) / rate
        record_claim(
            Claim(
                name=f"{way} of 58 million between two hosts' layouts, 1 Gbit/s", unit="s",
                ours=median(seconds), baseline=limit_s, baseline_name="bytes over bandwidth",
                higher_is_better=False,
                correct=all(rank[2] for rank in found) and sum(sent) > total,
                detail=f"{max(getattr(moved, way)):,} bytes each way; spread {min(seconds):.2f} to "
                f"{max(seconds):.2f} s; all values as they must be; the hosts' links counted "
                f"{sum(sent) / total:.3f} of the planned bytes, headers among them",
                source=COMMAND,
            ),
            aim=0.9,
            spread=(limit_s / max(seconds), limit_s / min(seconds)),
        )  # fmt: skip
