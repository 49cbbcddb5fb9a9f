"""Learns from two rows of a batch what a job's values are called, look like and depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from diffusionpipe.job.draws import Draw
from diffusionpipe.job.job import Job
from diffusionpipe.job.layers import OUTPUT
from diffusionpipe.profiler.saved import count_saved_bytes
from diffusionpipe.runtime.instructions import BackboneFlow, Dataflow
from diffusionpipe.runtime.shapes import Shapes, ValueShape

__all__ = ["Trace", "trace_job"]


class Trace(NamedTuple):
    """What a few rows tell of a job.

    Attributes:
        flow: names of its values.
        shapes: of its values.
        frozen_sizes: mean size of each frozen output.
        result_sizes: mean size of each backbone's output.
    """

    flow: Dataflow
    shapes: Shapes
    frozen_sizes: dict[str, float]
    result_sizes: dict[str, float]


class _Seen(NamedTuple):
    """Values of a few rows: names of frozen outputs by component, these, and each backbone's values."""

    components: dict[str, tuple[str, ...]]
    frozen: dict[str, Tensor]
    values: list[dict[str, Tensor]]


def trace_job(job: Job, batch: Mapping[str, Any]) -> Trace:
    """Runs one row and two rows through the job; all ranks get the same.

    Args:
        job: whose values are asked for.
        batch: two rows of the first batch of a training run.

    Raises:
        DataError: a value's type or number of dimensions depends on the number of rows.
    """
    single, pair = (_run(job, batch, count) for count in (1, 2))
    backbones = tuple(
        BackboneFlow(
            reads=tuple(layer.reads for layer in chain.layers),
            writes=tuple(layer.writes for layer in chain.layers),
            feeds=fed,
            differentiable=frozenset(key for key, value in seen.items() if value.requires_grad),
        )
        for chain, fed, seen in zip(job.chains, job.feeds(batch), single.values, strict=True)
    )
    shapes = Shapes(
        values=tuple(map(_find_shapes, single.values, pair.values)),
        frozen=_find_shapes(single.frozen, pair.frozen),
        device=single.values[0][OUTPUT].device,
    )
    frozen_sizes = {f"frozen {key!r}": value for key, value in pair.frozen.items()}
    result_sizes = {f"the output of backbone {i}": v[OUTPUT] for i, v in enumerate(pair.values)}
    return Trace(
        Dataflow(backbones=backbones, components=single.components),
        shapes,
        _measure_sizes(frozen_sizes),
        _measure_sizes(result_sizes),
    )


def _run(job: Job, batch: Mapping[str, Any], num_rows: int) -> _Seen:
    rows, draw = job.take(batch, range(num_rows)), Draw(0, 0, range(num_rows))
    outputs = {component: job.encode(component, rows, draw) for component in job.components}
    frozen = {key: value for own in outputs.values() for key, value in own.items()}
    prepared = zip(job.chains, job.prepare(rows, frozen, draw), strict=True)
    values = []
    for chain, inputs in prepared:
        # Each value requires a gradient if a step's run of it would.
        _, all_values = count_saved_bytes(chain, inputs.state)
        values.append({key: all_values[key] for layer in chain.layers for key in layer.writes})
    return _Seen({component: tuple(own) for component, own in outputs.items()}, frozen, values)


def _find_shapes(single: dict[str, Tensor], pair: dict[str, Tensor]) -> dict[str, ValueShape]:
    return {key: ValueShape.between(single[key], pair[key]) for key in single}


def _measure_sizes(values: dict[str, Tensor]) -> dict[str, float]:
    return {
        f"weights, by the mean size of {name},": float(value.detach().double().abs().mean())
        for name, value in values.items()
    }
