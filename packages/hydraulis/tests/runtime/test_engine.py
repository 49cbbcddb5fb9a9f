"""Steps over ranks beside one process that computes each document alone."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, GPT2Config

from hydraulis.config import Cost, SequenceTooLong
from hydraulis.runtime.engine import Engine
from hydraulis.runtime.step_loader import StepLoader
from shared.comms import Group
from shared.errors import CommError, ConfigError, DataError, DivergenceError

from .test_attention import documents, make_model, one_by_one

LENGTHS = (7, 1, 30, 2, 13, 5, 5, 11)
SGD = partial(torch.optim.SGD, lr=0.1)


def expected(family, batches):
    """Losses, and weights after plain steps in one process."""
    model = make_model(family)
    optimizer = SGD(model.parameters())
    losses = []
    for lengths in batches:
        texts = documents(lengths)
        count = sum(length - 1 for length in lengths)
        loss = one_by_one(model, texts) / max(count, 1)
        if count:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def shard(model):
    """As FSDP2's users do."""
    mesh = Group.world().device_mesh()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def trained(family, batches, settings, shards):
    model = make_model(family)
    if shards:
        shard(model)
    engine = Engine(model, SGD, **settings)
    losses = [engine.step(documents(lengths)).loss for lengths in batches]
    degrees = {mb.degree for mb in engine.plan(batches[0]).micro_batches[engine.rank]}
    state = {name: one.clone() for name, one in engine.state_dict().items()}
    return losses, state, degrees, str(engine.report())


BATCHES = (LENGTHS, (3, 29), (1, 1, 1), (4,))


@pytest.mark.parametrize(
    ("family", "settings", "shards"),
    [
        ("llama", {"max_tokens": 16}, False),
        pytest.param("qwen3", {"max_tokens": 64, "strategy": "cp1"}, False, marks=pytest.mark.slow),
        pytest.param("llama", {"max_tokens": 64, "strategy": "cp4"}, False, marks=pytest.mark.slow),
        ("llama", {"max_tokens": 64, "strategy": "cp4"}, True),
        ("qwen3", {"max_tokens": 16}, True),
        ("llama", {"max_tokens": 8, "cost": Cost(a=1e-6, b=1e-4, c=1e-3)}, True),
    ],
)
def test_ranks_train_as_one_process_does(ranks, family, settings, shards):
    found = ranks.run(trained, family, BATCHES, settings, shards).results
    losses, weights = expected(family, BATCHES)
    for got, state, _, told in found:
        assert got == pytest.approx(losses, rel=1e-9)
        assert state.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)
        assert "rank 3: idle" in told
    if "strategy" not in settings:
        assert {4} < {degree for _, _, degrees, _ in found for degree in degrees} or shards


def test_one_process_needs_no_ranks():
    losses, weights = expected("llama", BATCHES)
    model = make_model("llama")
    engine = Engine(model, SGD, max_tokens=64)
    for lengths, loss in zip(BATCHES, losses, strict=True):
        assert engine.step(documents(lengths)).loss == pytest.approx(loss, rel=1e-10)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-11)


