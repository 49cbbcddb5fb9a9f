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

# Steps whose draws are tried.
_NUM_DRAWS = 8


def find_feeds(job: Any, batch: Batch) -> tuple[dict[str, tuple[str, ...]], ...]:
    """Changes one frozen output at a time and compares the inputs and targets.

    Args:
        job: a `Job`, whose `inputs` is tried.
        batch: a few rows.

    Returns:
        For each backbone, names of frozen outputs by input key and "target".
    """
    samples = range(count_rows(batch))
    draw = Draw(0, 0, samples)
    values = job.encode_all(batch, draw)
    if job.self_conditioning:
        with torch.no_grad():
            (prepared,) = job.prepare(batch, values, draw)
            values[ESTIMATE] = job.chains[0].run(prepared.state)[OUTPUT]

    def prepare(values: dict[str, Tensor], draw: Draw) -> list[dict[str, Tensor]]:
        made = job.prepare(batch, values, draw)
        return [{**each.state, **flatten("target", each.target)} for each in made]

    # Draws may leave an output out, as where captions are dropped at random.
    references = [prepare(values, Draw(0, step, samples)) for step in range(_NUM_DRAWS)]
    feeds: tuple[dict[str, dict[str, None]], ...] = tuple(
        {_name(key): {} for key in (*state, "target")} for state in references[0]
    )
    for step, reference in enumerate(references):
        for name, value in values.items():
            changed = prepare({**values, name: _change(value)}, Draw(0, step, samples))
            for before, after, table in zip(reference, changed, feeds, strict=True):
                for key in before:
                    if not torch.equal(before[key], after[key]):
                        table[_name(key)][name] = None
    return tuple(
        {key: tuple(n for n in values if n in names) for key, names in table.items()}
        for table in feeds
    )


def _name(key: str) -> str:
    """Parts of a target count together."""
    return "target" if key.startswith("target.") else key


def _change(value: Tensor) -> Tensor:
    if value.is_floating_point():
        # No shift or factor alone: normalised values would hide it.
        return value * 1.5 + 0.25 + 0.5 * torch.arange(value.numel()).reshape(value.shape).to(value)
    # Towards 0, as numbers may be indices of a table that ends behind them.
    return ~value if value.dtype == torch.bool else torch.where(value > 0, value - 1, value + 1)
