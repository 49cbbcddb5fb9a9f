"""Times a job's layers and frozen functions, and counts the bytes of its values.

Each layer is timed by itself, in the order of a step: the frozen functions, all forwards, then all
backwards from the last layer. Whole passes are timed beside them, with what belongs to no layer:
inputs, the loss, gradients that are added up. Layers' seconds are scaled to add up to these.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from diffusionpipe.job.batches import Batch, count_rows, flatten, take_rows, take_two
from diffusionpipe.job.chain import Chain
from diffusionpipe.job.checks.rows import find_parameters
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.frozen import Frozen
from diffusionpipe.job.job import Job, Prepared
from diffusionpipe.job.layers import OUTPUT
from diffusionpipe.profiler.interference import time_messages
from diffusionpipe.profiler.job_profile import ChainProfile, JobProfile
from diffusionpipe.profiler.saved import count_saved_bytes, count_working_bytes
from shared.errors import ConfigError

__all__ = ["profile"]

Result = TypeVar("Result")

# Runs of each size; their median leaves out a first run that allocates or chooses algorithms.
_REPEATS = 3
# Bytes of parameters, or a parameter more, of the optimizer's timed step.
_STEP_BYTES = 64 << 20


def profile(
    job: Job, batch: Batch, *, sizes: Sequence[int] | None = None, repeats: int = _REPEATS
) -> JobProfile:
    """Measures a job on this machine; on all ranks at once where torch.distributed is set up.

    Args:
        job: what to measure.
        batch: a batch as for training; nothing is trained with it.
        sizes: numbers of samples of micro-batches to time; 1 and an eighth, a quarter, a half and
            all of the batch when left out. Sizes between are interpolated.
        repeats: runs of each size, of which the median counts.

    Returns:
        The same figures on every rank: of times, the median over ranks.

    Raises:
        ConfigError: a size is not a number of samples of the batch, or `job.check` refuses.
    """
    num_samples = count_rows(batch)
    if sizes is None:
        sizes = [1, *(max(1, num_samples // part) for part in (8, 4, 2, 1))]
    sizes = tuple(sorted(set(sizes)))
    if not sizes or sizes[0] < 1 or sizes[-1] > num_samples:
        raise ConfigError(
            f"sizes: expected numbers of samples from 1 to {num_samples}, got {list(sizes)}; do "
            "hand over a larger batch or choose smaller sizes"
        )
    # The first row may have costs of its own.
    num_rows = 2
    few, draw = take_two(batch), Draw(0, 0, range(num_rows))
    job.check(few)
    device = _find_device(job)
    timings = [_time_size(job, take_rows(batch, range(size)), repeats, device) for size in sizes]
    outputs = {component: job.encode(component, few, draw) for component in job.components}
    values = {key: tensor for part in outputs.values() for key, tensor in part.items()}
    chains = tuple(
        _describe_chain(
            chain,
            prepared,
            partial(job.compute_losses, target=prepared.target, num_samples=num_rows),
            num_rows,
            feeds=feeds,
            forward_s=tuple(zip(*(timing.forward_s[index] for timing in timings), strict=True)),
            backward_s=tuple(zip(*(timing.backward_s[index] for timing in timings), strict=True)),
        )
        for index, (chain, prepared, feeds) in enumerate(
            zip(job.chains, job.prepare(few, values, draw), job.feeds(few), strict=True)
        )
    )
    # A batch of middle size: long enough to be measured, short enough to be repeated.
    rows = take_rows(batch, range(sizes[len(sizes) // 2]))
    compute = torch.no_grad()(partial(job.compute_loss, rows, seed=0, step=0))
    message_s, message_s_per_byte = time_messages(compute, repeats)
    measured = JobProfile(
        sizes=sizes,
        chains=chains,
        frozen_s={name: tuple(each.frozen_s[name] for each in timings) for name in job.components},
        frozen_outputs={component: tuple(part) for component, part in outputs.items()},
        frozen_bytes={key: math.ceil(t.nbytes / num_rows) for key, t in values.items()},
        frozen_parameter_bytes={
            component: _count_parameters(job.list_functions(component), few, draw)
            for component in job.components
        },
        frozen_working_bytes={
            name: math.ceil(count_working_bytes(partial(job.encode, name, few, draw)) / num_rows)
            for name in job.components
        },
        step_s_per_byte=_time_optimizer(job, device),
        message_s=message_s,
        message_s_per_byte=message_s_per_byte,
        self_conditioning=job.self_conditioning,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        num_ranks=1,
        fingerprints=job.list_fingerprints(),
    )
    return _agree(measured)


_Passes = tuple[tuple[float, ...], tuple[float, ...]]
"""Seconds of layers' forward passes, and of their backward passes."""


