"""Between training's layout and generation's, in place: a bucket at a time, nothing kept twice.

A bucket of weights is allocated in generation's layout, filled from this rank's training shard and
from the others of its group, and the training shard is let go; on the way back the training shard is
cut out of what generation held. So the most there is at once is the generation shard and one bucket,
where keeping the training shards beside (as gathering into fresh memory does) would take M / (t p)
more (after HybridFlow, arXiv 2409.19256, section 5). There is no copy, then, to go back to when a
move is broken off: weights that are half here and half there are refused from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hybridflow.models.decoder import Decoder
from hybridflow.models.pieces import Piece, local, pieces
from hybridflow.reshard.planner import Boxes, Plan, plan_boxes
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
        live_bytes: that its weights take now.
    """

    def __init__(
        self, model: Decoder, device: torch.device, share: tuple[int, int], is_kept: bool = False
    ) -> None:
        self.model, self._device, self._is_kept = model, device, is_kept
        self._shapes = {name: weight.shape for name, weight in model.named_parameters()}
        # Walking a parameter's path for each weight of each move would show in its time.
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
        """Parameters that hold some weights."""
        return {piece.parameter for name in names for piece in self.pieces.get(name, ())}

    def views(self, name: str) -> list:
        """Boxes of a weight and where their values lie."""
        return [(piece.box, piece.view(self.model)) for piece in self.pieces.get(name, ())]

    def rows(self, name: str) -> Tensor:
        """The rows of a parameter that hold the one piece of a weight, one after another."""
        (piece,) = self.pieces[name]
        return getattr(*self._owners[piece.parameter]).data[piece.rows]

    def allocate(self, names: set[str]) -> None:
        """Allocates the parameters that hold some weights."""
        self._set({name: self._shapes[name] for name in self.parameters_of(names)})

    def release(self, names: set[str]) -> None:
        """Frees the parameters that hold some weights."""
        self._set({name: torch.Size([0]) for name in self.parameters_of(names)})

    def _set(self, shapes: dict[str, torch.Size]) -> None:
        if self._is_kept:
            return
        for name, shape in shapes.items():
            parameter = getattr(*self._owners[name])
            fresh = torch.empty(shape, dtype=parameter.dtype, device=self._device)
            self.live_bytes += fresh.numel() * fresh.element_size()
            if parameter.device == fresh.device:
                self.live_bytes -= parameter.numel() * parameter.element_size()
                parameter.data = fresh
            else:  # from "meta", which a parameter can only leave as a whole
                setattr(*self._owners[name], torch.nn.Parameter(fresh, requires_grad=False))


class Transition:
    """Moves the values of one decoder into another that shares no memory with it, and back.

    Attributes:
        plan, plan_back: of the way to generation's layout, and of the way back.
        training, generation: the two decoders' pieces and memory.
        buckets: names of the weights that move together, in the order in which they move.
        peak_bytes: the most that weights and a bucket's messages have taken at once, so far.
        is_generating: which of the two holds the values.
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
        """Plans both ways.

        Args:
            training: holds the values.
            generation: made on the device "meta"; its weights are there while generating only.
            sources, wanted: what the group's ranks hold, by rank in it.
            group: ranks that exchange weights; None where this one is alone.
            share: index and number of the replicas that share training's parameters out, as FSDP2
                does. Their parts, 1 / number of a shard, then stay where they are.
            bucket_bytes: of generation's weights, about; a layer is never cut.

        Raises:
            DataError: if a weight that generation wants is held by no rank of the group.
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
        self.peak_bytes = 0
        self.is_generating = False
        self._is_under_way = False

    def to_generation(self) -> None:
        """Fills generation's weights and lets training's go; nothing if that is so already.

        Raises:
            RankFailure: if an earlier move was broken off, either way.
        """
        self._refuse_if_broken_off()
        if not self.is_generating:
            self._move(self.training, self.generation, self.plan)
        self.is_generating = True

    def to_training(self) -> None:
        """Restores training's weights and lets generation's go; nothing if that is so already.

        Raises:
            RankFailure: if an earlier move was broken off, either way.
        """
        self._refuse_if_broken_off()
        if self.is_generating and self._is_kept:
            for bucket in self.buckets:
                self.generation.release(bucket)
        elif self.is_generating:
            self._move(self.generation, self.training, self.plan_back)
        self.is_generating = False

    def _refuse_if_broken_off(self) -> None:
        if self._is_under_way:
            raise RankFailure(
                "the weights lie between training's layout and generation's, as moving them was "
                "broken off by an error that was told before; start again from the last checkpoint"
            )

    @torch.no_grad()
    def _move(self, src: Side, dst: Side, plan: Plan) -> None:
        self._is_under_way = True
        for bucket in self.buckets:
            dst.allocate(bucket)
            self._move_bucket(bucket, src, dst, plan)
            src.release(bucket)
        self._is_under_way = False

    def _move_bucket(self, bucket: set[str], src: Side, dst: Side, plan: Plan) -> None:
        gathered: set[str] = self._gathered & bucket if dst is self.generation else set()
        if gathered:
            assert self._group is not None, "parts lie on several ranks"
            with self._group.ledger.phase("reshard"):
                parts = [(dst.rows(name), src.rows(name)) for name in sorted(gathered)]
                all_gather_into(self._group, parts)
        # The views end with this call: one that lived on would keep what is released after it.
        moves = [
            reshard.Move(
                transfers=plan.transfers[name], held=src.views(name), wanted=dst.views(name)
            )
            for name in sorted(bucket - gathered)
        ]
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
    """Whether all ranks want one box, which their own, of one size and in their order, make up.

    An all-gather then moves what the plan moves, straight to its place.
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
    """Weights that move together: whole layers, about so many bytes on the rank with the most.

    All ranks cut alike, because messages of a bucket are packed together.
    """
    # Of weights that replicas share out, a plan may have a layer's in several places.
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
