"""Noise in nats: beside measured divergence, and beside the exact Fisher information."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmpq.evaluation import rank_correlation
from llmpq.profiler import SENSITIVITIES
from llmpq.profiler.sensitivity import output_noise, round_to_nearest, sensitivity
from llmpq.runtime.gptq import find_matrices
from shared.errors import ConfigError, DataError
from shared.kernels import weight_matmul

LAYERS = 4


def make(family="llama", layers=LAYERS, vocab=64):
    torch.manual_seed(0)
    names = {"n_layer": layers, "n_head": 4}
    if family != "bloom":
        names = {"num_hidden_layers": layers, "num_attention_heads": 4}
    sizes = {"ffn_dim": 80, "word_embed_proj_dim": 32} if family == "opt" else {}
    if family == "llama":
        sizes = {"intermediate_size": 80}
    config = AutoConfig.for_model(family, vocab_size=vocab, hidden_size=32, **names, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


def uneven():
    """A model whose layers differ in how much they matter."""
    model = make()
    with torch.no_grad():
        for number, layer in enumerate(find_matrices(model)):
            for module in layer:
                module.weight.mul_(2.0 + 2.0 * ((number * 3) % LAYERS))
    return model


def text(rows=6, tokens=24, vocab=64):
    torch.manual_seed(2)
    return torch.randint(vocab, (rows, tokens))


@torch.no_grad()
def test_int8_counts_what_rounding_products_adds():
    model, batch = uneven(), text(2, 12)
    found = sensitivity(model, [batch], "int8", bits=(4, 16), group_size=16).noise
    before = model(batch).logits
    assert (found[:, 1] == 0).all()
    first = find_matrices(model)[0]

    def to_8_bits(rows):
        step = rows.abs().amax(-1, keepdim=True) / 127
        return (rows / step).round() * step

    def log_p():
        return model(batch).logits.double().log_softmax(-1)

    kept = [module.weight.data for module in first]
    for module in first:
        packed = weight_matmul.pack(module.weight, 4, group_size=16)
        module.weight.data = weight_matmul.unpack(packed)
    p = log_p()
    hooks = [m.register_forward_pre_hook(lambda _, x: (to_8_bits(x[0]),)) for m in first]
    for module in first:
        module.weight.data = to_8_bits(module.weight.data)
    expected = float((p.exp() * (p - log_p())).sum(-1).mean())
    for hook, module, weight in zip(hooks, first, kept, strict=True):
        hook.remove()
        module.weight.data = weight
    assert found[0, 0] == pytest.approx(expected, rel=0.02)
    assert found[0, 0] > 0
    assert torch.equal(model(batch).logits, before), "the model is left as it was"


def test_noise_orders_and_predicts_measured_divergence():
    model = uneven()
    settings = {"bits": (4, 8), "group_size": 16}
    fisher = sensitivity(model, [text(24)], **settings).noise
    measured = sensitivity(model, [text(24)], method="kl", **settings).noise
    for column in range(2):
        assert rank_correlation(fisher[:, column], measured[:, column]) == 1.0
    assert (fisher[:, 1] / measured[:, 1] > 0.6).all()
    assert (fisher[:, 1] / measured[:, 1] < 1.6).all()


def test_noise_is_half_the_diagonal_fisher_information():
    # One layer, three tokens to choose from, one token a sequence: the expectation over drawn tokens
    # is a sum, so the information is exact.
    model, ids = make(layers=1, vocab=3), torch.tensor([[1]])
    weights = [m.weight for m in find_matrices(model)[0]]
    logs = model(input_ids=ids).logits[0, 0].log_softmax(-1)
    exact = 0.0
    for number in range(3):
        gradients = torch.autograd.grad(logs[number], weights, retain_graph=True)
        for weight, gradient in zip(weights, gradients, strict=True):
            packed = weight_matmul.pack(weight, 3, group_size=16)
            error = weight_matmul.unpack(packed) - weight.detach()
            exact += 0.5 * float(
                logs[number].detach().exp() * (gradient * error).square().sum().detach()
            )
    found = sensitivity(model, [ids.repeat(400, 1)], bits=(3,), group_size=16)
    assert found.noise[0, 0] == pytest.approx(exact, rel=0.15)
    assert found.num_tokens == 400


@pytest.mark.parametrize("family", ["llama", "opt", "bloom"])
def test_sequences_in_one_pass_are_squared_one_by_one(family):
    model, ids = make(family, 2), text(5, 9)
    found = sensitivity(model, [ids], bits=(4,), group_size=16)
    # The same draws, then plain autograd, a sequence at a time.
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    probabilities = logits.detach().flatten(0, 1).softmax(-1)
    drawn = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(0))
    for number, layer in enumerate(find_matrices(model)):
        weights, expected = [module.weight for module in layer], 0.0
        for row, tokens in zip(ids, drawn.view(5, 9), strict=True):
            logs = model(input_ids=row[None]).logits[0].log_softmax(-1)
            gradients = torch.autograd.grad(logs[torch.arange(9), tokens].sum(), weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                packed = weight_matmul.pack(weight, 4, group_size=16)
                error = weight_matmul.unpack(packed) - weight.detach()
                expected += 0.5 * float((gradient * error).square().sum()) / ids.numel()
        assert found.noise[number, 0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "opt", "bloom"])
@pytest.mark.parametrize("method", [name for name in SENSITIVITIES if name != "int8"])
def test_fewer_bits_are_noisier_and_16_have_no_noise(family, method):
    found = sensitivity(make(family, 2), [text(2, 8)], method, bits=(16, 8, 3), group_size=16)
    assert found.noise.shape == (2, 3)
    assert (found.noise[:, 0] == 0).all()
    assert (found.noise[:, 1] > 0).all()
    assert (found.noise[:, 2] > found.noise[:, 1]).all()


def test_padding_does_not_count():
    model, ids = make(), text(2, 8)
    padded = torch.cat([ids, torch.zeros(2, 3, dtype=torch.int64)], 1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(2, 3, dtype=torch.int64)], 1)
    settings = {"bits": (3,), "group_size": 16}
    for method in ("fisher", "kl"):
        plain = sensitivity(model, [ids], method, **settings)
        again = sensitivity(
            model, [{"input_ids": padded, "attention_mask": mask}], method, **settings
        )
        assert again.num_tokens == plain.num_tokens == 16
        np.testing.assert_allclose(again.noise, plain.noise, rtol=1e-3)


def test_the_model_is_left_as_it_was():
    model = make().train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for method in SENSITIVITIES:
        sensitivity(model, [text(1, 8)], method, bits=(3,), group_size=16)
    assert model.training
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_are_put_back_after_an_error():
    model = make()
    weight = find_matrices(model)[2][1].weight
    before = weight.clone()

    def fail():
        with round_to_nearest(model, [3] * LAYERS, group_size=16):
            assert not torch.equal(weight, before)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("columns", [64, 100])
def test_output_noise_is_that_of_rounding(bits, columns):
    torch.manual_seed(3)
    weight = torch.randn(256, columns)
    x = torch.randn(2000, columns) + 0.5 + torch.rand(columns)
    rounded = weight_matmul.unpack(weight_matmul.pack(weight, bits, group_size=32))
    measured = float((x.double() @ (rounded - weight).double().t()).square().sum(1).mean())
    found = output_noise(weight, x.square().mean(0), bits=bits, group_size=32)
    assert found == pytest.approx(measured, rel=0.1)


def test_constant_inputs_have_noise():
    weight, constant = torch.randn(8, 32), torch.full((32,), 4.0)
    assert output_noise(weight, constant, bits=4, group_size=16) > 0
    model, ids = make(), torch.full((2, 6), 7)
    assert (sensitivity(model, [ids], bits=(4,), group_size=16).noise > 0).all()


def test_what_cannot_be_measured_is_refused():
    model = make()
    with pytest.raises(ConfigError, match=r"sensitivity: expected one of fisher, .*got 'loss'"):
        sensitivity(model, [text()], "loss")
    with pytest.raises(ConfigError, match=r"bits: expected some of 3, 4, 8 and 16, got \[5\]"):
        sensitivity(model, [text()], bits=(5,))
    with pytest.raises(DataError, match="batches with tokens, got none"):
        sensitivity(model, [])
    with pytest.raises(DataError, match="batches with tokens, got none"):
        sensitivity(model, [{"input_ids": text(), "attention_mask": torch.zeros(6, 24)}])
    with torch.no_grad():
        find_matrices(model)[1][0].weight[2, 5] = float("nan")
    with pytest.raises(DataError, match=r"finite|nan"):
        sensitivity(model, [text()], "kl", bits=(3,), group_size=16)
