"""The boxes of a DTensor that one rank holds, from its mesh and placements alone."""

from __future__ import annotations

import functools

from shared.topology.boxes import Box

__all__ = ["list_shard_boxes"]


@functools.lru_cache(maxsize=65536)
def list_shard_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple,
) -> list[Box] | None:
    """Lists the boxes of a DTensor's local tensor in row-major order; None for an unknown placement.

    Placements apply in the mesh's order, each cutting what those before it left, as torch.chunk
    does; a strided shard (FSDP over tensor parallelism) takes its part of each of several pieces.
    """
    runs = [[(0, size)] for size in shape]
    for size, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        kind = type(placement).__name__
        if kind not in ("Shard", "_StridedShard"):
            return None
        dim = placement.dim % len(shape)
        parts = _split_runs(runs[dim], getattr(placement, "split_factor", 1))
        cut = [_split_runs(part, size) for part in parts]
        runs[dim] = _join_runs([run for chunks in cut if at < len(chunks) for run in chunks[at]])
    boxes = [Box((), ())]
    for dim_runs in runs:
        boxes = [
            Box((*box.offsets, start), (*box.sizes, length))
            for box in boxes
            for start, length in dim_runs
        ]
    return boxes


def _split_runs(runs: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """Cuts a sequence of index runs as torch.chunk does: ceil(n / count) each, fewer in the last."""
    total = sum(length for _, length in runs)
    each = -(-total // count)
    chunks: list[list[tuple[int, int]]] = []
    room = 0
    for start, length in runs:
        while length:
            if not room:
                chunks.append([])
                room = each
            take = min(room, length)
            chunks[-1].append((start, take))
            start, length, room = start + take, length - take, room - take
    return chunks


def _join_runs(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined
