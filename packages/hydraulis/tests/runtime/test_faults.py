"""Bad input and ranks that disagree or fail: what is told, and that nothing waits without end."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import hydraulis as hy
from hydraulis.config import Cost
from hydraulis.runtime.step_loader import StepLoader
from shared.comms import Group
from shared.errors import CommError, ConfigError, DataError

from .test_attention import documents, make_model
from .test_engine import LENGTHS, SGD, shard


def make_engine(**settings):
    return hy.Engine(make_model("llama"), SGD, **{"max_tokens": 64, **settings})


def unlike_arguments():
    rank = Group.world().rank
    for unlike in (
        {"strategy": "cp4" if rank == 1 else "cp1"},
        {"max_tokens": 64 + (rank == 1)},
        {"cost": Cost(a=1e-6 * (1 + (rank == 1)), b=1e-3)},
        {"strategy": "tp2+tp2" if rank == 1 else "tp2+pp2"},
    ):
        with pytest.raises(CommError, match=r"the same arguments on all ranks, but ranks \[1\]"):
            make_engine(**unlike)
    return make_engine().step(documents(LENGTHS)).loss


def test_ranks_with_unlike_arguments_are_named_before_they_make_groups(ranks):
    assert len(set(ranks.run(unlike_arguments).results)) == 1


def measured():
    model = make_model("llama").float()
    cost = hy.measure_cost(model, 1024, repeats=1, micro_batches=[(1024,), (500, 12), (32,)])
    loss = make_engine(cost=cost).step(documents(LENGTHS)).loss
    shard(model)
    with pytest.raises(ConfigError, match=r"model that is not sharded yet, got DTensors"):
        hy.measure_cost(model, 64, repeats=1)
    return cost.a, cost.b, cost.c, cost.device, loss


def test_ranks_measure_one_cost_together(ranks):
    found = ranks.run(measured).results
    assert len(set(found)) == 1
    assert found[0][3] == "cpu"


def test_a_cost_is_kept_in_a_file_of_its_version_and_device(tmp_path):
    path = tmp_path / "cost.json"
    cost = replace(Cost.fit([([9], 1.0), ([20], 2.5), ([7, 7], 1.6)]), device="cpu")
    cost.save(path)
    found = Cost.load(path)
    assert found == cost
    assert (found.error, found.device) == (cost.error, "cpu")
    make_engine(cost=found)
    with pytest.raises(
        ConfigError, match=r"one of cpu, got one that was measured on H100; measure"
    ):
        make_engine(cost=replace(found, device="H100"))
    for text, told in (
        (path.read_text().replace('"version": 1', '"version": 2'), r"a cost of version 1, got 2"),
        ("[]", r"a cost of version 1, got None; measure it anew"),
        ('{"version": 1, "a": -1, "b": 1}', r"cost\.json: expected a cost: Cost\.a: .* got -1"),
        ('{"version": 1, "b": 1}', r"cost\.json: expected a cost: missing .* 'a'"),
        (
            '{"version": 1, "a": 1, "b": 1, "z": 1, "d": 0}',
            r"cost\.json: expected a cost of a, b and c, got d, z too; measure it anew",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            Cost.load(path)
    path.write_text("{")
    with pytest.raises(DataError, match=r"cost\.json: expected a cost as JSON, got Expecting"):
        Cost.load(path)
    with pytest.raises(DataError, match="none: expected a cost, there is nothing; check the path"):
        Cost.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ([[1, 2, 3], [4, 97, 5]], r"document 1: expected token ids from 0 to 96, .* 97, got 97"),
        ([[1, 2, 3], [4, -100, 5]], r"document 1: .* got -100; is it another tokenizer's"),
        ([[1, 2, 3], [0.5, 1.0]], r"document 1: expected one row .*, got \[2\] of torch.float32"),
        ([[1, 2], {"input_ids": [1]}], r"document 1: .* got dict: .*; of a data set's rows give"),
        (["some text"], r"document 0: expected one row .* got text; tokenise it before"),
    ],
)
def test_tokens_that_the_model_does_not_know_are_named(texts, told):
    with pytest.raises(DataError, match=told):
        make_engine().step(texts)


@pytest.mark.parametrize(
    ("lengths", "told"), [([3, 6], "expected 6 tokens, .* got 5"), ([3, 4], "expected 4 .* got 5")]
)
def test_documents_of_other_lengths_than_was_said_are_named(lengths, told):
    engine = make_engine()
    loader = StepLoader(documents((3, 5)), engine, tokens_per_step=99, lengths=lengths)
    with pytest.raises(DataError, match=f"document 1: {told}"):
        engine.step(next(iter(loader)))


def test_a_document_that_cannot_be_read_is_named():
    engine = make_engine()
    texts = [[1, 2], np.zeros((2, 2), dtype=np.int64)]
    loader = StepLoader(texts, engine, tokens_per_step=99)
    with pytest.raises(DataError, match=r"document 1: expected one row of token ids"):
        engine.step(next(iter(loader)))


def test_negative_and_unknown_lengths_are_named():
    for lengths, told in (
        ([3, -4], r"lengths\[1\].* got -4"),
        (np.array([3.0, np.nan]), "got nan"),
    ):
        with pytest.raises(ConfigError, match=told):
            StepLoader(documents((3, 4)), make_engine(), tokens_per_step=9, lengths=lengths)
    with pytest.raises(ConfigError, match=r"lengths\[0\]: expected a whole number .* got 0"):
        make_engine().step([[], [1, 2]])


def wrapped():
    with pytest.raises(ConfigError, match=r"the model itself, got it in DistributedDataParallel"):
        hy.Engine(DistributedDataParallel(make_model("llama")), SGD, max_tokens=64)


def test_a_wrapped_model_is_asked_for_itself(ranks):
    ranks.run(wrapped)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="max_grad_norm: expected more than 0"):
            make_engine(max_grad_norm=wrong)


@pytest.mark.unchecked
def test_an_optimizer_that_is_made_already_is_refused():
    made = torch.optim.SGD(make_model("llama").parameters())
    with pytest.raises(ConfigError, match=r"expected what makes one, .* got a made SGD"):
        hy.Engine(make_model("llama"), made, max_tokens=64)  # pyrefly: ignore[bad-argument-type]


def steps_of(too_long, num_ranks=4):
    engine = make_engine(max_tokens=12)
    lengths = (7, 1, 14, 2, 40, 5, 5, 11, 9, 30, 3, 12)
    loader = StepLoader(documents(lengths), engine, tokens_per_step=24, seed=5, too_long=too_long)
    found = [(step.number, step.indices, step.plan.lengths) for step in loader]
    for step in loader:
        engine.step(step)
    return found, loader.state_dict()


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_what_other_ranks_drop_or_cut_moves_no_other_document_to_another_step(ranks, too_long):
    (many, state), *_ = ranks.run(steps_of, too_long).results
    few, of_few = steps_of(too_long)
    assert state == of_few
    lost = {2, 4, 9} if too_long == "drop" else set()
    for number, indices, lengths in few:
        (same,) = [one for one in many if one[0] == number]
        assert [i for i in same[1] if i not in lost] == list(indices)
        assert max(lengths) <= 12
    kept = {i for _, indices, _ in few for i in indices}
    assert kept == set(range(12)) - lost
    assert {i for _, indices, _ in many for i in indices} == set(range(12))
    with pytest.raises(ConfigError, match=r"num_tokens: expected 7, .* got 139 of the state"):
        StepLoader(documents((3, 4)), make_engine(), tokens_per_step=24, seed=5).load_state_dict(
            {**state, "num_documents": 2}
        )


class Unreadable(list):
    """Documents whose last one cannot be read on a rank."""

    def __getitem__(self, at):
        if at == len(self) - 1 and Group.world().rank == self.faulty:
            raise OSError("the disk is gone")
        return super().__getitem__(at)


def unread(settings):
    engine = make_engine(**settings)
    texts = Unreadable(documents(LENGTHS))
    loader = StepLoader(texts, engine, tokens_per_step=sum(LENGTHS), lengths=LENGTHS)
    step = next(iter(loader))
    place = step.indices.index(len(LENGTHS) - 1)
    readers = [
        rank
        for rank, queue in enumerate(getattr(step.plan, "micro_batches", ()))
        if any(place in getattr(one, "documents", one) for one in queue)
    ]
    texts.faulty = 2 * readers[0] if "strategy" in settings else readers[-1]
    expected = OSError if engine.rank == texts.faulty else CommError
    with pytest.raises(expected) as told:
        engine.step(step)
    texts.faulty = None
    return str(told.value), engine.step(step).loss


@pytest.mark.parametrize("settings", [{}, {"strategy": "tp2+tp2"}], ids=str)
def test_a_rank_that_cannot_read_its_documents_stops_all_before_anything_is_computed(
    ranks, settings
):
    engine = make_engine(max_tokens=sum(LENGTHS))
    loss = engine.step(documents(LENGTHS)).loss
    found = ranks.run(unread, settings).results
    messages = [told for told, _ in found]
    (faulty,) = [rank for rank, told in enumerate(messages) if told == "the disk is gone"]
    told = f"one plan and its documents on all ranks, but ranks [{faulty}] failed; see what they"
    assert all(told in one for one in messages if one != "the disk is gone")
    assert [one for _, one in found] == pytest.approx([loss] * 4, rel=1e-6)


def short_of_memory():
    engine = make_engine(strategy="tp2+tp2")
    error = torch.OutOfMemoryError("no memory left")
    with (
        mock.patch("hydraulis.runtime.replicas.stage.sum_losses", side_effect=error),
        pytest.raises(torch.OutOfMemoryError) as told,
    ):
        engine.step(documents(LENGTHS))
    return told.value.__notes__


def test_memory_that_is_short_in_a_replica_says_which(ranks):
    notes = ranks.run(short_of_memory).results
    told = [f"in tp2, replica {number} of the step, where others wait" for number in (0, 0, 1, 1)]
    for (note,), expected in zip(notes, told, strict=True):
        assert note.startswith(expected)
        assert note.endswith("start again with max_tokens below 64")


def unlike_weights(settings):
    torch.manual_seed(Group.world().rank)
    model = make_model("llama")
    if Group.world().rank:
        with torch.no_grad():
            for one in model.parameters():
                one.add_(1.0)
    engine = hy.Engine(model, SGD, max_tokens=64, **settings)
    return engine.step(documents(LENGTHS)).loss, engine.state_dict()


@pytest.mark.parametrize("settings", [{}, {"strategy": "tp2+tp1+tp1"}], ids=str)
def test_all_ranks_begin_with_the_first_ones_weights(ranks, settings):
    engine = make_engine(max_tokens=sum(LENGTHS))
    loss = engine.step(documents(LENGTHS)).loss
    for got, state in ranks.run(unlike_weights, settings).results:
        assert got == pytest.approx(loss, rel=1e-6)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-8)


def test_a_loaders_length_is_its_steps():
    loader = StepLoader(documents(LENGTHS), make_engine(), tokens_per_step=20)
    assert len(loader) == len(list(loader)) > 2
    short = StepLoader(
        documents((3, 40, 4)), make_engine(max_tokens=8), tokens_per_step=3, too_long="drop"
    )
    assert len(short) == len(list(short)) == 2


def too_few():
    """Ranks without a document, in DDP, FSDP2 and replicas, with and without next tokens."""
    losses = []
    for settings in ({}, {"is_sharded": True}, {"strategy": "tp2+tp1+tp1"}):
        model = make_model("llama")
        if settings.pop("is_sharded", False):
            shard(model)
        engine = hy.Engine(model, SGD, max_tokens=64, **settings)
        losses.append([engine.step(documents(lengths)).loss for lengths in ((5,), (1,), (9, 1))])
    return losses


def test_fewer_documents_than_ranks_and_none_to_learn_end_and_agree(ranks):
    for losses in ranks.run(too_few).results:
        assert torch.tensor(losses).isfinite().all()
        for other in losses[1:]:
            assert other == pytest.approx(losses[0], rel=1e-9)
        assert losses[0][1] == 0.0
