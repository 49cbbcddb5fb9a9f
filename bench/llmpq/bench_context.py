"""One process without any pipeline, for context: transformers as it is, beside a plan of one stage.

SmolLM2-135M-Instruct on one core; 32 prompts of 128 tokens of the Bible, 32 new ones. transformers generates with
its static and its dynamic cache, in float32 and in bfloat16; the fastest counts. Ours runs 4 bits in
groups of 64, in the forms that are fastest on this processor, so that the two lose unlike much: no aim.
"""

import time
from datetime import timedelta
from statistics import median

import pytest
import torch

from llmpq.config import ModelSpec
from llmpq.data import paragraphs, smollm2
from llmpq.demo import shortfall
from llmpq.planner.plan import Plan, Stage
from llmpq.profiler.layer_times import choose_forms
from llmpq.runtime.loader import load
from llmpq.runtime.pipeline import Pipeline
from shared.claims import Claim
from shared.comms import RankPool
from shared.comms.handicap import handicap

PROMPTS, TOKENS, NEW, TURNS, GROUP = 32, 128, 32, 2, 64
PEERS = [
    {
        "peer": "transformers",
        "setting": "sdpa attention, dynamic or static cache, float32 or bfloat16: the fastest of four; "
        "greedy, no end before 32 tokens",
        "why": "what a user of one machine runs without this package",
    },
]


def answer_in_turns(folder, ids):
    """Seconds of each way by turn, and the tokens of ours."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    forms = {
        "0": {
            "4": choose_forms(
                ModelSpec.from_hf(folder), 4, group_size=GROUP, dtype="bfloat16", limit_s=20.0
            )
        }
    }
    plan = Plan(
        stages=(Stage(rank=0, layers=(0, 30)),), bits=(4,) * 30, group_size=GROUP, prefill_size=8,
        decode_size=32, dtype="bfloat16", forms=forms,
    )  # fmt: skip
    whole = {
        dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        for dtype in ("float32", "bfloat16")
    }
    mask = torch.ones_like(ids)

    def generate(dtype, cache):
        return whole[dtype].generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW,
            do_sample=False, cache_implementation=cache, pad_token_id=0,
        )  # fmt: skip

    taken, answers = {}, []
    with Pipeline(plan, folder) as pipe:
        ways = {"ours": lambda: pipe.generate(ids, mask, max_new_tokens=NEW)}
        for dtype in whole:
            for cache in ("static", "dynamic"):
                ways[f"{dtype}, {cache} cache"] = lambda d=dtype, c=cache: generate(d, c)
        for turn in range(TURNS + 1):
            for name, way in ways.items():
                begun = time.perf_counter()
                found = way()
                if turn:
                    taken.setdefault(name, []).append(time.perf_counter() - begun)
                if name == "ours":
                    answers.append(found)
    return taken, shortfall(load(folder, plan), ids, answers[-1], NEW)


@pytest.fixture(scope="module")
def one():
    with RankPool(1, prefix=[handicap(cores=[0])]) as pool:
        yield pool


def bench_context(one, benchmark, record_claim):
    transformers = pytest.importorskip("transformers")
    folder = smollm2()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(" ".join(paragraphs(400)))["input_ids"])
    ids = ids[1000 : 1000 + PROMPTS * TOKENS].view(PROMPTS, TOKENS)
    ((taken, missed),) = benchmark.pedantic(
        lambda: one.run(answer_in_turns, folder, ids, timeout=timedelta(minutes=20)).results,
        rounds=1,
    )
    middle = {name: median(seconds) for name, seconds in taken.items()}
    best = min((name for name in middle if name != "ours"), key=middle.__getitem__)
    ratios = [b / a for a, b in zip(taken["ours"], taken[best], strict=True)]
    record_claim(
        Claim(
            name="tokens/s of one process on one core, 4 bits",
            unit="tokens/s",
            ours=PROMPTS * NEW / middle["ours"],
            baseline=PROMPTS * NEW / middle[best],
            baseline_name="transformers",
            higher_is_better=True,
            correct=missed <= 0.5,
            detail=f"{TURNS} turns; its fastest: {best}; all: "
            + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in middle.items())
            + f"; our tokens at most {missed:.2g} nats below the rounded model's best",
            source="hatch run bench llmpq -k context",
        ),
        spread=(min(ratios), max(ratios)),
    )
