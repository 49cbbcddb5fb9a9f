"""Ranks arranged along named axes, as ("dp", "tp").

The last axis varies fastest, as in torch.distributed's DeviceMesh: ranks of one `tp` group are then
neighbours, which the fastest links of a host connect.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from shared.errors import TopologyError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Mesh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Ranks 0..size-1 as a box with named axes.

    Attributes:
        axes: sizes by name, slowest axis first.

    Example:
        >>> mesh = Mesh(axes={"dp": 2, "tp": 3})
        >>> mesh.coordinate(4), mesh.groups("dp")
        ({'dp': 1, 'tp': 1}, [[0, 3], [1, 4], [2, 5]])

    Raises:
        TopologyError: there is no axis, or one has no name or less than one rank.
    """

    axes: dict[str, int]

    def __post_init__(self) -> None:
        if not self.axes or any(not name or size < 1 for name, size in self.axes.items()):
            raise TopologyError(
                f"a mesh needs named axes of at least one rank each, got {dict(self.axes)}"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.axes.values())

    def coordinate(self, rank: int) -> dict[str, int]:
        """A rank's coordinate along each axis.

        Raises:
            TopologyError: if the rank is not in the mesh.
        """
        if not 0 <= rank < self.size:
            raise TopologyError(f"a mesh of {dict(self.axes)} has ranks 0..{self.size - 1}: {rank}")
        position = {}
        for name, size in reversed(self.axes.items()):
            rank, position[name] = divmod(rank, size)
        return {name: position[name] for name in self.axes}

    def rank_at(self, **position: int) -> int:
        """The rank at a coordinate along each axis.

        Raises:
            TopologyError: if an axis is missing or unknown, or a coordinate out of range.
        """
        if position.keys() != self.axes.keys():
            raise TopologyError(
                f"a place in this mesh names the axes {list(self.axes)}, got {list(position)}"
            )
        rank = 0
        for name, size in self.axes.items():
            if not 0 <= position[name] < size:
                raise TopologyError(f"axis {name!r} has places 0..{size - 1}: {position[name]}")
            rank = rank * size + position[name]
        return rank

    def groups(self, axis: str) -> list[list[int]]:
        """Groups of ranks that differ along one axis only, one for each coordinate of the others.

        Raises:
            TopologyError: if there is no such axis.
        """
        if axis not in self.axes:
            raise TopologyError(f"this mesh has the axes {list(self.axes)}, not {axis!r}")
        names = list(self.axes)
        stride = prod(self.axes[name] for name in names[names.index(axis) + 1 :])
        span = stride * self.axes[axis]
        return [
            list(range(start + offset, start + offset + span, stride))
            for start in range(0, self.size, span)
            for offset in range(stride)
        ]

    def to_device_mesh(self, device_type: str) -> DeviceMesh:
        """The same mesh as torch.distributed's DeviceMesh; all ranks call this.

        Args:
            device_type: "cuda" or "cpu".

        Raises:
            TopologyError: if the world's number of ranks is not the mesh's size.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        world_size = dist.get_world_size() if dist.is_initialized() else None
        if world_size != self.size:
            found = "not initialised" if world_size is None else f"{world_size} ranks"
            raise TopologyError(
                f"a mesh of {dict(self.axes)} needs a world of {self.size} ranks, it is {found}"
            )
        shape, names = tuple(self.axes.values()), tuple(self.axes)
        return init_device_mesh(device_type, shape, mesh_dim_names=names)
