"""Static addresses of a traced step beside the most that is alive at once, and what allocators reserve.

Traces are those of Llama 7B in bf16 at 32,768 tokens, made on fake tensors: one step's forward and backward
with the loss over all logits, without the optimizer. Nothing here runs on a GPU: allocators are emulated by
PyTorch's published rules and never flush, and the claims on them say simulated.

MiniMalloc's eleven files (A.*csv to K.*csv, not shipped) are packed too where bench/.peers/minimalloc has them.
"""

import itertools
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memo
from shared.claims import Claim

TOKENS = 32_768
LENGTHS = range(20_480, 32_769, 2_048)
TURNS = 3
CAPACITY, FILES = 1_048_576, "ABCDEFGHIJK"
COMMAND = "hatch run bench memo -k packing"
MINIMALLOC = Path(__file__).parents[1] / ".peers" / "minimalloc"
PEERS = [
    {
        "peer": "the load",
        "setting": "most bytes alive at once, each rounded up to 512",
        "why": "no addresses need less: the limit itself",
    },
    {
        "peer": "PyTorch's caching allocator",
        "setting": "emulated, same traces one after another, no flush; lengths ascending, and longest first; "
        "and expandable segments",
        "why": "what trains without a plan; longest first and expandable segments are its known cures",
    },
]


def trace_step(layers, tokens, *, checkpointed=False):
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11_008, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32_000, max_position_embeddings=TOKENS,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16().train()
        ids = torch.empty(1, tokens, dtype=torch.long)
    if checkpointed:
        model.gradient_checkpointing_enable()
    return memo.Trace.from_fake(model, {"input_ids": ids, "labels": ids})


