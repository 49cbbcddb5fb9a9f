import itertools

import pytest
import torch

from llmpq.runtime import linear
from llmpq.runtime.linear import FORMS, QuantLinear, fastest_form, form_for, forms_table
from shared.errors import ConfigError
from shared.kernels.weight_matmul import pack, unpack


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# What rounding costs: none beyond float32's, bfloat16's of weights and x, 8 bits of both.
TOLERANCES = {"packed": 1e-5, "dense32": 1e-5, "dense16": 2e-2, "int8": 4e-2}


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_gives_the_product(form, bits):
    packed, bias = pack(draw(40, 96), bits, group_size=64), draw(40, seed=1)
    x = draw(2, 9, 96, seed=2)
    out = QuantLinear(packed, bias, forms=[[1, form]])(x)
    exact = x.double() @ unpack(packed).double().t() + bias
    assert out.shape == (2, 9, 40)
    assert out.dtype == torch.float32
    assert float((out - exact).abs().max() / exact.abs().max()) <= TOLERANCES[form]


def test_dense_forms_cut_large_weights_into_blocks(monkeypatch):
    monkeypatch.setattr(linear, "BLOCK_BYTES", 1)
    packed, x = pack(draw(200, 40), 4), draw(3, 40)
    exact = x.double() @ unpack(packed).double().t()
    assert float((FORMS["dense32"](x, packed) - exact).abs().max()) <= 1e-4


def test_the_table_decides_by_tokens(monkeypatch):
    used = []
    for name in ("packed", "dense16", "dense32"):
        monkeypatch.setitem(
            FORMS, name, lambda x, w, name=name: used.append(name) or x.new_zeros(*x.shape[:-1], 8)
        )
    table = [[1, "packed"], [4, "dense32"], [10, "dense16"]]
    layer = QuantLinear(pack(draw(8, 32), 4), forms=table)
    for shape in ((1, 32), (3, 32), (4, 1, 32), (3, 3, 32), (2, 5, 32)):
        layer(torch.zeros(shape))
    assert used == ["packed", "packed", "dense32", "dense32", "dense16"]
    assert [form_for(table, tokens) for tokens in (0, 1, 4, 9, 10, 999)] == [
        "packed",
        "packed",
        "dense32",
        "dense32",
        "dense16",
        "dense16",
    ]


@pytest.mark.parametrize(
    "table",
    [[], [[2, "packed"]], [[1, "packed"], [1, "dense32"]], [[1, "dense64"]], [["a", "packed"]]],
)
def test_wrong_tables_are_refused(table):
    with pytest.raises(ConfigError, match="forms"):
        QuantLinear(pack(draw(8, 32), 4), forms=table)


def test_state_moves_with_the_layer():
    layer = QuantLinear(pack(draw(8, 300), 3, group_size=100), draw(8))
    other = QuantLinear(pack(draw(8, 300, seed=5), 3, group_size=100), draw(8, seed=5))
    other.load_state_dict(layer.state_dict())
    x = draw(2, 300)
    assert torch.equal(layer(x), other(x))
    assert not any(True for _ in layer.parameters())
    assert "bits=3" in repr(layer)


def test_replaced_weights_are_used():
    layer = QuantLinear(pack(draw(8, 96), 4, group_size=32), forms=[[1, "packed"]])
    other = QuantLinear(pack(draw(8, 96, seed=5), 4, group_size=32), forms=[[1, "packed"]])
    x = draw(2, 96)
    before = layer(x)
    layer.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(layer(x), other(x))
    assert not torch.equal(layer(x), before)
    layer.scale = layer.scale * 2
    assert torch.equal(layer(x), 2 * other(x))
    assert layer.to("meta").packed.data.is_meta


@pytest.mark.parametrize("form", list(FORMS))
def test_no_form_is_recorded_for_gradients(form):
    bias = torch.nn.Parameter(draw(8))
    layer = QuantLinear(pack(draw(8, 32), 4), bias, forms=[[1, form]])
    x = draw(3, 32).requires_grad_()
    assert not layer(x).requires_grad


def test_bfloat16_in_and_out():
    packed = pack(draw(8, 64), 4)
    for tokens in (1, 100):
        x = draw(tokens, 64).bfloat16()
        out = QuantLinear(packed)(x)
        assert out.dtype == torch.bfloat16
        exact = x.double() @ unpack(packed).double().t()
        assert float((out - exact).abs().max() / exact.abs().max()) <= 2e-2


def test_the_fastest_form_is_one_that_was_measured():
    asked = {"bits": 4, "tokens": 2, "in_features": 64, "out_features": 48}
    assert fastest_form(**asked) == fastest_form(**asked)
    assert fastest_form(**asked) in ("packed", "dense16", "dense32")
    with pytest.raises(ConfigError, match="at least 1"):
        fastest_form(bits=4, tokens=0, in_features=64, out_features=48)
    with pytest.raises(ConfigError, match="bits"):
        fastest_form(bits=5, tokens=1, in_features=64, out_features=48)


def test_forms_are_timed_with_weights_that_none_has_just_read(monkeypatch):
    calls = []
    for name in ("packed", "dense32"):
        monkeypatch.setitem(
            FORMS, name, lambda x, w, name=name: calls.append((name, w.data.data_ptr())) or x
        )
    found = linear.measure_forms(
        bits=4, in_features=96, out_features=32, tokens=(3,), forms=("packed", "dense32")
    )
    assert set(found[3]) == {"packed", "dense32"}
    assert len({weight for _, weight in calls}) == 16
    assert all(a[1] != b[1] for a, b in itertools.pairwise(calls))
    assert {name for name, _ in calls[::2]} == {"packed", "dense32"}, "each begins some turns"


def test_a_table_names_each_change_once():
    times = {
        1: {"packed": 1.0, "dense16": 2.0},
        4: {"packed": 1.0, "dense16": 2.0},
        16: {"packed": 3.0, "dense16": 2.0},
        64: {"packed": 9.0, "dense16": 2.0},
    }
    assert forms_table(times) == [[1, "packed"], [16, "dense16"]]


@pytest.mark.parametrize("wrong", [{"bits": 16}, {"bits": 5}, {"group_size": 0}, {"tokens": 0}])
def test_what_cannot_be_measured_is_refused(wrong):
    given = {"bits": 4, "tokens": 1, "in_features": 64, "out_features": 64, **wrong}
    with pytest.raises(ConfigError, match="expected"):
        fastest_form(**given)
