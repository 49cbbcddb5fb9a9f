"""The work and memory of sets of roots, linear in a profile's expected edges and rows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from heta.graph.schema import Schema
from heta.partitioning.frontier import BatchProfile
from shared.errors import ConfigError

__all__ = ["FLOAT_BYTES", "ID_BYTES", "NUM_MOMENTS", "Loads", "StepRates", "Workload", "row_bytes"]

FLOAT_BYTES = 4
ID_BYTES = 8
# Of each learnable row, first and second.
NUM_MOMENTS = 2
# A learnable row's count of its steps.
_COUNT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """Seconds that a rank takes for each unit of work; the defaults are one core's.

    `heta.profiler.measure_rates` measured the defaults on a quiet Zen 4; those of packing, a collective
    and a step were fitted to steps of two ranks.

    Attributes:
        sampled_edge_s: to draw an edge and number its source.
        gathered_byte_s: to copy a byte of input rows.
        aggregated_byte_s: to add a byte of a source's row to its destination's, one pass.
        flop_s: for one floating point operation of a product.
        module_s: for one relation's module in one layer, forward and backward, without its rows.
        updated_byte_s: to update a byte of a learnable row, its moments included.
        packed_byte_s: to pack or unpack a byte of rows that travel.
        exchange_s: for one collective, besides the link.
        step_s: for a step, whatever it computes.

    Raises:
        ConfigError: a number is negative or not finite.
    """

    sampled_edge_s: float = 5.3e-8
    gathered_byte_s: float = 8.6e-10
    aggregated_byte_s: float = 1.1e-10
    flop_s: float = 1.2e-11
    module_s: float = 6.5e-4
    updated_byte_s: float = 1.9e-10
    packed_byte_s: float = 2.2e-9
    exchange_s: float = 5.0e-4
    step_s: float = 2.0e-3

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not np.isfinite(value) or value < 0:
                raise ConfigError(
                    f"rates.{field.name}: expected a finite number from 0, got {value}; measure "
                    "it by heta.profiler.measure_rates()"
                )


class Loads(NamedTuple):
    """The work of n sets of roots.

    Attributes:
        main_s: [n] seconds of forward, backward and reading learnable rows.
        behind_s: [n] seconds of sampling the next batch and reading its features.
        touched: [n, L] rows that are read of each learnable type.
        modules: [n, M] whether a module is used; its parameters are `Workload.module_bytes`.
    """

    main_s: np.ndarray
    behind_s: np.ndarray
    touched: np.ndarray
    modules: np.ndarray


def row_bytes(schema: Schema, hidden: int) -> np.ndarray:
    """Computes the memory of one row of each type, [T]: its features, or its weights and moments."""
    learnable = (1 + NUM_MOMENTS) * hidden * FLOAT_BYTES + _COUNT_BYTES
    return np.array([FLOAT_BYTES * schema.feat_dim.get(t, 0) or learnable for t in schema.types])


class Workload:
    """The work of any set of roots, as linear functions of a profile's edges and rows.

    The model is R-GCN: a mean and a product for each relation, and a product for each type's own rows
    if destinations are read. Other models take longer by about the same factor on every part.
    """

    def __init__(self, profile: BatchProfile, rates: StepRates, hidden: int) -> None:
        """Prepares the coefficients.

        Args:
            profile: expected edges and rows.
            rates: seconds for each unit of work.
            hidden: width of hidden and learnable rows.
        """
        self.profile, self.rates, self.hidden = profile, rates, hidden
        schema = self.schema = profile.schema
        self.types = {kind: number for number, kind in enumerate(schema.types)}
        self.roots = {relation: number for number, relation in enumerate(schema.roots)}
        self.learnable = np.array([self.types[kind] for kind in schema.learnable], dtype=int)
        self._target = self.types[schema.target]
        num_hops, num_roots = profile.seed_edges.shape
        shape = (num_hops, len(self.types))
        # Seconds of a root for all seeds, and of a frontier row, by hop; hop 0 has no frontier.
        self._root_s, self._root_sample_s = np.zeros((2, num_hops, num_roots))
        self._row_s, self._row_sample_s, self._calls = np.zeros((3, *shape))
        # Bytes of parameters: a root's, a type's own and its relations', and the target's own.
        self._root_bytes = np.zeros((num_hops, num_roots))
        self._type_bytes = np.zeros(shape)
        self._target_bytes = np.zeros(num_hops)
        for hop in range(num_hops):
            self._add_hop(hop)
        parameters = (self._root_bytes, self._type_bytes, self._target_bytes)
        self.module_bytes = np.concatenate([each.ravel() for each in parameters])
        self._prepare_memory()

    def _add_hop(self, hop: int) -> None:
        profile, rates, schema = self.profile, self.rates, self.schema
        layer = len(profile.active) - hop
        for number, relation in enumerate(schema.relations):
            if relation not in profile.active[layer - 1]:
                continue
            src, _, dst = relation
            width = self._width(src, layer)
            # Features have no gradient: the mean goes one way only, and one product less is needed.
            passes = 2 if layer > 1 or not schema.feat_dim.get(src) else 1
            edge_s = width * FLOAT_BYTES * passes * rates.aggregated_byte_s
            row_s = 2.0 * self.hidden * (1 + passes) * width * rates.flop_s
            if relation in self.roots:
                root = self.roots[relation]
                self._root_bytes[hop, root] = FLOAT_BYTES * width * self.hidden
                if hop == 0 or profile.uses_dst:
                    edges = profile.seed_edges[hop, root]
                    self._root_s[hop, root] = edges * edge_s + profile.batch_size * row_s
                    self._root_sample_s[hop, root] = edges * rates.sampled_edge_s
            else:
                self._type_bytes[hop, self.types[dst]] += FLOAT_BYTES * width * self.hidden
            edges = profile.draws[hop, number]
            self._row_s[hop, self.types[dst]] += edges * edge_s + row_s
            self._row_sample_s[hop, self.types[dst]] += edges * rates.sampled_edge_s
            self._calls[hop, self.types[dst]] += 1
        if not profile.uses_dst:
            return
        for kind, number in self.types.items():
            if self._calls[hop, number]:
                width = self._width(kind, layer)
                self._row_s[hop, number] += 6.0 * self.hidden * width * rates.flop_s
                self._calls[hop, number] += 1
                own = self._target_bytes if number == self._target else self._type_bytes[:, number]
                own[hop] += FLOAT_BYTES * (width + 1) * self.hidden

    def _width(self, kind: str, layer: int) -> int:
        return self.schema.feat_dim.get(kind, 0) or self.hidden if layer == 1 else self.hidden

    def _prepare_memory(self) -> None:
        schema = self.schema
        num_types = len(self.types)
        self._src = np.zeros((len(self.roots), num_types), dtype=np.float32)
        self._into = np.zeros((num_types, num_types), dtype=np.float32)
        self._edge_bytes = np.zeros(num_types)
        self._root_edge_bytes = np.zeros(len(self.roots))
        for relation, num_edges in schema.num_edges.items():
            src, dst = self.types[relation[0]], self.types[relation[2]]
            index_bytes = FLOAT_BYTES if schema.num_nodes[relation[0]] < 2**31 else ID_BYTES
            num_bytes = index_bytes * num_edges + ID_BYTES * (schema.num_nodes[relation[2]] + 1)
            self._into[dst, src] = 1
            self._edge_bytes[dst] += num_bytes
            if relation in self.roots:
                self._src[self.roots[relation], src] = 1
                self._root_edge_bytes[self.roots[relation]] = num_bytes
        counts = np.array([schema.num_nodes[kind] for kind in self.types], dtype=float)
        has_features = np.array([bool(schema.feat_dim.get(kind)) for kind in self.types])
        self.type_bytes = counts * row_bytes(schema, self.hidden)
        self._feature_bytes = self.type_bytes * has_features

    def evaluate(self, fractions: np.ndarray) -> Loads:
        """Computes the work of sets of roots.

        Args:
            fractions: [n, S] the fraction of the seeds for which each root is computed.
        """
        profile, rates = self.profile, self.rates
        num_hops = len(self._row_s)
        rows = profile.expect_rows(fractions)
        holds = fractions > 0
        main_s = rates.step_s + fractions @ self._root_s.sum(axis=0)
        behind_s = fractions @ self._root_sample_s.sum(axis=0)
        main_s = main_s + holds @ (self._root_s > 0).sum(axis=0) * rates.module_s
        root_modules, type_modules = [holds], [np.zeros(rows[0].shape, dtype=bool)]
        for hop in range(1, num_hops):
            above = rows[hop - 1]
            main_s = main_s + above @ self._row_s[hop]
            main_s = main_s + (above > 0) @ self._calls[hop] * rates.module_s
            behind_s = behind_s + above @ self._row_sample_s[hop]
            is_frontier = (above[:, self._target] > 0)[:, None]
            root_modules.append((holds & profile.uses_dst) | is_frontier)
            type_modules.append(above > 0)
        inputs = rows[-1]
        widths = np.array([self._width(kind, 1) for kind in self.types])
        if profile.uses_dst:
            inputs = inputs + profile.batch_size * (np.arange(len(widths)) == self._target)
        gathered_s = inputs * widths * FLOAT_BYTES * rates.gathered_byte_s
        main_s = main_s + gathered_s[:, self.learnable].sum(axis=1)
        behind_s = behind_s + np.delete(gathered_s, self.learnable, axis=1).sum(axis=1)
        own = np.ones((len(fractions), num_hops), dtype=bool)
        modules = np.concatenate([*root_modules, *type_modules, own], axis=1)
        return Loads(main_s, behind_s, inputs[:, self.learnable], modules)

    def add_owned(self, held_bytes: np.ndarray, owner: np.ndarray) -> np.ndarray:
        """Adds the memory of learnable rows to that of edges and features.

        Args:
            held_bytes: [n, P] edges and features.
            owner: [n, L] the part that owns each learnable type.

        Returns:
            [n, P] bytes.
        """
        is_owner = owner[:, None, :] == np.arange(held_bytes.shape[1])[:, None]
        return held_bytes + is_owner @ self.type_bytes[self.learnable]

    def count_memory(self, fractions: np.ndarray) -> np.ndarray:
        """Computes the memory of edges and features, [n], of sets of roots [n, S]."""
        reached = (fractions > 0).astype(np.float32) @ self._src > 0
        into = np.zeros_like(reached)
        read = reached
        for _ in range(len(self._row_s) - 1):
            into |= reached
            reached = reached.astype(np.float32) @ self._into > 0
            read = read | reached if self.profile.uses_dst else reached
        if self.profile.uses_dst:
            read = read.copy()
            read[:, self._target] = True
        # Where the target is in the frontier, roots are held whole among the relations into it.
        shares = np.where(into[:, [self._target]], 0.0, fractions)
        edges = into @ self._edge_bytes + shares @ self._root_edge_bytes
        return edges + read @ self._feature_bytes
