"""Measures a layer and the store, and plans; no training step is run."""

from __future__ import annotations

import gc
import logging
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memo.config import Budget, read_bytes, shown
from memo.planner.placement import check_possible, fits, place
from memo.planner.plan import Plan
from memo.planner.profile import (
    LayerProfile,
    PassBytes,
    StepProfile,
    TilesProfile,
    least_layer,
)
from memo.profiler.calls import LayerCall, capture_calls, shortened
from memo.profiler.clock import now
from memo.profiler.head import OutsideBytes, count_outside, measure_head
from memo.profiler.kinds import LayerKind, find_kinds
from memo.profiler.process_memory import bytes_to_come, fixed_bytes
from memo.profiler.timing.layer_tiles import count_tiles, measure_tiles
from memo.profiler.timing.layer_times import forward_s, measure_layer
from memo.profiler.timing.store_rate import measure_store
from memo.profiler.untouched import untouched
from memo.runtime.attention import offer_attention
from memo.runtime.block_loss import has_block_loss, offer_block_loss
from memo.runtime.device_memory import give_back_at_once, resident_bytes
from memo.runtime.host_memory import keep_within_host
from memo.runtime.layers import (
    attention_names,
    check_untouched,
    device_of,
    find_layers,
    kind_of,
)
from memo.runtime.stores import open_store
from memo.runtime.tiling.row_locality import Proofs
from memo.simulator import simulate
from shared.errors import ConfigError
from shared.topology.link import Link

__all__ = ["autotune", "measure_profile"]

_log = logging.getLogger(__name__)

_LEAST_TOKENS = 64
"""Of a sequence: seconds of fewer say little of longer ones."""

_LONGEST_S, _PROBE_TOKENS = 0.5, 1024
"""A layer's forward takes no longer where seconds are measured, unless fewer tokens of a sequence do: it is run some
fifty times, and seconds of longer sequences follow."""

_FREE_TILES = TilesProfile(
    tile_rows=1, forward_s=0.0, backward_s=0.0, levels=(PassBytes(forward=0, backward=0),) * 2
)
"""What tiles take at least, before they are counted."""

_NOISE_BYTES = 8 << 20
"""By which what is resident may differ between two looks, steps apart."""

_MARGIN_BYTES = 2 << 20
"""By which it may grow between two looks, with nothing but the end of measuring between them."""


def autotune(
    model: nn.Module,
    batch: Mapping[str, Any],
    budget: Budget,
    layers: Sequence[nn.Module] | None = None,
    *,
    optimizer_bytes: int | str | None = None,
) -> Plan:
    """The fastest plan for a model, a batch and a budget.

    One layer is run a few times at the batch's length, and the store is written and read beside it.
    Parameters, gradients and random numbers are left as they were. Where the device is RAM, glibc is told to give back what is
    freed, for this process from here on: limits would not hold otherwise.

    Args:
        model: a Hugging Face model in training mode, or any whose forward takes the batch as keywords; not
            yet wrapped by FSDP2.
        batch: of the longest length to come, on the model's device.
        budget: hard limits; those of RAM are lowered to this process's share of its host, see
            `keep_within_host`.
        layers: see `memo.apply`.
        optimizer_bytes: of optimizer states that are still to be made, a number or a text such as "2GiB"; by
            default AdamW's, two values a trained parameter.

    Raises:
        DoesNotFit: no plan is within the budget.
        ConfigError: the budget is none, or its store is none for this device; the model's layers cannot be told,
            have a plan applied or nothing to train; the batch is no mapping, has no tokens, lies on another device
            than the model, or is none that the model takes; inference mode is on.
        DataError: the store cannot be opened.
    """
    if not isinstance(budget, Budget):
        raise ConfigError(
            f"budget: expected a memo.Budget, got {shown(budget)}; give one, such as "
            'memo.Budget(device="6GiB", store="40GiB")'
        )
    device = device_of(model)
    store = _store_name(budget, device)
    budget = keep_within_host(budget, device, store)
    profile = measure_profile(
        model,
        batch,
        store if budget.store_bytes else None,
        layers,
        optimizer_bytes=(
            None if optimizer_bytes is None else read_bytes("optimizer_bytes", optimizer_bytes)
        ),
        store_limit_bytes=budget.store_bytes,
        room_bytes=budget.device_bytes - resident_bytes(device),
        budget=budget,
    )
    plan = place(profile, budget, store, predict=simulate)
    kinds = tuple(map(kind_of, find_layers(model, layers)))
    return replace(plan, layer_kinds=kinds, input_shape=profile.input_shape)


