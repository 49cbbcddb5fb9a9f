"""Training states that torch's own functions saved, loaded into modules and optimizers."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import bytecheckpoint as bcp
from shared.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore")


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def untrained():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


@pytest.fixture(params=["torch's files", "DCPWriter"])
def saved(request, tmp_path):
    model, optimizer = trained()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 7,
    }
    path = tmp_path / "checkpoint"
    kind = dcp.FileSystemWriter if request.param == "torch's files" else bcp.DCPWriter
    dcp.save(state, storage_writer=kind(path))
    return path, model, optimizer


def test_module_optimizer_and_numbers(saved):
    path, model, optimizer = saved
    new_model, new_optimizer = untrained()
    state = {"model": new_model, "optimizer": new_optimizer, "step": 0}
    bcp.load(path, state)
    assert state["step"] == 7
    assert new_optimizer.param_groups[0]["lr"] == 0.1
    for old, new in zip(model.parameters(), new_model.parameters(), strict=True):
        assert torch.equal(old, new)
        assert optimizer.state[old].keys() == new_optimizer.state[new].keys()
        for key, value in optimizer.state[old].items():
            assert torch.equal(value, new_optimizer.state[new][key])


def test_what_is_not_there_is_named_and_nothing_is_made(saved):
    path, *_ = saved
    model, optimizer = untrained()
    model.append(nn.Linear(2, 1))
    optimizer.add_param_group({"params": model[2].parameters()})
    before = next(model.parameters()).clone()
    with pytest.raises(DataError, match=r"model\.2\.weight: not in the checkpoint"):
        bcp.load(path, {"model": model, "optimizer": optimizer, "step": 0})
    assert torch.equal(next(model.parameters()), before)
    assert not optimizer.state


class Wrapped(nn.Module):
    """A module whose inner names look like full ones: "model.lin" from the root and from inside."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.model = nn.Module()
        self.model.lin = nn.Linear(2, 2)


@pytest.mark.parametrize("form", ["ours", "torch's"])
def test_a_module_inside_a_module_of_its_own_name(tmp_path, form):
    model = Wrapped()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    sum(p.sum() * at for at, p in enumerate(model.parameters(), 1)).backward()
    optimizer.step()
    if form == "ours":
        bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    else:
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    again = Wrapped()
    into = torch.optim.Adam(again.parameters(), lr=0.5)
    bcp.load(tmp_path / "c", {"model": again, "optimizer": into})
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(optimizer.state[old]["exp_avg"], into.state[new]["exp_avg"])
