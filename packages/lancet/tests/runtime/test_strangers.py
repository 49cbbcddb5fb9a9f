"""What users bring to a compiled step: each case gives the gradient of the mean of the ranks' losses."""

import contextlib
from typing import Any

import pytest
import torch
from lancet_models import FAMILIES, largest_difference, make_batch, make_model, whole_gradients

import lancet
from shared.comms import Group

pytestmark = pytest.mark.slow

NUM_RANKS = 2
SETTINGS = {
    "aux loss": {"output_router_logits": True, "router_aux_loss_coef": 0.1},
    "tied": {"tie_word_embeddings": True},
    **{family: {"family": family} for family in FAMILIES},
    "dense layer": {"num_hidden_layers": 2, "mlp_only_layers": [0]},
}


def _prepare(case):
    """The model of a case, before its experts are divided."""
    model = make_model(**{"num_hidden_layers": 1, **SETTINGS.get(case, {})})
    if case == "frozen":
        model.get_parameter("model.embed_tokens.weight").requires_grad_(False)
        model.get_parameter("model.layers.0.mlp.experts.down_proj").requires_grad_(False)
        model.get_parameter("model.layers.0.self_attn.q_proj.weight").requires_grad_(False)
    if case == "one expert":
        with torch.no_grad():
            model.get_parameter("model.layers.0.mlp.gate.weight").zero_()
    if case == "checkpointing":
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if case == "adapters":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        with torch.no_grad():  # adapters start without effect, and half of their gradients at zero
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.1)
    if case == "bfloat16":
        model.to(torch.bfloat16)
    return model


def _batches(case, rank):
    """A rank's batches: token ids and labels."""
    sizes = {"other size": (4, 2), "accumulation": (4, 4)}.get(case, (4,))
    for step, size in enumerate(sizes):
        ids = make_batch(step, size).chunk(NUM_RANKS)[rank]
        labels = ids.clone()
        if case == "unequal labels" and rank == 1:
            labels[:, :5] = -100
        yield ids, labels


def _cast(case):
    if case == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def _compile(case):
    torch._dynamo.reset()
    group = Group.world()
    model = lancet.parallelize(_prepare(case), group).train()
    memory_bytes = 0 if case == "no memory" else None
    backend = lancet.Backend(group, memory_bytes=memory_bytes)
    step = torch.compile(model, backend=backend, fullgraph=True)
    for ids, labels in _batches(case, group.rank):
        with _cast(case):
            loss = step(input_ids=ids, labels=labels).loss
        loss.backward()
    graphs = backend.report().graphs
    with torch.no_grad():
        step.eval()(input_ids=ids)
    return whole_gradients(model), backend.report().sentences, [g.plan is not None for g in graphs]


def _run_alone(case):
    model = _prepare(case).train()
    for rank in range(NUM_RANKS):
        for ids, labels in _batches(case, rank):
            with _cast(case):
                loss = model(input_ids=ids, labels=labels).loss
            (loss / NUM_RANKS).backward()
    return whole_gradients(model)


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        ("plain", 2e-6),
        ("aux loss", 2e-6),
        ("tied", 2e-6),
        ("dense layer", 2e-6),
        ("frozen", 2e-6),
        ("one expert", 2e-6),
        ("unequal labels", 2e-6),
        ("accumulation", 2e-6),
        ("other size", 2e-6),
        ("no memory", 2e-6),
        ("checkpointing", 2e-6),
        ("adapters", 2e-6),
        ("autocast", 3e-2),
        ("bfloat16", 3e-2),
        *((family, 2e-6) for family in FAMILIES),
    ],
)
def test_compiled_gradients_are_those_of_the_mean_loss(pool, case, tolerance):
    expected = _run_alone(case)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for gradients, sentences, are_planned in pool.run(_compile, case).results:
        assert largest_difference(gradients, expected) < tolerance * max(largest, 1.0)
        # Rank 0 may say what the limit costs.
        assert case == "no memory" or not sentences
        assert all("memory_bytes is 0" in sentence for sentence in sentences)
        assert any(are_planned)
