"""Losses and gradients of twelve plans on four ranks beside one process.

One process computes each document alone by transformers' own attention, in float64; ranks compute in float32:
degrees that follow documents, one degree, unequal replicas of tensor, pipeline, ring and Ulysses
parallelism, replicas without a document, and a rank in no replica. The models are small Llamas, Qwen2 and
Qwen3, whose biases are not zero and whose scales are not one.
"""

from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import hydraulis as hy
from shared.claims import Claim
from shared.comms import RankPool

COMMAND = "hatch run bench hydraulis -k equality"
SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
}
LENGTHS, CAP = (7, 1, 120, 2, 57, 5, 33, 90, 18, 64), 128
PLANS = [
    ("llama", None, (300, *LENGTHS)),  # degrees that follow documents, one over four ranks
    ("llama", "cp4", LENGTHS),
    ("llama", "tp2+tp1+tp1", LENGTHS),
    ("qwen2", "tp2+tp1+tp1", (90,)),  # two replicas without a document
    ("qwen3", "pp2+tp2", LENGTHS),
    ("qwen3", "ring2ulysses2", LENGTHS),
    ("qwen2", "tp2pp2", LENGTHS),
    ("llama", "tp4", LENGTHS),
    ("qwen3", "pp4", LENGTHS),
    ("qwen2", "tp2ring2", LENGTHS),
    ("llama", "pp2ulysses2", LENGTHS),
    ("qwen3", "pp3", LENGTHS),  # a rank in no replica
]
assert len(PLANS) == 12


def make_model(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.05 * torch.randn(one.shape))
    return model


def documents(lengths):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (length,), generator=draw) for length in lengths]


class Kept(torch.optim.SGD):
    """Keeps the whole gradients of its last step; weights stay as they are."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)
        self.seen = []

    def step(self, closure=None):
        every = [one.grad for group in self.param_groups for one in group["params"]]
        self.seen = [getattr(one, "full_tensor", one.clone)() for one in every]


def trained(plans):
    """Loss and flat gradients of each plan, documents in order and permuted."""
    torch.set_num_threads(1)
    found = []
    for family, strategy, lengths in plans:
        engine = hy.Engine(make_model(family), Kept, max_tokens=CAP, strategy=strategy)
        texts, pair = documents(lengths), []
        for order in (range(len(texts)), np.random.default_rng(0).permutation(len(texts))):
            loss = engine.step([texts[i] for i in order]).loss
            pair.append((loss, torch.cat([one.flatten() for one in engine.optimizer.seen])))
        found.append(pair)
    return found


def by_one_process(family, lengths):
    model = make_model(family).double()
    total = torch.zeros((), dtype=torch.float64)
    for ids in documents(lengths):
        if len(ids) > 1:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            total = total + nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
    loss = total / sum(length - 1 for length in lengths)
    loss.backward()
    every = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return loss.item(), torch.cat([one.flatten() for one in every])


def distance(one, other):
    """The larger of the relative errors of loss and gradients."""
    (loss, gradients), (known_loss, known) = one, other
    error = (gradients.double() - known.double()).norm() / known.double().norm()
    return max(abs(loss / known_loss - 1), float(error))


@pytest.fixture(scope="module")
def four():
    with RankPool(4, timeout=timedelta(minutes=5)) as pool:
        yield pool


def bench_equality(four, benchmark, record_claim):
    every = benchmark.pedantic(lambda: four.run(trained, PLANS).results, rounds=1)
    known = [by_one_process(family, lengths) for family, _, lengths in PLANS]
    beside = [
        max(distance(of_rank[number][0], one) for of_rank in every)
        for number, one in enumerate(known)
    ]
    permuted = [
        max(distance(of_rank[number][1], of_rank[number][0]) for of_rank in every)
        for number in range(len(PLANS))
    ]
    names = [f"{family} {strategy or 'by document'}" for family, strategy, _ in PLANS]
    differ = len({round(loss, 6) for loss, _ in known})
    for name, baseline_name, errors, aim in (
        ("12 plans on 4 ranks, float32: largest error of loss or gradients", "1e-5 of one process's",
         beside, 1e-5),
        ("12 plans on 4 ranks, float32, documents permuted: largest change", "1e-6", permuted, 1e-6),
    ):  # fmt: skip
        told = ", ".join(f"{one} {error:.1g}" for one, error in zip(names, errors, strict=True))
        record_claim(
            Claim(
                name=name, unit="of their length", ours=max(errors), baseline=aim,
                baseline_name=baseline_name, higher_is_better=False,
                correct=max(beside) <= 1e-5 and differ >= 4, detail=told, source=COMMAND,
            ),
            aim=1.0,
            spread=(aim / max(errors), aim / max(min(errors), 1e-12)),
        )  # fmt: skip
