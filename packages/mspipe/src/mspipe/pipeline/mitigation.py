"""Staleness mitigation after MSPipe: stale states mixed with fresher ones of similar nodes.

Roots of a batch whose memory is older than that of 99 % of the roots are mixed with the states of
nodes that met most of the same neighbours. The weight is fitted during training by least squares:
the writes that a stale state missed are known shortly afterwards, and the weight is the one whose
mixes would have been closest to the true states.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mspipe.data.events import Events
from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.row_layout import State
from mspipe.models.base import newest_mail
from mspipe.pipeline.iteration import Iteration
from mspipe.pipeline.report import Report
from mspipe.pipeline.written_rows import WrittenRows
from shared.errors import ConfigError

__all__ = ["Mitigation", "StaleMix", "similar_nodes"]

_NUM_BANDS, _BAND_ROWS, _BESIDE = 16, 2, 8


class Mitigation:
    """Finds the stalest states of a batch and mixes them with those of similar nodes.

    Args:
        events: past events; nodes that met the same neighbours in them are similar.
        num_similar: maximum number of similar nodes that a state is mixed with.
        quantile: quantile of the ages of the roots' memory, in [0, 1), above which they are mixed.
        weight: weight of a node's own state in the mix, in [0, 1]; None fits it.
        decay: factor in [0, 1) on the sums of earlier fits at each `fit`, of which an iteration has
            one at most.
        seed: seed of MinHash.

    Attributes:
        similar: int64 [num_nodes, num_similar], the most similar first, padded with -1.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        events: Events,
        num_similar: int = 10,
        *,
        quantile: float = 0.99,
        weight: float | None = None,
        decay: float = 0.99,
        seed: int = 0,
    ) -> None:
        if num_similar < 1 or not 0 <= quantile < 1 or not 0 <= decay < 1:
            raise ConfigError(
                f"expected num_similar of at least 1, quantile and decay in [0, 1), got {num_similar}, "
                f"{quantile}, {decay}"
            )
        if weight is not None and not 0 <= weight <= 1:
            raise ConfigError(f"weight: expected a share in [0, 1], got {weight}")
        self.similar = similar_nodes(events, num_similar, seed)
        self._quantile, self._given, self._decay = quantile, weight, decay
        self._dot = self._square = 0.0

    @property
    def weight(self) -> float:
        """Weight of a node's own state in the mix; 1 until something is fitted."""
        if self._given is not None:
            return self._given
        return min(1.0, max(0.0, self._dot / self._square)) if self._square > 0 else 1.0

    def asked(
        self, nodes: Int64[Tensor, " num_rows"], is_root: Bool[Tensor, " num_rows"], age: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The stale roots of a batch, and the nodes similar to each.

        Args:
            nodes: nodes of a batch.
            is_root: which of them are roots whose state was written before.
            age: [num_rows], time from the node's memory to the batch's last event.

        Returns:
            Indices into `nodes` [num_stale], and nodes [num_stale, num_similar], padded with -1.
        """
        roots = (is_root & (nodes < len(self.similar))).nonzero()[:, 0]
        if not len(roots):
            return roots, self.similar[:0]
        bound = torch.quantile(age[roots].float(), self._quantile)
        stale = roots[age[roots].float() > bound]
        return stale, self.similar[nodes[stale]]

    def mixed(
        self, own: Float[Tensor, "n dim"], times: Tensor, others: State, is_there: Tensor
    ) -> tuple[Float[Tensor, "n dim"], Bool[Tensor, " n"], Float[Tensor, "n dim"]]:
        """Mixes states with the mean state of those similar nodes that are fresher.

        Args:
            own: stale states.
            times: [n], their times.
            others: states of the similar nodes, [n * num_similar] rows.
            is_there: [n, num_similar], false for padding in `others`.

        Returns:
            The states, mixed where a similar node is fresher; which ones were mixed; the means.
        """
        count, num_similar = is_there.shape
        is_fresher = is_there & (others.memory_times.view(count, num_similar) > times[:, None])
        weights = is_fresher.to(own.dtype)
        total = weights.sum(1, keepdim=True)
        rows = others.memory.reshape(count, num_similar, -1)
        mean = (weights[:, None] @ rows)[:, 0] / total.clamp(min=1)
        is_mixed = total[:, 0] > 0
        mix = self.weight * own + (1 - self.weight) * mean
        return torch.where(is_mixed[:, None], mix, own), is_mixed, mean

    def fit(
        self,
        stale: Float[Tensor, "n dim"],
        mean: Float[Tensor, "n dim"],
        fresh: Float[Tensor, "n dim"],
    ) -> None:
        """Updates the weight from stale states, means of similar nodes' states, and true states.

        Call it once an iteration, with all that is known by then.
        """
        apart = (stale - mean).double()
        self._dot = self._decay * self._dot + float(((fresh - mean).double() * apart).sum())
        self._square = self._decay * self._square + float((apart * apart).sum())


class StaleMix:
    """What a run does with its stalest states.

    Args:
        mitigation: what is mixed, and with which weight.
        memory: the store of the rows.
        written_rows: the rows of the latest iterations, to which the weight is fitted.
        report: updated with the number of states mixed and the weight.
    """

    def __init__(
        self,
        mitigation: Mitigation,
        memory: NodeMemory,
        written_rows: WrittenRows,
        report: Report,
    ) -> None:
        self._mitigation, self._memory = mitigation, memory
        self._written_rows, self._report = written_rows, report

    def fetch(self, work: Iteration) -> int:
        """Fetches rows of nodes similar to stale ones; returns their number."""
        assert work.rows is not None, "rows were fetched before"
        sampled = work.sampled
        is_root = torch.zeros(len(sampled.nodes), dtype=torch.bool)
        is_root[sampled.roots] = True
        now = work.batch.events.t[-1].double()
        state = self._memory.unpack(work.rows)
        # Nodes that were never written have the greatest age but no state to mix.
        is_root &= newest_mail(state)[0].cpu()
        age = now - state.memory_times.cpu()
        stale, asked = self._mitigation.asked(sampled.nodes, is_root, age)
        rows = self._memory.read_rows(asked.clamp(min=0).flatten())
        work.similar = stale, asked, rows.to(work.rows.device, non_blocking=True)
        return len(rows)

    def mix(self, work: Iteration, state: State) -> State:
        """Returns the state with the stalest rows mixed, and fits the weight of the mix."""
        assert work.similar is not None, "rows of similar nodes were fetched before"
        stale, asked, rows = work.similar
        if not len(stale):
            return state
        device, mitigation = rows.device, self._mitigation
        here = stale.to(device)
        own = state.memory[here]
        mix, is_mixed, mean = mitigation.mixed(
            own, state.memory_times[here], self._memory.unpack(rows), (asked >= 0).to(device)
        )
        self._report.num_mixed += int(is_mixed.sum())
        self._report.weight = mitigation.weight
        self._fit(work, own, mean, is_mixed)
        return state._replace(memory=state.memory.index_copy(0, here, mix))

    def _fit(self, work: Iteration, own: Tensor, mean: Tensor, is_mixed: Tensor) -> None:
        """Fits the weight to the writes that the fetch missed, which are computed by now."""
        assert work.similar is not None, "rows of similar nodes were fetched before"
        stale, device = work.similar[0], own.device
        known, fresh = [], []
        for owner in range(work.num_committed, work.index):
            is_known = ((work.owners[stale] == owner).to(device) & is_mixed).nonzero()[:, 0]
            kept = self._written_rows.get(owner)
            if len(is_known) and kept is not None:
                place = work.places[stale[is_known.cpu()]].to(device)
                known.append(is_known)
                fresh.append(self._memory.layout.unpack(kept[place]).memory)
        if known:
            found = torch.cat(known)
            self._mitigation.fit(own[found], mean[found], torch.cat(fresh))


def similar_nodes(events: Events, num_similar: int, seed: int = 0) -> Int64[Tensor, "nodes k"]:
    """For each node the nodes that met most of the same neighbours, the most similar first.

    Jaccard similarity by MinHash (Broder, 1997): nodes are sorted by each band of hashes, the next
    few nodes of an equal band are candidates, and the share of equal hashes ranks them. Rows are
    padded with -1. O(events + nodes log nodes).
    """
    num_nodes, num_hashes = events.num_nodes, _NUM_BANDS * _BAND_ROWS
    if not num_nodes:
        return torch.empty(0, num_similar, dtype=torch.int64)
    random = np.random.default_rng([seed, 0x4D48])
    factors = random.integers(1, 2**31, (2, num_hashes), dtype=np.uint64) | np.uint64(1)
    here = torch.cat([events.src, events.dst]).numpy()
    there = torch.cat([events.dst, events.src]).numpy().astype(np.uint64)
    signs = np.full((num_hashes, num_nodes), 2**63, np.uint64)
    for number, (factor, shift) in enumerate(factors.T):
        mixed = (there + np.uint64(1)) * factor * np.uint64(0x9E3779B97F4A7C15) + shift
        mixed ^= mixed >> np.uint64(29)
        np.minimum.at(signs[number], here, mixed >> np.uint64(1))
    has_met = np.zeros(num_nodes, bool)
    has_met[here] = True
    nodes = np.flatnonzero(has_met)
    candidates = np.full((num_nodes, _NUM_BANDS * _BESIDE), -1, np.int64)
    for band in range(_NUM_BANDS):
        rows = signs[band * _BAND_ROWS : (band + 1) * _BAND_ROWS, nodes]
        order = np.lexsort((random.random(len(nodes)), *rows))
        ordered, keys = nodes[order], rows[:, order]
        for step in range(1, _BESIDE + 1):
            is_equal = (keys == np.roll(keys, -step, 1)).all(0)
            is_equal &= ordered != np.roll(ordered, -step)
            found = np.where(is_equal, np.roll(ordered, -step), -1)
            candidates[ordered, band * _BESIDE + step - 1] = found
    found = np.full((num_nodes, num_similar), -1, np.int64)
    for part in np.array_split(nodes, max(1, len(nodes) // 4096)):
        mine = np.sort(candidates[part], 1)
        mine[:, 1:][mine[:, 1:] == mine[:, :-1]] = -1  # each candidate once
        share = (signs[:, mine] == signs[:, part][..., None]).mean(0)
        share[mine < 0] = -1
        best = np.argsort(-share, 1, kind="stable")[:, :num_similar]
        taken = np.take_along_axis(mine, best, 1)
        found[part, : taken.shape[1]] = taken
    return torch.from_numpy(found)
