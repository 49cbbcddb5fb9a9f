"""Seconds of micro-batches measured on this rank, and the cost that fits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from hydraulis.config import Cost, check_lengths, device_name
from hydraulis.runtime.attention import PackedDocuments, attend
from hydraulis.runtime.loss import LossModel
from shared.comms import Group, all_reduce
from shared.errors import ConfigError

__all__ = ["measure_cost"]


def measure_cost(
    model: Any,
    max_tokens: int,
    *,
    repeats: int = 3,
    micro_batches: Sequence[Sequence[int]] | None = None,
) -> Cost:
    """Fits a, b and c to forward and backward passes of made-up tokens; weights stay as they are.

    Where there are ranks, all of them call it before the model is sharded, and get the same cost: that of
    their mean seconds.

    Args:
        model: a Hugging Face causal LM, on the device where it trains.
        max_tokens: of the largest micro-batch that is measured; at least 16.
        repeats: turns, of which the median counts, after one that warms up.
        micro_batches: lengths of the documents in each micro-batch that is measured, at least three and
            none above `max_tokens`; by default eight, of one document to sixteen equal ones. Some like
            those to come make the cost more exact.

    Raises:
        ConfigError: fewer than 16 tokens, a micro-batch above them, seconds that do not grow with
            tokens, a sharded model, or one that `LossModel` does not take.
    """
    if max_tokens < 16:
        raise ConfigError(f"measure_cost: expected at least 16 tokens, got {max_tokens}")
    if any(hasattr(one, "placements") for one in model.parameters()):
        raise ConfigError(
            "measure_cost: expected a model that is not sharded yet, got DTensors; measure it before"
        )
    if micro_batches is None:
        micro_batches = [
            (max_tokens,), (max_tokens // 2,) * 2, (max_tokens // 4,) * 4, (max_tokens // 16,) * 16,
            (max_tokens // 2,), (max_tokens // 4,), (max_tokens // 16,) * 4, (max_tokens // 16,),
        ]  # fmt: skip
    shapes = [tuple(check_lengths(one, "micro_batches").tolist()) for one in micro_batches]
    largest = max((sum(one) for one in shapes), default=0)
    if largest > max_tokens:
        raise ConfigError(
            f"micro_batches: expected at most {max_tokens} tokens in each, got {largest}"
        )
    loss = LossModel(model)
    device = next(model.parameters()).device
    taken: dict[int, list[float]] = {at: [] for at in range(len(shapes))}
    kept = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    try:
        for turn in range(repeats + 1):
            for at, lengths in enumerate(shapes):
                begun = perf_counter()
                packing = PackedDocuments(lengths=lengths)
                ids = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
                with attend(model):
                    loss(ids, packing.positions().to(device), ids, packing).backward()
                if ids.is_cuda:
                    torch.cuda.synchronize(device)
                if turn:
                    taken[at].append(perf_counter() - begun)
    finally:
        for name, p in model.named_parameters():
            p.grad = kept[name]
    seconds = torch.tensor([median(one) for one in taken.values()], dtype=torch.float64)
    if Group.exists():
        group = Group.world()
        seconds = all_reduce(group, seconds.to(group.device)).cpu() / group.world_size
    try:
        found = Cost.fit(list(zip(shapes, seconds.tolist(), strict=True)))
    except ConfigError as error:
        raise ConfigError(
            f"measure_cost: expected seconds that grow with tokens, got from {min(seconds):.3g} to "
            f"{max(seconds):.3g} s; measure more tokens or repeats"
        ) from error
    return replace(found, device=device_name(device))
