"""64 bits that tell whether tensors hold the same bytes in the same shapes and order.

Every 8-byte word is mixed with its place by a bijective finaliser (Stafford's variant 13, the one of
splitmix64, as in `shared.kernels.philox.stream_key`), and the results are added modulo 2^64. The sum
can be taken in any order, so threads and blocks of a GPU work apart and all forms agree to the bit.
A single changed word always changes the digest of its tensor; other differences go unseen with a
probability of about 2^-64. No cryptography: somebody who wants a collision finds one.
"""

from collections.abc import Iterable

from torch import Tensor

__all__ = ["digest"]


def digest(tensors: Tensor | Iterable[Tensor]) -> int:
    """A digest in [0, 2^64) of the bytes, the shapes and the order of `tensors`.

    The element type does not enter: a view of the same bytes in the same shape has the same digest.
    Tensors on a GPU are digested there; the host waits once for each device.

    Args:
        tensors: Dense tensors of any types, shapes and devices; non-contiguous ones are copied.
    """
    raise NotImplementedError
