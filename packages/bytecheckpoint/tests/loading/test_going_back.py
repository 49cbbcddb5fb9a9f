"""Loads into a state that has got more since the checkpoint, or less."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bytecheckpoint as bcp
from shared.errors import DataError


def train(model, optimizer):
    for _ in range(2):
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def build(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    return model, kind(model.parameters())


KINDS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("num_before", [0, 1], ids=["step 0", "unfrozen later"])
@pytest.mark.parametrize("kind", ["AdamW", "momentum"])
def test_optimizer_state_from_after_the_checkpoint_is_dropped(tmp_path, kind, num_before, strict):
    model, optimizer = state = build(KINDS[kind])
    state = {"model": model, "optimizer": optimizer}
    for _ in range(num_before):
        train(model, optimizer)
    bcp.save(tmp_path / "c", state)
    histories = []
    for _ in range(2):
        assert len(optimizer.state) == 2 * num_before
        model[0].requires_grad_(True)
        train(model, optimizer)
        histories.append([p.detach().clone() for p in model.parameters()])
        model[0].requires_grad_(False)
        model.zero_grad()
        bcp.load(tmp_path / "c", state, strict=strict)
    assert all(map(torch.equal, *histories))


def test_lists_of_tensors_in_an_optimizers_state_are_loaded_into_a_new_one(tmp_path):
    def build():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1)

    def train(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(torch.arange(6.0).view(2, 3)) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    histories = []
    for is_resumed in (False, True):
        model, optimizer = build()
        state = {"model": model, "optimizer": optimizer}
        if is_resumed:
            bcp.load(tmp_path / "c", state)
        else:
            train(model, optimizer)
            bcp.save(tmp_path / "c", state)
        assert len(optimizer.state[model.weight]["old_dirs"]) > 1
        train(model, optimizer)
        histories.append(model.weight.detach())
    assert torch.equal(*histories)


def test_a_key_of_a_parameter_from_after_the_checkpoint_is_dropped(tmp_path):
    model, optimizer = build(KINDS["AdamW"])
    train(model, optimizer)
    parameter = model[1].weight
    optimizer.state[parameter]["kept"] = 3
    bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.state[parameter]["max_exp_avg_sq"] = torch.ones_like(parameter)
    optimizer.state[parameter]["note"] = 5
    bcp.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq", "kept"}
    assert not optimizer.param_groups[0]["amsgrad"]


def test_parameters_that_the_optimizer_did_not_have_keep_their_state_unless_strict(tmp_path):
    model, _ = build(KINDS["AdamW"])
    small = torch.optim.AdamW(model[1].parameters())
    train(model, small)
    bcp.save(tmp_path / "c", {"model": model, "optimizer": small})
    model[0].requires_grad_(True)
    large = torch.optim.AdamW(model.parameters())
    train(model, large)
    with pytest.raises(DataError, match=r"optimizer.state.model.0.weight.exp_avg: not in"):
        bcp.load(tmp_path / "c", {"model": model, "optimizer": large})
    bcp.load(tmp_path / "c", {"model": model, "optimizer": large}, strict=False)
    assert len(large.state) == 4


@pytest.mark.parametrize("rest", [{}, {"w": torch.ones(2), "rng": bcp.rng_state()}])
def test_a_dictionary_gets_the_plain_values_that_were_saved(tmp_path, rest, caplog):
    saved = {"step": 5, "best": 0.5, "history": {"loss": [1.0]}}
    bcp.save(tmp_path / "c", {"extra": saved | rest})
    state = {"extra": {"step": 0, "later": (1, 2)} | rest}
    bcp.load(tmp_path / "c", state)
    assert {key: state["extra"][key] for key in state["extra"].keys() - rest.keys()} == saved
    assert "does not have yet: extra.later" in caplog.text
    state = {"extra": {"step": 0, "later": (1, 2)} | rest}
    report = bcp.load(tmp_path / "c", state, strict=False)
    assert state["extra"].items() >= (saved | {"later": (1, 2)}).items()
    assert report.missing == ["extra.later"]


def test_tensors_and_keys_of_the_state_itself_are_still_checked(tmp_path):
    bcp.save(tmp_path / "c", {"x": {"n": 1, "t": torch.ones(2)}, "step": 3})
    for state, name in [
        ({"x": {"n": 0}}, "x.t: in the checkpoint"),
        ({"x": {"n": 0, "t": torch.zeros(2), "u": torch.zeros(2)}}, "x.u: not in"),
        ({"stp": 0}, "stp: not in"),
        ({"x": {"n": 0, "t": torch.zeros(2), "rng": bcp.rng_state()}}, "x.rng: not in"),
    ]:
        with pytest.raises(DataError, match=name):
            bcp.load(tmp_path / "c", state)


def test_a_number_as_key_is_not_replaced_by_its_text(tmp_path):
    bcp.save(tmp_path / "c", {"x": {"1": "text"}})
    state = {"x": {1: "number"}}
    with pytest.raises(DataError, match=r"x\.1: not in the checkpoint"):
        bcp.load(tmp_path / "c", state)
    bcp.load(tmp_path / "c", state, strict=False)
    assert state == {"x": {1: "number"}}


class Count:
    """An object whose state differs by rank, which does not say so."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count, "inner": {"list": [self.count, 0]}}

    def load_state_dict(self, state):
        self.count, (inner, _) = state["count"], state["inner"]["list"]
        assert inner == self.count


def save_and_load_counts(path):
    rank = dist.get_rank()
    bcp.save(path, {"c": Count(10 + rank)})
    count = Count(0)
    bcp.load(path, {"c": count})
    return count.count


def test_an_object_gets_its_own_ranks_state_back(tmp_path, pool):
    assert pool.run(save_and_load_counts, str(tmp_path / "c")).results == [10, 11]
    count = Count(0)
    bcp.load(tmp_path / "c", {"c": count})
    assert count.count == 10
