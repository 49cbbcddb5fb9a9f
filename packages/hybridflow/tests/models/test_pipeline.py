"""Micro-batches through stages: the whole model's gradients, in order, with little kept."""

import pytest
import torch

from hybridflow.models.config import DecoderConfig
from hybridflow.models.decoder import Decoder, Shard
from hybridflow.models.pieces import initialize, pieces
from hybridflow.models.pipeline import run_forward, train
from shared.comms import pipeline
from shared.comms.group import Group

TREE = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "initializer_range": 0.3,
}


def made(pp=0, num_stages=1):
    config = DecoderConfig.parse(TREE)
    model = Decoder(config, Shard(config, pp, num_stages), dtype=torch.float64)
    initialize(model, 2)
    return model


def drawn(count):
    """Micro-batches of different numbers of rows and widths."""
    draw = torch.Generator().manual_seed(count)
    return [torch.randint(0, 12, (1 + k % 3, 3 + k), generator=draw) for k in range(count)]


def loss_of(k, hidden):
    return (hidden * torch.linspace(-1, 1, 8, dtype=torch.float64)).sum() * (k + 1)


def gradients(model):
    """By Hugging Face's name; a parameter's gradient stands where its values lie."""
    for parameter in model.parameters():
        grad = parameter.grad
        parameter.data = torch.zeros_like(parameter) if grad is None else grad
    return {piece.name: piece.view(model).clone() for piece in pieces(model)}


def on_a_stage(num_stages, count):
    """Runs on each rank, of which the first ones are stages."""
    world = Group.world()
    if world.rank >= num_stages:
        return None
    group = Group.of(range(num_stages), members_only=True)
    model, batches = made(world.rank, num_stages), drawn(count)
    live, most, seen = 0, 0, []
    plain_forward, plain_backward = pipeline.Stage.forward, pipeline.run_backward

    def forward(self, k, x, loss_of):
        nonlocal live, most
        live += 1
        most = max(most, live)
        return plain_forward(self, k, x, loss_of)

    def backward(kept, grad):
        nonlocal live
        live -= 1
        return plain_backward(kept, grad)

    def told(k, hidden):
        seen.append((k, hidden.shape[:2] == batches[k].shape))
        return loss_of(k, hidden)

    pipeline.Stage.forward, pipeline.run_backward = forward, backward
    try:
        train(model, group, batches, told)
    finally:
        pipeline.Stage.forward, pipeline.run_backward = plain_forward, plain_backward
    states = []
    run_forward(model, group, batches, lambda k, hidden: states.append((k, hidden.clone())))
    return gradients(model), most, live, seen, states


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_have_the_whole_models_gradients_and_keep_few(num_stages, count, ranks):
    model, batches = made(), drawn(count)
    states = []
    run_forward(model, None, batches, lambda k, hidden: states.append((k, hidden)))
    train(model, None, batches, loss_of)
    wanted = gradients(model)
    found = ranks.run(on_a_stage, num_stages, count).results
    assert found[num_stages:] == [None] * (4 - num_stages)
    names = []
    for stage, (grads, most, live, seen, told) in enumerate(found[:num_stages]):
        names += grads
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-10, atol=1e-12, msg=name)
        assert live == 0
        assert most == min(num_stages - stage, count)
        is_last = stage == num_stages - 1
        assert seen == [(k, True) for k in range(count)] * is_last
        assert [k for k, _ in told] == list(range(count)) * is_last
        for (_, mine), (_, whole) in zip(told, states, strict=False):
            torch.testing.assert_close(mine, whole)
            assert not mine.requires_grad
    assert sorted(names) == sorted(wanted)


def test_a_whole_model_adds_up_the_gradients_of_its_micro_batches():
    model, twin = made(), made()
    batches = drawn(4)
    train(model, None, batches, loss_of)
    sum(loss_of(k, twin(tokens)) for k, tokens in enumerate(batches)).backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)
    train(made(), None, [], loss_of)
