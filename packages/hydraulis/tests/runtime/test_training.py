"""What else a training loop asks of an engine: clipping, evaluation, recomputation, autocast, adapters."""

import gc
import time
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import hydraulis as hy
from hydraulis.runtime.documents import attend_documents
from hydraulis.runtime.records import StepRecord, TrainingReport
from shared.comms import Group
from shared.errors import ConfigError

from .test_attention import documents, one_by_one
from .test_engine import BATCHES, LENGTHS, SGD, shard
from .test_replicas import make_model

WAYS = [
    {"max_tokens": 16},
    {"max_tokens": 16, "is_sharded": True},
    {"max_tokens": 64, "strategy": "tp2+tp1+tp1"},
    {"max_tokens": 64, "strategy": "pp2+ring2"},
]
# What does not depend on how ranks share their work is tried in one way by default.
FEW = [pytest.param(one, marks=pytest.mark.slow) if at else one for at, one in enumerate(WAYS)]
# What differs between shards of weights and whole ones, and between one process a replica and several.
BOTH = [WAYS[1], WAYS[2], *(pytest.param(WAYS[at], marks=pytest.mark.slow) for at in (0, 3))]


def make_engine(family="qwen3", optimizer=SGD, *, is_sharded=False, prepare=None, **settings):
    model = make_model(family, torch.float64)
    if prepare is not None:
        prepare(model)
    if is_sharded:
        shard(model)
    return hy.Engine(model, optimizer, **settings)


def clipped(settings):
    engine = make_engine(max_grad_norm=0.5, **settings)
    results = [engine.step(documents(lengths)) for lengths in BATCHES]
    return [one.grad_norm for one in results], engine.state_dict()


@pytest.mark.parametrize("settings", BOTH, ids=str)
def test_gradients_are_clipped_by_the_norm_of_all(ranks, settings):
    model = make_model("qwen3", torch.float64)
    optimizer, norms = SGD(model.parameters()), []
    for lengths in BATCHES:
        count = sum(length - 1 for length in lengths)
        if not count:
            norms.append(0.0)
            continue
        optimizer.zero_grad()
        (one_by_one(model, documents(lengths)) / count).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    assert max(norms) > 0.5, "something is clipped"
    for got, state in ranks.run(clipped, settings).results:
        assert got == pytest.approx(norms, rel=1e-8)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9)


def evaluated(settings):
    engine = make_engine(**settings)
    before = {name: one.clone() for name, one in engine.state_dict().items()}
    losses = [engine.evaluate(documents(lengths)) for lengths in BATCHES]
    engine.step(documents(LENGTHS))
    after = engine.state_dict()
    assert any(not torch.equal(after[name], one) for name, one in before.items())
    return losses, len(engine.report().records)


@pytest.mark.parametrize("settings", FEW, ids=str)
def test_documents_are_evaluated_without_learning_them(ranks, settings):
    model = make_model("qwen3", torch.float64)
    with torch.no_grad():
        expected = [
            one_by_one(model, documents(lengths)).item() / max(sum(lengths) - len(lengths), 1)
            for lengths in BATCHES
        ]
    for losses, num_records in ranks.run(evaluated, settings).results:
        assert losses == pytest.approx(expected, rel=1e-9)
        assert num_records == 1


def recomputed(settings):
    """Losses, weights, and how often documents' attention was computed."""
    calls = []

    def counted(*given):
        calls.append(given)
        return attend_documents(*given)

    def prepare(model):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})

    engine = make_engine(prepare=prepare, **settings)
    with mock.patch("hydraulis.runtime.attention.by_document.attend_documents", counted):
        losses = [engine.step(documents(lengths)).loss for lengths in BATCHES[:2]]
    return losses, engine.state_dict(), len(calls)


@pytest.mark.parametrize("settings", FEW, ids=str)
def test_layers_may_be_recomputed_in_the_backward_pass(ranks, settings):
    model = make_model("qwen3", torch.float64)
    optimizer, losses = SGD(model.parameters()), []
    for lengths in BATCHES[:2]:
        optimizer.zero_grad()
        loss = one_by_one(model, documents(lengths)) / (sum(lengths) - len(lengths))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = ranks.run(recomputed, settings).results
    for got, state, _ in found:
        assert got == pytest.approx(losses, rel=1e-9)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)
    engine = make_engine(max_tokens=sum(LENGTHS))
    rows = engine.plan(LENGTHS).micro_batches[0]
    assert len(rows) == 1
    *_, alone = recomputed({"max_tokens": sum(LENGTHS)})
    assert alone == 2 * 2 * engine.model.config.num_hidden_layers, "once each pass"


