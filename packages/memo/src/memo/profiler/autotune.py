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
from memo.planner.layer_plan import ATTENTION, INPUT, LayerPlan
from memo.planner.placement import check_possible, fits, place
from memo.planner.plan import Plan
from memo.planner.profile import (
    ItemProfile,
    LayerProfile,
    PassBytes,
    StepProfile,
    TilesProfile,
    least_layer,
)
from memo.profiler.head import (
    capture_call,
    count_block_head,
    count_given,
    count_head,
    measure_head,
    shortened,
)
from memo.profiler.layer_bytes import LayerBytes, count_bytes
from memo.profiler.process_memory import bytes_to_come, fixed_bytes
from memo.profiler.timing.layer_tiles import count_tiles, measure_tiles
from memo.profiler.timing.layer_times import LayerTimes, forward_s, measure_layer
from memo.profiler.timing.store_rate import measure_store
from memo.profiler.untouched import untouched
from memo.runtime.attention import offer_attention
from memo.runtime.block_loss import has_block_loss, offer_block_loss
from memo.runtime.device_memory import give_back_at_once, resident_bytes
from memo.runtime.host_memory import keep_within_host
from memo.runtime.layers import attention_names, check_untouched, device_of, find_layers
from memo.runtime.recording.arguments import input_of
from memo.runtime.recording.calls import NotRepeatable
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
    return place(profile, budget, store, predict=simulate)


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
    with untouched(model, batch, idle=found[1:]):
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
    layer, proofs = found[0], Proofs()
    tiles: TilesProfile | None = None
    # One that cannot be opened is told before anything is measured.
    opened = None if store is None else open_store(store, device=device_of(model))
    undo = [offer_attention(name) for name in attention_names(found)]
    try:
        args, kwargs = capture_call(model, found, batch)
        source = input_of(args, kwargs)
        num_tokens = source.numel() // source.shape[-1]
        given_bytes = count_given(args, kwargs, batch)
        whole = _count_items(layer, args, kwargs)
        plain = count_bytes(layer, args, kwargs, LayerPlan())
        head_bytes = count_head(model, found, batch)
        link = None if store is None else Link.from_rate(1.0)
        least = StepProfile(
            layer=least_layer(whole.item_bytes, plain.held_bytes, plain.passes),
            num_layers=len(found),
            num_tokens=num_tokens,
            head_s=0.0,
            head_bytes=head_bytes,
            block_head_s=0.0,
            block_head_bytes=0 if has_block_loss(model) else None,
            fixed_bytes=fixed_before - _NOISE_BYTES,
            given_bytes=given_bytes,
            send=link,
            fetch=link,
        )
        if budget is not None and not fits(least, budget):
            least = replace(least, fixed_bytes=least.fixed_bytes - _garbage_bytes(source.device))
            check_possible(replace(least, layer=replace(least.layer, tiles=_FREE_TILES)), budget)
            tiles = count_tiles(layer, (args, kwargs), proofs)
            check_possible(replace(least, layer=replace(least.layer, tiles=tiles)), budget)
        needed = max(plain.held_bytes + plain.passes.forward + plain.passes.backward, head_bytes)
        factor = _fitting(batch, needed, room_bytes)
        factor = _quick(model, found, batch, factor)
        short = batch if factor == 1 else shortened(batch, factor)
        assert short is not None
        called = (args, kwargs) if factor == 1 else capture_call(model, found, short)
        times = measure_layer(layer, *called, list(whole.item_bytes))
        described = _describe_layer(
            whole,
            plain,
            times.scaled(factor),
            lambda plan: count_bytes(layer, args, kwargs, plan),
        )

        def work() -> None:
            with torch.no_grad():
                layer(*called[0], **called[1])

        limits = [one for one in (store_limit_bytes, room_bytes) if one is not None]
        rate = None
        if opened is not None:
            rate = measure_store(
                opened, work, device=source.device, limit_bytes=min(limits, default=None)
            )
        head_s = measure_head(model, found, short) * factor
        block_head_s, block_head_bytes = _block_head(model, found, short, factor)
        profile = StepProfile(
            layer=described,
            num_layers=len(found),
            num_tokens=num_tokens,
            head_s=head_s,
            head_bytes=head_bytes,
            block_head_s=block_head_s,
            block_head_bytes=block_head_bytes,
            fixed_bytes=0 if rate is None else rate.own_bytes,
            given_bytes=given_bytes,
            send=None if rate is None else rate.send,
            fetch=None if rate is None else rate.fetch,
            slowdown=1.0 if rate is None else rate.slowdown,
            details={
                "device": _device_name(source.device),
                "torch": str(torch.__version__),
                "store": store or "none",
                "seconds": f"measured at {num_tokens // factor:,} tokens",
            },
        )
        as_found = replace(profile, fixed_bytes=profile.fixed_bytes + fixed() + _NOISE_BYTES)
        if times.can_replay and (budget is None or not fits(as_found, budget)):
            tiles = tiles or count_tiles(layer, (args, kwargs), proofs)
            if tiles is not None:
                tiles = measure_tiles(layer, called, tiles, times, factor, proofs)
            profile = replace(profile, layer=replace(described, tiles=tiles))
    finally:
        for one in undo:
            one()
        if opened is not None:
            opened.close()
    return profile


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


