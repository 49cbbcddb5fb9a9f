"""Compares a chain's layers with the model's own forward, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from diffusionpipe.job.layers import OUTPUT, ChainLayer
from shared.errors import ConfigError

__all__ = ["compare_forwards"]


def compare_forwards(
    model: nn.Module,
    layers: Sequence[ChainLayer],
    run: Callable[[], dict[str, Tensor]],
    example: dict[str, Any],
) -> None:
    """Runs both with the same arguments and compares outputs; if they differ, each module's.

    Args:
        model: whose forward is the reference; a list of modules has none and is compared with
            itself, which still finds random draws.
        layers: of the chain.
        run: runs all of them with the same arguments.
        example: arguments of the forward.

    Raises:
        ConfigError: the forward draws random numbers, or a value differs.
    """
    kind = type(model).__name__
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = run()[OUTPUT]
        torch.manual_seed(1)
        if not _is_equal(run()[OUTPUT], output):
            raise ConfigError(
                f"{kind}: expected a forward without random draws, got two outputs of the same "
                "arguments; do call its eval() or set its dropout to 0, else weights would depend on "
                "the number of stages and micro-batches"
            )
        if isinstance(model, nn.ModuleList):
            return
        # An output class of diffusers is a dictionary that lists its values by number.
        result = model(**example)
        expected = result if isinstance(result, Tensor) else result[0]
        if _is_equal(output, expected):
            return
        ours = _record(layers, run)
        theirs = _record(layers, lambda: model(**example))
    for layer in layers:
        for module in dict.fromkeys(m for owner in layer.modules for m in owner.modules()):
            mine, other = ours.get(module, []), theirs.get(module, [])
            if len(mine) != len(other) or not all(map(_is_equal, mine, other)):
                raise ConfigError(
                    f"layer {layer.name}: expected what {kind}'s own forward computes, got another "
                    f"value into or out of its {type(module).__name__}; do use a release of "
                    "diffusers that this adapter knows, or a list of layers"
                )
    raise ConfigError(
        f"layer {layers[-1].name}: expected the output of {kind}'s own forward, got another one of "
        f"shape {list(output.shape)} for {list(expected.shape)}; do use a release of diffusers that "
        "this adapter knows, or a list of layers"
    )


def _record(layers: Sequence[ChainLayer], run: Callable[[], Any]) -> dict[nn.Module, list[Tensor]]:
    """Of each module, all tensors that went in and came out."""
    trace: dict[nn.Module, list[Tensor]] = {}

    def note(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        leaves = tree_leaves((arguments, keywords, output))
        trace.setdefault(module, []).extend(leaf for leaf in leaves if isinstance(leaf, Tensor))

    modules = {m for layer in layers for owner in layer.modules for m in owner.modules()}
    handles = [m.register_forward_hook(note, with_kwargs=True) for m in modules]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return trace


def _is_equal(ours: Tensor, theirs: Tensor) -> bool:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    # NaN of a bad sample is no random draw.
    return bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())
