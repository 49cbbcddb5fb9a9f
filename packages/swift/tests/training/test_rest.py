import collections
from collections import defaultdict

import pytest
import torch

from shared.errors import DataError
from swift.training.rest import Rest, pack, unpack


def parts():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    module.register_buffer("table", torch.ones(2), persistent=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.5), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    return module, optimizer, scheduler, Rest(module, optimizer, [scheduler])


def disturb(module, optimizer, scheduler):
    module(torch.randn(8, 3))
    module.table.mul_(7)
    optimizer.step()
    scheduler.step()
    optimizer.param_groups[0]["momentum"] = 0.1


def test_restoring_puts_everything_back():
    module, optimizer, scheduler, rest = parts()
    before = rest.pack()
    rest.keep(3)
    disturb(module, optimizer, scheduler)
    assert not torch.equal(rest.pack(), before)
    rest.restore(3)
    assert torch.equal(rest.pack(), before)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    disturb(module, optimizer, scheduler)
    rest.restore(3)  # what is kept was not changed by the first
    assert torch.equal(rest.pack(), before)


def test_another_rank_takes_it_and_packs_the_same_bytes():
    module, optimizer, scheduler, rest = parts()
    disturb(module, optimizer, scheduler)
    other_module, other_optimizer, other_scheduler, other = parts()
    rate = other_optimizer.param_groups[0]["lr"]
    other.load(rest.pack())
    assert torch.equal(other.pack(), rest.pack())
    assert torch.equal(other_module[1].running_mean, module[1].running_mean)
    assert other_optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == optimizer.param_groups[0]["lr"].item() != 0.5
    assert other_scheduler.last_epoch == 1


def test_buffers_of_the_state_dict_are_shared():
    module, *_, rest = parts()
    assert [one.data_ptr() for one in rest.shared_buffers] == [
        one.data_ptr() for name, one in module.named_buffers() if name != "table"
    ]


def test_a_buffer_that_a_forward_pass_replaces_is_put_back_and_packed():
    module, *_, rest = parts()
    before = rest.pack()
    rest.keep(0)
    module[1].running_mean = module[1].running_mean + 5
    assert not torch.equal(rest.pack(), before)
    replaced = dict(module.named_buffers())["1.running_mean"]
    assert any(one.data_ptr() == replaced.data_ptr() for one in rest.shared_buffers)
    other, *_, taker = parts()
    taker.load(rest.pack())
    assert torch.equal(other[1].running_mean, torch.full((3,), 5.0))
    rest.restore(0)
    assert torch.equal(module[1].running_mean, torch.zeros(3))
    assert torch.equal(rest.pack(), before)


def test_the_state_of_a_run_with_other_frozen_parameters_is_refused():
    module, *_, ours = parts()
    other, *_, theirs = parts()
    ours.frozen, theirs.frozen = "a", "b"
    other[1].running_mean += 1
    with pytest.raises(DataError, match="trained with, b, got a; load the same base model"):
        ours.load(theirs.pack())
    assert torch.equal(module[1].running_mean, torch.zeros(3))
    theirs.frozen = "a"
    ours.load(theirs.pack())
    assert torch.equal(module[1].running_mean, torch.ones(3))


def test_buffers_that_a_forward_pass_makes_or_replaces_by_others_are_no_part_of_it():
    """As tables that grow with the longest text that a rank has seen."""
    module, *_, rest = parts()
    before = rest.pack()
    rest.keep(0)
    module.register_buffer("cache", torch.ones(5), persistent=False)
    module.table = torch.ones(9)
    assert torch.equal(rest.pack(), before)
    rest.restore(0)
    assert torch.equal(module.table, torch.ones(2))
    assert torch.equal(module.cache, torch.ones(5))
    other, *_, taker = parts()
    other.table = torch.ones(7)
    taker.load(before)
    assert torch.equal(other.table, torch.ones(7))


def test_a_buffer_of_another_shape_is_put_back():
    module, *_, rest = parts()
    rest.keep(0)
    module[1].running_mean = torch.ones(9)
    packed = rest.pack()
    rest.restore(0)
    assert torch.equal(module[1].running_mean, torch.zeros(3))
    rest.load(packed)
    assert torch.equal(module[1].running_mean, torch.ones(9))


def test_the_step_before_can_be_put_back_too():
    module, *_, rest = parts()
    mean = dict(module.named_buffers())["1.running_mean"]
    for version in range(3):
        mean.fill_(version)
        rest.keep(version)
    rest.restore(1)
    assert mean.tolist() == [1, 1, 1]
    rest.restore(2)
    assert mean.tolist() == [2, 2, 2]
    with pytest.raises(KeyError):
        rest.restore(0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        torch.tensor([True, False]),
    ],
)
def test_tensors_are_packed_by_their_bytes(tensor):
    found = unpack(pack({"x": [tensor, (1, "a")]}))
    assert found["x"][1] == (1, "a")
    assert found["x"][0].dtype == tensor.dtype
    torch.testing.assert_close(found["x"][0], tensor, rtol=0, atol=0, equal_nan=True)


def test_equal_values_give_equal_bytes_whichever_objects_they_are():
    name = "a word"
    assert torch.equal(pack([name, name]), pack([name, f"a {name[2:]}"]))
    assert not torch.equal(pack([1, 2]), pack([2, 1]))


def test_numbers_that_the_optimizer_keeps_are_given_to_another_rank():
    module, optimizer, _, rest = parts()
    _, taker, _, other = parts()
    weight, bias = module[0].weight, module[0].bias
    taken = taker.param_groups[0]["params"]
    optimizer.state[weight] = {"count": 3, "by_name": {"rate": 0.5}, "seen": [1, None]}
    taker.state[taken[0]] = {"count": 1, "made": True}
    taker.state[taken[1]] = {"count": 1}
    before = other.pack()
    other.load(rest.pack())
    assert taker.state[taken[0]] == optimizer.state[weight]
    assert not taker.state[taken[1]]
    assert bias not in optimizer.state
    assert torch.equal(other.pack(), rest.pack())
    assert not torch.equal(before, rest.pack())


def test_kinds_of_dictionaries_stay_what_they_are():
    *_, scheduler, rest = parts()
    rest.keep(0)
    *_, other_scheduler, other = parts()
    other.load(rest.pack())
    rest.restore(0)
    for one in (scheduler, other_scheduler):
        assert sorted(one.milestones.elements()) == [1, 2]
    held = unpack(pack({"x": collections.OrderedDict(a=torch.ones(2), b=defaultdict(int, c=1))}))
    assert type(held["x"]) is collections.OrderedDict
    assert torch.equal(held["x"]["a"], torch.ones(2))
    assert held["x"]["b"]["missing"] == 0


class Average:
    """Gives its own dictionary as its state, and takes one as its own."""

    def __init__(self):
        self.values = {"mean": torch.zeros(2), "seen": []}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


def test_what_is_kept_is_not_what_is_put_back():
    module, optimizer, *_ = parts()
    average = Average()
    rest = Rest(module, optimizer, [average])
    module[1].running_mean = torch.zeros(9)  # is put back itself, as its shape is another
    rest.keep(0)
    for _ in range(2):
        module[1].running_mean = torch.ones(3)
        rest.restore(0)
        assert torch.equal(module[1].running_mean, torch.zeros(9))
        assert average.values["seen"] == []
        assert torch.equal(average.values["mean"], torch.zeros(2))
        dict(module.named_buffers())["1.running_mean"].add_(1)
        average.values["mean"].add_(1)
        average.values["seen"].append(1)
