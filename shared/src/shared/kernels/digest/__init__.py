"""64 bits that tell whether tensors hold the same bytes in the same shapes and order.

Every 8-byte word is mixed with its place by a bijective finaliser (that of splitmix64, as in
`shared.kernels.philox.stream_key`), and the results are added modulo 2^64. The sum can be taken in
any order, so threads and blocks of a GPU work apart and all forms agree to the bit. A single changed
word always changes the digest of its tensor; other differences go unseen with a probability of about
2^-64. No cryptography: somebody who wants a collision finds one.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from shared.errors import DataError
from shared.kernels.philox import stream_key
from shared.kernels.registry import select

__all__ = ["digest"]


def digest(tensors: Tensor | Iterable[Tensor]) -> int:
    """A digest in [0, 2^64) of the bytes, the shapes and the order of `tensors`.

    The element type does not enter: a view of the same bytes in the same shape has the same digest.
    Tensors on a GPU are digested there; the host waits once for each device.

    Args:
        tensors: Dense tensors of any types, shapes and devices; those that are not contiguous, or
            do not start or end at a multiple of 8 bytes, are copied in whole or in part.

    Raises:
        DataError: A tensor is sparse or quantised.
    """
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    state = stream_key(len(given))
    on: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    places: list[tuple[torch.device, int, int]] = []
    for place, tensor in enumerate(given):
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise DataError(
                f"expected dense tensors, got {tensor.layout} with {tensor.dtype} at place {place}: "
                "give its parts"
            )
        parts = _words(tensor.detach())
        places.append((tensor.device, len(on[tensor.device]), len(parts)))
        on[tensor.device] += parts
    sums = {device: select("digest", device).sums(words) for device, words in on.items() if words}
    for tensor, (device, first, count) in zip(given, places, strict=True):
        parts = sums[device][first : first + count] if count else []
        state = stream_key(state, *tensor.shape, tensor.dim(), tensor.element_size(), *parts)
    return state


def _words(tensor: Tensor) -> list[Tensor]:
    """The bytes of a tensor as int64: whole words, then the rest filled up with zeros."""
    if tensor.numel() == 0:
        return []
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    parts = []
    if whole:
        body = raw[:whole]
        # A view in wider elements must begin at a multiple of them.
        if body.storage_offset() % 8 or body.data_ptr() % 8:
            body = body.clone()
        parts.append(body.view(torch.int64))
    if whole < raw.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        rest[: raw.numel() - whole] = raw[whole:]
        parts.append(rest.view(torch.int64))
    return parts