class _Timing(NamedTuple):
    """Median seconds of some samples: by component; by backbone and layer."""

    frozen_s: dict[str, float]
    forward_s: tuple[tuple[float, ...], ...]
    backward_s: tuple[tuple[float, ...], ...]


def _time_size(job: Job, rows: Batch, repeats: int, device: torch.device) -> _Timing:
    """Runs what a step runs, in its order, again and again: caches are as cold as in training."""
    draw = Draw(0, 0, range(count_rows(rows)))
    frozen: dict[str, list[float]] = {name: [] for name in job.components}
    layers: list[list[_Passes]] = [[] for _ in job.chains]
    wholes: list[list[tuple[float, float]]] = [[] for _ in job.chains]
    for _ in range(repeats):
        values: dict[str, Tensor] = {}
        for name in job.components:
            seconds, outputs = _time_run(partial(job.encode, name, rows, draw), device)
            frozen[name].append(seconds)
            values |= outputs
        for index, chain in enumerate(job.chains):
            prepare = partial(job.prepare, rows, values, draw)
            with _keep_gradients(chain.model):
                layers[index].append(_time_layers(chain, prepare()[index], device))
                # Gradients are there now, so that this pass adds to them, as most of a step do.
                wholes[index].append(_time_whole(job, index, count_rows(rows), prepare, device))
    return _Timing(
        {name: statistics.median(own) for name, own in frozen.items()},
        *zip(*map(_scale_layers, layers, wholes), strict=True),
    )


def _scale_layers(layers: list[_Passes], wholes: list[tuple[float, float]]) -> _Passes:
    """Medians by layer, longer or shorter by one factor so that they add up to whole passes."""
    scaled = []
    for which in (0, 1):
        passes = _median([own[which] for own in layers])
        whole_s = statistics.median(own[which] for own in wholes)
        # A clock may be too coarse for tiny layers.
        factor = whole_s / sum(passes) if sum(passes) else 1.0
        scaled.append(tuple(factor * seconds for seconds in passes))
    return scaled[0], scaled[1]


def _count_parameters(frozen: Frozen, rows: Batch, draw: Draw) -> int:
    used = [p for own in find_parameters(frozen, rows, draw).values() for p in own]
    return sum({id(parameter): parameter.nbytes for parameter in used}.values())


def _time_layers(chain: Chain, prepared: Prepared, device: torch.device) -> _Passes:
    """Seconds of each layer's forward and backward."""
    values: dict[str, Tensor] = dict(prepared.state)
    graphs: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    forwards, backwards = [], []
    for index, layer in enumerate(chain.layers):
        # Cut off from the layers before, as at a stage's border.
        read = {k: values[k].detach().requires_grad_(values[k].requires_grad) for k in layer.reads}
        seconds, written = _time_run(partial(chain.run_layer, index, read), device)
        forwards.append(seconds)
        values.update(written)
        graphs.append((read, written))
    gradients: dict[str, Tensor] = {OUTPUT: torch.ones_like(values[OUTPUT])}
    for read, written in reversed(graphs):
        seconds, _ = _time_run(partial(_go_back, read, written, gradients), device)
        backwards.append(seconds)
    return tuple(forwards), tuple(reversed(backwards))


def _time_whole(
    job: Job,
    backbone: int,
    num_rows: int,
    prepare: Callable[[], tuple[Prepared, ...]],
    device: torch.device,
) -> tuple[float, float]:
    """Seconds of a pass as in training: with its inputs and its loss, and back."""

    def compute_loss() -> Tensor:
        prepared = prepare()[backbone]
        output = job.chains[backbone].run(prepared.state)[OUTPUT]
        return job.compute_losses(output, prepared.target, num_rows).mean()

    forward_s, loss = _time_run(compute_loss, device)
    backward_s, _ = _time_run(loss.backward, device)
    return forward_s, backward_s


