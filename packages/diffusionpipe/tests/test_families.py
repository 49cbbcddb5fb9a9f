"""Steps of each family on two ranks, planned from a profile, beside one process."""

import pytest
import small_pipelines
import torch
from small_models import controlled

import diffusionpipe as dp
from shared.comms import RankPool
from shared.topology import Cluster
from shared.topology.device import CPU


def build_control():
    """A ControlNet whose locked half is a frozen function."""
    from diffusers import DDPMScheduler

    model = controlled()
    inputs, loss = dp.losses.epsilon(
        DDPMScheduler(), latents="z", text="h", controlnet_cond="edges", locked="locked"
    )
    torch.manual_seed(0)
    batch = {
        "z": torch.randn(4, 4, 8, 8),
        "h": torch.randn(4, 5, 12),
        "edges": torch.rand(4, 3, 64, 64),
    }
    frozen = {"locked": model.lock(inputs)}
    return dp.Job(dp.chain(model), frozen, inputs, loss), batch


def build(name):
    if name == "controlnet":
        return build_control()
    return dp.Job.from_pipeline(getattr(small_pipelines, name)()), small_pipelines.batch(4)


def train(name, placement):
    """The first step's loss of one process, and two steps' of both ranks."""
    job, batch = build(name)
    with torch.no_grad():
        expected = float(job.compute_loss(batch, seed=0, step=0))
    plan = dp.plan(
        job,
        dp.profile(job, batch, sizes=[1, 2], repeats=1),
        Cluster.uniform(1, 2, CPU),
        batch_size=4,
        num_micro_batches=2,
        placement=placement,
    )
    engine = dp.Engine(job, plan, lambda parameters: torch.optim.SGD(parameters, 0.1))
    return expected, list(engine.steps([batch, batch]))


@pytest.fixture(scope="module")
def pair():
    with RankPool(2, modules=("diffusers", "transformers")) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("stable_diffusion", "data"),
        ("xl", "folded"),
        ("sd3", "chain"),
        ("flux", "chain"),
        ("controlnet", "chain"),
        ("controlnet", "folded"),
    ],
)
def test_two_ranks_compute_one_process_loss(pair, name, placement):
    results = pair.run(train, name, placement).results
    for expected, losses in results:
        assert losses[0] == pytest.approx(expected, rel=1e-6)
        assert losses == results[0][1]
        assert losses[0] != losses[1]