def load_in_units(intervals, align=512):
    """The most alive at once, counted anew."""
    changes = sorted(
        change
        for start, stop, size in intervals
        for change in ((start, 1, -(-size // align)), (stop, 0, -(-size // align)))
    )
    alive = most = 0
    for _, is_start, units in changes:
        alive += units if is_start else -units
        most = max(most, alive)
    return most * align


def is_sound(intervals, packing):
    """Whether no two that meet overlap, pair by pair among those alive."""
    order = sorted(range(len(intervals)), key=lambda i: intervals[i][0])
    alive = []
    for this in order:
        start, stop, size = intervals[this]
        if not size or start == stop:
            continue
        low = int(packing.offsets[this])
        alive = [other for other in alive if intervals[other][1] > start]
        for other in alive:
            place = int(packing.offsets[other])
            if low < place + intervals[other][2] and place < low + size:
                return False
        if low < 0 or low % 512 or low + size > packing.peak:
            return False
        alive.append(this)
    return True


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(("layers", "aim"), [(4, 1.003), (32, 1.01)])
def bench_packing_step(benchmark, record_claim, layers, aim, checkpointed):
    intervals = trace_step(layers, TOKENS, checkpointed=checkpointed).intervals
    memo.pack(intervals, time_limit_s=0.1)  # compiles
    load = load_in_units(intervals)
    found = []

    def turns():
        for _ in range(TURNS):
            begun = time.perf_counter()
            packing = memo.pack(intervals, time_limit_s=5.0)
            found.append((packing, time.perf_counter() - begun))

    benchmark.pedantic(turns, rounds=1)
    peaks = [packing.peak / load for packing, _ in found]
    seconds = [taken for _, taken in found]
    correct = all(
        is_sound(intervals, packing) and load <= packing.lower_bound <= packing.peak
        for packing, _ in found
    )
    kind = "checkpointed" if checkpointed else "plain"
    detail = (
        f"{len(intervals):,} allocations, {load / 2**30:.1f} GiB; "
        f"{sum(packing.is_optimal for packing, _ in found)} of {TURNS} proven optimal"
    )
    record_claim(
        Claim(
            name=f"arena of a {kind} step, 7B, {layers} layers, 32K tokens, over its load", unit="x",
            ours=median(peaks), baseline=aim, baseline_name="the aim", higher_is_better=False,
            correct=correct, detail=detail, source=COMMAND,
        ),
        aim=1.0,
        spread=(aim / max(peaks), aim / min(peaks)),
    )  # fmt: skip
    record_claim(
        Claim(
            name=f"seconds to plan a {kind} step, 7B, {layers} layers, 32K tokens", unit="s",
            ours=median(seconds), baseline=5.2, baseline_name="the limit of 5 s, and its last step",
            higher_is_better=False, correct=correct, detail=detail, source=COMMAND,
        ),
        aim=1.0,
        spread=(5.2 / max(seconds), 5.2 / min(seconds)),
    )  # fmt: skip


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def bench_packing_fragmentation(benchmark, record_claim, checkpointed):
    """Steps of ascending lengths: reserved over needed."""
    traces = [trace_step(2, tokens, checkpointed=checkpointed) for tokens in LENGTHS]
    needed = max(load_in_units(trace.intervals, 1) for trace in traces)

    def run():
        return {
            "the caching allocator": memo.emulate(traces, "caching"),
            "the caching allocator, longest first": memo.emulate(traces[::-1], "caching"),
            "expandable segments": memo.emulate(traces, "expandable"),
            "expandable segments, longest first": memo.emulate(traces[::-1], "expandable"),
            "planned": memo.emulate(traces, "planned"),
        }

    found = benchmark.pedantic(run, rounds=1)
    planned = found.pop("planned")
    plans = [memo.pack(trace, time_limit_s=1.0) for trace in traces]
    correct = planned.needed_bytes == needed and all(
        is_sound(trace.intervals, plan) and plan.peak <= planned.reserved_bytes * 1.02
        for trace, plan in zip(traces, plans, strict=True)
    )
    kind = "checkpointed" if checkpointed else "plain"
    rows = {"the aim, 1.02": (1.02, 1.0)}
    rows |= {name: (one.overhead, 1.0) for name, one in found.items()}
    for name, (overhead, aim) in rows.items():
        ratio = overhead / planned.overhead
        record_claim(
            Claim(
                name=f"memory reserved over needed, {kind} 7B steps of 2 layers, 20K to 32K tokens ascending",
                unit="x", ours=planned.overhead, baseline=overhead, baseline_name=name, kind="simulated",
                higher_is_better=False, correct=correct, source=COMMAND,
                detail=f"{len(traces)} steps, {needed / 2**30:.1f} GiB needed; one arena for all of them",
            ),
            aim=aim,
            spread=(ratio, ratio),
        )  # fmt: skip


@pytest.mark.skipif(not MINIMALLOC.is_dir(), reason=f"{MINIMALLOC} is no folder")
def bench_packing_minimalloc(benchmark, record_claim):
    folder = MINIMALLOC
    traces = {name: memo.Trace.from_csv(next(folder.glob(f"{name}.*csv"))) for name in FILES}

    def run():
        found = {}
        for name, trace in traces.items():
            packing = memo.pack(trace, align=1, time_limit_s=60.0)
            ends = zip(packing.offsets.tolist(), trace.intervals, strict=True)
            for (at, one), (place, other) in itertools.combinations(ends, 2):
                is_apart = one[1] <= other[0] or other[1] <= one[0]
                assert is_apart or at + one[2] <= place or place + other[2] <= at
            found[name] = packing.peak
        return found

    found = benchmark.pedantic(run, rounds=1)
    solved = sum(peak <= CAPACITY for peak in found.values())
    record_claim(
        Claim(
            name="MiniMalloc's files packed into 1,048,576 bytes, 60 s each", unit="files", ours=solved,
            baseline=8, baseline_name="the aim", higher_is_better=True, correct=len(found) == 11,
            detail=", ".join(f"{name} {peak / CAPACITY:.3f}" for name, peak in found.items()),
            source=COMMAND,
        ),
        aim=1.0,
        spread=(solved / 8, solved / 8),
    )  # fmt: skip
