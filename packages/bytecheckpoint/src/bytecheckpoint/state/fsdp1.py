"""FSDP1's flat parameters as flat ranges of the parameters they were made of.

FullyShardedDataParallel concatenates parameters and cuts the result evenly. Its own state dicts
gather parameters before they are stored. A checkpoint only needs the ranges that each flat
parameter records: which elements of which parameter a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from bytecheckpoint.state.local_tensors import FlatShard

__all__ = ["FlatRange", "find_flat_parameters"]


class FlatRange(NamedTuple):
    """The range of a parameter's elements in this rank's part of a flat parameter.

    Attributes:
        name: name of the parameter, from the root module.
        shape: shape of the whole parameter.
        start: flat index in the parameter of the first element held here.
        offset: index of that element in the rank's part of the flat parameter.
        numel: elements held here.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int

    def of(self, flat: Tensor) -> FlatShard:
        """The parameter's elements in a tensor laid out as the rank's part is."""
        return FlatShard(flat[self.offset : self.offset + self.numel], self.shape, self.start)


class FlatParameters(NamedTuple):
    """The flat parameters of a model.

    Attributes:
        shards: this rank's part of each, with the ranges of parameters in it.
        owners: by id of every parameter object an optimizer may hold, the tensor's ranges: one for
            an original parameter, whose offset is 0 then; several for a flat one.
    """

    shards: list[tuple[Tensor, list[FlatRange]]]
    owners: dict[int, list[FlatRange]]


def find_flat_parameters(root: nn.Module, clean: Callable[[str], str]) -> FlatParameters:
    """The flat parameters that FSDP1 made in a model, none where it is not used.

    Args:
        root: the model.
        clean: function from a module's path to the path without wrappers' names.
    """
    found = FlatParameters([], {})
    for path, module in root.named_modules():
        handle: Any = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None or not hasattr(flat, "_shard_param_infos"):
            continue
        prefix = clean(f"{path}." if path else "")
        # Before the first forward pass the parameter itself is the shard.
        local = getattr(flat, "_local_shard", flat.data)
        ranges = []
        infos = zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)
        for at, (fqn, shape, info) in enumerate(infos):
            name = clean(prefix + fqn)
            if handle.uses_sharded_strategy:
                start, offset, numel = (
                    (info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard)
                    if info.in_shard
                    else (0, 0, 0)
                )
            else:
                start, offset, numel = 0, sum(flat._numels[:at]), flat._numels[at]
            ranges.append(FlatRange(name, tuple(shape), start, offset, numel))
            if flat._params is not None:
                found.owners[id(flat._params[at])] = [ranges[-1]._replace(offset=0)]
        found.owners[id(flat)] = ranges
        found.shards.append((local, ranges))
    return found