def measure_profile(
    model: nn.Module,
    batch: Mapping[str, Any],
    store: str | None,
    layers: Sequence[nn.Module] | None = None,
    *,
    optimizer_bytes: int | None = None,
    store_limit_bytes: int | None = None,
    room_bytes: int | None = None,
    budget: Budget | None = None,
) -> StepProfile:
    """What a step takes on this machine: see `autotune`.

    Bytes are counted at the batch's length. Seconds are measured there too if a plain layer and the loss
    have room; else at a half of it, a quarter and so on, from which they follow: attention's grow with the
    square of the length, all others with the length.

    Args:
        model, batch, layers, optimizer_bytes: see there.
        store: "memory", "pinned" or "file:DIR"; None: none is measured.
        store_limit_bytes: most bytes that are stored while it is measured.
        room_bytes: what measuring may take on the device; None: no limit.
        budget: for which the profile is asked: tiles are left out where something fits without them. None: they
            are measured in any case.

    Raises:
        DoesNotFit: no plan is within the budget, as bytes show that are counted before anything is measured.
    """
    found = find_layers(model, layers)
    device = device_of(model)
    check_untouched(model, found, ())
    if torch.is_inference_mode_enabled() or any(one.is_inference() for one in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__}: expected a model and a call outside of torch.inference_mode(), in which nothing "
            "runs backward, got one inside; leave it, and load the model outside of it"
        )
    if not any(one.requires_grad for one in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__}: expected parameters to train, got none that requires a gradient; plan for the "
            "model that your loop trains"
        )
    _check_batch(batch, device)
    if not model.training:
        _log.warning(
            "%s: expected a model in training mode, got one in evaluation, whose dropout is off; if your loop calls "
            "model.train(), call it before you plan", type(model).__name__,
        )  # fmt: skip
    if device.type == "cpu":
        give_back_at_once()
    to_come = bytes_to_come(model, optimizer_bytes)

    def fixed() -> int:
        return fixed_bytes(device) + to_come

    before = fixed()
    with untouched(model, batch):
        profile = _measure(
            model, found, batch, store, store_limit_bytes, room_bytes, budget, before, fixed
        )
    if device.type == "cuda":
        gc.collect()  # tensors in cycles would count as held for good
    # The layers' arguments are gone; what measuring imported and cached is there from now on.
    return replace(profile, fixed_bytes=profile.fixed_bytes + fixed())


