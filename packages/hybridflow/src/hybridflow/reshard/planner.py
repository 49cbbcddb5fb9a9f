"""Plans which rank sends which part of which weight to which rank, between any two layouts.

In the groups of HybridFlow's 3D-HybridEngine (arXiv 2409.19256) a rank receives just its generation
shard minus its training shard: no element twice, and none that it holds. Here this is so for every
pair of layouts, because the plan consists of boxes: those that a rank needs minus those that it
holds, each element from the holder with the least to send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.models.config import DecoderConfig, read_config
from hybridflow.models.decoder import Shard
from hybridflow.models.pieces import shard_boxes
from hybridflow.workers.batch.layout import GenerationGroups, Layout, generation_groups
from shared.comms import reshard
from shared.errors import ConfigError
from shared.topology.boxes import Box

__all__ = ["Boxes", "Plan", "find_held_boxes", "plan"]

Boxes = Mapping[str, Sequence[Box]]
"""Boxes of weights that a rank holds, by the weight's Hugging Face name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Transfers of every weight; iterating gives the bytes that each rank receives.

    Attributes:
        num_ranks: number of ranks of both layouts together.
        itemsize: bytes of an element.
        transfers: by weight, in the order in which they run; local copies included.
        held, wanted: by rank, bytes before and after.
    """

    num_ranks: int
    itemsize: int
    transfers: Mapping[str, Sequence[reshard.Transfer]] = field(repr=False)
    held: Sequence[int]
    wanted: Sequence[int]

    @property
    def received_bytes(self) -> list[int]:
        """Bytes that each rank receives from others."""
        received = [0] * self.num_ranks
        for found in self.transfers.values():
            for src, dst, box in found:
                received[dst] += box.numel * self.itemsize * (src != dst)
        return received

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes that each rank sends to others."""
        sent = [0] * self.num_ranks
        for found in self.transfers.values():
            for rank, count in enumerate(reshard.sent_bytes(found, self.itemsize, self.num_ranks)):
                sent[rank] += count
        return sent

    def pair_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes sent, by sender and receiver."""
        pairs: dict[tuple[int, int], int] = {}
        for found in self.transfers.values():
            for src, dst, box in found:
                if src != dst:
                    pairs[src, dst] = pairs.get((src, dst), 0) + box.numel * self.itemsize
        return pairs

    def __iter__(self) -> Iterator[int]:
        return iter(self.received_bytes)

    def __getitem__(self, rank: int) -> int:
        return self.received_bytes[rank]

    def __len__(self) -> int:
        return self.num_ranks


def plan(
    src_layout: str | Layout,
    dst_layout: str | Layout,
    model: Any = "config:small-llama",
    *,
    itemsize: int = 2,
    is_sharded: bool = False,
    is_disjoint: bool = False,
) -> Plan:
    """Plans moving a model's weights.

    Args:
        src_layout: "p-t-d" of training.
        dst_layout: "p-t" or "p-t-g-d", in HybridFlow's groups inside training's ranks if it divides
            training's layout, else with ranks in the default order; or "p-t-d", in that order.
        model: as accepted by `read_config`.
        itemsize: bytes of an element.
        is_sharded: whether training's replicas shard the weights by rows, as FSDP2 does.
        is_disjoint: whether the destination has other ranks, numbered after the source's.

    Returns:
        The plan. Of groups whose ranks hold and need the same, such as replicas', one is planned and
        its transfers are reused: O(weights x different groups x (ranks and boxes of a group)), plus
        writing the transfers down.

    Raises:
        ConfigError: if a layout does not fit the model or the ranks.
    """
    config = read_config(model)
    src = Layout.parse(src_layout)
    dst = None if src.contains(dst_layout) else src.other(dst_layout)
    sources = _all_held_boxes(config, src, is_sharded=is_sharded)
    groups: GenerationGroups | None = None
    if dst is not None:
        wanted = _all_held_boxes(config, dst)
    else:
        groups = generation_groups(src, str(dst_layout))
        wanted = _all_wanted_boxes(config, groups, src.num_ranks)
    if is_disjoint:
        sources, wanted = [*sources, *({} for _ in wanted)], [*({} for _ in sources), *wanted]
    elif len(sources) != len(wanted):
        raise ConfigError(
            f"expected layouts of equally many ranks, got {src} with {len(sources)} and "
            f"{dst_layout} with {len(wanted)}; pass is_disjoint=True if they are different ranks"
        )
    is_grouped = groups is not None and not is_sharded and not is_disjoint
    domains = groups.micro_dp if is_grouped else None
    return plan_boxes(sources, wanted, itemsize, domains)


def plan_boxes(
    sources: Sequence[Boxes],
    wanted: Sequence[Boxes],
    itemsize: int,
    domains: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """Plans transfers from the boxes that each rank holds and needs.

    Args:
        sources, wanted: boxes held and needed, by rank.
        itemsize: bytes of an element.
        domains: groups of ranks with no transfers between them; None: one group of all ranks.

    Raises:
        DataError: if no rank of the domain holds a box that a rank needs.
    """
    num_ranks = len(sources)
    different = {id(boxes): boxes for boxes in (*sources, *wanted)}
    names = list(dict.fromkeys(name for boxes in different.values() for name in boxes))
    groups = domains or [range(num_ranks)]
    planned: dict[tuple[tuple[int, int], ...], dict[str, list[reshard.Transfer]]] = {}
    found = []
    for ranks in groups:
        alike = tuple((id(sources[rank]), id(wanted[rank])) for rank in ranks)
        if alike not in planned:
            planned[alike] = _plan_group(
                names, [sources[rank] for rank in ranks], [wanted[rank] for rank in ranks], itemsize
            )
        found.append(planned[alike])
    num_bytes = {key: _num_bytes(boxes, itemsize) for key, boxes in different.items()}
    return Plan(
        num_ranks=num_ranks,
        itemsize=itemsize,
        transfers={
            name: [
                reshard.Transfer(ranks[src], ranks[dst], box)
                for ranks, transfers in zip(groups, found, strict=True)
                for src, dst, box in transfers[name]
            ]
            for name in names
        },
        held=[num_bytes[id(boxes)] for boxes in sources],
        wanted=[num_bytes[id(boxes)] for boxes in wanted],
    )


def _plan_group(
    names: Sequence[str], sources: Sequence[Boxes], wanted: Sequence[Boxes], itemsize: int
) -> dict[str, list[reshard.Transfer]]:
    """Transfers by weight inside one group; ranks are places in it."""
    load = [0] * len(sources)
    transfers = {}
    for name in names:
        found = reshard.plan(
            [list(boxes.get(name, ())) for boxes in sources],
            [list(boxes.get(name, ())) for boxes in wanted],
            itemsize,
            already_sent=load,
        )
        sent = reshard.sent_bytes(found, itemsize, len(load))
        load = [before + now for before, now in zip(load, sent, strict=True)]
        transfers[name] = found
    return transfers


def _all_held_boxes(
    config: DecoderConfig, layout: Layout, *, is_sharded: bool = False
) -> list[Boxes]:
    """By rank; ranks that hold the same have one object."""
    found: dict[tuple[int, int, int], Boxes] = {}
    ranks = []
    for rank in range(layout.num_ranks):
        pp, tp, dp = layout.coordinates(rank)
        key = (pp, tp, dp if is_sharded else 0)
        if key not in found:
            found[key] = find_held_boxes(config, layout, rank, is_sharded=is_sharded)
        ranks.append(found[key])
    return ranks


def _all_wanted_boxes(
    config: DecoderConfig, groups: GenerationGroups, num_ranks: int
) -> list[Boxes]:
    """By rank; ranks that want the same have one object."""
    found: dict[tuple[int, int], Boxes] = {}
    ranks = []
    for rank in range(num_ranks):
        at = groups.coordinates(rank)
        if (at.pp, at.tp) not in found:
            found[at.pp, at.tp] = find_wanted_boxes(config, groups, rank)
        ranks.append(found[at.pp, at.tp])
    return ranks


def find_held_boxes(
    config: DecoderConfig, layout: Layout, rank: int, *, is_sharded: bool = False
) -> dict[str, list[Box]]:
    """Boxes of weights that a rank holds in training.

    Args:
        config: of the model.
        layout: of training.
        rank: rank in the layout.
        is_sharded: whether replicas shard the parameters, as FSDP2 does.
    """
    pp, tp, dp = layout.coordinates(rank)
    shard = Shard(config, pp, layout.pp, tp, layout.tp)
    return shard_boxes(config, shard, share=(dp, layout.dp) if is_sharded else (0, 1))


def find_wanted_boxes(
    config: DecoderConfig, groups: GenerationGroups, rank: int
) -> dict[str, list[Box]]:
    """Boxes of weights that a rank of training holds in generation."""
    at = groups.coordinates(rank)
    return shard_boxes(config, Shard(config, at.pp, groups.pp_size, at.tp, groups.tp_size))


def _num_bytes(boxes: Boxes, itemsize: int) -> int:
    return itemsize * sum(box.numel for found in boxes.values() for box in found)