def test_nothing_is_learned_without_next_tokens():
    model = make_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = Engine(model, SGD, max_tokens=64)
    result = engine.step(documents((1, 1)))
    assert (result.loss, result.num_losses) == (0.0, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_loss_that_diverged_is_told_with_its_step_and_nothing_is_learned_of_it():
    engine = Engine(make_model("llama"), SGD, max_tokens=64)
    engine.step(documents((3, 8)))
    with torch.no_grad():
        next(engine.model.parameters()).fill_(torch.inf)
    before = engine.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    with pytest.raises(
        DivergenceError, match=r"^step 2: expected a finite loss, got nan; lower the"
    ):
        engine.step(documents((3, 8)))
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


def disagreeing():
    engine = Engine(make_model("llama"), SGD, max_tokens=64)
    texts = documents((3, 8, 20) if Group.world().rank != 2 else (3, 8, 21))
    with pytest.raises(CommError, match=r"ranks \[2\] have another one than rank 0"):
        engine.step(texts)
    return engine.step(documents((3, 8, 20))).loss


def test_ranks_that_disagree_are_named_before_anything_is_computed(ranks):
    losses, _ = expected("llama", [(3, 8, 20)])
    assert ranks.run(disagreeing).results == pytest.approx(losses * 4, rel=1e-9)


def loaded(lengths, stop_at, state=None):
    """Documents of each step of two epochs, the place after `stop_at` steps, and the weights."""
    model, texts = make_model("llama"), documents(lengths)
    engine = Engine(model, SGD, max_tokens=16)
    loader = StepLoader(texts, engine, tokens_per_step=24, seed=5)
    if state is not None:
        loader.load_state_dict(state)
    seen, kept = [], None
    for _ in range(2):
        for step in loader:
            engine.step(step)
            seen.append(step.indices)
            if len(seen) == stop_at:
                kept = loader.state_dict()
    return seen, kept


def test_a_loader_goes_on_with_the_same_documents_on_other_ranks(ranks):
    lengths = (7, 1, 14, 2, 13, 5, 5, 11, 9, 9, 3, 12)
    found = ranks.run(loaded, lengths, 3).results
    seen, kept = found[0]
    assert all(one == found[0] for one in found)
    assert sorted(i for step in seen for i in step) == sorted([*range(12), *range(12)])
    assert seen[0] != seen[len(seen) // 2], "epochs are shuffled anew"
    rest, _ = loaded(lengths, 0, kept)
    assert rest[: len(seen) - 3] == seen[3:]


class FailsOnce(Engine):
    """Its second plan fails, as if the planner had been killed."""

    calls = 0

    def plan(self, lengths):
        self.calls += 1
        if self.calls == 2:
            raise MemoryError("killed")
        return super().plan(lengths)


def test_a_plan_that_fails_ahead_of_time_is_made_in_line_and_counted():
    engine = FailsOnce(make_model("llama"), SGD, max_tokens=64)
    loader = StepLoader(documents(LENGTHS), engine, tokens_per_step=20)
    steps = list(loader)
    for step in steps:
        engine.step(step)
    assert len(steps) > 2
    assert steps[1].is_late, "whose plan failed"
    assert loader.num_planned_late == sum(step.is_late for step in steps)
    report = engine.report()
    assert report.num_planned_late == loader.num_planned_late
    assert f"{report.num_planned_late} of them waited for their plan" in str(report)


def test_documents_that_nothing_holds_are_named_dropped_or_cut():
    engine, texts = Engine(make_model("llama"), SGD, max_tokens=12), documents((5, 13, 30))
    with pytest.raises(SequenceTooLong, match=r"sequence 1: expected at most 12 tokens, got 13"):
        StepLoader(texts, engine, tokens_per_step=20)
    dropped = StepLoader(texts, engine, tokens_per_step=20, too_long="drop")
    assert [step.indices for step in dropped] == [(0,)]
    cut = StepLoader(texts, engine, tokens_per_step=100, too_long="truncate")
    (step,) = cut
    assert sorted(step.plan.lengths) == [5, 12, 12]
    assert sorted(len(step.tokens(place)) for place in range(3)) == [5, 12, 12]
    engine.step(step)


def test_bytes_and_lists_are_documents_too():
    engine = Engine(make_model("llama"), SGD, max_tokens=64)
    text = b"abc, a!"
    ids = [one % 97 for one in text]
    first = Engine(make_model("llama"), SGD, max_tokens=64).step([ids, torch.tensor(ids)])
    second = engine.step([bytes(ids), ids])
    assert second.loss == pytest.approx(first.loss)


def test_bad_input_is_refused():
    model = make_model("llama")
    with pytest.raises(ConfigError, match="max_tokens: expected at least 1, got 0"):
        Engine(model, SGD, max_tokens=0)
    for strategy, told in (
        ("cp3", r"strategy: expected cp and a power of two"),
        ("cp2", r"strategy: expected cp and a power of two"),
        ("tp2", r"expected ranks and a model that is not sharded, got one process"),
        ("", r"strategy: expected replicas joined by '\+'"),
    ):
        with pytest.raises(ConfigError, match=told):
            Engine(model, SGD, max_tokens=8, strategy=strategy)
    other = AutoModelForCausalLM.from_config(
        GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=30)
    )
    with pytest.raises(ConfigError, match=r"expected a causal LM of llama, .* got 'gpt2'"):
        Engine(other, SGD, max_tokens=8, cost=Cost(a=1, b=1))
    with pytest.raises(ConfigError, match="expected a Hugging Face causal LM, got Linear"):
        Engine(torch.nn.Linear(2, 2), SGD, max_tokens=8)
    engine = Engine(model, SGD, max_tokens=8)
    with pytest.raises(DataError, match="at least one document"):
        engine.step([])
    with pytest.raises(DataError, match="one row of token ids"):
        engine.step([torch.zeros(2, 2, dtype=torch.int64)])
    with pytest.raises(SequenceTooLong, match="got 9"):
        engine.step([torch.zeros(9, dtype=torch.int64)])
    for given, told in (
        ({"tokens_per_step": 0}, "tokens_per_step: expected at least 1"),
        ({"tokens_per_step": 4, "too_long": "cut"}, "too_long: expected one of raise"),
        ({"tokens_per_step": 4, "lengths": [1]}, "one for each of 2 documents, got 1"),
    ):
        with pytest.raises(ConfigError, match=told):
            StepLoader(documents((3, 4)), engine, **given)
    loader = StepLoader(documents((3, 4)), engine, tokens_per_step=4)
    with pytest.raises(ConfigError, match="seed: expected 0, as this loader has, got 1"):
        loader.load_state_dict({**loader.state_dict(), "seed": 1})


@pytest.mark.parametrize("change", ["order", "tokens", "lengths"])
def test_a_loader_resumes_with_the_same_documents_only(change):
    engine = Engine(make_model("llama"), SGD, max_tokens=64)
    texts = documents((3, 4, 3))
    state = StepLoader(texts, engine, tokens_per_step=4).state_dict()
    StepLoader([text.tolist() for text in texts], engine, tokens_per_step=4).load_state_dict(state)
    if change == "order":
        texts = [texts[2], texts[1], texts[0]]
    elif change == "tokens":
        texts[1] = (texts[1] + 1) % 50
    else:
        texts = [texts[1], texts[0], texts[2]]
    with pytest.raises(ConfigError, match=r"digest: expected .* other ones, or in another order"):
        StepLoader(texts, engine, tokens_per_step=4).load_state_dict(state)


def test_a_loader_compares_the_lengths_of_all_documents():
    engine = Engine(make_model("llama"), SGD, max_tokens=64)
    texts = [b"abc"] * 2000  # more than are read for a digest
    lengths = np.full(2000, 3)
    lengths[[0, -1]] = 2, 4  # the total stays
    state = StepLoader(texts, engine, tokens_per_step=99).state_dict()
    with pytest.raises(ConfigError, match="digest: expected"):
        StepLoader(texts, engine, tokens_per_step=99, lengths=lengths).load_state_dict(state)


def test_a_loader_reads_states_of_earlier_versions(caplog):
    engine = Engine(make_model("llama"), SGD, max_tokens=64)
    loader = StepLoader(documents((3, 4)), engine, tokens_per_step=4)
    state = {name: value for name, value in loader.state_dict().items() if name != "digest"}
    loader.load_state_dict({**state, "step": 1})
    assert loader.state_dict()["step"] == 1
    assert "does not say which documents it was of" in caplog.text


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("changed", "told"),
    [({"max_tokens": "4k"}, "max_tokens: expected a whole number, got '4k'"),
     ({"cost": "fast"}, "cost: expected a Cost, got 'fast'")],
)  # fmt: skip
def test_arguments_of_other_kinds_are_refused_by_name(changed, told):
    with pytest.raises(ConfigError, match=told):
        Engine(make_model("llama"), SGD, **{"max_tokens": 8, **changed})


