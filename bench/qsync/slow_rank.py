"""A slow rank beside a fast one: MiniLM stepped in any precisions, and claims that two benchmarks share."""

from statistics import median

import torch
from real_models import build_job
from unlike_ranks import PRECISIONS, lower

from qsync.planner.milp import solve
from shared.claims import Claim

__all__ = [
    "LENGTH",
    "TOKENS",
    "Way",
    "find_least_noise",
    "longest",
    "on_rank",
    "record_uniform",
]

TOKENS, LENGTH = 2048, 128
"""Of a rank's batch, and of each passage."""


class Way:
    """A model under DDP with its optimizer, stepped in any precisions."""

    def __init__(self, wrap):
        self.job = build_job("MiniLM", num_batches=2, tokens=TOKENS)
        self.model = self.job.model if wrap is None else wrap(self.job.model)
        self.optimizer = torch.optim.AdamW(self.job.model.parameters(), 2e-5, fused=True)

    def bind(self, precisions, *, is_cast=False, num_passages=None):
        """A step in these precisions, under autocast, or of another number of passages."""
        ids, labels = (torch.cat(each) for each in zip(*self.job.batches, strict=True))
        count = TOKENS // LENGTH if num_passages is None else num_passages
        weight = count * LENGTH / TOKENS

        def step(turn):
            lower(self.job.model, precisions)
            first = turn % 2 * (TOKENS // LENGTH) if count <= TOKENS // LENGTH else 0
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                loss = self.job.loss_fn(
                    self.model, (ids[first : first + count], labels[first : first + count])
                )
            (weight * loss).backward()
            self.optimizer.step()

        return step


def on_rank(rank, precisions):
    """Precisions of the slow rank alone."""
    return precisions if rank == 1 else {}


def find_least_noise(survey, plan):
    """HiGHS's noise of the slow rank within the seconds that the plan lets it compute."""
    costs = survey.profiles[1].costs()
    return solve(
        survey.graph,
        survey.noise,
        precisions=PRECISIONS,
        kernel_s=lambda op, p: costs.kernel_s(op, p) + costs.backward_kernel_s(op, p),
        cast_s=costs.cast_s,
        limit_s=(plan.ranks[1].compute_s - costs.rest_s) * (1 + 1e-6),
    ).noise


def longest(turns):
    """The slower rank's seconds by turn."""
    return [max(turn) for turn in turns]


def record_uniform(record_claim, steps, plan, least, told, command, row, fastest):
    """Step beside the fastest uniform precision's, and noise beside HiGHS's."""
    ratios = [b / a for a, b in zip(steps["plan"], steps[fastest], strict=True)]
    record_claim(
        Claim(
            name=f"step beside the slow rank's fastest uniform precision, {row}",
            unit="s",
            ours=median(steps["plan"]),
            baseline=median(steps[fastest]),
            baseline_name=f"the faster one: {fastest}",
            higher_is_better=False,
            correct=bool(plan.ranks[1].lowered),
            detail=told,
            source=f"{command} -k {row}",
        ),
        aim=1 / 1.05,
        spread=(min(ratios), max(ratios)),
    )
    record_claim(
        Claim(
            name=f"predicted noise of the slow rank, {row}",
            unit="squared relative error",
            ours=plan.ranks[1].noise,
            baseline=least,
            baseline_name="HiGHS",
            higher_is_better=False,
            correct=plan.ranks[1].noise > 0,
            detail=f"{len(plan.ranks[1].lowered)} operators lowered; the same costs, and the seconds that the plan lets "
            "the slow rank compute",
            source=f"{command} -k {row}",
        ),
        aim=1 / 1.05,
    )
