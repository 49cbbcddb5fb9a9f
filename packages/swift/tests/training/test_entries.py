import torch

import swift
from swift.training.entries import Entries
from swift.training.rest import Rest


def parts():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 3))
    opt = swift.undoable(torch.optim.SGD(module[0].parameters(), 0.1, momentum=0.9))
    entries = Entries(["0.weight"], opt, Rest(module, opt.optimizer))
    entries.constants.update({f"1.{name}": one for name, one in module[1].named_parameters()})
    entries.prefix = "shard1/"
    return module, opt, entries


def test_constants_are_entries_that_a_step_does_not_change():
    module, opt, entries = parts()
    assert entries.last == 3
    assert list(entries.state_of(2)) == ["shard1/1.bias/constant"]
    entries.rest.keep(0)
    module[0].weight.grad = torch.ones(2, 2)
    opt.step()
    entries.rest_version = 1
    assert entries.versions() == [1, 1, 1, 1]
    entries.undo([0, 1, 2, 3])
    assert entries.versions() == [0, 0, 0, 0]


def test_a_newcomer_takes_constants_and_names_are_those_of_its_shard():
    module, _, entries = parts()
    other, _, newcomer = parts()
    for entry in range(4):
        given = entries.state_of(entry)
        assert list(given) == list(newcomer.state_of(entry))
        newcomer.fill(entry, {name: one.clone() for name, one in given.items()}, 5)
    assert newcomer.versions() == [5, 5, 5, 5]
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert list(entries.prepare(0)) == ["shard1/0.weight/param", "shard1/0.weight/momentum_buffer"]
