"""How much of each layer's activations is swapped: a closed form, and a knapsack by tensor.

After MEMO (arXiv 2407.12117): the tensors that a layer's whole backward needs go to the store whole,
the token-wise others for a fraction alpha of the tokens, as much as hides behind a layer's forward and
as the store holds; the other tokens are recomputed. The paper rounds alpha down to a grid and has one
alpha for all tensors. Here it is not rounded, and `alphas` chooses one a tensor, by what its
recomputation costs a byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

from shared.errors import ConfigError

__all__ = ["alpha", "alphas"]


def alpha(
    *,
    whole_bytes: float,
    row_bytes: float,
    link_bytes: float | None,
    store_bytes: float | None,
    num_layers: int,
    is_clipped: bool = True,
) -> float:
    """The largest fraction of tokens whose activations can be swapped.

    The closed form of MEMO (arXiv 2407.12117), not rounded down to a grid. With n layers, the largest alpha for which

        whole + alpha * row <= link  and  (n - 2) * (whole + alpha * row) <= store.

    The last two layers stay in the device's two buffers, since their backward comes first: they need
    neither copy nor store, and up to two layers give 1. Only the forward's overlap binds: a backward
    takes twice as long.

    Before it is clipped the value is negative when not even the whole tensors hide behind compute, or
    fit into the store. A result of 0 may be that case: then a plan with this alpha exposes copies or
    overruns the store, and the layer should recompute its attention or not be swapped. Ask with
    `is_clipped=False` to tell it from a true 0.

    Args:
        whole_bytes: bytes a layer of the tensors that are swapped whole: input and attention output.
        row_bytes: bytes a layer of the token-wise tensors.
        link_bytes: bytes that the link to the store moves during one layer's forward; None is no limit.
        store_bytes: bytes that the store holds for all layers; None is no limit.
        num_layers: layers of the model.
        is_clipped: whether the value is clipped to [0, 1]. Without it a negative value, times
            `row_bytes`, is what is missing for the whole tensors of a layer, and a value above 1 is
            room to spare; infinite if nothing limits.

    Returns:
        The fraction, not rounded.

    Raises:
        ConfigError: a size is negative or not a number, or there is no layer.
    """
    sizes = {"whole_bytes": whole_bytes, "row_bytes": row_bytes}
    limits = {"link_bytes": link_bytes, "store_bytes": store_bytes}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    for name, value in {**sizes, **given}.items():
        is_size = isinstance(value, Real) and value >= 0
        if not is_size or (name in sizes and math.isinf(value)):
            kind = "a finite number" if name in sizes else "a number"
            raise ConfigError(
                f"alpha.{name}: expected {kind} of bytes from 0, got {value!r}; give it in bytes"
            )
    if num_layers < 1:
        raise ConfigError(
            f"alpha.num_layers: expected at least one layer, got {num_layers!r}; count the model's"
        )
    if num_layers <= 2:
        return 1.0 if is_clipped else math.inf
    rooms = [math.inf]
    if link_bytes is not None:
        rooms.append(link_bytes - whole_bytes)
    if store_bytes is not None:
        rooms.append(store_bytes / (num_layers - 2) - whole_bytes)
    room_bytes = min(rooms)
    fraction = room_bytes / row_bytes if row_bytes else math.copysign(math.inf, room_bytes)
    return min(max(fraction, 0.0), 1.0) if is_clipped else fraction


def alphas(
    items: Mapping[str, tuple[float, float]], room_bytes: float | None = None
) -> dict[str, float]:
    """The fraction of each tensor to swap, so that recomputing the rest takes the fewest seconds.

    MEMO has one fraction for all tensors; here each has its own. Solves exactly: the least sum of recompute_s * (1 - alpha), with sum of bytes * alpha <= room_bytes
    and 0 <= alpha <= 1. A fractional knapsack: tensors fill the room by recompute seconds a byte,
    largest first, those that are equal in the order given. What has no bytes is swapped whole; what
    takes no seconds comes last. O(items log items).

    Args:
        items: bytes of each tensor, and seconds to recompute all of it, by name.
        room_bytes: bytes to fill; None or infinity is no limit.

    Returns:
        Fractions in [0, 1] by name, in the order given; all but one of those between are 0 or 1.

    Raises:
        ConfigError: an item is no pair; bytes, seconds or the room are negative or not a number, or
            bytes or seconds are infinite.
    """
    for name, pair in items.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(
                f"alphas[{name!r}]: expected a pair of bytes and seconds, got {pair!r:.60}; give both"
            )
        num_bytes, recompute_s = pair
        for value, unit in ((num_bytes, "bytes"), (recompute_s, "recompute seconds")):
            if not (isinstance(value, Real) and 0 <= value < math.inf):
                raise ConfigError(
                    f"alphas[{name!r}]: expected a finite number of {unit} from 0, got {value!r}; measure it"
                )
    room = math.inf if room_bytes is None else room_bytes
    if not (isinstance(room, Real) and room >= 0):
        raise ConfigError(
            f"alphas.room_bytes: expected a number of bytes from 0, got {room_bytes!r}; None is no limit"
        )

    def worth(name: str) -> float:
        num_bytes, recompute_s = items[name]
        return recompute_s / num_bytes if num_bytes else math.inf

    found = dict.fromkeys(items, 0.0)
    for name in sorted(items, key=worth, reverse=True):
        num_bytes = items[name][0]
        found[name] = 1.0 if num_bytes <= room else room / num_bytes
        room = max(room - num_bytes, 0.0)
    return found
