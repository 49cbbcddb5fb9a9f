"""A plan: which rank computes what, in which order; as JSON with a hash of its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from shared.errors import ConfigError, DataError
from shared.files import read_json, write_atomically

__all__ = ["Action", "Kind", "Order", "Placement", "Plan", "RankForecast"]

_FORMAT = 1

Placement = Literal["data", "chain", "folded", "opposite"]
"""Where layers lie: all on every rank, consecutive spans, spans from both ends on a device, or two
backbones in opposite directions over the same devices."""

Kind = Literal["forward", "estimate", "backward", "encode", "sum", "step"]
"""What a rank does: a stage's forward pass, the same without gradient (self-conditioning), its
backward pass, a frozen component of rows of the next batch, the start of the sum of a stage's
gradients over its replicas, the optimizer step."""


class Action(NamedTuple):
    """One entry of a rank's static list.

    Attributes:
        kind: what is done.
        stage: virtual stage of a pass or a sum.
        micro_batch: of a pass.
        name: frozen component that is encoded.
        samples: first row and the row after the last, of the next batch, that are encoded.
    """

    kind: Kind
    stage: int = -1
    micro_batch: int = -1
    name: str = ""
    samples: tuple[int, int] = (0, 0)


Order = tuple[tuple[Action, ...], ...]
"""Actions by rank or device."""


class RankForecast(NamedTuple):
    """What the replay of a plan says of one rank.

    Attributes:
        pass_s: seconds of a step in which it computes the backbone and the optimizer step.
        encode_s: seconds of a step in which it computes frozen components.
        idle_s: the rest of the step.
        sent_bytes: bytes that it sends in a step: values, gradients, frozen outputs, its part of sums.
        peak_bytes: most memory that it needs.
    """

    pass_s: float
    encode_s: float
    idle_s: float
    sent_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training step of all ranks.

    Attributes:
        placement: "data" (every rank holds all layers), "chain", "folded" (a device holds a span from
            the front and its mirror from the back) or "opposite" (two backbones in opposite
            directions over the same devices).
        num_stages: devices of one pipeline; 1 for "data".
        num_micro_batches: micro-batches of a step.
        num_groups: copies of the pipeline that share no micro-batch; each has the rows of one equal
            part of the batch, in order.
        batch_size: samples of a step over all groups.
        spans: by virtual stage, the first layer and the one after the last.
        backbones: by virtual stage, the index of the backbone whose layers it holds.
        devices: by virtual stage, the ranks that hold it, group by group; those of a group share each
            micro-batch's rows evenly, in order.
        order: by rank, its actions.
        estimate_order: the same for a step with a self-conditioning pass; empty without.
        owners: by frozen component, by rank, the ranges of rows that it encodes.
        bucket_bytes: largest bucket of gradients that is summed at once.
        predicted_s: predicted seconds of a step.
        limit_s: seconds of a step if all compute were spread evenly and nothing else took time.
        cached_s: predicted seconds if the frozen outputs came from a cache.
        unfilled_s: predicted seconds if every rank encoded its share before the step.
        edges: bytes of a step by (source rank, target rank), without those of sums.
        ranks: forecast of each rank.
        explanation: why a search chose this plan.
        fingerprints: what the plan was made for, as `Job.list_fingerprints` says; empty if unknown.

    Raises:
        ConfigError: the parts contradict each other.
    """

    placement: Placement
    num_stages: int
    num_micro_batches: int
    batch_size: int
    spans: tuple[tuple[int, int], ...]
    devices: tuple[tuple[int, ...], ...]
    order: Order
    estimate_order: Order = ()
    num_groups: int = 1
    backbones: tuple[int, ...] = ()
    owners: Mapping[str, tuple[tuple[tuple[int, int], ...], ...]] = field(default_factory=dict)
    bucket_bytes: int = 4_000_000
    predicted_s: float = 0.0
    limit_s: float = 0.0
    cached_s: float = 0.0
    unfilled_s: float = 0.0
    edges: Mapping[tuple[int, int], int] = field(default_factory=dict)
    ranks: tuple[RankForecast, ...] = ()
    explanation: str = ""
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.backbones:
            object.__setattr__(self, "backbones", (0,) * len(self.spans))
        counts = {len(ranks) for ranks in self.devices}
        if not self.spans or len({len(self.spans), len(self.devices), len(self.backbones)}) > 1:
            raise ConfigError(
                f"plan: expected a span, ranks and a backbone for each virtual stage, got "
                f"{len(self.spans)}, {len(self.devices)} and {len(self.backbones)}; plan anew"
            )
        if any(rank >= len(self.order) for ranks in self.devices for rank in ranks):
            raise ConfigError(
                f"plan.order: expected a list for each rank that holds a stage, got "
                f"{len(self.order)}; plan anew"
            )
        rows = self.batch_size // (self.num_groups * self.num_micro_batches)
        if self.batch_size % (self.num_groups * self.num_micro_batches) or any(
            count % self.num_groups or rows % (count // self.num_groups) for count in counts
        ):
            raise ConfigError(
                f"plan: expected batch_size {self.batch_size} to be divisible by groups "
                f"({self.num_groups}) x micro-batches ({self.num_micro_batches}) x the replicas of a "
                f"stage in a group, got stages of {sorted(counts)} ranks; plan anew"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of the plan."""
        return len(self.order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the virtual stages that a rank holds."""
        return self._stages_by_rank[rank]

    def list_backbone(self, backbone: int) -> list[int]:
        """Returns the virtual stages of a backbone."""
        return [v for v, each in enumerate(self.backbones) if each == backbone]

    def list_group(self, group: int) -> list[int]:
        """Returns the ranks of a copy of the pipeline, by device and replica."""
        ranks: dict[int, None] = {}
        for own in self.devices:
            count = len(own) // self.num_groups
            ranks |= dict.fromkeys(own[group * count : (group + 1) * count])
        return list(ranks)

    def samples(self, stage: int, micro_batch: int, rank: int) -> range:
        """Returns the rows of the batch that a rank computes in a pass of a stage it holds.

        Raises:
            ConfigError: the rank does not hold the stage.
        """
        if rank not in self._first_rows[stage]:
            raise ConfigError(
                f"plan: stage {stage} is on the ranks {self.devices[stage]}, not on {rank}"
            )
        rows = self.batch_size // (self.num_groups * self.num_micro_batches)
        first = self._first_rows[stage][rank] + micro_batch * rows
        return range(first, first + rows * self.num_groups // len(self.devices[stage]))

    def explain(self) -> str:
        """Returns why it was chosen: winner, runner-up, limit, idle time, what would change it."""
        return (
            self.explanation
            or f"{self.placement}, {self.num_stages} stages: not chosen by a search"
        )

    def fingerprint(self) -> str:
        """Returns 16 hexadecimal digits that differ between different plans."""
        text = json.dumps(self._to_tree(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, replacing `path` at once."""
        tree = {"format": _FORMAT, "fingerprint": self.fingerprint(), **self._to_tree()}
        write_atomically(path, json.dumps(tree, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan that `save` wrote.

        Raises:
            DataError: the file is missing, is not a plan of this format, or was edited.
        """
        tree = read_json(path, "a plan")
        try:
            plan = _build_plan(tree)
            recorded = tree["fingerprint"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: expected a plan of format {_FORMAT} as Plan.save writes it, got "
                f"{type(error).__name__}: {error}; make the plan again"
            ) from error
        if recorded != plan.fingerprint():
            raise DataError(
                f"{path}: expected the fingerprint {plan.fingerprint()} of its content, got "
                f"{recorded}: the plan was edited; make it again"
            )
        return plan

    def _to_tree(self) -> dict[str, Any]:
        tree = asdict(self)
        tree["edges"] = [[*edge, count] for edge, count in sorted(self.edges.items())]
        for name in ("order", "estimate_order"):
            tree[name] = [[_write_action(each) for each in own] for own in getattr(self, name)]
        # Through text and back, so that tuples are lists in a new plan as in a loaded one.
        return json.loads(json.dumps(tree))

    @cached_property
    def _first_rows(self) -> list[dict[int, int]]:
        """By stage, the first row of each of its ranks in micro-batch 0."""
        group_rows = self.batch_size // self.num_groups
        firsts = []
        for ranks in self.devices:
            count = len(ranks) // self.num_groups
            own = group_rows // self.num_micro_batches // count
            firsts.append(
                {rank: i // count * group_rows + i % count * own for i, rank in enumerate(ranks)}
            )
        return firsts

    @cached_property
    def _stages_by_rank(self) -> list[tuple[int, ...]]:
        return [
            tuple(v for v, ranks in enumerate(self.devices) if rank in ranks)
            for rank in range(self.num_ranks)
        ]


def _build_plan(tree: dict[str, Any]) -> Plan:
    if tree["format"] != _FORMAT:
        raise ValueError(f"format {tree['format']!r}")
    names = {each.name for each in fields(Plan)}
    if unknown := tree.keys() - names - {"format", "fingerprint"}:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    values = {name: tree[name] for name in names}
    for name in ("order", "estimate_order"):
        values[name] = tuple(tuple(map(_read_action, own)) for own in values[name])
    values["owners"] = {
        name: tuple(tuple((first, stop) for first, stop in ranges) for ranges in by_rank)
        for name, by_rank in values["owners"].items()
    }
    values["spans"] = tuple((first, stop) for first, stop in values["spans"])
    values["devices"] = tuple(tuple(ranks) for ranks in values["devices"])
    values["edges"] = {(source, target): count for source, target, count in values["edges"]}
    values["ranks"] = tuple(RankForecast(*each) for each in values["ranks"])
    values["backbones"] = tuple(values["backbones"])
    return Plan(**values)


def _write_action(action: Action) -> str:
    """An action as a line that people read: "forward 0 3", "encode vae 0:8"."""
    if action.kind == "encode":
        first, stop = action.samples
        return f"encode {action.name} {first}:{stop}"
    numbers = [each for each in (action.stage, action.micro_batch) if each >= 0]
    return " ".join(map(str, (action.kind, *numbers)))


def _read_action(text: str) -> Action:
    kind, _, rest = text.partition(" ")
    if kind not in get_args(Kind):
        raise ValueError(f"action {text!r}")
    if kind == "encode":
        name, rows = rest.rsplit(" ", 1)
        first, stop = map(int, rows.split(":"))
        return Action("encode", name=name, samples=(first, stop))
    return Action(kind, *map(int, rest.split()))  # type: ignore[arg-type]
