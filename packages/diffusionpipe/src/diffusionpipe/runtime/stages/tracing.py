"""Learns from two rows of a batch what a job's values are called, look like and depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffusionpipe.job.chain import Chain
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.job import Job
from diffusionpipe.job.layers import OUTPUT
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


def trace_job(job: Job, batch: Mapping[str, Any]) -> Trace:
    """Runs one row and two rows through the job; all ranks find the same.

    Args:
        job: whose values are asked for.
        batch: the first batch of a training run, with a row or more.

    Raises:
        DataError: a value's type or number of dimensions depends on the number of rows.
    """
    # Of a single row all shapes are taken as they are, which fits batches of one row.
    num_rows = min(2, job.num_samples(batch))
    one, two = (_run(job, job.take(batch, range(count)), count) for count in (1, num_rows))
    feeds = job.feeds(job.take(batch, range(num_rows)))
    backbones, values = [], []
    for index, chain in enumerate(job.chains):
        seen, again = one.values[index], two.values[index]
        values.append({key: ValueShape.between(seen[key], again[key]) for key in seen})
        backbones.append(
            BackboneFlow(
                reads=tuple(layer.reads for layer in chain.layers),
                writes=tuple(layer.writes for layer in chain.layers),
                feeds=feeds[index],
                differentiable=frozenset(key for key in seen if seen[key].requires_grad),
            )
        )
    frozen = {key: ValueShape.between(one.frozen[key], two.frozen[key]) for key in one.frozen}
    return Trace(
        flow=Dataflow(backbones=tuple(backbones), components=one.components),
        shapes=Shapes(
            values=tuple(values), frozen=frozen, device=next(iter(one.values[0].values())).device
        ),
        frozen_sizes={f"frozen {k!r}": _measure_size(v) for k, v in two.frozen.items()},
        result_sizes={
            f"the output of backbone {index}": _measure_size(values[OUTPUT])
            for index, values in enumerate(two.values)
        },
    )


def _measure_size(value: Tensor) -> float:
    return float(value.detach().double().abs().mean())


class _Seen:
    """Values of a few rows.

    Attributes:
        frozen: frozen outputs by name.
        components: names of frozen outputs by component.
        values: what layers write, by backbone and key; each requires a gradient if a plan's run of it would.
    """

    def __init__(self) -> None:
        self.frozen: dict[str, Tensor] = {}
        self.components: dict[str, tuple[str, ...]] = {}
        self.values: list[dict[str, Tensor]] = []


def _run(job: Job, rows: Mapping[str, Any], num_rows: int) -> _Seen:
    seen, draw = _Seen(), Draw(0, 0, range(num_rows))
    for component in job.components:
        outputs = job.encode(component, rows, draw)
        seen.frozen |= outputs
        seen.components[component] = tuple(outputs)
    for chain, prepared in zip(job.chains, job.prepare(rows, seen.frozen, draw), strict=True):
        seen.values.append(_run_layers(chain, prepared.state))
    return seen


def _run_layers(chain: Chain, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What layers write, without keeping more than one layer's activations."""
    values, written = dict(state), {}
    for layer in chain.layers:
        inputs = {
            key: values[key].detach().requires_grad_(values[key].requires_grad)
            for key in layer.reads
        }
        with torch.enable_grad():
            outputs = layer.call(inputs)
        for key, value in outputs.items():
            written[key] = values[key] = value.detach().requires_grad_(value.requires_grad)
    return written
