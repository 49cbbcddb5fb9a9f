import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import lancet
from lancet.moe.experts import parallelize
from lancet.moe.gates import GATES, capacity
from lancet.moe.layer import Layer
from shared.comms import Group, all_reduce
from shared.errors import ConfigError

DIM, HIDDEN_DIM, NUM_EXPERTS = 8, 16, 4


def new_layer(gate="top_k", k=2, factor=1.0, dtype=torch.float32):
    torch.manual_seed(0)
    layer = Layer(DIM, HIDDEN_DIM, NUM_EXPERTS, gate=gate, k=k, capacity_factor=factor)
    return layer.to(dtype)


def new_tokens(*shape, dtype=torch.float32):
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(1), dtype=dtype)


def one_by_one(layer, tokens, routing):
    """The output token after token, each expert as two products in float64."""
    outputs = []
    for token, experts, slots, weights in zip(tokens, *routing, strict=True):
        total = torch.zeros(DIM, dtype=torch.float64)
        for expert, slot, weight in zip(experts, slots, weights, strict=True):
            if slot >= 0:
                up, down = (w[expert].double() for w in layer.experts.parameters())
                total = total + weight.double() * (down @ nn.functional.gelu(up @ token.double()))
        outputs.append(total)
    return torch.stack(outputs)


@pytest.mark.parametrize("factor", [0.5, 1.25])
@pytest.mark.parametrize("gate", GATES.names())
def test_outputs_and_gradients_are_those_of_one_token_after_another(gate, factor):
    layer = new_layer(gate, k=1 if gate == "switch" else 2, factor=factor)
    tokens = new_tokens(3, 7).requires_grad_()
    ids = torch.arange(21).view(3, 7)
    torch.manual_seed(5)  # of the random gate
    out, _ = layer(tokens, ids)
    flat = tokens.reshape(-1, DIM)
    logits = layer.router(flat) if layer.router else torch.zeros(21, NUM_EXPERTS)
    torch.manual_seed(5)
    slots_each = capacity(21, NUM_EXPERTS, factor, layer.k)
    routing = layer.gate.route(logits, ids.view(-1), layer.k, slots_each)
    assert (routing.slots < 0).any() or factor > 1
    expected = one_by_one(layer, flat, routing).view_as(out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    leaves = [tokens, *layer.parameters()]
    seed = torch.randn_like(out)
    ours = torch.autograd.grad(out, leaves, seed, retain_graph=True)
    theirs = torch.autograd.grad(expected, leaves, seed.double())
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)


def test_a_dropped_token_gets_nothing():
    layer = new_layer("switch", k=1, factor=1.0)
    nn.init.zeros_(layer.router.weight)
    layer.router.weight.data[2, 0] = 1.0
    tokens = new_tokens(8)
    tokens[:, 0] = 5.0  # all prefer expert 2, which has two slots
    out, loss = layer(tokens)
    assert (out[:2] != 0).any(1).all()
    assert not out[2:].any()
    assert loss.item() > 3


def test_the_loss_trains_the_router_to_even_choices():
    layer = new_layer("switch", k=1)
    tokens = new_tokens(200)
    with torch.no_grad():
        layer.router.weight[1] += 2 * tokens.mean(0).sign()
    optimizer = torch.optim.SGD([layer.router.weight], lr=2.0)
    losses = []
    for _ in range(60):
        _, loss = layer(tokens)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > 1.3
    assert losses[-1] < 1.02


@pytest.mark.parametrize("gate", ["random", "hash", "expert_choice"])
def test_gates_that_are_even_by_themselves_have_no_loss(gate):
    layer = new_layer(gate, k=1)
    _, loss = layer(new_tokens(9), torch.arange(9))
    assert float(loss) == 0.0
    assert not loss.requires_grad


def test_an_empty_batch_and_one_token_are_taken():
    layer = new_layer("top_k", k=2)
    out, _ = layer(new_tokens(0))
    assert out.shape == (0, DIM)
    out, _ = layer(new_tokens(1, 1))
    assert out.shape == (1, 1, DIM)
    assert (out != 0).all()