def _measure(
    model: nn.Module,
    found: list[nn.Module],
    batch: Mapping[str, Any],
    store: str | None,
    store_limit_bytes: int | None,
    room_bytes: int | None,
    budget: Budget | None,
    fixed_before: int,
    fixed: Callable[[], int],
) -> StepProfile:
    """See `measure_profile`; fixed bytes are those of the store alone."""
    device = device_of(model)
    begun = now(device)
    # One that cannot be opened is told before anything is measured.
    opened = None if store is None else open_store(store, device=device)
    undo = [offer_attention(name) for name in attention_names(found)]
    try:
        calls = capture_calls(model, found, batch)
        outside = count_outside(model, found, calls, batch)
        calls = _needing(calls, outside)
        kinds, numbers = find_kinds(found, calls)
        tiles: list[TilesProfile | None] = [None] * len(kinds)
        num_tokens = max(kind.call.num_rows for kind in kinds)
        input_shape = tuple(_call_of(calls, kinds[0]).source.shape)
        link = None if store is None else Link.from_rate(1.0)

        def step_of(layers: Sequence[LayerProfile], **known: Any) -> StepProfile:
            return StepProfile(
                layers=tuple(layers[number] for number in numbers),
                num_tokens=num_tokens,
                input_shape=input_shape,
                head_bytes=outside.head_bytes,
                given_bytes=outside.given_bytes,
                forward_bytes=outside.forward_bytes,
                outer_bytes=outside.outer_bytes,
                **known,
            )

        def least_of(tiles: Sequence[TilesProfile | None]) -> list[LayerProfile]:
            return [
                least_layer(
                    kind.call.num_rows,
                    kind.call.source.nbytes,
                    kind.item_bytes,
                    kind.plain.held_bytes,
                    kind.plain.passes,
                    one,
                )
                for kind, one in zip(kinds, tiles, strict=True)
            ]

        least = step_of(
            least_of(tiles),
            head_s=0.0,
            block_head_s=0.0,
            block_head_bytes=0 if has_block_loss(model) else None,
            fixed_bytes=fixed_before - _NOISE_BYTES,
            send=link,
            fetch=link,
        )
        if budget is not None and not fits(least, budget):
            least = replace(least, fixed_bytes=least.fixed_bytes - _garbage_bytes(device))
            free = least_of([_FREE_TILES] * len(kinds))
            check_possible(replace(least, layers=tuple(free[one] for one in numbers)), budget)
            tiles = [_count_tiles(kind) for kind in kinds]
            counted = least_of(tiles)
            check_possible(replace(least, layers=tuple(counted[one] for one in numbers)), budget)
        passes = [kind.plain.passes for kind in kinds]
        needed = max(
            outside.head_bytes,
            *(
                kind.plain.held_bytes + one.forward + one.backward
                for kind, one in zip(kinds, passes, strict=True)
            ),
        )
        factor = _fitting(batch, needed, room_bytes)
        factor = _quick(model, found, batch, kinds, factor)
        short = batch if factor == 1 else shortened(batch, factor)
        assert short is not None
        short_calls = calls
        if factor != 1:
            short_calls = _needing(capture_calls(model, found, short), outside)
        times = []
        for kind in kinds:
            call = _call_of(short_calls, kind)
            with call.settings():
                times.append(
                    measure_layer(kind.layer, call.args, call.kwargs, list(kind.item_bytes))
                )
        layers = [
            kind.describe(spent.scaled(factor)) for kind, spent in zip(kinds, times, strict=True)
        ]
        usual = kinds[max(set(numbers), key=numbers.count)]
        work_call = _call_of(short_calls, usual)

        def work() -> None:
            with torch.no_grad(), work_call.settings():
                usual.layer(*work_call.args, **work_call.kwargs)

        limits = [one for one in (store_limit_bytes, room_bytes) if one is not None]
        rate = None
        if opened is not None:
            rate = measure_store(opened, work, device=device, limit_bytes=min(limits, default=None))
        head_s = measure_head(model, found, short_calls, short) * factor
        block_head_s, block_head_bytes = _block_head(model, found, short_calls, short, factor)
        profile = step_of(
            layers,
            head_s=head_s,
            block_head_s=block_head_s,
            block_head_bytes=block_head_bytes,
            fixed_bytes=0,
            mover_bytes=0 if rate is None else rate.own_bytes,
            send=None if rate is None else rate.send,
            fetch=None if rate is None else rate.fetch,
            slowdown=1.0 if rate is None else rate.slowdown,
            details={
                "device": _device_name(device),
                "torch": str(torch.__version__),
                "store": store or "none",
                "seconds": f"measured at {num_tokens // factor:,} tokens",
                "busy": f"{now(device).share_waited(begun):.2f}",
            },
        )
        gc.collect()  # what only cycles hold would count for good
        as_found = replace(profile, fixed_bytes=profile.fixed_bytes + fixed() + _MARGIN_BYTES)
        if budget is None or not fits(as_found, budget):
            for place, (kind, spent) in enumerate(zip(kinds, times, strict=True)):
                if spent.can_replay:
                    counted_tiles = tiles[place] or _count_tiles(kind)
                    call = _call_of(short_calls, kind)
                    measured = counted_tiles and measure_tiles(
                        kind.layer, (call.args, call.kwargs), counted_tiles, spent, factor, Proofs()
                    )
                    layers[place] = replace(layers[place], tiles=measured)
            profile = replace(profile, layers=tuple(layers[number] for number in numbers))
    finally:
        for one in undo:
            one()
        if opened is not None:
            opened.close()
    return profile


