"""A model with its memory as one module, for training loops that sample by themselves.

Such a loop, gnnflow's `ContinualTrainer` for one, samples neighbours of events, asks the module for
embeddings, and tells it once of each event afterwards. The hooks are `reset_state`, `commit`, `state` and
`load_state`; what is sampled is a `TemporalBlock` a hop, so that neither package knows the other.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mspipe.data.sampler import Sampled, index_of
from mspipe.memory.node_memory import NodeMemory
from mspipe.models.base import MemoryModel
from shared.errors import ConfigError, DataError

__all__ = ["Hooked"]


class Hooked(nn.Module):
    """TGN or JODIE over samples of others, remembering what it is told of.

    Args:
        model: one that sends mail to the ends of events only.
        memory: its rows; made to grow with the nodes that come.

    Attributes:
        layout, uses_time, dim, num_layers: what a loop asks a model for.

    Raises:
        ConfigError: the model's mail needs neighbours when it is sent, as APAN's does, or the memory is
            not for it.
    """

    layout: Literal["mfg"] = "mfg"
    uses_time: bool = True
    num_layers: int = 1

    def __init__(self, model: MemoryModel, memory: NodeMemory) -> None:
        super().__init__()
        if model.slots != 1:
            raise ConfigError(
                f"Hooked: expected a model that keeps one message a node, such as TGN, got "
                f"{type(model).__name__}, whose mail goes to neighbours; train it by a Pipeline"
            )
        layout = memory.layout
        if (layout.dim, layout.mail_dim, layout.slots) != (model.dim, model.mail_dim, 1):
            raise ConfigError(f"memory: expected rows for {type(model).__name__}, got {layout}")
        self.model, self.memory, self.dim = model, memory, model.dim

    def forward(self, sample: Any, inputs: Any) -> Float[Tensor, "num_roots dim"]:
        """Embeds the roots.

        Args:
            sample: whose `layers[0]` is a `TemporalBlock`.
            inputs: whose `edges[0]` has `values` and `index`, one a sampled edge; not looked at where
                the model has no features of edges.

        Raises:
            DataError: features are missing or of another width.
        """
        sampled = Sampled.of(sample.layers[0])
        self._grow(sampled.nodes)
        updated = self.model.update(self.memory.read(sampled.nodes))
        edge_rows = torch.empty(len(sampled.eids), 0)
        if self.model.edge_dim:
            if not inputs.edges or inputs.edges[0].values.shape[1] != self.model.edge_dim:
                raise DataError(
                    f"expected {self.model.edge_dim} features an edge, got none or others"
                )
            edge_rows = inputs.edges[0].values[inputs.edges[0].index]
        return self.model.embed(sampled, updated, edge_rows)

    def reset_state(self) -> None:
        """Forgets everything."""
        self.memory.reset()

    @torch.no_grad()
    def commit(self, events: Any) -> None:
        """Remembers events: applies the mail of their ends, and leaves them new one.

        Args:
            events: with `src`, `dst`, `t` and `features`, by time; each is told once, in order.
        """
        if not len(events):
            return
        nodes, roots = index_of(torch.cat([events.src, events.dst]))
        self._grow(nodes)
        none, no_rows = torch.empty(0), torch.empty(0, dtype=torch.int64)
        sampled = Sampled(
            nodes, roots, events.t.double().repeat(2), no_rows, none.double(), no_rows,
            torch.zeros(len(roots) + 1, dtype=torch.int64),
        )  # fmt: skip
        state = self.memory.read(nodes)
        updated = self.model.update(state)
        rows = events.features if self.model.edge_dim else torch.empty(len(events), 0)
        new = self.model.mail(sampled, torch.arange(len(nodes)), state, updated, events.t, rows)
        self.memory.write(nodes, *new)

    def state(self) -> dict[str, Tensor]:
        """What is remembered, as a copy."""
        return self.memory.snapshot()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Remembers what `state` gave, and nothing else."""
        self.memory.restore(state)

    def _grow(self, nodes: Tensor) -> None:
        # A root may be any id at all; one that memory has never met gets a fresh row.
        if len(nodes) and int(nodes[-1]) >= self.memory.num_nodes:
            self.memory.grow(max(int(nodes[-1]) + 1, 3 * self.memory.num_nodes // 2))
