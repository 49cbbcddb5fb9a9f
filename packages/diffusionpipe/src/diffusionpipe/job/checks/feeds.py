"""Finds by trial which frozen outputs a backbone's inputs depend on.

A stage needs only the frozen outputs that its layers' inputs depend on: text states on every stage
with attentions, latents where noise is added and where the target is compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffusionpipe.job.batches import Batch, count_rows, flatten
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.layers import ESTIMATE, OUTPUT

__all__ = ["find_feeds"]


def find_feeds(job: Any, batch: Batch) -> tuple[dict[str, tuple[str, ...]], ...]:
    """Changes one frozen output at a time and compares the inputs and targets.

    Args:
        job: a `Job`, whose `inputs` is tried.
        batch: a few rows.

    Returns:
        For each backbone, names of frozen outputs by input key and "target".
    """
    draw = Draw(0, 0, range(count_rows(batch)))
    values: dict[str, Tensor] = {}
    for component in job.components:
        values |= job.encode(component, batch, draw)
    if job.self_conditioning:
        with torch.no_grad():
            prepared = job.prepare(batch, values, draw)[0]
            values[ESTIMATE] = job.chains[0].run(prepared.state)[OUTPUT]
    reference = _flatten_all(job.prepare(batch, values, draw))
    feeds: tuple[dict[str, list[str]], ...] = tuple({key: [] for key in r} for r in reference)
    for name, value in values.items():
        changed = _flatten_all(job.prepare(batch, {**values, name: _change(value)}, draw))
        for before, after, table in zip(reference, changed, feeds, strict=True):
            for key, names in table.items():
                if not _is_same(before[key], after[key]):
                    names.append(name)
    return tuple({key: tuple(names) for key, names in table.items()} for table in feeds)


def _flatten_all(prepared: tuple[Any, ...]) -> list[dict[str, list[Tensor]]]:
    return [
        {
            **{key: [tensor] for key, tensor in one.state.items()},
            "target": list(flatten("target", one.target).values()),
        }
        for one in prepared
    ]


def _is_same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


def _change(value: Tensor) -> Tensor:
    if value.is_floating_point():
        # No shift or factor alone: normalised values would hide it.
        return value * 1.5 + 0.25 + 0.5 * torch.arange(value.numel()).reshape(value.shape).to(value)
    return ~value if value.dtype == torch.bool else (value + 1)
