"""Bytecheckpoint reads what an engine of diffusionpipe saved from the ranks of a pipeline, by name."""

import pytest
import torch
from torch import nn

import bytecheckpoint as bcp
import diffusionpipe as dp
from diffusionpipe.planner.plan import Action, Plan
from shared.comms import RankPool

BATCH = 4


def make_job():
    torch.manual_seed(0)
    modules = [nn.Linear(6, 6) for _ in range(4)]
    return dp.Job(dp.chain(modules), {"z": double}, make_inputs, square)


def double(batch):
    return 2 * batch["x"]


def make_inputs(batch, frozen, draw):
    return {"sample": frozen["z"], "target": draw.normal((6,))}


def square(output, target):
    return (output - target).square().mean(1)


def make_plan():
    """Two stages of two layers, two micro-batches, the frozen part on the first rank."""
    passes = [
        [("forward", 0, 0), ("forward", 0, 1), ("backward", 0, 0), ("backward", 0, 1)],
        [("forward", 1, 0), ("backward", 1, 0), ("forward", 1, 1), ("backward", 1, 1)],
    ]
    orders = [[Action(*one) for one in own] for own in passes]
    orders[0].append(Action("encode", name="z", samples=(0, BATCH)))
    return Plan(
        placement="chain", num_stages=2, num_micro_batches=2, batch_size=BATCH,
        spans=((0, 2), (2, 4)), devices=((0,), (1,)),
        order=tuple((*own, Action("step")) for own in orders),
    )  # fmt: skip


def train(folder):
    engine = dp.Engine(make_job(), make_plan(), lambda p: torch.optim.AdamW(p, 1e-2))
    for _ in engine.steps([{"x": torch.full((BATCH, 6), float(step))} for step in range(3)]):
        pass
    engine.save(folder)
    held = {p.data_ptr() for group in engine.optimizer.param_groups for p in group["params"]}
    weights = {n: p.detach() for n, p in engine.job.trained.items() if p.data_ptr() in held}
    state = engine.optimizer.state
    return weights, {n: state[p] for n, p in engine.job.trained.items() if n in weights}


@pytest.mark.slow
def test_bytecheckpoint_reads_an_engines_checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    with RankPool(2) as pool:
        results = pool.run(train, str(folder)).results
    weights, states = (
        {k: v for one in part for k, v in one.items()} for part in zip(*results, strict=True)
    )
    assert len(weights) == 8
    target = {
        "model": {name: torch.zeros_like(value) for name, value in weights.items()},
        "optimizer": {
            "state": {
                name: {"exp_avg": torch.zeros_like(state["exp_avg"])}
                for name, state in states.items()
            }
        },
    }
    bcp.load(folder, target, strict=False)
    for name, value in weights.items():
        assert torch.equal(target["model"][name], value)
        loaded = target["optimizer"]["state"][name]["exp_avg"]
        assert torch.equal(loaded, states[name]["exp_avg"])
