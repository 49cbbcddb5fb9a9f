"""Gathers trained weights, which lie on the ranks that train them, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from diffusionpipe.runtime.shapes import pack, unpack
from shared.comms import Group, gather_v

__all__ = ["gather_weights"]


@torch.no_grad()
def gather_weights(
    group: Group | None, owned: Sequence[Sequence[str]], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Copies every rank's weights into rank 0's parameters; every rank calls it.

    Args:
        group: all ranks, for CPU tensors; None in one process, where all weights lie already.
        owned: by rank, names of the parameters that it sends; each stands with one rank.
        parameters: all parameters that train, by name.

    Raises:
        CommError: another rank died.
    """
    if group is None:
        return
    # The types with the most bytes first, as `unpack` wants it.
    names = [sorted(own, key=lambda name: -parameters[name].element_size()) for own in owned]
    mine = [parameters[name].detach().cpu() for name in names[group.rank]]
    empty = torch.empty(0, dtype=torch.uint8)
    payload = pack([empty, *mine]) if mine and group.rank else empty
    received = gather_v(group, payload)
    if received is None:
        return
    for rank in range(1, len(names)):
        layout = [(tuple(parameters[n].shape), parameters[n].dtype) for n in names[rank]]
        for name, value in zip(names[rank], unpack(received[rank], layout), strict=True):
            parameters[name].copy_(value)