@pytest.mark.parametrize("is_autocast", [False, True])
def test_half_types_and_autocast_keep_the_inputs_type(is_autocast):
    dtype = torch.float32 if is_autocast else torch.bfloat16
    layer = new_layer("top_k", k=NUM_EXPERTS, factor=NUM_EXPERTS, dtype=torch.bfloat16).to(dtype)
    tokens = new_tokens(12, dtype=torch.bfloat16).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        out, loss = layer(tokens)
    assert out.dtype == dtype
    out.sum().backward()
    assert tokens.grad.dtype == dtype
    assert loss.dtype == torch.float32
    # All experts are chosen and none is full, so that rounding flips no choice.
    exact, _ = copy.deepcopy(layer).float()(tokens.detach().float())
    torch.testing.assert_close(out.float(), exact, rtol=0.03, atol=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate": "swith"}, "did you mean 'switch'"),
        ({"gate": "switch", "k": 2}, "k of 1 to 1 for the gate 'switch' and 4 experts, got 2"),
        ({"gate": "top_k", "k": 5}, "k of 1 to 4 for the gate 'top_k' and 4 experts, got 5"),
        ({"capacity_factor": 0.0}, "finite factor above 0, got"),
        ({"dim": 6}, "dim and hidden_dim to be multiples of 8, got 6 and 16"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Layer(**{"dim": DIM, "hidden_dim": HIDDEN_DIM, "num_experts": NUM_EXPERTS, **settings})


@pytest.mark.unchecked
def test_a_hash_without_an_id_for_each_token_is_refused():
    layer = new_layer("hash", k=1)
    with pytest.raises(ConfigError, match="expected token_ids for a gate that hashes them"):
        layer(new_tokens(3))
    with pytest.raises(ConfigError, match="expected the ids of 3 tokens, got 2"):
        layer(new_tokens(3), torch.arange(2))


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("gate", GATES.names())
def test_a_compiler_captures_the_layer_whole(gate):
    layer = new_layer(gate, k=1 if gate == "switch" else 2)
    tokens, ids = new_tokens(2, 9), torch.arange(18).view(2, 9)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        step = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.manual_seed(2)
        out, loss = step(tokens, ids)
    torch.manual_seed(2)
    expected, expected_loss = layer(tokens, ids)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)


def compare_with_one_process(gate: str) -> None:
    """Output and gradients on two ranks, against the whole layer on each rank's own tokens."""
    group = Group.world()
    whole, divided = new_layer(gate, factor=0.8), new_layer(gate, factor=0.8)
    parallelize(divided, group)
    tokens = torch.randn(15, DIM, generator=torch.Generator().manual_seed(group.rank))
    ours, theirs = tokens.clone().requires_grad_(), tokens.clone().requires_grad_()
    outputs = divided(ours), whole(theirs)
    for out, loss in outputs:
        ((out**2).sum() + loss).backward()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    local = divided.experts.up_proj.to_local()
    assert local.shape == (NUM_EXPERTS // 2, HIDDEN_DIM, DIM)
    for name, parameter in whole.named_parameters():
        mean = all_reduce(group, parameter.grad.clone()) / 2
        gradient = divided.get_parameter(name).grad
        gradient = getattr(gradient, "full_tensor", lambda gradient=gradient: gradient)()
        torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["top_k", "expert_choice"])
def test_experts_over_two_ranks_give_what_one_process_gives(pool, gate):
    pool.run(compare_with_one_process, gate)


class TiedBlock(nn.Module):
    """A layer, and two linear ones that share their weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.last.weight = self.first.weight
        self.layer = new_layer()


class BlockWithConfiguration(PreTrainedModel):
    """A transformers model whose configuration says nothing of its layer."""

    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.block = TiedBlock()
        self.post_init()


MODELS = {
    "own": TiedBlock,
    "transformers": lambda: BlockWithConfiguration(PreTrainedConfig()),
}


def export(kind, folder):
    lancet.export(parallelize(MODELS[kind](), Group.world()), folder)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_with_layers_is_exported_as_its_state_alone(pool, tmp_path, kind):
    pool.run(export, kind, str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    model = MODELS[kind]()
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    model.load_state_dict(load_file(tmp_path / "out/model.safetensors"))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name])
