"""Weights from training's layout to generation's, on real ranks and real networks.

Inside one host: 1-4-2 to 1-2 on eight ranks, ours beside an all-gather over training's TP x PP group,
as frameworks without generation groups do; both move the same model, by the same rounds, and torch's
own all-gather stands beside. Between two hosts, joined by an emulated link of 1 Gbit/s: the same
pair, of which no byte may cross; and disjoint pools, one on each host, whose bytes all cross and are
held against the link's rate.

What weights and messages take at once is read from the kernel, on each rank: the most that was
resident during moves there and back, less what was there before beside training's shard.
"""

import ctypes
import gc
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch

from hybridflow.models import pieces
from hybridflow.models.config import read_config
from hybridflow.models.decoder import Decoder, Shard
from hybridflow.reshard.planner import find_held_boxes, find_wanted_boxes, plan
from hybridflow.reshard.transition import Transition
from hybridflow.reshard.vote import VOTE
from hybridflow.workers.batch.layout import Layout, generation_groups
from shared.claims import Claim
from shared.comms import Group, NetLab, RankPool, all_gather_into, reshard

MODEL = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
TRAIN, GENERATE = "1-4-2", "1-2"
ROUNDS = 8
WARM_UP = 3  # turns until the heap has its size: before, fresh pages weigh more than messages
COMMAND = "hatch run bench hybridflow -k reshard"
PEERS = [
    {
        "peer": "all-gather over training's TP group",
        "setting": "our own rounds, all weights of a layer in one call, outputs let go at once",
        "why": "the same transport as ours, so that what differs is what is moved; a call a layer "
        "packs small weights together",
    },
    {
        "peer": "torch's all-gather",
        "setting": "all_gather_into_tensor over gloo, a weight at a time, output made before",
        "why": "the collective that frameworks call, in the form that copies least",
    },
    {
        "peer": "bytes over bandwidth",
        "setting": "1 Gbit/s of the emulated link, no header counted",
        "why": "nothing can be faster",
    },
]


def setup(world):
    """This rank's decoders, its micro-DP and TP groups, and the transition between them."""
    config, layout = read_config(MODEL), Layout.parse(TRAIN)
    groups = generation_groups(layout, GENERATE)
    training = Decoder(config, Shard(config, 0, 1, layout.coordinates(world.rank)[1], layout.tp))
    pieces.initialize(training, 0)
    at = groups.coordinates(world.rank)
    generation = Decoder(config, Shard(config, 0, 1, at.tp, groups.tp_size), device="meta")
    mine = {}
    for name, found in (("micro", groups.micro_dp), ("tp", layout.groups("tp"))):
        for ranks in found:
            group = Group.of(ranks)
            if world.rank in ranks:
                mine[name] = (group, ranks)
    group, members = mine["micro"]
    move = Transition(
        training, generation,
        [find_held_boxes(config, layout, rank) for rank in members],
        [find_wanted_boxes(config, groups, rank) for rank in members],
        group, bucket_bytes=8 << 20,
    )  # fmt: skip
    return move, training, generation, mine["tp"][0], members


def gathered(model, group, gather):
    """Every weight of the model on every rank, a layer at a time, each let go at once."""
    for weights in ([model.embedding], *(list(layer.parameters()) for layer in model.layers),
                    [model.head]):  # fmt: skip
        # Norms are whole on every rank.
        cut = [weight.data.flatten() for weight in weights if weight.dim() > 1]
        gather(group, [(torch.empty(group.world_size * len(part)), part) for part in cut])


def gather_by_torch(group, gathers):
    """The collective that frameworks call, a weight at a time."""
    for out, part in gathers:
        torch.distributed.all_gather_into_tensor(out, part, group=group.checked())


GATHERS = {"all-gather": all_gather_into, "torch's all-gather": gather_by_torch}


