import pytest
import torch
from torch import nn

import diffusionpipe as dp
from diffusionpipe.job.batches import take_rows
from diffusionpipe.job.checks.rows import check_rows, check_untrained, find_parameters
from diffusionpipe.job.frozen import encode, group_components
from shared.errors import ConfigError


@pytest.fixture
def rows():
    torch.manual_seed(0)
    return {"x": torch.randn(4, 3), "names": ["a", "bb", "ccc", "dddd"]}


DRAW = dp.Draw(0, 0, range(4))


def check_frozen(frozen, rows):
    """As `Job.check` calls it."""

    def compute(samples):
        values = encode(frozen, take_rows(rows, samples), dp.Draw(0, 0, samples))
        return {f"frozen[{name!r}]": value for name, value in values.items()}

    check_untrained(frozen, rows, DRAW, {})
    check_rows(compute, 4)


def test_functions_of_draws_join_those_before_them():
    def of_batch(batch):
        return batch["x"]

    def of_all(batch, frozen, draw):
        return frozen["z"]

    assert group_components({"z": of_batch, "h": of_batch}) == {"z": ("z",), "h": ("h",)}
    frozen = {"z": of_batch, "h": of_batch, "r": of_all, "late": of_batch}
    assert group_components(frozen) == {"z+h+r": ("z", "h", "r"), "late": ("late",)}
    assert group_components({"m": nn.Linear(3, 3)}) == {"m": ("m",)}
    assert group_components({"n": draw_noise}) == {"n": ("n",)}


def draw_noise(batch, frozen, draw):
    return draw.normal((2,))


@pytest.mark.parametrize(
    ("frozen", "match"),
    [
        ({"a.b": lambda b: b}, "expected names without '.' and '[+]', got 'a.b'"),
        ({"a+b": lambda b: b}, "got 'a[+]b'"),
        ({"estimate": lambda b: b}, "frozen: expected names other than 'estimate'"),
        (
            {"z": lambda b, f: b},
            r"frozen\['z'\]: expected a function of \(batch\) or of .* \(b, f\)",
        ),
        ({"z": lambda: None}, r"got \(\)"),
    ],
)
def test_names_and_signatures_are_checked(frozen, match):
    with pytest.raises(ConfigError, match=match):
        group_components(frozen)


def test_outputs_are_flat_and_without_gradients(rows):
    linear = nn.Linear(3, 2)
    values = encode(
        {
            "z": lambda b: linear(b["x"]),
            "pair": lambda b: (b["x"], {"twice": b["x"] * 2}),
            "noisy": lambda b, f, d: f["pair"][1]["twice"] + d.normal((3,)),
        },
        rows,
        DRAW,
    )
    assert set(values) == {"z", "pair.0", "pair.1.twice", "noisy"}
    assert not any(tensor.requires_grad for tensor in values.values())
    assert torch.equal(values["noisy"], rows["x"] * 2 + DRAW.normal((3,)))


def test_functions_of_rows_alone_pass(rows):
    linear, norm = nn.Linear(3, 2), nn.LayerNorm(3)
    frozen = {
        "z": lambda b: linear(norm(b["x"])),
        "lengths": lambda b: torch.tensor([len(name) for name in b["names"]]),
        "noisy": lambda b, f, d: f["z"] + d.normal((2,)),
    }
    check_frozen(frozen, rows)


MIXING = {
    "a mean over the batch": lambda b: b["x"] - b["x"].mean(0),
    "a sum over the batch": lambda b: b["x"] + 0.01 * b["x"].sum(),
    "its place in the batch": lambda b: b["x"] + torch.arange(len(b["x"]))[:, None],
    "sorting": lambda b: b["x"].sort(0).values,
    "a BatchNorm": nn.BatchNorm1d(3),
    "that it is alone": lambda b: b["x"] * 2 if len(b["x"]) == 1 else b["x"],
}


@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_rows_are_refused(name, rows):
    function = MIXING[name]
    call = (lambda b: function(b["x"])) if isinstance(function, nn.Module) else function
    with pytest.raises(ConfigError, match=r"frozen\['z'\]: expected row i to need row i only"):
        check_frozen({"z": call}, rows)


def test_padding_to_the_longest_text_is_refused(rows):
    def tokenize(batch):
        longest = max(map(len, batch["names"]))
        return torch.tensor([[ord(c) for c in name.ljust(longest)] for name in batch["names"]])

    with pytest.raises(ConfigError, match="do pad texts to a fixed length"):
        check_frozen({"ids": tokenize}, rows)


def test_functions_that_draw_by_themselves_are_refused(rows):
    dropout = nn.Dropout(0.5)
    for function in (lambda b: dropout(b["x"]), lambda b: b["x"] + torch.randn(3)):
        with pytest.raises(ConfigError, match="expected the same values of the same rows"):
            check_frozen({"z": function}, rows)
    dropout.eval()
    check_frozen({"z": lambda b: dropout(b["x"])}, rows)


@pytest.mark.parametrize("output", [torch.zeros(3), torch.tensor(1.0), torch.zeros(1, 4)])
def test_outputs_without_a_row_a_sample_are_refused(output, rows):
    with pytest.raises(ConfigError, match="expected a value with 4 rows, one a sample, got shape"):
        check_frozen({"z": lambda b: output}, rows)


def test_weights_that_train_are_found_by_identity(rows):
    tied, own = nn.Linear(3, 3), nn.Linear(3, 3)
    trained = {"encoder.weight": tied.weight, "encoder.bias": tied.bias}
    with pytest.raises(
        ConfigError, match=r"got encoder\.(weight|bias), encoder\.\w+ of the backbone"
    ):
        check_untrained({"z": lambda b: tied(own(b["x"]))}, rows, DRAW, trained)
    # A whole model with default flags is nobody's wish to train it.
    check_untrained({"z": lambda b: own(b["x"])}, rows, DRAW, trained)
    # Looking at a type uses no value.
    check_untrained({"z": lambda b: own(b["x"].to(tied.weight.dtype))}, rows, DRAW, trained)


def test_an_adapter_on_an_encoder_is_refused(rows):
    from peft import LoraConfig, inject_adapter_in_model

    encoder = nn.Sequential(nn.Linear(3, 3), nn.SiLU(), nn.Linear(3, 3))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"]), encoder)
    with pytest.raises(ConfigError, match=r"got 2 trainable parameters among 6 \(shapes \[2, 3\]"):
        check_untrained({"z": lambda b: encoder(b["x"])}, rows, DRAW, {})
    encoder.requires_grad_(False)
    check_untrained({"z": lambda b: encoder(b["x"])}, rows, DRAW, {})


def test_all_parameters_of_a_function_are_found(rows):
    lstm, norm = nn.LSTM(3, 4, batch_first=True), nn.LayerNorm(4)
    used = find_parameters({"z": lambda b: norm(lstm(b["x"][:, None])[0])}, rows, DRAW)["z"]
    expected = [*lstm.parameters(), *norm.parameters()]
    assert {id(parameter) for parameter in used} == {id(parameter) for parameter in expected}
