"""Planning a save of ten thousand ranks on one core: what the coordinator does beside its own save.

Ranks hold a dense transformer of 405B parameters, cut over tensor, pipeline and data parallel axes
as Megatron's distributed optimizer does: bf16 weights replicated over dp, and one flat fp32 buffer
each of master weights and both moments, cut over dp wherever a rank's share ends. The shapes of the
model are those published for Llama 3 (arXiv 2407.21783). Descriptors are made for each rank apart
and merged through the tree that they would take; ranks, network and bytes are not there, so this is
a simulation of everything but the coordinator.

    python bench/bytecheckpoint/bench_planning.py --out bench/.results
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bytecheckpoint.planner.planner import Pieces, RankPart, plan
from shared.claims import Claim
from shared.comms import Tree
from shared.topology.boxes import Box, decompose
from shared.units import format_bytes, format_s

HIDDEN, FFN, KV, LAYERS = 16_384, 53_248, 1_024, 126
LIMIT_S = 10.0

# Global shape of each of a layer's tensors, and the dimension that the tensor axis cuts.
_LAYER = {
    "attention.wq": ((HIDDEN, HIDDEN), 0),
    "attention.wk": ((KV, HIDDEN), 0),
    "attention.wv": ((KV, HIDDEN), 0),
    "attention.wo": ((HIDDEN, HIDDEN), 1),
    "feed_forward.w1": ((FFN, HIDDEN), 0),
    "feed_forward.w3": ((FFN, HIDDEN), 0),
    "feed_forward.w2": ((HIDDEN, FFN), 1),
    "attention_norm": ((HIDDEN,), None),
    "ffn_norm": ((HIDDEN,), None),
}
_FLAT = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes; ranks count tp fastest, then dp, then pp."""

    tp: int = 8
    dp: int = 78
    pp: int = 16

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What planning took.

    Attributes:
        ranks, descriptors, chunks: how many.
        received_bytes: what the tree brings to the coordinator.
        merge_s, plan_s, parts_s, index_s: the coordinator's seconds for merging what arrives,
            planning, encoding every rank's part, and encoding the index.
        relay_s: the busiest other rank's seconds for merging.
        parts_bytes, index_bytes: what the coordinator sends and what it stores.
        peak_bytes: peak memory of the process, all ranks' descriptors included.
        imbalance: bytes of the rank that writes most over the mean.
    """

    ranks: int
    descriptors: int
    chunks: int
    received_bytes: int
    merge_s: float
    plan_s: float
    parts_s: float
    index_s: float
    relay_s: float
    parts_bytes: int
    index_bytes: int
    peak_bytes: int
    imbalance: float

    @property
    def coordinator_s(self) -> float:
        return self.merge_s + self.plan_s + self.parts_s + self.index_s


def held_by(layout: Layout, rank: int) -> Iterator[tuple[str, str, tuple[int, ...], Box]]:
    """The pieces of one rank: name, type, global shape, box."""
    tp, rest = rank % layout.tp, rank // layout.tp
    dp, pp = rest % layout.dp, rest // layout.dp
    weights: list[tuple[str, tuple[int, ...], Box]] = []
    for layer in range(pp * LAYERS // layout.pp, (pp + 1) * LAYERS // layout.pp):
        for name, (shape, dim) in _LAYER.items():
            sizes = tuple(n // layout.tp if d == dim else n for d, n in enumerate(shape))
            offsets = tuple(tp * n if d == dim else 0 for d, n in enumerate(sizes))
            weights.append((f"layers.{layer}.{name}.weight", shape, Box(offsets, sizes)))
    yield from ((f"model.{name}", "bfloat16", shape, box) for name, shape, box in weights)
    total = sum(box.numel for name, _, box in weights)
    start, stop = dp * total // layout.dp, (dp + 1) * total // layout.dp
    base = 0
    for name, shape, box in weights:
        low, high = max(start, base) - base, min(stop, base + box.numel) - base
        # Norms are whole on every tensor rank, which would each hold them as a replica.
        for part in decompose(box.sizes, low, high) if low < high else ():
            moved = tuple(o + b for o, b in zip(part.offsets, box.offsets, strict=True))
            for state in _FLAT:
                yield f"optimizer.{state}.{name}", "float32", shape, Box(moved, part.sizes)
        base += box.numel


def measure(layout: Layout) -> Planning:
    """Merges all ranks' descriptors through the tree and plans, with times of each step."""
    world_size = layout.world_size
    tree = Tree(world_size=world_size, arity=8, ranks_per_host=8)
    messages: dict[int, bytes] = {}
    relay_s = merge_s = 0.0
    merged, received = Pieces.merge([]), 0
    # A parent's rank is lower than its children's.
    for rank in reversed(range(world_size)):
        own = Pieces.of(rank, held_by(layout, rank))
        arrived = [messages.pop(child) for child in tree.children(rank)]
        started_s = time.perf_counter()
        merged = Pieces.merge([own, *(Pieces.decode(data) for data in arrived)])
        if rank:
            messages[rank] = merged.encode()
            relay_s = max(relay_s, time.perf_counter() - started_s)
        else:
            merge_s = time.perf_counter() - started_s
            received = sum(map(len, arrived))
    started_s = time.perf_counter()
    planned = plan(merged, world_size)
    planned_s = time.perf_counter()
    parts = [planned.part(rank).encode() for rank in range(world_size)]
    parted_s = time.perf_counter()
    index = planned.index.encode()
    indexed_s = time.perf_counter()
    # Headers are the ranks' own work; one that did not fit what was planned would raise here.
    for data in parts[:: max(world_size // 100, 1)]:
        assert RankPart.decode(data).header
    return Planning(
        ranks=world_size,
        descriptors=len(merged.owner),
        chunks=len(planned.index.chunks),
        received_bytes=received,
        merge_s=merge_s,
        plan_s=planned_s - started_s,
        parts_s=parted_s - planned_s,
        index_s=indexed_s - parted_s,
        relay_s=relay_s,
        parts_bytes=sum(map(len, parts)),
        index_bytes=len(index),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        imbalance=float(planned.load.max() / planned.load.mean()),
    )


def table(rows: list[Planning]) -> str:
    heads = (
        *("ranks", "descriptors", "chunks", "arrive", "merge", "plan", "parts", "index"),
        *("coordinator", "busiest relay", "parts sent", "index", "peak memory", "max / mean"),
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for p in rows:
        cells = [f"{p.ranks:,}", f"{p.descriptors:,}", f"{p.chunks:,}"]
        cells.append(format_bytes(p.received_bytes))
        seconds = (p.merge_s, p.plan_s, p.parts_s, p.index_s, p.coordinator_s, p.relay_s)
        cells += [format_s(value) for value in seconds]
        cells += [format_bytes(n) for n in (p.parts_bytes, p.index_bytes, p.peak_bytes)]
        lines.append(f"| {' | '.join(cells)} | {p.imbalance:.3f} |")
    return "\n".join(lines)


def bench_ten_thousand_ranks(benchmark, record_claim):
    benchmark.group = "planning a save"
    result = benchmark.pedantic(measure, args=(Layout(),), rounds=1)
    benchmark.extra_info.update(asdict(result))
    record_claim(
        Claim(
            name=f"coordinator, {result.ranks:,} simulated ranks, {result.descriptors:,} pieces",
            unit="s",
            ours=result.coordinator_s,
            baseline=LIMIT_S,
            baseline_name="limit set beforehand",
            kind="simulated",
            higher_is_better=False,
            correct=result.imbalance <= 1.05,
            detail=f"most loaded rank {result.imbalance:.3f} of the mean, "
            f"peak memory {format_bytes(result.peak_bytes)}",
            source="bench/bytecheckpoint/bench_planning.py",
        ),
        aim=1.0,
    )


def main() -> None:
    """Plan for several numbers of ranks, print the table, and write it with all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 78], help="data parallel sizes")
    parser.add_argument("--out", type=Path, help="folder for planning.json and planning.md")
    options = parser.parse_args()
    results = [measure(Layout(dp=dp)) for dp in options.dp]
    print(table(results))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        rows = [asdict(result) for result in results]
        (options.out / "planning.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        (options.out / "planning.md").write_text(table(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
