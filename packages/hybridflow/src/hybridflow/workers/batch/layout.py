"""Layouts p-t-d of a model over ranks, and the groups of generation inside a training layout.

Training uses p pipeline stages, t tensor shards and d replicas; generation may use fewer stages and
shards, p_g and t_g, so that each training replica holds d_g = p t / (p_g t_g) generation replicas.
After HybridFlow's 3D-HybridEngine (arXiv 2409.19256): ranks of a generation group are taken at a
stride, so that a rank's training shard lies inside its generation shard, and one all-gather in each
micro-data-parallel group moves the model without redundant memory.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared.errors import ConfigError

__all__ = [
    "GenerationCoordinates",
    "GenerationGroups",
    "Layout",
    "generation_groups",
    "generation_layout",
]

_log = logging.getLogger(__name__)

ORDERS = ("dp-pp-tp", "pp-dp-tp")
"""Axes from the slowest to the fastest as rank numbers rise; Megatron's default is the second."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many stages, shards and replicas, and which rank is which.

    Attributes:
        pp: pipeline stages.
        tp: tensor shards.
        dp: replicas.
        order: one of `ORDERS`.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    order: str = ORDERS[0]

    def __post_init__(self) -> None:
        if min(self.pp, self.tp, self.dp) < 1:
            raise ConfigError(
                f"a layout needs at least one stage, shard and replica, got "
                f"{self.pp}-{self.tp}-{self.dp}"
            )
        if self.order not in ORDERS:
            raise ConfigError(f"order: expected one of {', '.join(ORDERS)}, got {self.order!r}")

    @staticmethod
    def parse(text: str | Layout, order: str = ORDERS[0]) -> Layout:
        """Reads "p-t-d", such as "1-4-2"; a Layout is returned as it is.

        Raises:
            ConfigError: if the text is not three whole numbers joined by dashes.
        """
        if isinstance(text, Layout):
            return text
        return Layout(*_numbers(text, 3, "p-t-d, such as 1-4-2"), order=order)

    def __str__(self) -> str:
        return f"{self.pp}-{self.tp}-{self.dp}"

    @property
    def num_ranks(self) -> int:
        """pp * tp * dp."""
        return self.pp * self.tp * self.dp

    def rank(self, pp: int, tp: int, dp: int) -> int:
        """The rank at some coordinates."""
        if self.order == ORDERS[0]:
            return (dp * self.pp + pp) * self.tp + tp
        return (pp * self.dp + dp) * self.tp + tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Stage, shard and replica of a rank."""
        rest, tp = divmod(rank, self.tp)
        if self.order == ORDERS[0]:
            dp, pp = divmod(rest, self.pp)
        else:
            pp, dp = divmod(rest, self.dp)
        return pp, tp, dp

    def groups(self, axis: str) -> list[list[int]]:
        """Groups of ranks that differ only along `axis` ("pp", "tp" or "dp"), in its order."""
        fixed = {"pp": (1, 2), "tp": (0, 2), "dp": (0, 1)}[axis]
        return _grouped(
            range(self.num_ranks), lambda rank: tuple(self.coordinates(rank)[k] for k in fixed)
        )

    def contains(self, generate: str | Layout) -> bool:
        """Whether generation "p-t" or "p-t-g-d" has groups inside this layout."""
        if isinstance(generate, Layout) or generate.count("-") == 2:
            return False
        count = 4 if generate.count("-") == 3 else 2
        pp, tp = _numbers(generate, count, "p-t, such as 1-2, or p-t-g-d")[:2]
        return min(pp, tp) >= 1 and self.pp % pp == 0 and self.tp % tp == 0

    def other(self, text: str | Layout) -> Layout:
        """Reads "p-t-d", or "p-t" with as many replicas as fit this layout's ranks.

        Raises:
            ConfigError: if the text is not a layout, or "p-t" does not divide the ranks.
        """
        if isinstance(text, Layout) or text.count("-") == 2:
            return Layout.parse(text, self.order)
        pp, tp = _numbers(text, 2, "p-t, such as 1-2")
        layout = Layout(pp, tp, max(1, self.num_ranks // max(1, pp * tp)), self.order)
        layout.check(self.num_ranks, f"generate {text}")
        return layout

    def check(self, num_ranks: int, what: str = "layout") -> None:
        """Checks that this layout fills `num_ranks`; the error names the nearest layouts that do.

        Raises:
            ConfigError: if pp * tp * dp is another number.
        """
        if self.num_ranks == num_ranks:
            return
        near = sorted(_layouts(num_ranks), key=self._distance)[:3]
        raise ConfigError(
            f"{what}: {self} takes {self.num_ranks} ranks, and there are {num_ranks}; the nearest "
            f"that fit are {', '.join(str(layout) for layout in near)}"
        )

    def _distance(self, other: Layout) -> float:
        pairs = ((self.pp, other.pp), (self.tp, other.tp), (self.dp, other.dp))
        return sum(abs(a - b) / max(a, b) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class GenerationCoordinates:
    """Coordinates of a training rank in generation.

    Attributes:
        pp, tp: stage and shard.
        micro: index of its generation replica among the d_g inside its training replica.
        replica: index of its generation replica among all d d_g.
    """

    pp: int
    tp: int
    micro: int
    replica: int


@dataclass(frozen=True, slots=True)
class GenerationGroups:
    """Ranks, from 0, of every group of a pair of layouts; after HybridFlow's 3D-HybridEngine.

    Attributes:
        train: the layout of training.
        pp_size, tp_size: p_g and t_g.
        micro_dp: groups whose training shards make up one generation shard, by shard.
        tp: generation's tensor-parallel groups, by shard.
        pp: generation's pipelines, by stage.
        other: the layout of generation if it does not divide training's, else None; `micro_dp` is
            then one group of all ranks.
    """

    train: Layout
    pp_size: int
    tp_size: int
    micro_dp: list[list[int]]
    tp: list[list[int]]
    pp: list[list[int]]
    other: Layout | None = None

    @property
    def micro_dp_size(self) -> int:
        """d_g: generation replicas in a training replica.

        Raises:
            ConfigError: if the generation layout does not divide the training layout, so that a
                generation replica may span training replicas.
        """
        if self.other is not None:
            raise ConfigError(
                f"generation {self.other} has no groups inside training {self.train}, so training "
                f"replicas hold no fixed number of generation replicas; use `num_replicas`, which "
                f"counts all of them"
            )
        return self.train.pp * self.train.tp // (self.pp_size * self.tp_size)

    @property
    def num_replicas(self) -> int:
        """d d_g: generation replicas in all."""
        if self.other is not None:
            return self.other.dp
        return self.train.dp * self.micro_dp_size

    def coordinates(self, rank: int) -> GenerationCoordinates:
        """Coordinates of a rank in generation."""
        if self.other is not None:
            pp, tp, dp = self.other.coordinates(rank)
            return GenerationCoordinates(pp=pp, tp=tp, micro=0, replica=dp)
        stages, shards = self.train.pp // self.pp_size, self.train.tp // self.tp_size
        pp, tp, dp = self.train.coordinates(rank)
        micro = pp % stages * shards + tp % shards
        return GenerationCoordinates(
            pp=pp // stages, tp=tp // shards, micro=micro, replica=dp * self.micro_dp_size + micro
        )


def generation_groups(
    train: str | Layout, generate: str, order: str = ORDERS[0]
) -> GenerationGroups:
    """The groups of generation inside a training layout.

    Args:
        train: "p-t-d".
        generate: "p-t", or "p-t-g-d" with the replicas written out.
        order: axes of rank numbers, one of `ORDERS`; ignored when `train` is a Layout.

    Raises:
        ConfigError: if p_g does not divide p or t_g does not divide t (`hybridflow.reshard` moves a
            model between any two layouts, without groups), or if g or d is wrong.
    """
    layout = Layout.parse(train, order)
    parts = generate.count("-") + 1
    written = _numbers(generate, 4 if parts == 4 else 2, "p-t, such as 1-2, or p-t-g-d")
    pp_size, tp_size = written[:2]
    if min(written) < 1 or layout.pp % pp_size or layout.tp % tp_size:
        raise ConfigError(
            f"generate: {generate} does not divide the training layout {layout}; its stages must "
            f"be one of {_divisors(layout.pp)} and its shards one of {_divisors(layout.tp)}. Other "
            f"pairs of layouts have no common groups: move them with hybridflow.reshard"
        )
    size = layout.pp * layout.tp // (pp_size * tp_size)
    if parts == 4 and written[2:] != [size, layout.dp]:
        raise ConfigError(
            f"generate: {generate} in the training layout {layout} has {size} replicas in each of "
            f"{layout.dp}: {pp_size}-{tp_size}-{size}-{layout.dp}"
        )
    bare = GenerationGroups(layout, pp_size, tp_size, [], [], [])
    at = [bare.coordinates(rank) for rank in range(layout.num_ranks)]
    dp = [layout.coordinates(rank)[2] for rank in range(layout.num_ranks)]
    ranks = range(layout.num_ranks)
    return GenerationGroups(
        layout,
        pp_size,
        tp_size,
        micro_dp=_grouped(ranks, lambda r: (dp[r], at[r].pp, at[r].tp)),
        tp=_grouped(ranks, lambda r: (dp[r], at[r].pp, at[r].micro)),
        pp=_grouped(ranks, lambda r: (dp[r], at[r].tp, at[r].micro)),
    )


def generation_layout(train: Layout, generate: str) -> GenerationGroups:
    """Groups of generation inside training's layout if it divides that, else a separate layout.

    Raises:
        ConfigError: if generation does not divide the ranks either.
    """
    if train.contains(generate):
        return generation_groups(train, generate)
    other = train.other(generate)
    other.check(train.num_ranks, f"generate {generate}")
    _log.info(
        "generation %s does not divide training %s: weights are moved between any ranks",
        other,
        train,
    )
    return GenerationGroups(
        train,
        other.pp,
        other.tp,
        micro_dp=[list(range(train.num_ranks))],
        tp=other.groups("tp"),
        pp=other.groups("pp"),
        other=other,
    )


def _grouped(ranks: Iterable[int], key: Callable[[int], tuple[int, ...]]) -> list[list[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return sorted(groups.values())


def _numbers(text: str, count: int, form: str) -> list[int]:
    if not re.fullmatch(r"\d+(-\d+)*", text) or text.count("-") != count - 1:
        raise ConfigError(f"expected a layout {form}, got {text!r}")
    return [int(part) for part in text.split("-")]


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


def _layouts(num_ranks: int) -> list[Layout]:
    return [
        Layout(pp, tp, num_ranks // (pp * tp))
        for pp, tp in itertools.product(_divisors(num_ranks), repeat=2)
        if num_ranks % (pp * tp) == 0
    ]
