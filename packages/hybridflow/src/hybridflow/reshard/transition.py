"""Resharding in place between training's and generation's layouts, bucket by bucket.

A bucket of weights is allocated in generation's layout and filled from the training shards of this
rank and of others in its group; then its training shard is freed. On the way back the training
shard is cut out of generation's. So peak memory is the generation shard and one bucket; keeping the
training shards as well (as gathering into fresh memory does) would take M / (t p) more (after
HybridFlow, arXiv 2409.19256, section 5). On a CPU both layouts share one region (`region`); a GPU's
allocator reuses freed blocks by itself. No copy remains to restore after an interrupted move:
weights split between the layouts are refused from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from hybridflow.models.decoder import Decoder
from hybridflow.models.pieces import Piece, local, pieces
from hybridflow.reshard.planner import Boxes, Plan, plan_boxes
from hybridflow.reshard.region import Region
from hybridflow.reshard.vote import check_boxes, together
from shared.comms import reshard
from shared.comms.collectives import all_gather_into
from shared.comms.group import Group
from shared.errors import RankFailure
from shared.topology.boxes import Box, intersect

__all__ = ["Side", "Transition", "buckets"]

_BUCKET_BYTES = 64 << 20


class Side:
    """One of the two decoders: its pieces, and allocating and releasing its parameters.

    Attributes:
        live_bytes: bytes that its weights take now.
    """

    def __init__(
        self, model: Decoder, device: torch.device, share: tuple[int, int], is_kept: bool = False
    ) -> None:
        self.model, self._device, self._is_kept = model, device, is_kept
        self._shapes = {name: weight.shape for name, weight in model.named_parameters()}
        self._places: dict[str, Tensor] = {}
        # Resolved once, as doing so for each weight of each move takes measurable time.
        self._owners = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name in self._shapes
        }
        self.pieces: dict[str, list[Piece]] = {}
        for piece in pieces(model, share):
            self.pieces.setdefault(piece.name, []).append(piece)
        weights = (p.data for p in model.parameters() if p.device.type != "meta")
        self.live_bytes = sum(w.numel() * w.element_size() for w in map(local, weights))

    def parameters_of(self, names: set[str]) -> set[str]:
        """Names of the parameters that hold the named weights."""
        return {piece.parameter for name in names for piece in self.pieces.get(name, ())}

    def views(self, name: str) -> list:
        """Boxes of a weight, and views of their values."""
        return [(piece.box, piece.view(self.model)) for piece in self.pieces.get(name, ())]

    def rows(self, name: str) -> Tensor:
        """The consecutive rows of a parameter that hold the one piece of a weight."""
        (piece,) = self.pieces[name]
        return getattr(*self._owners[piece.parameter]).data[piece.rows]

    def sizes(self, names: set[str]) -> dict[str, Tensor]:
        """Tensors without memory, of the sizes and types of the parameters of the named weights."""
        return {
            name: torch.empty(
                self._shapes[name], dtype=getattr(*self._owners[name]).dtype, device="meta"
            )
            for name in sorted(self.parameters_of(names))
        }

    def settle(self, places: dict[str, Tensor]) -> None:
        """Allocates parameters at these places from now on, and moves there what is allocated."""
        self._places = places
        for name, place in places.items():
            parameter = getattr(*self._owners[name])
            if parameter.device.type != "meta" and parameter.numel():
                parameter.data = place.copy_(parameter.data)

    def allocate(self, names: set[str]) -> None:
        """Allocates the parameters that hold the named weights."""
        self._set({name: self._shapes[name] for name in self.parameters_of(names)})

    def release(self, names: set[str]) -> None:
        """Frees the parameters that hold the named weights."""
        self._set({name: torch.Size([0]) for name in self.parameters_of(names)})

    def _set(self, shapes: dict[str, torch.Size]) -> None:
        if self._is_kept:
            return
        for name, shape in shapes.items():
            parameter = getattr(*self._owners[name])
            if shape.numel() and name in self._places:
                fresh = self._places[name]
            else:
                fresh = torch.empty(shape, dtype=parameter.dtype, device=self._device)
            self.live_bytes += fresh.numel() * fresh.element_size()
            if parameter.device == fresh.device:
                self.live_bytes -= parameter.numel() * parameter.element_size()
                parameter.data = fresh
            else:  # a parameter on "meta" has to be replaced to change its device
                setattr(*self._owners[name], torch.nn.Parameter(fresh, requires_grad=False))


class Transition:
    """Moves the values of one decoder into another that shares no memory with it, and back.

    Attributes:
        plan, plan_back: transfers to generation's layout, and back.
        training, generation: the two decoders' pieces and memory.
        buckets: names of the weights that move together, in the order in which they move.
        peak_bytes: most bytes that weights and a bucket's messages have taken at once so far.
        is_generating: whether generation holds the values, else training.
    """

    def __init__(
        self,
        training: Decoder,
        generation: Decoder,
        sources: Sequence[Boxes],
        wanted: Sequence[Boxes],
        group: Group | None,
        share: tuple[int, int] = (0, 1),
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        """Plans the moves in both directions.

        Args:
            training: decoder that holds the values.
            generation: decoder on the device "meta"; its weights are allocated only to generate.
            sources, wanted: boxes that the group's ranks hold in training and in generation.
            group: ranks that exchange weights; None if this one is alone.
            share: this rank's index among the replicas that shard training's parameters (FSDP2),
                and their number. Their parts, 1 / number of a shard, then stay allocated.
            bucket_bytes: about the bytes of a bucket in generation's layout; a layer is never
                split.

        Raises:
            DataError: if no rank of the group holds a weight that generation needs.
        """
        first = next(training.parameters())
        self._group = group
        self.plan = plan_boxes(sources, wanted, first.element_size())
        self.plan_back = plan_boxes(wanted, sources, first.element_size())
        self._is_kept = share[1] > 1
        self.training = Side(training, first.device, share, self._is_kept)
        self.generation = Side(generation, first.device, (0, 1))
        self.buckets = list(buckets(self.plan, bucket_bytes))
        self._gathered = {
            name
            for name in self.plan.transfers
            if group is not None
            and not self._is_kept
            and _tile(
                [boxes.get(name, ()) for boxes in sources],
                [boxes.get(name, ()) for boxes in wanted],
            )
        }
        for bucket in self.buckets:
            self.generation.release(bucket)
        self._region: Region | None = None
        if first.device.type == "cpu" and not self._is_kept:
            self._region = Region(
                [self.generation.sizes(bucket) for bucket in self.buckets],
                [self.training.sizes(bucket) for bucket in self.buckets],
            )
            with torch.no_grad():
                self.training.settle(self._region.falling)
            self.generation.settle(self._region.rising)
        self.peak_bytes = 0
        self.is_generating = False
        self._is_under_way = False

    def to_generation(self) -> None:
        """Fills generation's weights and frees training's; does nothing if generation has them.

        Raises:
            RankFailure: if an earlier move, in either direction, was interrupted.
            CommError: if another rank raised; all ranks stop at the same bucket.
        """
        self._refuse_if_broken_off()
        if not self.is_generating:
            self._move(self.training, self.generation, self.plan)
        self.is_generating = True

    def to_training(self) -> None:
        """Restores training's weights and frees generation's; does nothing if training has them.

        Raises:
            RankFailure: if an earlier move, in either direction, was interrupted.
        """
        self._refuse_if_broken_off()
        if self.is_generating and self._is_kept:
            for bucket in self.buckets:
                self.generation.release(bucket)
        elif self.is_generating:
            self._move(self.generation, self.training, self.plan_back)
            if self._region is not None:
                self._region.give_back()
        self.is_generating = False

    def _refuse_if_broken_off(self) -> None:
        if self._is_under_way:
            raise RankFailure(
                "the weights lie between training's layout and generation's, because an earlier "
                "error interrupted moving them; start again from the last checkpoint"
            )

    @torch.no_grad()
    def _move(self, src: Side, dst: Side, plan: Plan) -> None:
        self._is_under_way = True
        # Back in the reverse order: see `region`.
        for bucket in self.buckets if dst is self.generation else reversed(self.buckets):
            self._move_bucket(bucket, src, dst, plan)
            src.release(bucket)
        self._is_under_way = False

    def _move_bucket(self, bucket: set[str], src: Side, dst: Side, plan: Plan) -> None:
        gathered: set[str] = self._gathered & bucket if dst is self.generation else set()
        # Views must not outlive this call: they would keep released memory alive.
        with together(self._group) if self._group is not None else nullcontext():
            dst.allocate(bucket)
            moves = [
                reshard.Move(
                    transfers=plan.transfers[name], held=src.views(name), wanted=dst.views(name)
                )
                for name in sorted(bucket - gathered)
            ]
            check_boxes(moves, 0 if self._group is None else self._group.rank)
        if gathered:
            assert self._group is not None, "parts lie on several ranks"
            with self._group.ledger.phase("reshard"):
                parts = [(dst.rows(name), src.rows(name)) for name in sorted(gathered)]
                all_gather_into(self._group, parts)
        if self._group is None:
            for move in moves:
                _copy_locally(move)
        else:
            reshard.run(self._group, moves, phase="reshard")
        live = src.live_bytes + dst.live_bytes + self._message_bytes(moves, plan.itemsize)
        self.peak_bytes = max(self.peak_bytes, live)

    def _message_bytes(self, moves: Sequence[reshard.Move], itemsize: int) -> int:
        if self._group is None:
            return 0
        rank = self._group.rank
        count = sum(
            box.numel
            for move in moves
            for src, dst, box in move.transfers
            if src != dst and rank in (src, dst)
        )
        return count * itemsize


def _tile(sources: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]]) -> bool:
    """Whether all ranks need one box that is their own boxes, equal in size, in rank order.

    An all-gather straight into the destination then does what the plan does.
    """
    if any(len(boxes) != 1 for boxes in (*sources, *wanted)):
        return False
    (whole,), parts = wanted[0], [boxes[0] for boxes in sources]
    if any(boxes[0] != whole for boxes in wanted):
        return False
    cut = [d for d, (a, b) in enumerate(zip(parts[0].sizes, whole.sizes, strict=True)) if a != b]
    if len(cut) != 1:
        return False
    (dim,) = cut
    size = parts[0].sizes[dim]
    offsets = [list(whole.offsets) for _ in parts]
    for k, offset in enumerate(offsets):
        offset[dim] += k * size
    expected = [Box(tuple(offset), parts[0].sizes) for offset in offsets]
    return parts == expected and len(parts) * size == whole.sizes[dim]


def _copy_locally(move: reshard.Move) -> None:
    for wanted, landing in move.wanted:
        for held, values in move.held:
            box = intersect(wanted, held)
            if box is not None:
                landing[box.within(wanted)].copy_(values[box.within(held)])


def buckets(plan: Plan, bucket_bytes: int) -> Iterator[set[str]]:
    """Splits weights into buckets of whole layers, of about `bucket_bytes` on the largest rank.

    All ranks make the same buckets, because a bucket's messages are packed together.
    """
    # If replicas shard the weights, a layer's weights may not be adjacent in a plan.
    layers: dict[str, set[str]] = {}
    for name in plan.transfers:
        layers.setdefault(_layer(name), set()).add(name)
    bucket: set[str] = set()
    filled = 0
    for names in layers.values():
        size = plan.itemsize * max(
            sum(t.box.numel for name in names for t in plan.transfers[name] if t.dst == rank)
            for rank in range(plan.num_ranks)
        )
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = set(), 0
        bucket |= names
        filled += size
    if bucket:
        yield bucket


def _layer(name: str) -> str:
    parts = name.split(".")
    return parts[2] if name.startswith("model.layers.") else name