class Adapter(nn.Module):
    """A frozen layer with a product of low rank beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.low = nn.Parameter(torch.linspace(-1, 1, 2 * layer.in_features).view(2, -1).double())
        self.high = nn.Parameter(torch.linspace(1, -1, 2 * layer.out_features).view(-1, 2).double())

    def forward(self, x):
        return self.layer(x) + x @ self.low.T @ self.high.T * 0.1


def adapt(model):
    model.requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        for name in ("q_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))


def adapted(settings):
    engine = make_engine(prepare=adapt, **settings)
    return [engine.step(documents(lengths)).loss for lengths in BATCHES], engine.state_dict()


@pytest.mark.parametrize("settings", [FEW[0], FEW[1], FEW[3]], ids=str)
def test_adapters_beside_frozen_layers_are_trained(ranks, settings):
    losses, weights = adapted({"max_tokens": 64})
    frozen = make_model("qwen3", torch.float64).state_dict()
    key = "model.layers.0.self_attn.v_proj.weight"
    for got, state in ranks.run(adapted, settings).results:
        assert got == pytest.approx(losses, rel=1e-9)
        assert torch.equal(state[key], frozen[key])
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9)


def refused():
    with pytest.raises(ConfigError, match=r"q_proj: expected a linear layer .* got Adapter; train"):
        make_engine(prepare=adapt, max_tokens=64, strategy="tp2+tp2")


def test_tensor_parallel_ranks_refuse_adapters(ranks):
    ranks.run(refused)


def autocast(settings):
    model = make_model("qwen3")
    engine = hy.Engine(model, SGD, **settings)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [engine.step(documents(lengths)).loss for lengths in BATCHES[:2]]
    dtypes = {one.dtype for one in engine.state_dict().values()}
    return losses, dtypes


@pytest.mark.parametrize("settings", [FEW[0], FEW[3]], ids=str)
def test_steps_run_under_autocast(ranks, settings):
    with torch.no_grad():
        exact = hy.Engine(make_model("qwen3", torch.float64), SGD, max_tokens=64)
    losses = [exact.step(documents(lengths)).loss for lengths in BATCHES[:2]]
    for got, dtypes in ranks.run(autocast, settings).results:
        assert got == pytest.approx(losses, rel=0.02)
        assert got != pytest.approx(losses, rel=1e-6), "some products are of 16 bits"
        assert dtypes == {torch.float32}


def test_a_schedule_changes_the_optimizers_rate():
    engine = make_engine(max_tokens=64)
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.0 if step else 1)
    before = engine.state_dict()["lm_head.weight"].clone()
    engine.step(documents(LENGTHS))
    schedule.step()
    learned = engine.state_dict()["lm_head.weight"].clone()
    assert not torch.equal(learned, before)
    engine.step(documents(LENGTHS))
    assert torch.equal(engine.state_dict()["lm_head.weight"], learned)


def alive(settings):
    """Tensors alive after two steps, and after as many again, and again."""
    engine = make_engine(optimizer=partial(torch.optim.AdamW, lr=1e-3), **settings)
    counts = []
    for _ in range(3):
        for lengths in BATCHES[:2]:
            engine.step(documents(lengths))
        gc.collect()
        counts.append(sum(torch.is_tensor(one) for one in gc.get_objects()))
    return counts


@pytest.mark.parametrize("settings", [FEW[0], FEW[3]], ids=str)
def test_steps_leave_no_tensors_behind(ranks, settings):
    for counts in ranks.run(alive, settings).results:
        assert counts[2] <= counts[1] <= counts[0], counts


def test_a_report_tells_waiting_and_how_well_plans_fit():
    one = StepRecord(planned_s=1.0, planned_busy_s=1.0, gap=0.0, busy_s=1.0, seconds=2.0)
    records = (
        one, replace(one, gap=0.03, busy_s=1.2, is_late=True), replace(one, gap=0.01, busy_s=0.9),
    )  # fmt: skip
    told = str(TrainingReport(records=records, idle_shares=(0.05, 0.25))).splitlines()
    assert told == [
        "3 steps, 2 s each",
        "1 of them waited for their plan",
        "planned within 3.00% of the best there could be",
        "seconds of this rank's steps off by 10.0% on average, at 1 of the planned ones",
        "rank 0: idle 5.0%",
        "rank 1: idle 25.0%",
    ]
    assert str(TrainingReport(records=(), idle_shares=())) == "no steps yet"


def uneven(folder):
    """Shares of steps in which ranks wait, where rank 0 computes and the others have little to do."""
    texts = documents((60, 1, 1, 1))
    model = make_model("qwen3")
    engine = hy.Engine(model, SGD, max_tokens=64, strategy="cp1")
    assert Group.world().world_size == 4
    num_steps = 0

    def tell(_parameter):
        (folder / f"{num_steps}-{engine.rank}").touch()

    def attend_in_turn(query, *given):
        # However slow the machine: the other ranks' gradients are complete before rank 0 has computed.
        while engine.rank == 0 and len(list(folder.glob(f"{num_steps}-[123]"))) < 3:
            time.sleep(0.005)
        return attend_documents(query, *given)

    # An embedding's gradient is a backward's last one.
    model.get_input_embeddings().weight.register_post_accumulate_grad_hook(tell)
    with mock.patch("hydraulis.runtime.attention.by_document.attend_documents", attend_in_turn):
        for num_steps in range(3):  # noqa: B007 - read by the functions above
            engine.step(texts)
    return engine.report()


def test_idle_shares_are_those_of_ranks_that_wait(ranks, tmp_path):
    reports = ranks.run(uneven, tmp_path).results
    shares = reports[0].idle_shares
    assert all(one.idle_shares == shares for one in reports)
    assert all(0 <= share < 1 for share in shares)
    assert min(shares[1:]) > shares[0]
    (first, *_), (other, *_) = (one.records for one in reports[:2])
    assert first.planned_busy_s == first.planned_s > 10 * other.planned_busy_s
    assert 0 <= first.gap < 0.5
