"""Pareto fronts of the ways to run a set of models on n GPUs.

A way is a layout for each model of the set. Layouts depend on one another through memory only: the
memory left by the other models decides how many waves the actor's cache needs for generation. The
seconds of the three stages are three criteria, because a stage takes as long as its slowest set,
which is not known yet; so a set has a Pareto front of ways instead of one best way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from hybridflow.mapping import memory
from hybridflow.mapping.cost import CostModel
from hybridflow.mapping.degrees import GenerationLayout, generation_layouts, layouts
from hybridflow.mapping.models import ModelSpec
from hybridflow.workers.batch.layout import Layout

__all__ = ["Choice", "Front", "Ways", "pareto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A model in a layout.

    Attributes:
        model: the model.
        layout: its degrees.
        generation: the actor's degrees in generation; None for other models.
    """

    model: ModelSpec
    layout: Layout
    generation: GenerationLayout | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Front:
    """Ways of a set on n GPUs.

    Attributes:
        stage_s: [ways, 3] seconds of the stages.
        choices: [ways] a choice for each model.
        least_bytes: least bytes per GPU of any way; above the usable bytes if there is no way.
    """

    stage_s: Float64[np.ndarray, "ways 3"]
    choices: list[tuple[Choice, ...]]
    least_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Table:
    """Ways of some models that do not generate: [ways] bytes and seconds, one column each."""

    # Columns: resident bytes, working bytes, preparation, training.
    values: np.ndarray
    choices: list[tuple[Choice, ...]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ActorTable:
    """Ways of the actor, each a training and a generation layout."""

    # Columns: resident, working, generation weights, cache a sequence; preparation, training.
    values: np.ndarray
    num_sequences: np.ndarray
    choices: list[Choice]


class Ways:
    """Fronts of sets, cached.

    Args:
        costs: cost model of seconds and bytes.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._tables: dict[tuple[tuple[str, ...], int], _Table] = {}
        self._actors: dict[int, _ActorTable] = {}
        self._generate_s: dict[tuple[int, int, int], float] = {}

    def front(self, models: tuple[ModelSpec, ...], num_gpus: int) -> Front:
        """The front of a set on a number of GPUs.

        O(ways of the actor x front of the others' bytes and seconds) with arrays.

        Args:
            models: the set, always in the same order.
            num_gpus: GPUs of the set.
        """
        actors = [model for model in models if model.role == "actor"]
        others = tuple(model for model in models if model.role != "actor")
        table = self._table(others, num_gpus)
        if actors:
            return self._with_actor(actors[0], table, num_gpus)
        return self._without_actor(table, num_gpus)

    def _without_actor(self, table: _Table, num_gpus: int) -> Front:
        num_models = len(table.choices[0]) if table.choices else 0
        resident, working, prepare, train = table.values.T
        needed = resident + working
        fitting = np.flatnonzero(needed <= self._costs.usable_bytes)
        prepare = prepare + num_models * self._costs.transfer_s(num_gpus)
        stage_s = np.stack([np.zeros_like(train), prepare, train], axis=1)[fitting]
        kept = pareto(stage_s)
        return Front(
            stage_s=stage_s[kept],
            choices=[table.choices[fitting[way]] for way in kept],
            least_bytes=float(needed.min(initial=np.inf)),
        )

    def _with_actor(self, actor: ModelSpec, table: _Table, num_gpus: int) -> Front:
        own = self._actor(actor, num_gpus)
        resident, working, weights, per_sequence, prepare, train = own.values.T[:, :, None]
        other_resident, other_working, other_prepare, other_train = table.values.T[:, None, :]
        resident = resident + other_resident
        updating = resident + np.maximum(working, other_working)
        cache = self._costs.usable_bytes - resident - weights
        # Negative caches hold no sequence, and must not enter the division.
        capacity = np.floor(np.maximum(cache, 0.0) / per_sequence)
        fits = (updating <= self._costs.usable_bytes) & (capacity >= 1)
        row, column = np.nonzero(fits)
        num_waves = np.ceil(own.num_sequences[row] / capacity[row, column]).astype(np.int64)
        stage_s = np.stack(
            [
                self._generation(own, num_gpus, row, num_waves),
                (prepare + other_prepare)[row, column],
                (train + other_train)[row, column],
            ],
            axis=1,
        )
        kept = pareto(stage_s)
        needed = np.maximum(updating, resident + weights + per_sequence)
        return Front(
            stage_s=stage_s[kept],
            choices=[(own.choices[row[way]], *table.choices[column[way]]) for way in kept],
            least_bytes=float(needed.min(initial=np.inf)),
        )

    def _generation(
        self, own: _ActorTable, num_gpus: int, row: np.ndarray, num_waves: np.ndarray
    ) -> np.ndarray:
        # Encodes each pair as one integer, as np.unique over pairs sorts row by row.
        span = int(num_waves.max(initial=0)) + 1
        keys, inverse = np.unique(row * span + num_waves, return_inverse=True)
        seconds = np.empty(len(keys))
        for index, (way, waves) in enumerate(divmod(key, span) for key in keys.tolist()):
            key = (num_gpus, way, waves)
            if key not in self._generate_s:
                choice = own.choices[way]
                assert choice.generation is not None, "the actor's choices have one"
                self._generate_s[key] = self._costs.generate_s(
                    choice.model, choice.layout, choice.generation, waves
                )
            seconds[index] = self._generate_s[key]
        return seconds[inverse]

    def _layouts(self, model: ModelSpec, num_gpus: int) -> list[Layout]:
        max_dp = self._costs.workload.max_dp(model)
        return layouts(model, num_gpus, self._costs.hardware.devices_per_host, max_dp)

    def _actor(self, actor: ModelSpec, num_gpus: int) -> _ActorTable:
        if num_gpus not in self._actors:
            costs, workload = self._costs, self._costs.workload
            rows, num_sequences, choices = [], [], []
            for layout in self._layouts(actor, num_gpus):
                shared = (costs.prepare_s(actor, layout), costs.train_s(actor, layout))
                resident = memory.resident_bytes(actor, layout)
                working = memory.working_bytes(actor, layout, workload)
                for generation in generation_layouts(layout):
                    weights = memory.generation_bytes(actor, layout, generation)
                    cache = memory.kv_bytes_per_sequence(actor, generation, workload)
                    rows.append((resident, working, weights, cache, *shared))
                    num_sequences.append(costs.replica_sequences(layout, generation))
                    choices.append(Choice(model=actor, layout=layout, generation=generation))
            self._actors[num_gpus] = _ActorTable(
                values=np.array(rows, dtype=np.float64).reshape(-1, 6),
                num_sequences=np.array(num_sequences, dtype=np.int64),
                choices=choices,
            )
        return self._actors[num_gpus]

    def _table(self, models: tuple[ModelSpec, ...], num_gpus: int) -> _Table:
        key = (tuple(model.name for model in models), num_gpus)
        if key not in self._tables:
            self._tables[key] = self._new_table(models, num_gpus)
        return self._tables[key]

    def _new_table(self, models: tuple[ModelSpec, ...], num_gpus: int) -> _Table:
        if not models:
            return _Table(values=np.zeros((1, 4)), choices=[()])
        before, model = self._table(models[:-1], num_gpus), models[-1]
        costs = self._costs
        found = self._layouts(model, num_gpus)
        rows = [
            (
                memory.resident_bytes(model, layout),
                memory.working_bytes(model, layout, costs.workload),
                costs.prepare_s(model, layout),
                costs.train_s(model, layout),
            )
            for layout in found
        ]
        own = np.array(rows, dtype=np.float64).reshape(-1, 4)
        both = before.values[:, None, :] + own[None, :, :]
        both[:, :, 1] = np.maximum(before.values[:, None, 1], own[None, :, 1])
        values = both.reshape(-1, 4)
        kept = pareto(values)
        first, second = np.divmod(kept, max(1, len(found)))
        choices: list[tuple[Choice, ...]] = [
            (*before.choices[i], Choice(model=model, layout=found[j]))
            for i, j in zip(first, second, strict=True)
        ]
        return _Table(values=values[kept], choices=choices)


def pareto(points: Float64[np.ndarray, "points criteria"]) -> Int64[np.ndarray, " kept"]:
    """Indices of the Pareto-optimal (smallest) points.

    Of equal points one is kept. O(points x kept) with arrays.

    Returns:
        Indices in ascending order of the criteria, the first one first.
    """
    left, total = np.ascontiguousarray(points.T), points.sum(axis=1)
    index = np.arange(len(points))
    kept = []
    # A point that dominates another has a sum no larger, so the smallest sum is not dominated.
    while index.size:
        least = total.argmin()
        kept.append(index[least])
        unbeaten = (left < left[:, least, None]).any(axis=0)
        left, total, index = left[:, unbeaten], total[unbeaten], index[unbeaten]
    found = np.array(kept, dtype=np.int64)
    return found[np.lexsort(points[found].T[::-1])]