def _needing(calls: list[LayerCall | None], outside: OutsideBytes) -> list[LayerCall | None]:
    """Calls whose tensors need gradients where they do in a step."""
    return [
        None if call is None else call.needing(outside.needing[number])
        for number, call in enumerate(calls)
    ]


def _call_of(calls: list[LayerCall | None], kind: LayerKind) -> LayerCall:
    call = calls[kind.number]
    assert call is not None
    return call


def _count_tiles(kind: LayerKind) -> TilesProfile | None:
    with kind.call.settings():
        return count_tiles(kind.layer, (kind.call.args, kind.call.kwargs), Proofs())


def _garbage_bytes(device: torch.device) -> int:
    """Bytes that were held by nobody any more, and are no longer held."""
    before = resident_bytes(device)
    gc.collect()
    return max(0, before - resident_bytes(device))


def _check_batch(batch: Any, device: torch.device) -> None:
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"batch: expected the model's arguments by name, got {type(batch).__name__}; give what your loop "
            'gives, such as {"input_ids": ids, "labels": ids}'
        )
    tensors = {name: one for name, one in batch.items() if isinstance(one, Tensor)}
    if tensors and not any(one.numel() for one in tensors.values()):
        name, one = next(iter(tensors.items()))
        raise ConfigError(
            f"batch[{name!r}]: expected tokens, got a tensor of shape {list(one.shape)}; give the longest batch "
            "that will come"
        )
    for name, one in tensors.items():
        if one.is_inference():
            raise ConfigError(
                f"batch[{name!r}]: expected a tensor that a backward may use, got one from torch.inference_mode(); "
                "make it outside, or give a clone"
            )
        if one.device != device:
            raise ConfigError(
                f"batch[{name!r}]: expected a tensor on the model's device, {device}, got one on {one.device}; "
                f"move it by .to({str(device)!r})"
            )


def _fitting(batch: Mapping[str, Any], needed_bytes: int, room_bytes: int | None) -> int:
    """Which part of a batch is the longest that has room: 1 is all of it, 2 a half, 4 a quarter and so on."""
    factor = 1
    while room_bytes is not None and needed_bytes > room_bytes * factor:
        if shortened(batch, 2 * factor, least_tokens=_LEAST_TOKENS) is None:
            break
        factor *= 2
    return factor


def _quick(
    model: nn.Module,
    found: list[nn.Module],
    batch: Mapping[str, Any],
    kinds: list[LayerKind],
    factor: int,
) -> int:
    """That part, or a smaller one whose forward through any layer is short: it grows with the square at most."""
    probe = factor
    while shortened(batch, 2 * probe, least_tokens=_PROBE_TOKENS) is not None:
        probe *= 2
    short = shortened(batch, probe)
    if probe == factor or short is None:
        return factor
    calls = capture_calls(model, found, short)
    called = [(kind.layer, _call_of(calls, kind)) for kind in kinds]
    spent_s = max(forward_s(layer, call.args, call.kwargs) for layer, call in called)
    while factor < probe and spent_s * (probe / factor) ** 2 > _LONGEST_S:
        factor *= 2
    return factor


def _block_head(
    model: nn.Module,
    layers: list[nn.Module],
    calls: list[LayerCall | None],
    batch: Mapping[str, Any],
    factor: int,
) -> tuple[float | None, int | None]:
    """Seconds and bytes of what is outside of the layers with a loss in blocks; None where there is none."""
    half = shortened(batch, 2)
    if not has_block_loss(model) or half is None or not isinstance(batch.get("labels"), Tensor):
        return None, None
    half_calls = capture_calls(model, layers, half)
    undo = offer_block_loss(model)
    try:
        seconds = measure_head(model, layers, calls, batch) * factor
        num_bytes = count_outside(model, layers, calls, batch, is_real=True).head_bytes
        half_bytes = count_outside(model, layers, half_calls, half, is_real=True).head_bytes
    finally:
        undo()
    # What there is a token; the rest are blocks and sums, which no length changes.
    grown = 2 * max(0, num_bytes - half_bytes)
    return seconds, num_bytes + grown * (factor - 1)


def _store_name(budget: Budget, device: torch.device) -> str:
    if budget.store_at is not None:
        return budget.store_at
    return "pinned" if device.type == "cuda" else f"file:{tempfile.gettempdir()}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