def _quick(model: nn.Module, found: list[nn.Module], batch: Mapping[str, Any], factor: int) -> int:
    """That part, or a smaller one whose forward through a layer is short: it grows with the square at most."""
    probe = factor
    while shortened(batch, 2 * probe, least_tokens=_PROBE_TOKENS) is not None:
        probe *= 2
    short = shortened(batch, probe)
    if probe == factor or short is None:
        return factor
    args, kwargs = capture_call(model, found, short)
    spent_s = forward_s(found[0], args, kwargs)
    while factor < probe and spent_s * (probe / factor) ** 2 > _LONGEST_S:
        factor *= 2
    return factor


def _block_head(
    model: nn.Module, layers: list[nn.Module], batch: Mapping[str, Any], factor: int
) -> tuple[float | None, int | None]:
    """Seconds and bytes of what is outside of the layers with a loss in blocks; None where there is none."""
    half = shortened(batch, 2)
    if not has_block_loss(model) or half is None or not isinstance(batch.get("labels"), Tensor):
        return None, None
    undo = offer_block_loss(model)
    try:
        seconds = measure_head(model, layers, batch) * factor
        num_bytes = count_block_head(model, layers, batch)
        # What there is a token; the rest are blocks and sums, which no length changes.
        grown = 2 * max(0, num_bytes - count_block_head(model, layers, half))
    finally:
        undo()
    return seconds, num_bytes + grown * (factor - 1)


def _describe_layer(
    whole: LayerBytes,
    plain: LayerBytes,
    times: LayerTimes,
    count: Callable[[LayerPlan], LayerBytes],
) -> LayerProfile:
    """A layer's profile from its counted bytes and measured seconds.

    Args:
        whole: counted with every item kept.
        plain: counted without a plan.
        times: measured.
        count: counts the layer under another plan.
    """
    items = [
        ItemProfile(
            name=name,
            num_bytes=num_bytes,
            recompute_s=0.0 if name == INPUT else times.call_s.get(name, 0.0),
        )
        for name, num_bytes in whole.item_bytes.items()
    ]
    first, *others = items
    others.sort(key=lambda one: -one.recompute_s / max(one.num_bytes, 1))
    ordered = [first, *others]
    levels = [plain.passes] * len(ordered)
    if times.can_replay:
        kept = [frozenset(one.name for one in ordered[: num + 1]) for num in range(len(ordered))]
        levels = [count(LayerPlan(mode="restore", resident=names)).passes for names in kept]
    return LayerProfile(
        items=tuple(ordered),
        saved_bytes=plain.held_bytes,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        replay_s=times.replay_s,
        kept=plain.passes,
        levels=tuple(levels),
        can_replay=times.can_replay,
    )


def _count_items(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerBytes:
    """Bytes with every item kept; only the input is one where the layer cannot run again."""
    everything = frozenset([INPUT, ATTENTION, *_weights(layer)])
    try:
        return count_bytes(layer, args, kwargs, LayerPlan(mode="restore", resident=everything))
    except NotRepeatable:
        plain = count_bytes(layer, args, kwargs, LayerPlan())
        return replace(plain, item_bytes={INPUT: input_of(args, kwargs).nbytes})


def _weights(layer: nn.Module) -> list[str]:
    return [name for name, one in layer.named_parameters() if one.ndim > 1]


def _store_name(budget: Budget, device: torch.device) -> str:
    if budget.store_at is not None:
        return budget.store_at
    return "pinned" if device.type == "cuda" else f"file:{tempfile.gettempdir()}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
