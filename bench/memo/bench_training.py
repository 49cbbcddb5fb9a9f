"""Steps of a Llama under memory limits: memo, no plan, and recomputation as peers offer it.

The model has 16 layers of hidden size 256, is in float32 and trains on two sequences of 2,048 bytes of
the Bible. Each contender is a process of its own (`contender.py`), and contenders take turns step by
step. A peak is how far VmHWM grew beyond what was resident before the first step; a limit is RLIMIT_DATA
at what the process had then and an allowance, under which plain training must raise.
"""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).parent))
from contender import Contender, Ended, Setting

import memo
from memo.planner.layer_plan import LayerPlan
from shared.claims import Claim
from shared.units import format_bytes

REPEATS = 4
COMMAND = "hatch run bench memo/training"
PEERS = [
    {
        "peer": "transformers' full checkpointing",
        "setting": "gradient_checkpointing_enable, use_reentrant False",
        "why": "the least memory that transformers offers, and the variant that torch recommends",
    },
    {
        "peer": "no checkpointing",
        "setting": "the model as it is, without a limit",
        "why": "computes nothing twice: no way of training is faster",
    },
]


def in_turns(settings, repeats=REPEATS):
    """Steps of contenders that run at the same time and compute in turns, the first step left out."""
    with ExitStack() as stack:
        running = [stack.enter_context(Contender(setting)) for setting in settings]
        for _ in range(repeats + 1):
            for one in running:
                one.step()
    return running


def outcome(setting):
    """What becomes of a contender in one step: its error, or None."""
    try:
        with Contender(setting) as one:
            one.step()
    except Ended as error:
        return str(error)
    return None


def ratios(ours, theirs):
    """How many times faster ours is, turn by turn."""
    return [b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True)]


def bench_limit_of_full_checkpointing(tmp_path, benchmark, record_claim):
    """Ours under the limit that full checkpointing needs, beside it and beside no checkpointing."""

    def measure():
        with Contender(Setting(way="checkpoint")) as one:
            one.step()
            limit = one.step().peak_bytes
        ours = Setting(way="memo", store=f"file:{tmp_path}", allowance_bytes=limit)
        refused = outcome(Setting(way="plain", allowance_bytes=limit))
        return limit, refused, in_turns([ours, Setting(way="checkpoint"), Setting(way="plain")])

    limit, refused, running = benchmark.pedantic(measure, rounds=1)
    ours, full, plain = running
    is_equal = ours.losses == plain.losses == full.losses and len(set(ours.losses)) > 2
    stored = ours.steps[-1].store_bytes
    detail = (
        f"4,096 tokens; limit {format_bytes(limit)} beyond parameters, gradients and AdamW's states; ours grew by "
        f"{format_bytes(ours.steps[-1].peak_bytes)} with {format_bytes(stored)} in the file, plain by "
        f"{format_bytes(plain.steps[-1].peak_bytes)}; plain under the limit: {(refused or 'ran')[:60]}; "
        f"losses of {len(ours.steps)} steps equal to the bit: {is_equal}"
    )
    for name, peer, aim in (
        ("transformers' full checkpointing", full, 1.18),
        ("no checkpointing, without a limit", plain, 1 / 1.08),
    ):
        found = ratios(ours, peer)
        record_claim(
            Claim(
                name="step under the limit of full checkpointing",
                unit="s",
                ours=median(ours.seconds),
                baseline=median(peer.seconds),
                baseline_name=name,
                higher_is_better=False,
                correct=is_equal and refused is not None and stored > 0,
                detail=detail,
                source=f"{COMMAND} -k limit_of_full",
            ),
            aim=aim,
            spread=(min(found), max(found)),
        )


def bench_hooks_that_keep_everything(benchmark, record_claim):
    """A plan that keeps everything beside no plan: what memo costs where it has nothing to do."""
    plain = Setting(way="plain", num_tokens=512, num_layers=8)
    ours = replace(plain, way="memo", plan=memo.Plan(layers=(LayerPlan(),)))
    one, other = benchmark.pedantic(lambda: in_turns([ours, plain], repeats=40), rounds=1)
    found = ratios(one, other)
    low, _, high = quantiles(found, n=4)
    record_claim(
        Claim(
            name="step under a plan that keeps everything",
            unit="s",
            ours=median(one.seconds),
            baseline=median(other.seconds),
            baseline_name="no plan",
            higher_is_better=False,
            correct=one.losses == other.losses and len(set(one.losses)) > 2,
            detail=f"8 layers, 1,024 tokens; median of {len(found)} ratios of neighbouring steps "
            f"{median(found):.4f}, quartiles {low:.4f} to {high:.4f}; losses equal to the bit",
            source=f"{COMMAND} -k hooks",
        ),
        aim=1 / 1.01,
        spread=(low, high),
    )
