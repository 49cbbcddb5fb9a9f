"""Sample in-edges of graph rows without replacement, and number the nodes that they lead to.

A row's draws are a pure function of the key, the row, its degree and the fan-out: hosts that hold
the same row draw the same edges, whatever else they hold, and in whatever order rows are asked for.

The draws of a row of degree d above the fan-out k are Robert Floyd's (Bentley, "Programming Pearls:
A Sample of Brilliance", 1987): for n in 0..k-1 a position is drawn from [0, d - k + n]; if it is
chosen already, d - k + n is chosen in its place. O(k) words and steps, whatever the degree. Draw n
takes 64 bits of Philox, words 2 (n % 2) and 2 (n % 2) + 1 at the counter (row, n // 2), low word
first; the position is the high half of its product with the number of positions.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from shared.errors import ConfigError, DataError
from shared.kernels.registry import select
from shared.kernels.segment import CSR

__all__ = ["relabel", "sample"]


def sample(
    csr: CSR, rows: Int64[Tensor, " n"], fanout: int, key: int
) -> tuple[Int64[Tensor, " n_and_one"], Int64[Tensor, " m"]]:
    """Draws up to `fanout` entries of each row, uniformly and without replacement.

    Args:
        csr: The matrix; for a graph, rows are destinations and entries their in-edges. No row has
            2^31 entries.
        rows: Rows to sample [n], in any order; a row that is named twice is drawn alike twice.
            Bounds are checked on the CPU only.
        fanout: Most entries a row; -1 takes all.
        key: The stream, in [0, 2^64), see `shared.kernels.philox.stream_key`.

    Returns:
        `indptr` [n + 1] and `entries` [m]: those of rows[i] are entries[indptr[i]:indptr[i + 1]],
        positions in `csr.indices`, ascending.

    Raises:
        ConfigError: `fanout` is below -1, or `key` is outside its range.
        DataError: A row lies outside the matrix.
    """
    if fanout < -1:
        raise ConfigError(f"expected a fanout of 0 or more, or -1 for all entries, got {fanout}")
    if not 0 <= key < 1 << 64:
        raise ConfigError(f"expected a key in [0, 2^64), got {key}; make it by stream_key")
    _check_ids("rows", rows, csr.num_rows)
    form = select("neighbors", rows.device)
    return form.sample(csr.indptr, rows.contiguous(), fanout, key)


def relabel(
    ids: Int64[Tensor, " n"] | Sequence[Int64[Tensor, " _"]],
    num_nodes: int,
    first: Int64[Tensor, " k"],
    table: Int32[Tensor, " num_nodes"] | None = None,
) -> tuple[Int64[Tensor, " u"], Int64[Tensor, " n"]]:
    """Numbers ids from 0 in the order of their first appearance, those of `first` before others.

    Args:
        ids: Ids in [0, num_nodes); several tensors are read as one after another. Bounds are
            checked on the CPU only.
        num_nodes: Number of nodes.
        first: Ids with the numbers 0 to k - 1; an id that stands in it twice has the lower one.
        table: Scratch memory, all -1, which is all -1 again afterwards: with it a call takes
            O(n + k). Without it, and on a GPU, the call allocates its own.

    Returns:
        The distinct ids [u], which begin with `first`, and each id's position in them [n].

    Raises:
        DataError: An id lies outside its range, or `table` has another length.
    """
    if not isinstance(ids, Tensor):
        ids = torch.cat([first[:0], *ids])
    _check_ids("first", first, num_nodes)
    _check_ids("ids", ids, num_nodes)
    if table is not None and (table.shape != (num_nodes,) or table.dtype != torch.int32):
        raise DataError(
            f"expected table to be torch.int32 [{num_nodes}], got {table.dtype} {list(table.shape)}"
        )
    form = select("neighbors", ids.device)
    return form.relabel(ids.contiguous(), num_nodes, first.contiguous(), table)


def _check_ids(name: str, ids: Tensor, end: int) -> None:
    # On a GPU the check would make the host wait for the device.
    if ids.device.type == "cpu" and len(ids):
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= end:
            raise DataError(f"expected {name} in [0, {end}), got {low} to {high}")