def limited(most_tokens, faulty, settings):
    """Losses, weights and caps where one rank's memory holds fewer tokens than it was told."""
    model = make_model("llama")
    sizes = []

    def run_out(_, __, inputs):
        sizes.append(inputs["input_ids"].shape[1])
        if Group.world().rank == faulty and sizes[-1] > most_tokens:
            raise torch.OutOfMemoryError("no memory left")

    engine = Engine(model, SGD, **settings)
    model.model.register_forward_pre_hook(run_out, with_kwargs=True)
    loader = StepLoader(documents(OOM_LENGTHS), engine, tokens_per_step=60, seed=1)
    losses = [engine.step(step).loss for step in loader]
    return losses, engine.state_dict(), engine.num_lowered, loader.steps(0), sizes[-1]


OOM_LENGTHS = (9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 4, 9, 8, 7, 6, 9, 8, 7)


@pytest.mark.parametrize("faulty", [0, 2])
def test_a_step_for_which_memory_is_short_is_planned_anew_with_fewer_tokens(ranks, faulty, caplog):
    settings = {"max_tokens": 20, "strategy": "cp1"}
    found = ranks.run(limited, 16, faulty, settings).results
    model, texts = make_model("llama"), documents(OOM_LENGTHS)
    optimizer = SGD(model.parameters())
    losses = []
    for step in found[0][3]:
        count = sum(OOM_LENGTHS[i] - 1 for i in step)
        loss = one_by_one(model, [texts[i] for i in step]) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for got, state, num_lowered, _, last in found:
        assert got == pytest.approx(losses, rel=1e-9)
        assert num_lowered == 2, "20, then 18, then 16 tokens"
        assert last <= 16
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)


