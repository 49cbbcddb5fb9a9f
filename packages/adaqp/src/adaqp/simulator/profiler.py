"""Profiles a step without the network, and packing at every width, for predictions.

All ranks measure at the same time, so that they share cores as in training. The steps run on real
rows (only remote ones are zeros), which also gives the row ranges that an assignment needs.
"""

import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from adaqp.messages.distgraph import DistGraph
from adaqp.messages.wire import BufferLayout, pack, unpack
from adaqp.planner.widths import WIDTHS
from adaqp.policy import Adaptive
from adaqp.training.trainer import Trainer

__all__ = ["ChannelProfile", "Profile", "measure"]

# Steps in which pages are faulted in, kernels are compiled and moving averages settle.
_WARM_STEPS = 3
_NEVER = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelProfile:
    """One layer in one direction on one rank.

    Attributes:
        dim, itemsize: number of columns of a row, and bytes per value.
        rows_to: number of rows sent to each rank.
        hidden_s: seconds of local aggregation that overlap with the sending.
        pack_s, unpack_s: seconds per row, by width.
        beta: float64 [num_send], variance of each row at width b times (2^b - 1)^2, by peer.
    """

    dim: int
    itemsize: int
    rows_to: list[int]
    hidden_s: float
    pack_s: dict[int, float]
    unpack_s: dict[int, float]
    beta: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One rank's step without the network.

    Attributes:
        compute_s: seconds of compute.
        reduce_s: seconds of the gradients' reduction.
        skew_s: seconds spent waiting for other ranks to reach the same exchange.
        channels: profiles of the exchanges by name, in the order of a step.
    """

    compute_s: float
    reduce_s: float
    skew_s: float
    channels: dict[str, ChannelProfile]


def measure(dg: DistGraph, model: nn.Module, *, overlap: str | None, steps: int = 12) -> Profile:
    """Profiles training steps of `model`; every rank calls it together.

    Args:
        dg: this rank's share.
        model: trained for some steps with zeros as remote rows: pass a copy.
        overlap: as in `dg.messages`.
        steps: steps to measure, after the warm-up.
    """
    policy = Adaptive(first_at=_NEVER, every=_NEVER)
    with dg.messages(policy, overlap=overlap) as messages:
        messages.is_dry = True
        trainer = Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-3))
        seconds = trainer.fit(_WARM_STEPS + steps).seconds
        channels = {
            name: ChannelProfile(
                dim=side.dim,
                itemsize=side.itemsize,
                rows_to=[
                    side.route.sent_to(p).stop - side.route.sent_to(p).start
                    for p in range(dg.num_parts)
                ],
                hidden_s=side.hidden_s,
                beta=side.beta().double().cpu(),
                **_packing_s(side.dim, side.route.send_rows, dg, messages.wire_dtype),
            )
            for name, side in messages.sides.items()
        }
    return Profile(
        compute_s=median(seconds["compute"][_WARM_STEPS:]),
        reduce_s=min(seconds["reduce"][_WARM_STEPS:]),
        skew_s=median(seconds["wait"][_WARM_STEPS:]),
        channels=channels,
    )


def _packing_s(
    dim: int, rows: Tensor, dg: DistGraph, wire_dtype: torch.dtype
) -> dict[str, dict[int, float]]:
    """Seconds per row to pack and to unpack, for each width."""
    x = torch.randn(max(dg.num_local, dg.num_halo, 1), dim, device=dg.device)
    packing, unpacking = dict.fromkeys(WIDTHS, 0.0), dict.fromkeys(WIDTHS, 0.0)
    if not len(rows):
        return {"pack_s": packing, "unpack_s": unpacking}
    out = x.new_empty(len(rows), dim)
    for bits in WIDTHS:
        layout = BufferLayout(
            torch.full((len(rows),), bits, dtype=torch.uint8), dim, x.dtype, wire_dtype
        )
        packed, unpacked = [], []
        for key in range(3):
            start = time.perf_counter()
            buffer, _ = pack(layout, x, rows, key=key)
            middle = time.perf_counter()
            unpack(layout, buffer, out)
            if out.is_cuda:
                torch.cuda.synchronize(out.device)
            packed.append(middle - start)
            unpacked.append(time.perf_counter() - middle)
        packing[bits] = min(packed) / len(rows)
        # If all rows are sent in their own dtype, they are received in place.
        unpacking[bits] = min(unpacked) / len(rows) if not layout.is_raw else 0.0
    return {"pack_s": packing, "unpack_s": unpacking}
