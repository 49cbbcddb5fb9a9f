"""Unequal replicas side by side, beside one process that computes each document alone by transformers."""

import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import hydraulis as hy
from hydraulis.planner.replicas import ParameterPlacement, ReplicaLayout, read_strategy
from hydraulis.runtime.replicas.exchange import LayoutExchange, connect_lanes
from hydraulis.runtime.replicas.shards import read_placements
from shared.comms import Group, RankPool, reshard
from shared.errors import CommError, ConfigError, RankFailure
from shared.topology.boxes import Box

from .test_attention import documents, one_by_one

LENGTHS = (7, 1, 30, 2, 13, 5, 5, 11)
PAD = int(documents(LENGTHS)[2][3])
"""Of a token that occurs, as embeddings leave the padding token's row without a gradient."""
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, pad_token_id=PAD),
    "padded": LlamaConfig(**SHAPE, tie_word_embeddings=True, pad_token_id=PAD),
    "frozen": LlamaConfig(**SHAPE),
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
}


def make_model(family, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    with torch.no_grad():
        for one in model.parameters():  # no bias is zero, no scale is one
            one.add_(0.1 * torch.randn(one.shape))
    for name, one in model.named_parameters():
        one.requires_grad_(family != "frozen" or "layers.3" in name)
    return model.to(dtype)


class Recording(torch.optim.SGD):
    """Keeps the whole gradients of its first step."""

    seen: list[torch.Tensor]

    def step(self, closure=None):
        if not hasattr(self, "seen"):
            every = [one.grad for group in self.param_groups for one in group["params"]]
            self.seen = [getattr(one, "full_tensor", one.clone)() for one in every]
        return super().step(closure)


def trained(cases):
    """Of each case this rank's loss, gradients, bytes that were to move, and bytes that moved."""
    found = []
    for family, strategy, lengths, *order in cases:
        engine = hy.Engine(
            make_model(family), partial(Recording, lr=0.1), max_tokens=32, strategy=strategy
        )
        before = Group.world().ledger.snapshot()
        texts = documents(lengths)
        loss = engine.step([texts[at] for at in (*order, range(len(texts)))[0]]).loss
        traffic = Group.world().ledger.snapshot().diff(before).by_phase()
        names = [name for name, one in engine.model.named_parameters() if one.requires_grad]
        moved = engine.moved_bytes(engine.plan(lengths))
        predicted = [one[engine.rank] for one in (moved.parameters, moved.gradients)]
        measured = [
            traffic[phase].sent_bytes if phase in traffic else 0
            for phase in ("parameters", "gradients")
        ]
        found.append(
            (loss, dict(zip(names, engine.optimizer.seen, strict=True)), predicted, measured)
        )
    return found


def expected(family, lengths, dtype=torch.float64):
    """The same by one process."""
    model = make_model(family, dtype)
    loss = one_by_one(model, documents(lengths)) / sum(length - 1 for length in lengths)
    loss.backward()
    return loss.item(), {
        name: one.grad for name, one in model.named_parameters() if one.requires_grad
    }


def check(pool, cases):
    """All cases beside one process, and bytes as predicted."""
    every = pool.run(trained, cases).results
    for number, (family, strategy, lengths, *_) in enumerate(cases):
        loss, known = expected(family, lengths)
        for rank, of_rank in enumerate(every):
            got, gradients, predicted, measured = of_rank[number]
            assert got == pytest.approx(loss, rel=1e-5), strategy
            assert gradients.keys() == known.keys()
            for name, value in known.items():
                error = (gradients[name].double() - value).norm() / value.norm()
                assert error <= 1e-5, f"{strategy}, rank {rank}, {name}: {error:.2e}"
            assert measured == predicted, f"{strategy}, rank {rank}"
    return every


def test_replicas_train_as_one_process_does(ranks):
    every = check(
        ranks,
        [
            ("llama", "tp2+tp1+tp1", LENGTHS),
            ("llama", "tp2+tp1+tp1", LENGTHS, (5, 2, 7, 0, 1, 6, 4, 3)),
            ("llama", "tp2+tp1+tp1", (9,)),  # two replicas without a document
            ("qwen3", "pp2+tp2", LENGTHS),
            ("llama", "ring2ulysses2", LENGTHS),
            # The padding token's row, on the second rank of two: without a gradient as an embedding,
            # with one as the head's.
            ("biased", "tp2+tp1+tp1", LENGTHS),
            ("padded", "tp2+tp2", LENGTHS),
        ],
    )
    for (loss, known, *_), (got, gradients, *_), *_ in every:
        assert got == pytest.approx(loss, rel=1e-6)
        for name, value in known.items():
            assert (gradients[name] - value).norm() <= 1e-6 * value.norm(), name


@pytest.mark.slow
def test_more_replicas_train_as_one_process_does(ranks):
    check(
        ranks,
        [
            ("qwen3", "tp4", LENGTHS),
            ("llama", "pp4", LENGTHS),
            ("tied", "pp4", LENGTHS),
            ("qwen3", "ring4", LENGTHS),
            ("llama", "cp4", LENGTHS),
            ("qwen2", "pp2cp2", LENGTHS),
            ("biased", "tp2pp2", LENGTHS),
            ("biased", "tp2ulysses2", (40, 3, 1)),
            ("qwen2", "tp2ring2", (1, 2, 3)),
            ("tied", "tp2+pp2", LENGTHS),
            ("qwen3", "tp2+tp1", LENGTHS),  # a rank in no replica
            ("qwen3", "pp3+tp1", LENGTHS),
            ("frozen", "pp2tp2", LENGTHS),
        ],
    )


BATCHES = (LENGTHS, (60, 3), (4, 4, 5, 4, 6, 4, 5), (30, 28, 26, 1))
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def candidates():
    """Of them the one with least ranks a replica is fastest, where it holds all documents."""
    costs = {n: hy.Cost(a=1e-6 / n, b=1e-3 / n + (n > 1) * 1e-4, c=1e-3) for n in (1, 2, 4)}
    shapes = [
        hy.ReplicaShape(cost=costs[1], cap=12),
        hy.ReplicaShape(tp=2, cost=costs[2], cap=40),
        hy.ReplicaShape(pp=2, cost=costs[2], cap=30),
        hy.ReplicaShape(ring=2, ulysses=2, cost=costs[4], cap=200),
    ]
    return hy.propose([length for one in BATCHES for length in one], 4, shapes)


def make_engine(**settings):
    return hy.Engine(make_model("qwen3", torch.float64), ADAMW, max_tokens=64, **settings)


def trained_with_adamw(folder, proposed):
    """Losses, replicas of each step, weights; and the same of an engine that goes on half way."""
    engine = make_engine(candidates=proposed)
    losses, ran = [], []
    for number, lengths in enumerate(BATCHES):
        if number == 2:
            dcp.save(engine.sharded_state_dict(), checkpoint_id=folder)
        plan = engine.plan(lengths)
        assert 0 < plan.bound_s <= plan.makespan_s
        ran.append("+".join(map(str, plan.shapes)))
        losses.append(engine.step(documents(lengths)).loss)
    return losses, ran, engine.state_dict(), *gone_on_with(folder, "tp2+pp2")


def gone_on_with(folder, strategy):
    """Losses and weights after the last steps, from a saved state."""
    engine = make_engine(strategy=strategy)
    engine.step(documents((3, 9)))  # all of which is to be replaced
    state = engine.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder)
    engine.load_sharded_state_dict(state)
    losses = [engine.step(documents(lengths)).loss for lengths in BATCHES[2:]]
    return losses, engine.state_dict()