def is_gathered_alike(model, group):
    """Whether both ways of the baseline gather the same."""
    parts = [weight.data.flatten() for weight in model.layers[0].parameters() if weight.dim() > 1]
    found = []
    for gather in GATHERS.values():
        outs = [torch.empty(group.world_size * len(part)) for part in parts]
        gather(group, list(zip(outs, parts, strict=True)))
        found.append(outs)
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def moved(rounds):
    """On each rank: seconds of both ways, bytes planned and counted, and memory."""
    world = Group.world()
    move, training, generation, tp, members = setup(world)
    reference = Decoder(training.config, generation.shard)
    pieces.initialize(reference, 0)
    taken = {way: [] for way in ("ours", *GATHERS)}
    counted, is_right = None, is_gathered_alike(training, tp)
    for turn in range(WARM_UP + rounds):
        for way, seconds in taken.items():
            before = world.ledger.snapshot()
            torch.distributed.barrier()
            begun = time.perf_counter()
            if way == "ours":
                move.to_generation()
            else:
                gathered(training, tp, GATHERS[way])
            spent = time.perf_counter() - begun
            # Who is ready first would otherwise compare and move back while others are timed.
            torch.distributed.barrier()
            if turn >= WARM_UP:
                seconds.append(spent)
            if way == "ours":
                cells = world.ledger.snapshot().diff(before).cells.items()
                counted = sum(cell.received_bytes for key, cell in cells if key[2] != VOTE)
                for ours, right in zip(
                    generation.parameters(), reference.parameters(), strict=True
                ):
                    is_right &= torch.equal(ours, right)
                move.to_training()
    planned = move.plan.received_bytes[members.index(world.rank)]
    return taken, planned, counted, is_right


