"""Copies of other ranks' rows, chosen by what their misses cost.

A row is worth its accesses times the seconds of a miss, and costs its bytes. Savings add up, so that
filling the cache in order of worth a byte is optimal up to the last row (a fractional knapsack).
Heta (PVLDB 18(9)) instead splits the memory over types by accesses times the cost of a miss, then
takes the hottest rows of each type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from heta.rows.owners import Owners
from shared.errors import ConfigError
from shared.kernels.gather import gather
from shared.registry import Registry
from shared.units import parse_bytes

__all__ = ["CACHE_POLICIES", "Cache", "RemoteRowCache", "fill_cache"]

Policy = Callable[
    [Mapping[str, Tensor], Mapping[str, float], Mapping[str, int], int], dict[str, Tensor]
]


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache of remote rows.

    Attributes:
        bytes: memory for rows, a number or a text as "2GiB".
        policy: a name of `CACHE_POLICIES`.

    Raises:
        ConfigError: the size is negative or no size, or no policy has this name.
    """

    bytes: int | str
    policy: str = "knapsack"

    def __post_init__(self) -> None:
        size = parse_bytes(self.bytes) if isinstance(self.bytes, str) else self.bytes
        if size < 0:
            raise ConfigError(f"cache: expected 0 bytes or more, got {self.bytes}")
        object.__setattr__(self, "bytes", int(size))
        CACHE_POLICIES.get(self.policy)


def fill_cache(
    counts: Mapping[str, Tensor],
    miss_s: Mapping[str, float],
    row_bytes: Mapping[str, int],
    budget_bytes: int,
    policy: str = "knapsack",
) -> dict[str, Int64[Tensor, " rows"]]:
    """Chooses the rows of a cache.

    Args:
        counts: expected accesses of each row [num_nodes], by type; rows without any are left out,
            but for "uniform".
        miss_s: seconds that a row costs which is not in the cache, by type.
        row_bytes: bytes of a row, by type.
        budget_bytes: memory.
        policy: a name of `CACHE_POLICIES`.

    Returns:
        Ids by type, ascending, within the budget.

    Raises:
        ConfigError: the policy is unknown, types differ, or a number is negative.
    """
    choose = CACHE_POLICIES.get(policy)
    if not counts.keys() == miss_s.keys() == row_bytes.keys():
        raise ConfigError(
            f"expected counts, miss_s and row_bytes of the same types, got {list(counts)}, "
            f"{list(miss_s)} and {list(row_bytes)}"
        )
    if (
        budget_bytes < 0
        or any(b <= 0 for b in row_bytes.values())
        or any(s < 0 for s in miss_s.values())
    ):
        raise ConfigError("expected a budget and seconds from 0 and bytes above 0")
    if not counts:
        return {}
    counts = {name: count.double() for name, count in counts.items()}
    return choose(counts, miss_s, row_bytes, budget_bytes)


def _fill_uniformly(
    counts: Mapping[str, Tensor],
    miss_s: Mapping[str, float],
    row_bytes: Mapping[str, int],
    budget_bytes: int,
) -> dict[str, Tensor]:
    """Takes the same share of each type's rows."""
    total = sum(len(count) * row_bytes[name] for name, count in counts.items())
    share = min(1.0, budget_bytes / total) if total else 0.0
    return {name: torch.arange(int(len(count) * share)) for name, count in counts.items()}


def _fill_by_worth(
    counts: Mapping[str, Tensor],
    miss_s: Mapping[str, float],
    row_bytes: Mapping[str, int],
    budget_bytes: int,
) -> dict[str, Tensor]:
    """Takes the rows that save most seconds a byte."""
    worth = {name: count * miss_s[name] / row_bytes[name] for name, count in counts.items()}
    return _fill_in_order(worth, row_bytes, budget_bytes)


