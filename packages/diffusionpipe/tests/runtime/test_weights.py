"""A rank keeps the weights that it computes with; measured as the memory that its process has."""

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from diffusionpipe.job.chain import chain
from diffusionpipe.job.job import Job
from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.runtime.engine import Engine
from diffusionpipe.runtime.weights import is_freed
from shared.errors import CommError, ConfigError

from .toy import PLANS, encode_ids, make_batches, make_job, make_plan, make_sgd

WIDTH, BATCH = 3072, 4
LAYER_BYTES = 4 * WIDTH * WIDTH
SLACK_BYTES = LAYER_BYTES // 3
"""Buffers, code that is loaded late, and pages that the allocator keeps."""


def make_layer(value):
    layer = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def make_wide_job():
    """Four layers of 36 MiB and a frozen function of as much."""
    frozen = make_layer(1 / WIDTH).requires_grad_(False)
    layers = [make_layer(index / WIDTH) for index in range(1, 5)]
    return Job(
        chain(layers),
        {"z": lambda batch: frozen(batch["x"])},
        lambda batch, frozen, draw: {"sample": frozen["z"], "target": batch["x"]},
        lambda output, target: (output - target).square().mean(1),
    )


def make_wide_plan():
    """Two stages of two layers; rank 1 encodes all."""
    passes = [[("forward", 0), ("backward", 0)], [("forward", 1), ("backward", 1)]]
    orders = [[Action(kind, stage, 0) for kind, stage in own] for own in passes]
    orders[1].append(Action("encode", name="z", samples=(0, BATCH)))
    return Plan(
        placement="chain", num_stages=2, num_micro_batches=1, batch_size=BATCH,
        spans=((0, 2), (2, 4)), devices=((0,), (1,)),
        order=tuple((*own, Action("step")) for own in orders),
    )  # fmt: skip


def read_resident_bytes():
    """What is in use: a pool's ranks keep freed memory, which they are made to return here."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def train_wide(folder):
    """Bytes of this process above those at the start: with all weights, in a step, behind export."""
    # Loads what engines need.
    list(Engine(make_job(), PLANS["chain of 2"](), make_sgd).steps(make_batches(1)))
    start = read_resident_bytes()
    job, seen = make_wide_job(), {}
    seen["all"] = read_resident_bytes() - start

    def make_optimizer(parameters):
        own = torch.optim.SGD(parameters, 1e-3)

        def look(*_):
            seen["in step"] = read_resident_bytes() - start

        own.register_step_pre_hook(look)
        return own

    engine = Engine(job, make_wide_plan(), make_optimizer)
    batches = [{"x": torch.full((BATCH, WIDTH), 0.1 * (1 + step))} for step in range(3)]
    list(engine.steps(batches))
    engine.export(folder)
    seen["behind export"] = read_resident_bytes() - start
    return seen


@pytest.mark.slow
def test_a_rank_has_no_memory_for_others_weights(pair, tmp_path):
    first, second = pair.run(train_wide, str(tmp_path / "out")).results
    for seen in (first, second):
        assert seen["all"] > 5 * LAYER_BYTES - SLACK_BYTES
    # Two layers and their gradients; on rank 1 the frozen function too.
    assert first["in step"] < 4 * LAYER_BYTES + SLACK_BYTES
    assert second["in step"] < 5 * LAYER_BYTES + SLACK_BYTES
    assert first["behind export"] < 2 * LAYER_BYTES + SLACK_BYTES
    assert second["behind export"] < 3 * LAYER_BYTES + SLACK_BYTES
    (path,) = (tmp_path / "out").iterdir()
    weights = torch.load(path)
    assert [tuple(value.shape) for value in weights.values()] == [(WIDTH, WIDTH)] * 4
    for index, value in enumerate(weights.values(), start=1):
        assert not torch.equal(value, torch.full_like(value, index / WIDTH)), "it was trained"
        assert float((value - index / WIDTH).abs().max()) < 1


def list_weights(name):
    """Which weights lie on this rank behind a step, and which behind an export."""
    engine = Engine(make_job(), PLANS[name](), make_sgd)
    list(engine.steps(make_batches(1)))
    weights = engine.job.trained
    freed = [weight for weight in weights.values() if is_freed(weight)]
    assert all(weight.isnan().all() for weight in freed), "a use of them would be noticed"
    return engine.plan.stages_of(engine.rank), [n for n, w in weights.items() if not is_freed(w)]


@pytest.mark.parametrize("name", ["folded 4", "chain of 2, replicated", "data 4"])
def test_each_rank_keeps_the_weights_of_its_stages(ranks, name):
    job, plan = make_job(), PLANS[name]()
    for stages, kept in ranks.run(list_weights, name).results:
        own = {
            weight
            for stage in stages
            for layer in range(*plan.spans[stage])
            for weight in job.chains[0].list_parameters(layer)
        }
        assert set(kept) == own


def make_two_engines():
    job = make_job()
    list(Engine(job, PLANS["chain of 2"](), make_sgd).steps(make_batches(1)))
    with pytest.raises(ConfigError) as told:
        Engine(job, PLANS["chain of 2"](), make_sgd)
    return str(told.value)


def test_a_job_whose_weights_were_given_away_is_refused(pair):
    for text in pair.run(make_two_engines).results:
        assert "expected all weights before step 0, got none of" in text
        assert "an engine before this one has given them to other ranks" in text


def share_frozen_parts():
    """Two engines whose backbones are their own, but whose frozen part is one: rank 0 encodes nothing."""
    frozen = nn.Linear(6, 6, bias=False).double().requires_grad_(False)
    plan = make_plan("chain", [[0], [1]], 2)
    orders = [[a for a in own if a.kind != "encode"] for own in plan.order]
    encodes = [Action("encode", name=name, samples=(0, plan.batch_size)) for name in ("text", "z")]
    plan = replace(plan, order=(tuple(orders[0]), (*encodes, *orders[1])))
    jobs = [
        make_job(frozen={"z": lambda batch: frozen(batch["pixels"]), "text": encode_ids})
        for _ in range(2)
    ]
    engines = [Engine(job, plan, make_sgd) for job in jobs]
    list(engines[0].steps(make_batches(1)))
    with pytest.raises((ConfigError, CommError)) as told:
        list(engines[1].steps(make_batches(1)))
    return str(told.value), engines[1].step


def test_frozen_parts_that_an_engine_has_given_away_are_refused_by_name(pair):
    first, second = pair.run(share_frozen_parts).results
    assert (
        "expected all weights before step 0, got none of frozen['z']: an engine before" in first[0]
    )
    assert "expected all ranks to be able to go on, got " in second[0]
    assert "frozen['z']" in second[0]
    assert (first[1], second[1]) == (0, 0)