def resident_bytes(field):
    """What the kernel says of this process: VmRSS now, VmHWM at most so far."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def resident(rounds):
    """On each rank: bytes of both shards, the most resident during moves, and the most counted."""
    move, *_ = setup(Group.world())
    torch.distributed.barrier()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what drawing the weights has left behind
    of_training = move.training.live_bytes
    before = resident_bytes("VmRSS") - of_training
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    for _ in range(rounds):
        move.to_generation()
        of_generation = move.generation.live_bytes
        torch.distributed.barrier()
        move.to_training()
        torch.distributed.barrier()
    return of_training, of_generation, resident_bytes("VmHWM") - before, move.peak_bytes


def bench_resident_memory(benchmark, record_claim):
    with RankPool(8, timeout=timedelta(minutes=5)) as pool:
        found = benchmark.pedantic(lambda: pool.run(resident, ROUNDS).results, rounds=1)
    training, generation, peak, counted = max(found, key=lambda rank: rank[2])
    record_claim(
        Claim(
            name="resident memory of weights and messages on a rank, at most, 1-4-2 to 1-2",
            unit="MB",
            ours=peak / 1e6,
            baseline=(training + generation) / 1e6,
            baseline_name="both shards side by side",
            higher_is_better=False,
            correct=all(1.9 < rank[1] / rank[0] <= 2 and rank[2] >= rank[1] for rank in found),
            detail=f"VmHWM over {ROUNDS} moves there and back, less what was resident before them "
            f"beside training's shard, of the rank with the most; the generation shard alone takes "
            f"{generation / 1e6:.0f} MB, and what is live at once was counted as "
            f"{counted / 1e6:.0f} MB",
            source=COMMAND,
        ),
        spread=tuple(sorted((rank[0] + rank[1]) / rank[2] for rank in found))[:: len(found) - 1],
    )


def bench_one_host(benchmark, record_claim):
    with RankPool(8, timeout=timedelta(minutes=5)) as pool:
        found = benchmark.pedantic(lambda: pool.run(moved, ROUNDS).results, rounds=1)
    turns = {
        way: [max(rank[0][way][k] for rank in found) for k in range(ROUNDS)]
        for way in ("ours", *GATHERS)
    }
    slowest = {way: median(seconds) for way, seconds in turns.items()}
    spread = ", ".join(
        f"{way} {1e3 * slowest[way]:.0f} ({1e3 * min(seconds):.0f}-{1e3 * max(seconds):.0f}) ms"
        for way, seconds in turns.items()
    )
    _, planned, counted, _ = found[0]
    for name, way, aim in (
        ("weights of a 60 M model from 1-4-2 to 1-2, eight ranks on one host", "all-gather", 2.0),
        (
            "the 60 M model's shards from 1-4-2 to 1-2, eight ranks, one host",
            "torch's all-gather",
            None,
        ),
    ):
        ratios = [theirs / ours for ours, theirs in zip(turns["ours"], turns[way], strict=True)]
        record_claim(
            Claim(
                name=name,
                unit="ms",
                ours=1e3 * slowest["ours"],
                baseline=1e3 * slowest[way],
                baseline_name=f"{way} over training's TP group",
                higher_is_better=False,
                correct=all(rank[3] and rank[1] == rank[2] for rank in found),
                detail=f"slowest rank, median and spread of {ROUNDS} turns after {WARM_UP} to warm "
                f"up: {spread}; every weight equals that of a model made in that layout; "
                f"{planned:,} bytes planned and {counted:,} counted on a rank",
                source=COMMAND,
            ),
            aim=aim,
            spread=(min(ratios), max(ratios)),
        )


def crossed():
    """On each rank: bytes that the plan moves within groups of ranks."""
    world = Group.world()
    move, *_ = setup(world)
    torch.distributed.barrier()
    return move.plan.received_bytes


def switched():
    """Moves there and back, once."""
    move, *_ = setup(Group.world())
    torch.distributed.barrier()
    move.to_generation()
    torch.distributed.barrier()
    return move.plan.received_bytes[0]


def sent_across(rounds):
    """Ranks 0-3 hold a model as 1-4-1, ranks 4-7 want it so; seconds, and bytes received."""
    world = Group.world()
    config, layout = read_config(MODEL), Layout.parse("1-4-1")
    found = plan("1-4-1", "1-4-1", MODEL, itemsize=4, is_disjoint=True)
    model = Decoder(config, Shard(config, 0, 1, world.rank % 4, 4))
    if world.rank < 4:
        pieces.initialize(model, 0)
    parts = {}
    for piece in pieces.pieces(model):
        parts.setdefault(piece.name, []).append((piece.box, piece.view(model)))
    moves = [
        reshard.Move(
            transfers=transfers,
            held=parts[name] if world.rank < 4 else (),
            wanted=parts[name] if world.rank >= 4 else (),
        )
        for name, transfers in found.transfers.items()
    ]
    taken = []
    for _ in range(rounds + 1):
        torch.distributed.barrier()
        begun = time.perf_counter()
        reshard.run(world, moves)
        torch.distributed.barrier()
        taken.append(time.perf_counter() - begun)
    right = Decoder(config, Shard(config, 0, 1, world.rank % 4, 4))
    pieces.initialize(right, 0)
    pairs = zip(model.parameters(), right.parameters(), strict=True)
    is_right = all(torch.equal(a, b) for a, b in pairs)
    assert layout.num_ranks == 4
    return taken[1:], sum(found.received_bytes), is_right


@pytest.mark.netns
def bench_disjoint_pools_at_line_rate(benchmark, record_claim):
    with (
        NetLab(hosts=2, rate="1gbit", ranks_per_host=4) as lab,
        lab.pool(timeout=timedelta(minutes=5)) as pool,
    ):
        found = benchmark.pedantic(lambda: pool.run(sent_across, ROUNDS).results, rounds=1)
        limit_s = found[0][1] / lab.bytes_per_s
    seconds = found[0][0]
    record_claim(
        Claim(
            name="a 60 M model from four ranks on one host to four on another, 1 Gbit/s",
            unit="s",
            ours=median(seconds),
            baseline=limit_s,
            baseline_name="bytes over bandwidth",
            higher_is_better=False,
            correct=all(rank[2] for rank in found),
            detail=f"{found[0][1]:,} bytes; spread {min(seconds):.2f}-{max(seconds):.2f} s; every "
            f"weight equals that of a model made there",
            source=COMMAND,
        ),
        aim=0.9,
        spread=(limit_s / max(seconds), limit_s / min(seconds)),
    )


@pytest.mark.netns
def bench_two_hosts_cross_nothing(benchmark, record_claim):
    with (
        NetLab(hosts=2, rate="1gbit", ranks_per_host=4) as lab,
        lab.pool(timeout=timedelta(minutes=5)) as pool,
    ):
        pool.run(crossed)
        before = [counter.tx_bytes for counter in lab.counters()]
        pool.run(crossed)
        idle = sum(c.tx_bytes for c in lab.counters()) - sum(before)
        before = [counter.tx_bytes for counter in lab.counters()]
        received = benchmark.pedantic(lambda: pool.run(switched).results[0], rounds=1)
        sent = sum(c.tx_bytes for c in lab.counters()) - sum(before)
    record_claim(
        Claim(
            name="1-4-2 to 1-2 over two hosts of four: bytes between the hosts",
            unit="kB",
            ours=max(0, sent - idle) / 1e3,
            baseline=8 * received / 1e3,
            baseline_name="bytes that the eight ranks receive in all",
            higher_is_better=False,
            correct=sent - idle < 0.01 * 8 * received,
            detail="counted at the hosts' links, less what set-up and barriers take",
            source=COMMAND,
        )
    )
