"""Native generation beside transformers' generate, uncompiled.

64 sequences of 128 prompt tokens and 32 new ones, eight to a prompt, on one thread. transformers
generates in four ways, two of which read each prompt once, as ours does; the fastest of the four is
the baseline.
"""

import time
from statistics import median, quantiles

import pytest
import torch

from hybridflow.models import pieces
from hybridflow.models.config import read_config
from hybridflow.models.decoder import Decoder
from hybridflow.rollout.native.generator import generate
from hybridflow.rollout.sampling import Sampling
from shared.claims import Claim

TURNS = 7
PEERS = [
    {
        "peer": "transformers' generate",
        "setting": "DynamicCache of the 8 prompts, batch_repeat_interleave to 64 rows, SDPA",
        "why": "each prompt is read once, as in ours; takes turns with it, and so do the three below",
    },
    {
        "peer": "transformers' generate",
        "setting": "dynamic cache, 64 rows read, SDPA",
        "why": "generate's own way",
    },
    {
        "peer": "transformers' generate",
        "setting": "static cache, 64 rows read, uncompiled, SDPA",
        "why": "no keys and values are moved when one is added",
    },
    {
        "peer": "transformers' forward",
        "setting": "plain greedy loop, prompts read once and the cache repeated, logits of the last "
        "position only, inference_mode",
        "why": "generate's bookkeeping (stopping criteria, masks, processors) is left out",
    },
]


def both(preset):
    """The same weights, ours and transformers'."""
    transformers = pytest.importorskip("transformers")
    config = read_config(f"config:{preset}")
    ours = Decoder(config)
    pieces.initialize(ours, 0)
    raw = {key: value for key, value in config.raw.items() if key != "model_type"}
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**raw, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    ).eval()
    theirs.load_state_dict({piece.name: piece.view(ours) for piece in pieces.pieces(ours)})
    return ours, theirs


@pytest.mark.parametrize("preset", ["tiny-llama", "small-llama"])
def bench_native_against_transformers(preset, benchmark, record_claim):
    torch.set_num_threads(1)
    ours, theirs = both(preset)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, ours.config.vocab_size, (8, 128), generator=draw)
    sampling = Sampling(max_new_tokens=32, num_samples=8, temperature=0)
    rows = prompts.repeat_interleave(8, 0)
    mask = torch.ones_like(rows)

    def plain(**options):
        return theirs.generate(
            rows, attention_mask=mask, max_new_tokens=32, do_sample=False, **options
        )

    @torch.inference_mode()
    def once():
        """All but the last token of each prompt is read once; `generate` begins with that one."""
        cache = theirs(prompts[:, :-1], logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(8)
        return plain(past_key_values=cache)

    @torch.inference_mode()
    def loop():
        told = theirs(prompts, logits_to_keep=1)
        cache = told.past_key_values
        cache.batch_repeat_interleave(8)
        made = [told.logits[:, -1].argmax(-1).repeat_interleave(8)[:, None]]
        while len(made) < 32:
            told = theirs(made[-1], past_key_values=cache)
            made.append(told.logits[:, -1].argmax(-1)[:, None])
        return torch.cat([rows, *made], 1)

    rivals = {
        "generate, prompts read once": once,
        "generate, dynamic cache": plain,
        "generate, static cache": lambda: plain(
            cache_implementation="static", disable_compile=True
        ),
        "forward loop, prompts read once": loop,
    }
    ways = {"ours": lambda: generate(ours, list(prompts), sampling).tokens, **rivals}
    taken, found = {name: [] for name in ways}, {}

    def turns():
        for turn in range(TURNS + 1):
            for name, way in ways.items():
                begun = time.perf_counter()
                found[name] = way()
                if turn:
                    taken[name].append(time.perf_counter() - begun)

    benchmark.pedantic(turns, rounds=1)
    middle = {name: median(seconds) for name, seconds in taken.items()}
    best = min(rivals, key=middle.__getitem__)
    ratios = [
        theirs_s / ours_s for theirs_s, ours_s in zip(taken[best], taken["ours"], strict=True)
    ]
    low, _, high = quantiles(taken["ours"], n=4)
    record_claim(
        Claim(
            name=f"64 sequences of 128 + 32 tokens, eight a prompt, {preset}",
            unit="ms",
            ours=1e3 * middle["ours"],
            baseline=1e3 * middle[best],
            baseline_name="transformers, the fastest of four ways",
            higher_is_better=False,
            correct=all(torch.equal(found["ours"], found[name]) for name in rivals),
            detail=f"{TURNS} turns, one thread, greedy, tokens equal; quartiles of ours "
            f"{1e3 * low:.0f} and {1e3 * high:.0f} ms; "
            + ", ".join(f"{name} {1e3 * value:.0f} ms" for name, value in middle.items()),
            source="hatch run bench hybridflow -k generate",
        ),
        aim=2.5,
        spread=(min(ratios), max(ratios)),
    )
