"""A checkpoint loads into a state whose modules have other names by now, optimizers included."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.loading.renaming import Renaming
from shared.errors import DataError


def make(first, second):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module(first, nn.Linear(3, 4))
    model.add_module(second, nn.Linear(4, 2))
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    )
    return model, optimizer


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((5, 3), step + 1.0)).square().sum().backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("is_dcp", [False, True])
def test_training_goes_on_as_under_the_old_names(tmp_path, is_dcp):
    model, optimizer = make("encoder", "head")
    train(model, optimizer, 2)
    bcp.save(tmp_path / "old", {"model": model, "optimizer": optimizer})
    source = tmp_path / "old"
    if is_dcp:
        from bytecheckpoint.tools.convert import convert

        source = tmp_path / "dcp"
        convert(tmp_path / "old", source, "dcp")
    expected = train(model, optimizer, 3)

    other, its_optimizer = make("backbone", "head")
    state = {"model": other, "optimizer": its_optimizer}
    with pytest.raises(DataError, match=r"model.backbone.bias: not in the checkpoint"):
        bcp.load(source, state)
    report = bcp.load(source, state, rename={"model.encoder.": "model.backbone."})
    assert (report.missing, report.unexpected) == ([], [])
    assert its_optimizer.param_groups[0]["lr"] == 0.5
    for one, two in zip(train(other, its_optimizer, 3), expected, strict=True):
        assert torch.equal(one, two)


def test_a_hugging_face_folder_is_renamed_below_the_models_key(tmp_path):
    save_file(
        {"bert.w": torch.arange(3.0), "bert.b": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    model = {"w": torch.zeros(3), "b": torch.zeros(2)}
    bcp.load(tmp_path, {"model": model}, rename={"model.bert.": "model."})
    assert model["w"].tolist() == [0, 1, 2]
    assert model["b"].tolist() == [1, 1]


def test_the_longest_beginning_counts():
    rename = Renaming({"a.": "x.", "a.b.": "y.", "c": "d"})
    assert [rename(name) for name in ("a.b.w", "a.w", "cat", "b.a.w")] == [
        "y.w",
        "x.w",
        "dat",
        "b.a.w",
    ]
    assert rename.apply(["a.b.w", "a.w", "c"]) == {"y.w": "a.b.w", "x.w": "a.w", "d": "c"}


@pytest.mark.parametrize(
    ("beginnings", "message"),
    [
        ({"a.": "b."}, "'a.w' and 'b.w' would both be 'b.w'"),
        ({"z.": "y."}, "expected names that begin with 'z.', the checkpoint has a.w, b.w"),
    ],
)
def test_names_that_do_not_fit_are_refused_and_nothing_is_loaded(tmp_path, beginnings, message):
    bcp.save(tmp_path / "old", {"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}})
    state = {"a": {"w": torch.zeros(2)}, "b": {"w": torch.zeros(2)}}
    with pytest.raises(DataError, match=message):
        bcp.load(tmp_path / "old", state, rename=beginnings)
    assert not state["a"]["w"].any()