def _go_back(
    read: dict[str, Tensor], written: dict[str, Tensor], gradients: dict[str, Tensor]
) -> None:
    """One layer's backward; adds its inputs' gradients to those of the same values."""
    roots = {key: tensor for key, tensor in written.items() if tensor.requires_grad}
    used = [key for key in roots if key in gradients]
    if used:
        torch.autograd.backward([roots[k] for k in used], [gradients.pop(k) for k in used])
    for key, tensor in read.items():
        if tensor.grad is not None:
            total = gradients.get(key)
            gradients[key] = tensor.grad if total is None else total + tensor.grad


def _describe_chain(
    chain: Chain,
    prepared: Prepared,
    loss: Callable[[Tensor], Tensor],
    num_rows: int,
    **tables: Any,
) -> ChainProfile:
    with _keep_gradients(chain.model):
        saved, values = count_saved_bytes(chain, prepared.state, loss)
    target = sum(tensor.nbytes for tensor in flatten("target", prepared.target).values())
    sizes = {key: tensor.nbytes for key, tensor in values.items()} | {"target": target}
    layers = [chain.list_parameters(index).values() for index in range(len(chain))]
    return ChainProfile(
        layers=tuple(layer.name for layer in chain.layers),
        reads=tuple(layer.reads for layer in chain.layers),
        writes=tuple(layer.writes for layer in chain.layers),
        differentiable=tuple(key for key, tensor in values.items() if tensor.requires_grad),
        parameter_bytes=tuple(sum(p.nbytes for p in own) for own in layers),
        gradient_bytes=tuple(sum(p.nbytes for p in own if p.requires_grad) for own in layers),
        saved_bytes=tuple(math.ceil(count / num_rows) for count in saved),
        value_bytes={key: math.ceil(count / num_rows) for key, count in sizes.items()},
        sum_bytes=tuple(
            sum(p.numel() * max(p.itemsize, 4) for p in own if p.requires_grad) for own in layers
        ),
        whole=tuple(key for key, t in values.items() if not t.dim() or len(t) != num_rows),
        **tables,
    )


def _time_optimizer(job: Job, device: torch.device) -> float:
    """Seconds of AdamW a byte of trained parameters, by copies of the job's own up to some size."""
    copies: list[nn.Parameter] = []
    for parameter in job.trained.values():
        if sum(one.nbytes for one in copies) < _STEP_BYTES:
            copies.append(nn.Parameter(parameter.detach().to(device, copy=True)))
    if not copies:
        return 0.0
    for one in copies:
        one.grad = torch.zeros_like(one)
    optimizer = torch.optim.AdamW(copies, 1e-4)
    # The first run makes the moments.
    _, *runs = [_time_run(optimizer.step, device)[0] for _ in range(_REPEATS + 1)]
    return statistics.median(runs) / sum(one.nbytes for one in copies)


def _agree(measured: JobProfile) -> JobProfile:
    """Takes the median of times over all ranks, where there are several."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return measured
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, measured)
    ranks: list[JobProfile] = gathered
    if any(
        (each.sizes, each.fingerprints) != (measured.sizes, measured.fingerprints) for each in ranks
    ):
        raise ConfigError(
            "profile: expected the same job and sizes on every rank, got different ones; do hand "
            "over the same model and batch everywhere"
        )
    chains = tuple(
        replace(
            chain,
            forward_s=_median([each.chains[index].forward_s for each in ranks]),
            backward_s=_median([each.chains[index].backward_s for each in ranks]),
        )
        for index, chain in enumerate(ranks[0].chains)
    )
    return replace(
        ranks[0],
        chains=chains,
        frozen_s={
            name: _median([each.frozen_s[name] for each in ranks]) for name in measured.frozen_s
        },
        step_s_per_byte=_median([each.step_s_per_byte for each in ranks]),
        # Two ranks measured these, the others have zeros.
        message_s=sum(each.message_s for each in ranks) / 2,
        message_s_per_byte=sum(each.message_s_per_byte for each in ranks) / 2,
        num_ranks=len(ranks),
    )


def _median(tables: list[Any]) -> Any:
    """The median of numbers, or of tuples of them, place by place."""
    if isinstance(tables[0], tuple):
        return tuple(_median(list(rows)) for rows in zip(*tables, strict=True))
    return statistics.median(tables)


def _time_run(run: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    _wait_for(device)
    started = time.perf_counter()
    result = run()
    _wait_for(device)
    return time.perf_counter() - started, result


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _keep_gradients(model: nn.Module) -> Iterator[None]:
    """Puts aside the gradients there are, and back again."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _find_device(job: Job) -> torch.device:
    return next(job.chains[0].model.parameters()).device
