"""Finds which frozen outputs a backbone's inputs depend on.

A stage needs only the frozen outputs that its layers' inputs depend on: text states on every stage
with attentions, latents where noise is added and where the target is compared. Operators of torch are
followed, so that it does not matter what a draw selects. Where values leave torch, as in numpy or in
a branch of Python, trials show what changes: one output is changed, and inputs are compared.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffusionpipe.job.batches import Batch, count_rows, flatten
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.layers import ESTIMATE, OUTPUT

__all__ = ["find_feeds"]

# Steps whose draws are tried.
_NUM_DRAWS = 8


def find_feeds(job: Any, batch: Batch) -> tuple[dict[str, tuple[str, ...]], ...]:
    """Follows each frozen output to the inputs and targets, and compares these where one is changed.

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
    # Outputs that share memory, as halves of one tensor, are told apart.
    values = {name: value.clone() for name, value in values.items()}

    def prepare(values: dict[str, Tensor], draw: Draw) -> list[dict[str, Tensor]]:
        made = job.prepare(batch, values, draw)
        return [{**each.state, **flatten("target", each.target)} for each in made]

    feeds: list[dict[str, set[str]]] = []
    for step in range(_NUM_DRAWS):
        draw = Draw(0, step, samples)
        with _Sources(values) as sources:
            reference = prepare(values, draw)
        feeds = feeds or [{_name(key): set() for key in (*state, "target")} for state in reference]
        for state, table in zip(reference, feeds, strict=True):
            for key, value in state.items():
                table[_name(key)] |= sources.find(value)
        for name, value in values.items():
            changed = prepare({**values, name: _change(value)}, draw)
            for before, after, table in zip(reference, changed, feeds, strict=True):
                for key in before:
                    if not torch.equal(before[key], after[key]):
                        table[_name(key)].add(name)
    return tuple(
        {key: tuple(n for n in values if n in names) for key, names in table.items()}
        for table in feeds
    )


class _Sources(TorchDispatchMode):
    """Follows which values each tensor is computed from, by the memory that operators write."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self._names: WeakKeyDictionary[torch.UntypedStorage, set[str]] = WeakKeyDictionary()
        for name, value in values.items():
            self._names[value.untyped_storage()] = {name}

    def find(self, value: Tensor) -> set[str]:
        """Returns the names of the values from which a tensor is computed."""
        return self._names.get(value.untyped_storage(), set())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        # `zeros_like` and `new_zeros` read a tensor's shape and type, but not its numbers.
        name = func.overloadpacket.__name__
        if name.endswith("_like") or name.startswith("new_"):
            return results
        names = set().union(*map(self.find, _list_tensors((args, kwargs))))
        for result in _list_tensors(results) if names else ():
            self._names[result.untyped_storage()] = names
        return results


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _name(key: str) -> str:
    """Parts of a target count together."""
    return "target" if key.startswith("target.") else key


def _change(value: Tensor) -> Tensor:
    if value.is_floating_point():
        # No shift or factor alone: normalised values would hide it.
        return value * 1.5 + 0.25 + 0.5 * torch.arange(value.numel()).reshape(value.shape).to(value)
    # Towards 0, as numbers may be indices of a table that ends behind them.
    return ~value if value.dtype == torch.bool else torch.where(value > 0, value - 1, value + 1)