def _fill_by_hotness(
    counts: Mapping[str, Tensor],
    miss_s: Mapping[str, float],
    row_bytes: Mapping[str, int],
    budget_bytes: int,
) -> dict[str, Tensor]:
    """Takes the most accessed rows."""
    return _fill_in_order(counts, row_bytes, budget_bytes)


def _fill_in_order(
    worth: Mapping[str, Tensor], row_bytes: Mapping[str, int], budget_bytes: int
) -> dict[str, Tensor]:
    """Takes rows of all types in order of worth until one no longer fits."""
    names = list(worth)
    values = torch.cat([worth[name] for name in names]) if names else torch.empty(0)
    kinds = torch.cat([torch.full((len(worth[n]),), i) for i, n in enumerate(names)])
    ids = torch.cat([torch.arange(len(worth[n])) for n in names])
    order = values.argsort(descending=True, stable=True)
    order = order[values[order] > 0]
    sizes = torch.tensor([row_bytes[name] for name in names], dtype=torch.int64)
    order = order[sizes[kinds[order]].cumsum(0) <= budget_bytes]
    return {name: ids[order][kinds[order] == i].sort()[0] for i, name in enumerate(names)}


def _fill_by_type(
    counts: Mapping[str, Tensor],
    miss_s: Mapping[str, float],
    row_bytes: Mapping[str, int],
    budget_bytes: int,
) -> dict[str, Tensor]:
    """Splits the budget, gives what a type cannot use to the others, and takes the hottest rows."""
    useful = {name: int((count > 0).sum()) * row_bytes[name] for name, count in counts.items()}
    claims = {name: float(count.sum()) * miss_s[name] for name, count in counts.items()}
    given = dict.fromkeys(counts, 0.0)
    left, open_types = float(budget_bytes), {name for name in counts if claims[name] > 0}
    while left >= 1 and open_types:
        total = sum(claims[name] for name in open_types)
        grants = {n: min(left * claims[n] / total, useful[n] - given[n]) for n in open_types}
        for name, grant in grants.items():
            given[name] += grant
        left -= sum(grants.values())
        full = {name for name in open_types if given[name] >= useful[name]}
        if not full:
            break
        open_types -= full
    chosen = {}
    for name, count in counts.items():
        hottest = count.argsort(descending=True, stable=True)[: int(given[name]) // row_bytes[name]]
        chosen[name] = hottest[count[hottest] > 0].sort()[0]
    return chosen


CACHE_POLICIES: Registry[str, Policy] = Registry("cache policy")
CACHE_POLICIES.add("knapsack", _fill_by_worth, "the rows that save most seconds a byte")
CACHE_POLICIES.add(
    "heta", _fill_by_type, "memory split over types by what misses cost, then hottest"
)
CACHE_POLICIES.add("hotness", _fill_by_hotness, "the most accessed rows, whatever their type")
CACHE_POLICIES.add("uniform", _fill_uniformly, "the same share of each type's rows")


class RemoteRowCache:
    """Copies of some of one type's rows.

    Args:
        ids: the rows, ascending.
        rows: their values [ids, dim].
        num_nodes: nodes of the type.
    """

    def __init__(self, ids: Tensor, rows: Tensor, num_nodes: int) -> None:
        self._rows = rows
        self._slot = torch.full((num_nodes,), -1, dtype=torch.int32)
        self._slot[ids] = torch.arange(len(ids), dtype=torch.int32)

    def has(self, ids: Tensor) -> Tensor:
        """Tells which of the rows are copied."""
        return self._slot[ids] >= 0

    def read(self, ids: Tensor, own_rows: Tensor, owners: Owners, rank: int) -> Tensor:
        """Reads rows that are copied here or owned by this rank."""
        slots = self._slot[ids].long()
        is_copied = slots >= 0
        rows = torch.empty(len(ids), own_rows.shape[1])
        rows[is_copied] = gather(self._rows, slots[is_copied])
        rows[~is_copied] = gather(own_rows, owners.local(ids[~is_copied]))
        return rows
