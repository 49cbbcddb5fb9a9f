"""Compares a chain's layers with the model's own forward, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from diffusionpipe.job.layers import OUTPUT, Layer, State
from shared.errors import ConfigError

__all__ = ["compare_forwards"]

# Of each module, what went in and what came out, a list a call.
_Trace = dict[nn.Module, list[list[Tensor]]]


def compare_forwards(
    model: nn.Module,
    layers: Sequence[Layer],
    run: Callable[[State], dict[str, Tensor]],
    example: dict[str, Any],
    state: State,
) -> None:
    """Runs both with the same arguments and compares outputs, then what each module computed.

    Args:
        model: whose forward is the reference; a list of modules has none and is compared with
            itself, which still finds random draws.
        layers: of the chain.
        run: runs all of them.
        example: arguments of the forward.
        state: the same, flat.

    Raises:
        ConfigError: the forward draws random numbers, or a value differs.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with _record(layers) as ours:
            output = run(state)[OUTPUT]
        torch.manual_seed(1)
        if not _is_equal(run(state)[OUTPUT], output):
            raise ConfigError(
                f"{type(model).__name__}: expected a forward without random draws, got two outputs "
                "of the same arguments; do call its eval() or set its dropout to 0, else weights "
                "would depend on the number of stages and micro-batches"
            )
        if isinstance(model, nn.ModuleList):
            return
        with _record(layers) as theirs:
            expected = _first_tensor(model(**example))
    if _is_equal(output, expected):
        return
    for layer in layers:
        for module in dict.fromkeys(m for owner in layer.modules for m in owner.modules()):
            if not _is_equal_trace(ours.get(module, []), theirs.get(module, [])):
                raise ConfigError(
                    f"layer {layer.name}: expected what {type(model).__name__}'s own forward "
                    f"computes, got another value into or out of its {type(module).__name__}; do "
                    "use a release of diffusers that this adapter knows, or a list of layers"
                )
    raise ConfigError(
        f"layer {layers[-1].name}: expected the output of {type(model).__name__}'s own forward, got "
        f"another one of shape {list(output.shape)} for {list(expected.shape)}; do use a release of "
        "diffusers that this adapter knows, or a list of layers"
    )


@contextmanager
def _record(layers: Sequence[Layer]) -> Iterator[_Trace]:
    trace: _Trace = {}

    def note(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        leaves = tree_leaves((arguments, keywords, output))
        trace.setdefault(module, []).append([leaf for leaf in leaves if isinstance(leaf, Tensor)])

    modules = {m for layer in layers for owner in layer.modules for m in owner.modules()}
    handles = [m.register_forward_hook(note, with_kwargs=True) for m in modules]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _is_equal_trace(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    return len(ours) == len(theirs) and all(
        len(mine) == len(other) and all(map(_is_equal, mine, other))
        for mine, other in zip(ours, theirs, strict=True)
    )


def _is_equal(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def _first_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    # Output classes of diffusers are dictionaries that list their values by number.
    return output[0]
