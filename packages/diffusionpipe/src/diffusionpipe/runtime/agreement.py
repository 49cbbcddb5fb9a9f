"""What all ranks tell each other: that they do the same, a step's loss, and what went wrong."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusionpipe.runtime.stages.health import BadValues
from shared.comms import Group, all_gather_v, all_reduce
from shared.comms.collectives import start_all_reduce
from shared.errors import CommError, DataError, DivergenceError

__all__ = [
    "Form",
    "add_losses",
    "check_alike",
    "check_form",
    "compare_batches",
    "describe_batch",
    "exchange",
    "sketch_batch",
    "sketch_weights",
]

Form = Mapping[str, Mapping[str, Any]]
"""What each entry of a batch is: by entry, and by the words that introduce a fact in an error."""

_NOTHING = {"to be": "left out"}
_CLOSE = 1e-2
"""Ranks may compute with unlike processors and types of products, which round differently."""
_SKETCHED = 4096
"""Numbers of each tensor of a batch that its sketch depends on."""
_CLOSE_SKETCH = 1e-3
"""Processors that decode or resize unlike in their last bits have batches this close."""


def exchange(group: Group | None, value: Any) -> list[Any]:
    """Collects every rank's value, as JSON, on every rank.

    Raises:
        CommError: a peer died or the timeout passed.
    """
    text = json.dumps(value)
    if group is None or group.world_size == 1:
        return [json.loads(text)]
    tensor = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return [json.loads(text.numpy().tobytes()) for text in all_gather_v(group, tensor)]


def check_alike(
    group: Group | None, facts: Mapping[str, Any], problem: Exception | None = None
) -> None:
    """Checks that all ranks are about to do the same; every rank calls it.

    Args:
        group: all ranks; None in one process.
        facts: by name, what has to be equal; of floating-point numbers, but for a hundredth.
        problem: why this rank cannot go on, though others may.

    Raises:
        CommError: ranks differ in a fact, which is named with the ranks; or others cannot go on.
        Exception: `problem`, where there is one.
    """
    every = exchange(group, {"facts": dict(facts), "problem": problem and str(problem)})
    if problem is not None:
        raise problem
    failed = [rank for rank, answer in enumerate(every) if answer["problem"]]
    if failed:
        raise CommError(
            f"expected all ranks to be able to go on, got {every[failed[0]]['problem']!r} on the "
            f"ranks {failed}; see what they raised"
        )
    for name, first in every[0]["facts"].items():
        values = [answer["facts"].get(name) for answer in every]
        unlike = [rank for rank, value in enumerate(values) if not _is_alike(value, first)]
        if unlike:
            raise CommError(
                f"expected the same {name} on all ranks, got {_show(first)} on rank 0 and "
                f"{_show(values[unlike[0]])} on the ranks {unlike}; start all ranks with the same "
                "files, weights and settings"
            )


def compare_batches(
    group: Group | None, step: int, batch: Mapping[str, Any] | None, num_rows: int
) -> Callable[[], None]:
    """Starts to compare this rank's batch with the others'; every rank calls it.

    Batches that differ in few samples, or in what is neither a number nor a text, may pass.

    Args:
        group: all ranks; None in one process.
        step: that trains with the batch.
        batch: this rank's; None behind its last one.
        num_rows: its samples; 0 without a batch, -1 for a batch that this rank refuses.

    Returns:
        A function to be called before anything of the batch is sent. It waits, and raises CommError
        where a rank died, or has another batch than rank 0.
    """
    if group is None:
        return lambda: None
    # Each rank adds its own row to zeros.
    rows = torch.zeros(group.world_size, 2, dtype=torch.float64)
    rows[group.rank, 0] = num_rows
    rows[group.rank, 1] = sketch_batch(batch) if batch and num_rows > 0 else 0.0
    with _blame(group, step):
        reduction = start_all_reduce(group, rows)

    def wait() -> None:
        with _blame(group, step):
            reduction.wait()
        alike = (rows - rows[0]).abs() <= torch.tensor([0.0, _CLOSE_SKETCH])
        if alike.all():
            return
        unlike = [rank for rank, own in enumerate(alike.tolist()) if not all(own)]
        counts = sorted({max(int(count), 0) for count in rows[:, 0].tolist()})
        raise CommError(
            f"batch of step {step}: expected the same batch on all ranks, got another one on the "
            f"ranks {unlike} than on rank 0 (numbers of samples: {', '.join(map(str, counts))}); "
            "hand all ranks the same batches, as shuffled by one seed"
        )

    return wait


def describe_batch(batch: Mapping[str, Any]) -> Form:
    """What each entry of a batch is, but for its number of rows."""
    return {name: _describe_entry(value) for name, value in sorted(batch.items())}


def check_form(form: Form, first: Form, step: int) -> None:
    """Checks that a batch has the form of the first one, by which messages were laid out.

    Raises:
        DataError: an entry is missing or new, or its samples have another shape or type; names it.
    """
    for name in sorted(form.keys() | first.keys()):
        ours, theirs = form.get(name, _NOTHING), first.get(name, _NOTHING)
        for what, expected in theirs.items():
            if ours.get(what, expected) != expected:
                raise DataError(
                    f"batch of step {step}: expected {name} {what} {expected} as in the first batch, "
                    f"got {ours[what]}; make all batches alike, or plan for each kind and train it "
                    "with an engine of its own"
                )


def sketch_batch(batch: Mapping[str, Any]) -> float:
    """A number that unlike batches hardly share and that rounding hardly changes.

    Of a tensor of floating-point numbers it is a projection of numbers spread over all of it; of other
    tensors and of texts a checksum.
    """
    total = 0.0
    for factor, name in enumerate(sorted(batch), start=1):
        value = batch[name]
        if _is_numeric(value):
            # Flipped arrays have strides that torch does not take.
            array = value if isinstance(value, Tensor) else np.ascontiguousarray(value)
            total += factor * _sketch(torch.as_tensor(array))
        else:
            texts = (str(entry) for entry in value if isinstance(entry, str | int | float))
            total += factor * _sum_bytes("\n".join(texts).encode())
    return total + _sum_bytes(json.dumps(describe_batch(batch)).encode())


def sketch_weights(weights: Mapping[str, Tensor]) -> dict[str, float]:
    """A number of each weight that hardly two unlike ones share, by what errors call it."""
    return {f"weights, by a sketch of {name!r},": _sketch(value) for name, value in weights.items()}


def _sketch(value: Tensor) -> float:
    """A projection of numbers spread over a tensor, or the checksum of whole ones."""
    flat = value.detach().reshape(-1)
    spread = flat[:: max(1, len(flat) // _SKETCHED)].cpu()
    is_real = spread.is_floating_point()
    return _project(spread) if is_real else _sum_bytes(spread.numpy().tobytes())


def add_losses(group: Group | None, step: int, loss: float, problems: Sequence[BadValues]) -> float:
    """Adds up a step's loss over ranks, before any weight changes; every rank calls it.

    Args:
        group: all ranks; None in one process.
        step: index of the step.
        loss: this rank's part.
        problems: values of this rank that are not finite.

    Returns:
        The loss, the same on every rank.

    Raises:
        DivergenceError: a value is not finite; names the stage that computed it first, and samples.
        CommError: a peer died or the timeout passed.
    """
    # NaN spoils a sum, so problems are counted beside it.
    numbers = torch.tensor([loss, float(len(problems))], dtype=torch.float64)
    if group is not None:
        with _blame(group, step):
            all_reduce(group, numbers)
    total, num_problems = numbers.tolist()
    if not num_problems and math.isfinite(total):
        return total
    every = [BadValues(*each) for own in exchange(group, problems) for each in own]
    raise DivergenceError(_describe(step, total, every))


@contextmanager
def _blame(group: Group, step: int) -> Iterator[None]:
    """Counts what is sent as agreement, and notes in errors where this rank was."""
    try:
        with group.ledger.phase("agreement"):
            yield
    except CommError as error:
        # In a note, as the ledger keeps a cell for each phase.
        error.add_note(f"rank {group.rank} was at the agreement in step {step}")
        raise


_ORDER = ("forward", "loss", "backward", "gradients")


def _describe(step: int, loss: float, problems: Sequence[BadValues]) -> str:
    """Names where values first were not finite: the first stage forward, or the last backward."""
    if not problems:
        return f"step {step}: expected a finite loss, got {loss}; lower the learning rate"
    what = min((each.what for each in problems), key=_ORDER.index)
    of_kind = [each for each in problems if each.what == what]
    pick = max if what == "backward" else min
    stage = pick(each.stage for each in of_kind)
    samples = sorted({row for each in of_kind if each.stage == stage for row in each.samples})
    where = {
        "forward": f"the values that stage {stage} computes",
        "loss": f"the loss, of what stage {stage} computes",
        "backward": f"the gradients that stage {stage} sends back",
        "gradients": f"the parameters' gradients of stage {stage}",
    }[what]
    rows = f", samples {samples}" if samples else ""
    return (
        f"step {step}: expected finite numbers, got NaN or infinity in {where}{rows}; no weight was "
        "changed: look at these samples, lower the learning rate or use a wider type"
    )


def _is_numeric(value: Any) -> bool:
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return isinstance(value, Tensor) or kind in set("biuf")


def _describe_entry(value: Any) -> dict[str, Any]:
    if _is_numeric(value):
        kind = str(value.dtype).removeprefix("torch.")
        return {"to be": "a tensor", "of shape": list(value.shape[1:]), "of type": kind}
    kinds = sorted({_name_kind(entry) for entry in value if entry is not None})
    return {"to be": f"a list of {' and '.join(kinds)}"}


def _name_kind(value: Any) -> str:
    if isinstance(value, str):
        return "texts"
    if _is_numeric(value):
        return "tensors"
    return "numbers" if isinstance(value, int | float) else "objects"


def _project(values: Tensor) -> float:
    numbers = torch.nan_to_num(values.double(), 0.5, 1e9, -1e9)
    # Fractions of multiples of the golden ratio: spread evenly, and no two are alike.
    weights = torch.arange(1, len(numbers) + 1, dtype=torch.float64).mul(0.6180339887498949).frac()
    norm = float(numbers.norm())
    return float((weights - 0.5) @ numbers) / max(norm, 1e-30) + math.log1p(norm)


def _sum_bytes(content: bytes) -> float:
    return zlib.crc32(content) / 2**32


def _is_alike(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        both_nan = math.isnan(value) and math.isnan(other)
        return both_nan or math.isclose(value, other, rel_tol=_CLOSE)
    return value == other


def _show(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:20]}...{text[-17:]}"
