"""Mitigation within a run: fetches the rows of similar nodes, mixes states, and fits the weight."""

from __future__ import annotations

import torch

from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.row_layout import State
from mspipe.models.base import newest_mail
from mspipe.pipeline.iteration import Iteration
from mspipe.pipeline.mitigation import Mitigation
from mspipe.pipeline.report import Report
from mspipe.pipeline.written_rows import WrittenRows

__all__ = ["StaleMix"]


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
        state = self._memory.layout.unpack(work.rows)
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
            own, state.memory_times[here], self._memory.layout.unpack(rows), (asked >= 0).to(device)
        )
        self._report.num_mixed += int(is_mixed.sum())
        self._report.weight = mitigation.weight
        self._fit(work, own, mean, is_mixed)
        return state._replace(memory=state.memory.index_copy(0, here, mix))

    def _fit(
        self, work: Iteration, own: torch.Tensor, mean: torch.Tensor, is_mixed: torch.Tensor
    ) -> None:
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
