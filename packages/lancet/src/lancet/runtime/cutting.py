"""Cuts traced models into parts of the batch, in the same ranges on all ranks, and checks the results.

After the partition pass of Lancet (arXiv 2404.19429). Ranges are chosen by its dynamic programming, but
with nominal seconds: so every job of a model gets the same graph, for which its plan can be stored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from lancet.graph.batch_axes import find_batch_axes, fix_sizes, list_exchanges
from lancet.graph.capture import digest_lines
from lancet.graph.parts import cut
from lancet.planner.partition import PartCosts, choose_ranges
from lancet.runtime.agreement import share_texts
from shared.comms import Group
from shared.errors import ConfigError

__all__ = ["MAX_PARTS", "BatchCutter"]

MAX_PARTS = 8
# Largest difference of a tensor, relative to its largest element, as multiples of its type's precision:
# what sums in another order may differ by.
_NUM_ROUNDINGS = 200


class BatchCutter:
    """Cuts the graphs of one model.

    Args:
        control: a gloo group of the ranks that train the model.
        num_parts: parts of each range.
    """

    def __init__(self, control: Group, num_parts: int) -> None:
        self._control, self._num_parts = control, num_parts
        self._digest = ""
        self._ranges: tuple[tuple[int, int, int], ...] = ()

    def cut_first(self, module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        """Chooses ranges with all ranks, and cuts the first graph; every rank calls this.

        Runs the graph twice without a compiler, whole and in parts, to compare outputs and gradients.

        Args:
            module: of Dynamo, with sizes of inputs as symbols that it reads; they become numbers.
            inputs: its example inputs.

        Raises:
            ConfigError: the batch stays whole, on all ranks; says why.
            CommError: a rank died or the timeout passed.
        """
        parts, reason, digest = None, "", _digest(module)
        try:
            parts, ranges = self._choose(module, inputs)
        except ConfigError as error:
            reason, ranges = str(error), ()
        fix_sizes(module)
        states = share_texts(self._control, json.dumps([digest, ranges, reason]))
        if len({*states}) > 1:
            raise ConfigError(
                f"expected the same model on all ranks, and batches that can be cut into "
                f"{self._num_parts}, got {[json.loads(state)[2] or 'one' for state in states]}, of the "
                f"graphs {[json.loads(state)[0][:8] for state in states]}; give all ranks batches "
                f"of one shape in the first step"
            )
        if parts is None:
            raise ConfigError(reason)
        position = _find_far(_run(module, inputs), _run(parts, inputs))
        positions = [json.loads(t) for t in share_texts(self._control, json.dumps(position))]
        differing = [rank for rank, other in enumerate(positions) if other is not None]
        if differing:
            raise ConfigError(
                f"expected parts to give the whole batch's results, got others on ranks {differing} "
                f"(outputs or gradients {[positions[rank] for rank in differing]})"
            )
        self._digest, self._ranges = digest, ranges
        return parts

    def cut_later(self, module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        """Cuts a graph of another batch in the first one's ranges, without a message.

        A graph of another program, as of evaluation, stays whole.

        Raises:
            ConfigError: the batch has too few sequences, while other ranks may exchange rows in parts.
        """
        axes = find_batch_axes(module, inputs)
        digest = _digest(module)
        fix_sizes(module)
        if axes is not None and axes.size >= self._num_parts and digest == self._digest:
            return cut(module, axes, self._ranges)
        if torch.is_grad_enabled() and (axes is None or digest == self._digest):
            raise ConfigError(
                f"expected {self._num_parts} sequences or more in a batch after a first one in "
                f"{self._num_parts} parts, got {1 if axes is None else axes.size}; drop the last, "
                f"smaller batch, or pass partition=None"
            )
        return module

    def _choose(
        self, module: fx.GraphModule, inputs: Sequence[Any]
    ) -> tuple[fx.GraphModule, tuple[tuple[int, int, int], ...]]:
        axes = find_batch_axes(module, inputs)
        size = 1 if axes is None else axes.size
        if axes is None or size % self._num_parts:
            raise ConfigError(
                f"expected a batch that divides into {self._num_parts} parts, got {size} sequences"
            )
        nodes = list(module.graph.nodes)
        starts = {exchange[0] for exchange in list_exchanges(module.graph)}
        whole_s = [1.0 if node in starts else len(starts) / len(nodes) for node in nodes]
        costs = PartCosts(
            ["all_to_all" if node in starts else "compute" for node in nodes],
            {n: [seconds / n for seconds in whole_s] for n in (1, self._num_parts)},
            [0.0] * len(nodes),
        )
        chosen = choose_ranges(module.graph, axes, costs, may_stay_whole=False)
        if not chosen.ranges:
            raise ConfigError(chosen.reason)
        return cut(module, axes, chosen.ranges), chosen.ranges


def _digest(module: fx.GraphModule) -> str:
    return digest_lines(node.format_node() or "" for node in module.graph.nodes)


def _run(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Tensor]:
    """Outputs and gradients on this rank; the random state is as before."""
    # Copies, as hooks of divided models average the gradients of the parameters themselves.
    inputs = [
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, nn.Parameter)
        else int(value)
        if isinstance(value, torch.SymInt)
        else value
        for value in inputs
    ]
    with torch.random.fork_rng():
        outputs = [value for value in module.forward(*inputs) if isinstance(value, Tensor)]
        trained = [value for value in outputs if value.requires_grad]
        leaves = [v for v in inputs if isinstance(v, Tensor) and v.requires_grad]
        gradients: Sequence[Tensor | None] = ()
        if trained and leaves:
            gradients = torch.autograd.grad(
                trained, leaves, [torch.ones_like(v) for v in trained], allow_unused=True
            )
    results = [value for value in (*outputs, *gradients) if value is not None]
    return [getattr(value, "_local_tensor", value).detach() for value in results]


def _find_far(expected: Sequence[Tensor], results: Sequence[Tensor]) -> int | None:
    """Position of the first tensor that differs by more than rounding."""
    for position, (one, other) in enumerate(zip(expected, results, strict=True)):
        if not one.numel():
            continue
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return position
            continue
        bound = _NUM_ROUNDINGS * torch.finfo(one.dtype).eps * float(one.abs().max())
        if not float((one - other).abs().max()) <= bound:
            return position
    return None
