"""What ranks do by what all of them hold: on two real ranks."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import swift
from shared.comms import Group, reshard
from shared.errors import CommError, DataError
from swift.recovery.transfer import list_fetches, move
from swift.training.agreement import (
    HeldStates,
    begin_equal,
    expect_equal,
    expect_equal_parameters,
    gather_sizes,
)

SETS = [[0, 1]]


def make(seed=0, mode="exact"):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    run = SimpleNamespace(rank=Group.world().rank, world_size=2, reads_whole_batches=False)
    kinds = {"exact": partial(torch.optim.SGD, momentum=0.9), "arith": torch.optim.AdamW}
    optimizer = kinds[mode](model.parameters(), 0.1)
    dp = swift.DataParallel(model, swift.undoable(optimizer, mode), run)
    dp.regroup(Group.world())
    return model, dp


def step(dp, at):
    dp.begin(at)
    dp.backward(dp(torch.ones(1, 3)).sum())
    dp.finish(at)


def hold(dp, *, is_filled=True, checkpoint=None):
    return HeldStates.gather(Group.world(), dp, checkpoint, is_filled=is_filled)


def begin_unlike():
    """Which ranks are to be filled, by which is lost."""
    rank = Group.world().rank
    _, dp = make(seed=rank)
    found = []
    for lost in (None, 0, 1):
        held = hold(dp, is_filled=rank != lost)
        assert held.is_untrained
        begin_equal(Group.world(), dp, held, SETS)
        found.append([rank for rank, row in held.versions.items() if row is None])
    return found


def compare():
    rank = Group.world().rank
    model, dp = make()
    step(dp, 0)
    held = hold(dp, is_filled=rank != 1)
    assert not held.is_untrained
    assert held.versions == {0: [1, 1, 1], 1: None}
    sizes = gather_sizes(Group.world(), dp, could_undo=rank != 1)
    assert sizes.could_undo == [True, False]
    assert sizes.num_tensors == {rank: [2, 2, 1] for rank in range(2)}
    expect_equal(Group.world(), dp, SETS, 1)
    if rank == 1:
        model.weight.data[0, 0] += 1
    expect_equal(Group.world(), dp, [[0], [1]], 1)  # none replicates another
    with pytest.raises(DataError) as caught:
        expect_equal(Group.world(), dp, SETS, 1)
    return str(caught.value)


def compare_rates():
    _, dp = make()
    dp.optimizer.param_groups[0]["lr"] = 0.1 * (1 + Group.world().rank)
    with pytest.raises(DataError, match=r"ranks \[1\] differ from rank 0"):
        expect_equal(Group.world(), dp, SETS, 0)


def see_checkpoints(folder):
    """Of two checkpoints the second rank sees the older one alone."""
    own = folder / str(Group.world().rank)
    for step in (4, 8)[: 2 - Group.world().rank]:
        (own / f"step-{step}").mkdir(parents=True)
        (own / f"step-{step}" / "COMMITTED").touch()
    return hold(make()[1], checkpoint=swift.Every(4, own)).checkpoint


def copied(dp):
    return [
        {name: one.clone() for name, one in sorted(dp.state_of(entry).items())}
        for entry in range(3)
    ]


def tear_apart(*, undo_is_exact):
    """Arithmetic undo, of a step that one of two ranks has begun: whether both end alike."""
    rank = Group.world().rank
    _, dp = make(mode="arith")
    assert dp.describe()["undo_is_exact"] is False
    for at in range(3):
        step(dp, at)
    for one in dp.optimizer.parameters:
        one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(7))
    if rank == 0:
        dp.optimizer.update([0])
    decision = swift.decide(hold(dp).of(SETS), undo_is_exact=undo_is_exact)
    dp.undo(decision.undo.get(rank, []))
    sizes = gather_sizes(Group.world(), dp, could_undo=True)
    move(
        Group.world(), dp, list_fetches(decision.fetch, SETS), 3, is_lost=False,
        rest_bytes=sizes.rest_bytes, num_tensors=sizes.num_tensors,
    )  # fmt: skip
    assert dp.versions() == [3, 3, 3]
    try:
        expect_equal(Group.world(), dp, SETS, 3)
    except DataError:
        return False
    return True


def fetch_a_step():
    """A survivor that is a step behind fetches; at first the other is lost meanwhile."""
    rank = Group.world().rank
    _, dp = make()
    step(dp, 0)
    if rank == 1:
        dp.undo([0, 1, 2])
    sizes = gather_sizes(Group.world(), dp, could_undo=True)
    fetches = list_fetches({1: {0: 0, 1: 0, 2: 0}}, SETS)
    before = copied(dp)

    def fetch():
        move(
            Group.world(), dp, fetches, 1, is_lost=False,
            rest_bytes=sizes.rest_bytes, num_tensors=sizes.num_tensors,
        )  # fmt: skip

    start, begun = reshard.start, []

    class LostBehindAll:
        def __init__(self, *args):
            begun.append(self)
            self.messages = start(*args)

        def wait(self):
            self.messages.wait()
            if self is begun[-1]:
                raise CommError("lost")

    for what, happens in [("reach", CommError("lost")), ("reshard.start", LostBehindAll)]:
        with (
            patch(f"swift.recovery.transfer.{what}", side_effect=happens),
            pytest.raises(CommError),
        ):
            fetch()
        assert dp.versions() == [1 - rank] * 3
        now = copied(dp)
        assert [list(state) for state in now] == [list(state) for state in before]
        assert all(
            torch.equal(now[entry][name], before[entry][name])
            for entry in range(3)
            for name in now[entry]
        )
    fetch()
    assert dp.versions() == [1, 1, 1]
    expect_equal(Group.world(), dp, SETS, 1)
    return [len(names) for names in before]


def do_all(folder):
    compare_rates()
    assert [tear_apart(undo_is_exact=is_exact) for is_exact in (True, False)] == [False, True]
    return begin_unlike(), compare(), fetch_a_step(), see_checkpoints(folder)


@pytest.fixture(scope="module")
def found(two_ranks, tmp_path_factory):
    return two_ranks.run(do_all, tmp_path_factory.mktemp("checkpoints")).results


def test_those_built_unlike_the_first_that_lives_are_filled_from_it(found):
    assert [unlike for unlike, *_ in found] == [[[1], [0], [1]]] * 2


def test_states_that_differ_end_the_recovery_and_name_the_ranks(found):
    expected = (
        "after the recovery to step 1, ranks [1] differ from rank 0, whose state they replicate; a "
        "parameter was changed outside the optimizer, or memory is faulty: go back to a checkpoint"
    )
    assert [text for _, text, *_ in found] == [expected] * 2


def test_a_survivors_state_stays_as_it_was_until_all_is_fetched(found):
    assert [counts for *_, counts, _ in found] == [[2, 2, 1], [1, 1, 1]]


def test_the_newest_checkpoint_that_every_rank_sees_counts(found):
    assert [seen for *_, seen in found] == [4, 4]


@pytest.mark.unchecked  # the group is a stand-in
def test_the_first_parameter_that_differs_is_named_with_its_ranks_alone(monkeypatch):
    """Rank 1 has another second one, rank 2 another first one; digests differ in either half."""
    names = ["first", "second", "third"]
    digests = [[1, 2, 3], [1, 2 + (1 << 32), 3], [5, 2, 3]]
    calls = []

    def gather(group, mine):
        calls.append(mine)
        whole = [[0, sum(one)] for one in digests]
        rows = [[[one >> 32, one & 0xFFFFFFFF] for one in row] for row in digests]
        return (
            [torch.tensor([row]) for row in whole] if len(mine) == 1 else [*map(torch.tensor, rows)]
        )

    monkeypatch.setattr("swift.training.agreement.all_gather", gather)
    monkeypatch.setattr("swift.training.agreement.digest", lambda one: (7 << 32) + 9)
    group: Any = SimpleNamespace(world_size=3, ranks=[0, 4, 8], device=torch.device("cpu"))
    with pytest.raises(DataError, match=r"another first on ranks \[8\] than on rank 0"):
        expect_equal_parameters(group, dict.fromkeys(names, torch.ones(1)), 6)
    assert [one.tolist() for one in calls] == [[[7, 9]], [[7, 9]] * 3]
