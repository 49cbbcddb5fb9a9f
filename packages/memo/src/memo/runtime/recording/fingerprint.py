"""Fingerprints of tensors that a layer saved, by which a forward that runs again is compared with the first one.

Gradients follow from autograd's graph, which the first forward made, and from saved tensors, which the second one
makes. So a backward is plain autograd's if all of these have the bits that the first forward saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Fingerprint", "fingerprints_of_turn", "is_rounding"]

_FIRST_TURNS, _EVERY_TURNS = 2, 16
"""How many forwards of a layer are compared bit by bit at first, and each how many afterwards."""

_LARGEST_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Rounding of a product of fewer rows, relative to the largest entry; half types: `_HALF_DIFFERENCE`."""

_HALF_DIFFERENCE = 3e-2

_NUM_SAMPLES = 8
"""Entries of each of the last two dimensions that are compared always; of others a quarter of that."""

_MULTIPLIER = 0x2545F4914F6CDD1D
"""Any odd number of 62 bits: rows that change places give another sum."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """What is remembered of a tensor: a few of its entries, and a sum over all bits where these are checked."""

    __slots__ = ("_digest", "_geometry", "_sample", "_shift")

    def __init__(self, tensor: Tensor, *, is_whole: bool = False, shift: int = 0) -> None:
        """Reads the tensor.

        Args:
            tensor: plain and strided.
            is_whole: whether all of it is read. Reading takes about as long as an element-wise operation.
            shift: chooses which entries are sampled.
        """
        self._geometry = tuple(tensor.shape), tensor.dtype
        self._shift = shift
        self._sample: Tensor | None = None
        self._digest: int | None = None
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return  # without values
        with torch.no_grad():
            entries = _distinct(tensor)
            self._sample = _sample(entries, shift).clone()
            # Reading a sum from a GPU would wait for it.
            if is_whole and tensor.device.type == "cpu":
                self._digest = _digest(entries)

    def matches(self, tensor: Tensor, *, is_exact: bool) -> bool:
        """Whether another tensor is the same, as far as it was read.

        Args:
            tensor: the other one.
            is_exact: whether bits count; else what differs by rounding matches too. Rounding shows in many
                entries, so that a sum over all bits which differs beside equal samples is not rounding.
        """
        if self._geometry != (tuple(tensor.shape), tensor.dtype):
            return False
        if self._sample is None:
            return True
        with torch.no_grad():
            entries = _distinct(tensor)
            sample = _sample(entries, self._shift)
            if torch.equal(_bits(sample), _bits(self._sample)):
                return self._digest is None or _digest(entries) == self._digest
            return not is_exact and is_rounding(sample, self._sample)


def fingerprints_of_turn(turn: int, number: int) -> Callable[[Tensor], Fingerprint]:
    """Makes fingerprints of one forward of a layer.

    Args:
        turn: how many forwards of the layer came before.
        number: of the layer; so layers take turns in being compared bit by bit.
    """
    is_whole = turn < _FIRST_TURNS or (turn + number) % _EVERY_TURNS == 0
    return partial(Fingerprint, is_whole=is_whole, shift=turn)


def _distinct(tensor: Tensor) -> Tensor:
    """A tensor's entries in the order of memory, without repetitions of those that are expanded."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    tensor = tensor.permute(order)
    return tensor[tuple(slice(None) if stride else slice(1) for stride in tensor.stride())]


def _sample(entries: Tensor, shift: int) -> Tensor:
    """Some entries in each dimension, at equal distances."""
    cuts = []
    for dim, size in enumerate(entries.shape):
        count = _NUM_SAMPLES if dim >= entries.ndim - 2 else _NUM_SAMPLES // 4
        step = max(1, size // count)
        # Offsets of successive shifts visit all entries, and no two dimensions go in step.
        cuts.append(slice(shift * (2 * dim + 1) % step, None, step))
    return entries[tuple(cuts)]


def _bits(entries: Tensor) -> Tensor:
    """The same memory as whole numbers: NaNs equal themselves there."""
    if entries.is_complex():
        entries = torch.view_as_real(entries)
    return entries.view(_INTEGERS[entries.element_size()])


def _digest(entries: Tensor) -> int:
    """A sum over all bits which differs if one of them does, or if two rows have changed places."""
    bits = _bits(entries)
    if bits.ndim == 0:
        return int(bits)
    with suppress(RuntimeError):  # rows of an odd length, or apart from one another
        bits = bits.view(torch.int64)  # many times faster to add up than shorter words
    sums = bits.sum(-1, dtype=torch.int64).flatten()
    weights = (2 * torch.arange(len(sums), device=sums.device) + 1) * _MULTIPLIER
    return int((sums * weights).sum())


def is_rounding(one: Tensor, other: Tensor) -> bool:
    """Whether tensors differ by rounding; of whole numbers and truth values a few may have tipped over."""
    if not (one.is_floating_point() or one.is_complex()):
        return int((one != other).sum()) * 16 <= one.numel()
    allowed = _LARGEST_DIFFERENCE.get(one.real.dtype, _HALF_DIFFERENCE)
    largest = other.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(one, other, rtol=0.0, atol=allowed * largest, equal_nan=True)