def out_of_memory_again_and_again():
    before = make_model("llama").state_dict()
    model = make_model("llama")

    def run_out(_, __, inputs):
        if Group.world().rank == 1 and inputs["input_ids"].shape[1] > 2:
            raise torch.OutOfMemoryError("no memory left")

    engine = Engine(model, SGD, max_tokens=30, strategy="cp1")
    model.model.register_forward_pre_hook(run_out, with_kwargs=True)
    with pytest.raises(ConfigError, match=r"memory ran out 4 times, at last with 21 tokens a rank"):
        engine.step(documents(OOM_LENGTHS))
    return all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


def test_memory_that_is_always_short_ends_the_run_on_all_ranks(ranks):
    assert ranks.run(out_of_memory_again_and_again).results == [True] * 4


def test_memory_short_where_others_take_part_says_which_tokens():
    model = make_model("llama")
    fully_sharded = Engine(model, SGD, max_tokens=64)

    def run_out(*_):
        raise torch.OutOfMemoryError("no memory left")

    hook = next(model.parameters()).register_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError) as told:
        fully_sharded.step(documents((5, 7)))
    hook.remove()
    assert "a micro-batch of 12 tokens over 1 ranks" in told.value.__notes__[0]
    assert "start again with max_tokens below 64" in told.value.__notes__[0]


def short_of_memory_in_a_layer():
    model = make_model("llama")
    shard(model)

    def run_out(*_):
        raise torch.OutOfMemoryError("no memory left")

    engine = Engine(model, SGD, max_tokens=64)
    model.model.layers[1].register_forward_pre_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError) as told:
        engine.step(documents(LENGTHS))
    return told.value.__notes__, engine.num_lowered


def test_a_step_for_which_memory_is_short_is_not_planned_anew_under_fsdp2(ranks):
    for notes, num_lowered in ranks.run(short_of_memory_in_a_layer).results:
        assert num_lowered == 0
        assert "under FSDP2 in every layer, so that it cannot be planned anew; start" in notes[0]


def trained_with_less_memory(lengths, too_long):
    """Losses, documents of each step, and how often 20 tokens a rank were lowered, which holds 16."""
    model = make_model("llama")

    def run_out(_, __, inputs):
        if inputs["input_ids"].shape[1] > 16:
            raise torch.OutOfMemoryError("no memory left")

    engine = Engine(model, partial(torch.optim.SGD, lr=0.0), max_tokens=20, strategy="cp1")
    model.model.register_forward_pre_hook(run_out, with_kwargs=True)
    loader = StepLoader(documents(lengths), engine, tokens_per_step=90, seed=1, too_long=too_long)
    losses = [engine.step(step).loss for step in loader]
    return losses, loader.steps(0), engine.num_lowered


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_documents_that_nothing_holds_any_more_are_cut_or_dropped_as_was_asked(ranks, too_long):
    lengths = (20, 17, 9) * 4
    found = ranks.run(trained_with_less_memory, lengths, too_long).results
    model, texts = make_model("llama"), documents(lengths)
    for losses, steps, num_lowered in found:
        assert num_lowered == 2, "20, then 18, then 16 tokens"
        assert len(losses) == len(steps) > 1
        for loss, step in zip(losses, steps, strict=True):
            kept = [texts[i][:16] for i in step]
            count = sum(len(text) - 1 for text in kept)
            assert loss == pytest.approx(one_by_one(model, kept).item() / count, rel=1e-9)
            assert too_long == "truncate" or max(map(len, kept)) == 9


def refused_with_less_memory(lengths):
    with pytest.raises(SequenceTooLong, match="expected at most 18 tokens, got 20"):
        trained_with_less_memory(lengths, "raise")


def test_a_document_that_nothing_holds_any_more_is_named(ranks):
    ranks.run(refused_with_less_memory, (20, 17, 9) * 4)
