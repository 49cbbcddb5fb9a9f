"""Predicts the seconds of a step under any policy from profiles and link costs.

The model: compute, and waiting for other ranks to reach an exchange, are measured; an exchange
lasts as long as the rank that sends or receives longest; local aggregation overlaps with it as far
as the policy allows; packing and unpacking are added.
"""

from dataclasses import dataclass

import numpy as np
import torch

from adaqp.messages.assigner import problem_of
from adaqp.messages.network import LinkTable
from adaqp.messages.wire import HEADER_BYTES, row_bytes
from adaqp.planner.planner import assign, group_messages
from adaqp.planner.widths import AS_IS
from adaqp.policy import Adaptive, Policy
from adaqp.simulator.profiler import Profile
from shared.errors import ConfigError

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction of a step.

    Attributes:
        epoch_s: seconds of a step.
        seconds: seconds by phase: compute, quantise, wait, reduce.
        num_bytes: bytes that all ranks together send in a step.
        mean_bits: mean bits per value, without parameters.
    """

    epoch_s: float
    seconds: dict[str, float]
    num_bytes: int
    mean_bits: float


def predict(
    profiles: list[Profile],
    links: LinkTable,
    policy: Policy,
    *,
    overlap: str | None = "edges",
    wire_dtype: torch.dtype = torch.bfloat16,
) -> Prediction:
    """Predicts one step.

    Args:
        profiles: one per rank, measured with the same overlap.
        links: seconds per byte and per message between every two ranks.
        policy: the policy to predict.
        overlap: local aggregation that overlaps with the sending, as in `dg.messages`.
        wire_dtype: dtype of a row's scale and zero point.

    Raises:
        ConfigError: `links` has another number of ranks than `profiles`.
    """
    if links.world_size != len(profiles):
        raise ConfigError(
            f"links: expected costs between {len(profiles)} ranks, got {links.world_size}; measure "
            "these ranks with `adaqp probe-links`"
        )
    # A rank that computes longer waits less: the sum of the two is about equal on all ranks.
    slowest = max(profiles, key=lambda p: p.compute_s + p.skew_s)
    compute_s = slowest.compute_s
    reduce_s = max(p.reduce_s for p in profiles)
    quantise_s, wait_s, num_bytes, bits_sum, num_values = 0.0, slowest.skew_s, 0, 0.0, 0
    sending_s = 0.0
    for name in profiles[0].channels:
        widths = _widths(profiles, name, links, policy, wire_dtype)
        channel_bytes, packing_s = _bytes_and_packing(profiles, name, widths, wire_dtype)
        exchange_s = _exchange_s(channel_bytes, links)
        hidden_s = 0.0
        if overlap is not None:
            hidden_s = min(p.channels[name].hidden_s for p in profiles)
        quantise_s += packing_s
        sending_s += exchange_s
        wait_s += max(0.0, exchange_s - hidden_s)
        num_bytes += int(channel_bytes.sum())
        dim = profiles[0].channels[name].dim
        bits_sum += dim * sum(float(w.sum()) for row in widths for w in row)
        num_values += dim * sum(len(w) for row in widths for w in row)
    if policy.is_late:
        # What is sent during a step hides behind all of it, waiting for slower ranks included.
        wait_s = max(slowest.skew_s, sending_s - compute_s)
    seconds = {
        "compute": compute_s,
        "quantise": quantise_s,
        "wait": wait_s,
        "reduce": reduce_s,
    }
    return Prediction(
        epoch_s=sum(seconds.values()),
        seconds=seconds,
        num_bytes=num_bytes,
        mean_bits=bits_sum / max(num_values, 1),
    )


Widths = list[list[np.ndarray]]  # [sender][receiver], the width of each row


def _widths(
    profiles: list[Profile], name: str, links: LinkTable, policy: Policy, wire_dtype: torch.dtype
) -> Widths:
    rows_to = [p.channels[name].rows_to for p in profiles]
    if isinstance(policy, Adaptive):
        return _adaptive_widths(profiles, name, links, policy, wire_dtype)
    return [[np.full(rows, policy.start_bits) for rows in row] for row in rows_to]


def _adaptive_widths(
    profiles: list[Profile], name: str, links: LinkTable, policy: Adaptive, wire_dtype: torch.dtype
) -> Widths:
    tables, places = [], []
    for profile in profiles:
        channel = profile.channels[name]
        lines = [np.zeros((0, 4))]
        beta = np.split(channel.beta.numpy(), np.cumsum(channel.rows_to)[:-1])
        for peer, mine in enumerate(beta):
            if len(mine):
                order, offsets, group_beta = group_messages(mine, policy.group_size)
                rows = np.diff(offsets)
                zero = np.zeros(len(rows))
                lines.append(np.stack([zero, zero + peer, rows, group_beta], axis=1))
                places.append((peer, order, rows))
            else:
                places.append((peer, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)))
        tables.append(np.concatenate(lines))
    channel = profiles[0].channels[name]
    hidden_s = min(p.channels[name].hidden_s for p in profiles)
    shapes = [(channel.dim, channel.itemsize)]
    problem = problem_of(tables, shapes, policy, links, wire_dtype, hidden_s)
    chosen = assign(problem, solver=policy.solver).bits
    widths: Widths = []
    start = 0
    for number, (_, order, rows) in enumerate(places):
        if number % len(profiles) == 0:
            widths.append([])
        spread = np.empty(len(order), dtype=np.int64)
        spread[order] = np.repeat(chosen[start : start + len(rows)], rows)
        start += len(rows)
        widths[-1].append(spread)
    return widths


def _bytes_and_packing(
    profiles: list[Profile], name: str, widths: Widths, wire_dtype: torch.dtype
) -> tuple[np.ndarray, float]:
    """Bytes [sender, receiver], and seconds of packing and unpacking of the slowest rank."""
    num_ranks = len(profiles)
    num_bytes = np.zeros((num_ranks, num_ranks))
    packing_s = np.zeros(num_ranks)
    for sender, profile in enumerate(profiles):
        channel = profile.channels[name]
        for receiver, rows in enumerate(widths[sender]):
            values, counts = np.unique(rows, return_counts=True)
            for bits, count in zip(values.tolist(), counts.tolist(), strict=True):
                size = row_bytes(bits, channel.dim, channel.itemsize, wire_dtype)
                num_bytes[sender, receiver] += size * count
                if bits:
                    packing_s[sender] += channel.pack_s[bits] * count
                    unpack_s = profiles[receiver].channels[name].unpack_s
                    packing_s[receiver] += unpack_s[bits] * count
            if num_bytes[sender, receiver] and (rows != AS_IS).any():
                num_bytes[sender, receiver] += HEADER_BYTES
    return num_bytes, float(packing_s.max())


def _exchange_s(num_bytes: np.ndarray, links: LinkTable) -> float:
    """Seconds of one exchange: those of the rank that sends or receives longest.

    Ranks do not run rounds in lock step; the waiting within rounds is part of the link costs,
    which are measured over whole exchanges.
    """
    pair_s = np.where(num_bytes > 0, links.latency_s + links.s_per_byte * num_bytes, 0.0)
    return float(max(pair_s.sum(axis=0).max(), pair_s.sum(axis=1).max()))