def expected_of_adamw():
    model = make_model("qwen3", torch.float64)
    optimizer, losses = ADAMW(model.parameters()), []
    for lengths in BATCHES:
        loss = one_by_one(model, documents(lengths)) / sum(length - 1 for length in lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def check_weights(state, weights):
    assert state.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_strategies_change_between_steps_and_states_are_resumed(ranks, tmp_path):
    found = ranks.run(trained_with_adamw, str(tmp_path), candidates()).results
    losses, weights = expected_of_adamw()
    for got, ran, state, later, resumed in found:
        assert len(set(ran)) > 1, ran
        assert got == pytest.approx(losses, rel=1e-9)
        assert later == pytest.approx(losses[2:], rel=1e-9)
        check_weights(state, weights)
        check_weights(resumed, weights)


def trained_in_bfloat16():
    model = make_model("qwen3", torch.bfloat16)
    engine = hy.Engine(model, partial(Recording, lr=0.1), max_tokens=32, strategy="tp2+ring2")
    loss = engine.step(documents(LENGTHS)).loss
    names = [name for name, _ in model.named_parameters()]
    return loss, dict(zip(names, engine.optimizer.seen, strict=True))


@pytest.mark.slow
def test_bfloat16_errs_no_more_than_in_one_process(ranks):
    loss, known = expected("qwen3", LENGTHS)
    _, plain = expected("qwen3", LENGTHS, torch.bfloat16)

    def error(gradients):
        return sum((gradients[name].double() - one).norm() ** 2 for name, one in known.items())

    for got, gradients in ranks.run(trained_in_bfloat16).results:
        assert got == pytest.approx(loss, rel=0.01)
        assert all(one.dtype == torch.bfloat16 for one in gradients.values())
        assert error(gradients) <= 4 * error(plain), "twice the error, squared"


def summed():
    """This rank's rows of a sum whose addends vanish, one by one, in 16 bits."""
    group = Group.world()
    one = ParameterPlacement(name="x", shape=(8,), itemsize=2, layers=(0,), sharing="whole")
    shapes = read_strategy(
        "tp1+tp1+tp1+tp1", cost=hy.Cost(a=0.0, b=1.0), max_tokens=9, num_layers=1
    )
    exchange = LayoutExchange(ReplicaLayout([one], shapes, 1, 4), group)
    mine = torch.full((8,), 1.0 if group.rank else 256.0, dtype=torch.bfloat16)
    owned = {"x": torch.zeros(2, dtype=torch.bfloat16)}
    return exchange.sum_gradients({"x": mine}, owned)["x"].tolist()


def test_gradients_of_16_bits_are_summed_in_32(ranks):
    assert ranks.run(summed).results == [[260.0, 260.0]] * 4, "259, rounded once"


def exchanged(strategy):
    """Messages of two sizes of buckets, once all parameters and sums were found to be what they must."""
    group, model = Group.world(), make_model("biased")
    whole = {name: one.detach() for name, one in model.named_parameters()}
    shapes = read_strategy(strategy, cost=hy.Cost(a=0.0, b=1.0), max_tokens=9, num_layers=4)
    layout = ReplicaLayout(read_placements(model), shapes, 4, group.world_size)
    connect_lanes(group)

    def part(of, boxes):
        return of[boxes[group.rank].within(Box((0,) * of.ndim, tuple(of.shape)))].clone()

    held = {one.name: layout.held(one) for one in layout.parameters}
    shards = {one.name: layout.owned(one) for one in layout.parameters}
    owned = {name: part(one, shards[name]) for name, one in whole.items()}
    computed = {
        name: part(one, held[name]) for name, one in whole.items() if held[name][group.rank].numel
    }
    gradients = {name: (group.rank + 1) * one for name, one in computed.items()}
    counts, run = [], reshard.run
    for bucket_bytes in (1 << 20, 400):
        exchange, calls = LayoutExchange(layout, group, bucket_bytes=bucket_bytes), []

        def counted(*given, calls=calls, **settings):
            calls.append(given)
            run(*given, **settings)

        with mock.patch.object(reshard, "run", counted):
            loaded = exchange.load(owned)
            loaded.wait(4)
            sums = exchange.sum_gradients(gradients, owned)
        counts.append(len(calls))
        for name, one in computed.items():
            assert torch.equal(loaded.values[name], one), name
        for one in layout.parameters:
            total = torch.zeros(one.shape)
            for rank, box in enumerate(layout.given(one)):
                if box.numel:
                    at = box.within(Box((0,) * total.ndim, one.shape))
                    total[at] += (rank + 1) * whole[one.name][at]
            torch.testing.assert_close(sums[one.name], part(total, shards[one.name]))
    return counts


@pytest.mark.parametrize("strategy", ["pp2+tp2", "tp2+tp1"])
def test_layers_are_exchanged_in_buckets(ranks, strategy):
    (few, many), *others = ranks.run(exchanged, strategy).results
    assert few == 2 * 6, "layers, what is before and behind them; parameters and gradients"
    assert many > 60
    assert others == [[few, many]] * 3


def looped():
    """Documents of an epoch's steps, losses, and what is told of them."""
    engine = make_engine(strategy="tp2+tp1+ulysses1")
    loader = hy.StepLoader(documents(LENGTHS), engine, tokens_per_step=30)
    found = [(step.indices, engine.step(step).loss) for step in loader]
    return found, str(engine.report())


def test_a_loader_gives_replicas_their_steps(ranks):
    found, *others = ranks.run(looped).results
    assert all(steps == found[0] for steps, _ in others)
    assert sorted(at for indices, _ in found[0] for at in indices) == list(range(len(LENGTHS)))
    assert len(found[0]) > 2
    assert "rank 3: idle" in found[1]


@pytest.mark.slow
def test_a_state_goes_on_with_other_ranks(ranks, tmp_path):
    ranks.run(trained_with_adamw, str(tmp_path), candidates())
    losses, weights = expected_of_adamw()
    with RankPool(2) as pool:
        for got, state in pool.run(gone_on_with, str(tmp_path), "tp2").results:
            assert got == pytest.approx(losses[2:], rel=1e-9)
            check_weights(state, weights)


def lose_a_rank(folder):
    """The last rank ends in the middle of an exchange; the other one looks at what it has."""
    engine = make_engine(strategy="tp2")
    engine.step(documents(LENGTHS))
    run, calls = reshard.run, []

    def run_or_end(*given, **settings):
        calls.append(given)
        if engine.rank == 1 and len(calls) == 3:
            os._exit(7)
        run(*given, **settings)

    before = [one.to_local().clone() for one in engine.model.parameters()]
    with (
        mock.patch.object(reshard, "run", run_or_end),
        pytest.raises(CommError, match="died"),
    ):
        engine.step(documents(LENGTHS))
    after = [one.to_local() for one in engine.model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    Path(folder, f"rank{engine.rank}").touch()


@pytest.mark.slow
def test_a_rank_that_is_lost_leaves_the_optimizer_layout_as_it_was(tmp_path):
    with RankPool(2, timeout=timedelta(seconds=60)) as pool, pytest.raises(RankFailure):
        pool.run(lose_a_rank, str(tmp_path))
    assert [one.name for one in tmp_path.iterdir()] == ["rank0"]


def refused():
    for strategy, told in (
        ("tp4+tp1", r"tp4\+tp1: takes 5 ranks of 4"),
        ("tp8", r"tp8 takes 8 ranks of 4"),
        ("tp3", r"tp3 cannot share 8 heads among 3 ranks"),
        ("tp2ulysses2+pp5", r"pp5 takes 5 ranks of 4"),
        ("tp", r"expected replicas joined by '\+', .* got 'tp' in 'tp'"),
        ("tp2tp2", r"got 'tp2tp2'"),
        ("tp2+", r"got '' in 'tp2\+'"),
    ):
        with pytest.raises(ConfigError, match=told):
            make_engine(strategy=strategy)
    with pytest.raises(ConfigError, match=r"expected a strategy or candidates, got 'tp2' and"):
        make_engine(strategy="tp2", candidates=candidates())
    engine = make_engine(strategy="tp2+tp2")
    with pytest.raises(hy.SequenceTooLong, match=r"at most 64 tokens, got 65"):
        engine.step([torch.zeros(65, dtype=torch.int64)])
    assert engine.max_document == 64


def largest_documents():
    """Tokens of the longest document by shape, where a rank holds at most 20 tokens."""
    cost = hy.Cost(a=1e-9, b=1e-6)
    shapes = [
        hy.ReplicaShape(ring=2, ulysses=2, cost=cost, cap=200),
        hy.ReplicaShape(tp=2, cost=cost, cap=200),
        hy.ReplicaShape(cost=cost, cap=12),
    ]
    return [
        hy.Engine(
            make_model("qwen3"), ADAMW, max_tokens=20, candidates=hy.propose([5, 6], 4, [shape])
        ).max_document
        for shape in shapes
    ]


@pytest.mark.slow
def test_a_candidates_cap_holds_as_far_as_its_ranks_hold_tokens(ranks):
    # Tensor-parallel ranks hold the same tokens, the others share them.
    assert ranks.run(largest_documents).results[0] == [80, 20, 12]


def disagreeing():
    with pytest.raises(
        CommError, match=r"ranks \[1, 2, 3\] have another one than rank 0; give all"
    ):
        make_engine(strategy="tp2+tp2" if Group.world().rank else "tp4")


def test_ranks_with_other_candidates_are_named(ranks):
    ranks.run(disagreeing)


def test_what_cannot_run_is_refused_with_its_reason(ranks):
    ranks.run(refused)
    with pytest.raises(ConfigError, match="one process; start ranks by torchrun"):
        make_engine(strategy="tp1")
