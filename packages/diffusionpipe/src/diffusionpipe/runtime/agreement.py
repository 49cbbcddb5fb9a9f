"""What all ranks tell each other: that they do the same, a step's loss, and what went wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diffusionpipe.runtime.stages.health import BadValues
from shared.comms import Group, all_gather_v, all_reduce
from shared.errors import CommError, DivergenceError

__all__ = ["add_losses", "check_alike", "check_close", "exchange"]

_CLOSE = 1e-2
"""Ranks may compute with unlike processors and types of products, which round differently."""


def exchange(group: Group | None, value: Any) -> list[Any]:
    """Collects every rank's value, as JSON, on every rank.

    Raises:
        CommError: a peer died or the timeout passed.
    """
    text = json.dumps(value)
    if group is None or group.world_size == 1:
        return [json.loads(text)]
    tensor = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return [json.loads(bytes(one.tolist())) for one in all_gather_v(group, tensor)]


def check_alike(
    group: Group | None, facts: Mapping[str, Any], problem: Exception | None = None
) -> None:
    """Checks that all ranks are about to do the same; every rank calls it.

    Args:
        group: all ranks; None in one process.
        facts: by name, what has to be equal.
        problem: why this rank cannot go on, though others may.

    Raises:
        CommError: ranks differ in a fact, which is named with the ranks; or others cannot go on.
        Exception: `problem`, where there is one.
    """
    told = exchange(group, {"facts": dict(facts), "problem": problem and str(problem)})
    if problem is not None:
        raise problem
    failed = [rank for rank, one in enumerate(told) if one["problem"]]
    if failed:
        raise CommError(
            f"expected all ranks to be able to go on, got {told[failed[0]]['problem']!r} on the ranks "
            f"{failed}; see what they raised"
        )
    for name, mine in told[0]["facts"].items():
        unlike = [rank for rank, one in enumerate(told) if one["facts"].get(name) != mine]
        if unlike:
            raise CommError(
                f"expected the same {name} on all ranks, got {_show(mine)} on rank 0 and "
                f"{_show(told[unlike[0]]['facts'].get(name))} on the ranks {unlike}; start all ranks "
                "with the same files and settings"
            )


def check_close(
    group: Group | None, facts: Mapping[str, float], problem: Exception | None = None
) -> None:
    """Checks that all ranks compute the same up to rounding, as `check_alike` does.

    Args:
        group: all ranks; None in one process.
        facts: by name, mean sizes of values.
        problem: why this rank cannot go on, though others may.

    Raises:
        CommError: ranks differ in a fact by more than a hundredth, which is named with the ranks; or
            others cannot go on.
        Exception: `problem`, where there is one.
    """
    check_alike(group, {}, problem)
    told = exchange(group, dict(facts))
    for name, mine in told[0].items():
        unlike = [
            rank
            for rank, one in enumerate(told)
            if abs(one[name] - mine) > _CLOSE * max(abs(mine), abs(one[name]))
        ]
        if unlike:
            raise CommError(
                f"expected the same weights and first batch on all ranks, got {name} of mean size "
                f"{mine:.4g} on rank 0 and {told[unlike[0]][name]:.4g} on the ranks {unlike}; load or "
                "seed all models alike, and hand all ranks the same batches"
            )


def add_losses(group: Group | None, step: int, loss: float, problems: Sequence[BadValues]) -> float:
    """Adds up a step's loss over ranks, before any weight changes; every rank calls it.

    Args:
        group: all ranks; None in one process.
        step: index of the step.
        loss: this rank's part.
        problems: what this rank found that is not finite.

    Returns:
        The loss, the same on every rank.

    Raises:
        DivergenceError: a rank found something; names the stage that computed it first, and samples.
        CommError: a peer died or the timeout passed.
    """
    # NaN spoils a sum, so problems are counted beside it.
    told = torch.tensor([loss, float(len(problems))], dtype=torch.float64)
    if group is not None:
        with group.ledger.phase(f"agreement of step {step}"):
            all_reduce(group, told)
    if not told[1] and told[0].isfinite():
        return float(told[0])
    every = [BadValues(*one) for found in exchange(group, problems) for one in found]
    raise DivergenceError(_describe(step, float(told[0]), every))


_ORDER = ("forward", "loss", "backward", "gradients")


def _describe(step: int, loss: float, problems: Sequence[BadValues]) -> str:
    """Names where values first were not finite: the first stage forward, or the last backward."""
    if not problems:
        return f"step {step}: expected a finite loss, got {loss}; lower the learning rate"
    what = min((one.what for one in problems), key=_ORDER.index)
    of_kind = [one for one in problems if one.what == what]
    pick = max if what == "backward" else min
    stage = pick(one.stage for one in of_kind)
    samples = sorted({row for one in of_kind if one.stage == stage for row in one.samples})
    where = {
        "forward": f"the values that stage {stage} computes",
        "loss": f"the loss, of what stage {stage} computes",
        "backward": f"the gradients that stage {stage} sends back",
        "gradients": f"the parameters' gradients of stage {stage}",
    }[what]
    told = f", samples {samples}" if samples else ""
    return (
        f"step {step}: expected finite numbers, got NaN or infinity in {where}{told}; no weight was "
        "changed: look at these samples, lower the learning rate or use a wider type"
    )


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}...{text[-17:]}"
