"""Unequal replicas side by side, beside one process that computes each document alone by transformers."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import hydraulis as hy
from shared.comms import Group, RankPool
from shared.errors import ConfigError

from .test_attention import documents, one_by_one

LENGTHS = (7, 1, 30, 2, 13, 5, 5, 11)
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, pad_token_id=5),
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
}


@pytest.fixture(scope="module")
def ranks():
    with RankPool(4) as pool:
        yield pool


def make_model(family, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    with torch.no_grad():
        for one in model.parameters():  # no bias is zero, no scale is one
            one.add_(0.1 * torch.randn(one.shape))
    return model.to(dtype)


class Recording(torch.optim.SGD):
    """Keeps the whole gradients of its first step."""

    seen: list[torch.Tensor]

    def step(self, closure=None):
        if not hasattr(self, "seen"):
            every = [one.grad for group in self.param_groups for one in group["params"]]
            self.seen = [getattr(one, "full_tensor", one.clone)() for one in every]
        return super().step(closure)


def trained(cases):
    """Of each case this rank's loss, gradients, bytes that were to move, and bytes that moved."""
    found = []
    for family, strategy, lengths in cases:
        engine = hy.Engine(
            make_model(family), partial(Recording, lr=0.1), max_tokens=32, strategy=strategy
        )
        before = Group.world().ledger.snapshot()
        loss = engine.step(documents(lengths)).loss
        traffic = Group.world().ledger.snapshot().diff(before).by_phase()
        names = [name for name, _ in engine.model.named_parameters()]
        moved = engine.moved_bytes(engine.plan(lengths))
        predicted = [one[engine.rank] for one in (moved.parameters, moved.gradients)]
        measured = [
            traffic[phase].sent_bytes if phase in traffic else 0
            for phase in ("parameters", "gradients")
        ]
        found.append(
            (loss, dict(zip(names, engine.optimizer.seen, strict=True)), predicted, measured)
        )
    return found


def expected(family, lengths):
    """The same by one process in float64."""
    model = make_model(family, torch.float64)
    loss = one_by_one(model, documents(lengths)) / sum(length - 1 for length in lengths)
    loss.backward()
    return loss.item(), {name: one.grad for name, one in model.named_parameters()}


def check(pool, cases):
    """All cases beside one process, and bytes as predicted."""
    every = pool.run(trained, cases).results
    for number, (family, strategy, lengths) in enumerate(cases):
        loss, known = expected(family, lengths)
        for rank, of_rank in enumerate(every):
            got, gradients, predicted, measured = of_rank[number]
            assert got == pytest.approx(loss, rel=1e-5), strategy
            assert gradients.keys() == known.keys()
            for name, value in known.items():
                error = (gradients[name].double() - value).norm() / value.norm()
                assert error <= 1e-5, f"{strategy}, rank {rank}, {name}: {error:.2e}"
            assert measured == predicted, f"{strategy}, rank {rank}"


def test_replicas_train_as_one_process_does(ranks):
    check(
        ranks,
        [
            ("llama", "tp2+tp1+tp1", LENGTHS),
            ("qwen3", "pp2+tp2", LENGTHS),
            ("llama", "ring2ulysses2", LENGTHS),
            ("llama", "tp2+tp1+tp1", (9,)),  # two replicas without a document
        ],
    )


@pytest.mark.slow
def test_more_replicas_train_as_one_process_does(ranks):
    check(
        ranks,
        [
            ("qwen3", "tp4", LENGTHS),
            ("llama", "pp4", LENGTHS),
            ("tied", "pp4", LENGTHS),
            ("qwen3", "ring4", LENGTHS),
            ("llama", "cp4", LENGTHS),
            ("qwen2", "pp2cp2", LENGTHS),
            ("biased", "tp2pp2", LENGTHS),
            ("biased", "tp2ulysses2", (40, 3, 1)),
            ("qwen2", "tp2ring2", (1, 2, 3)),
            ("tied", "tp2+pp2", LENGTHS),
            ("qwen3", "tp2+tp1", LENGTHS),  # a rank in no replica
            ("qwen3", "pp3+tp1", LENGTHS),
        ],
    )
