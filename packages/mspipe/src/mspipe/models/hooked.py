"""A model with its memory as one module, for training loops that do their own sampling.

Such a loop, for example gnnflow's `ContinualTrainer`, samples neighbours of events, calls the
module for embeddings, and afterwards passes each event once to `commit`. The other hooks are
`reset_state`, `state` and `load_state`. Samples are `TemporalBlock`s, one per hop, so that neither
package depends on the other.
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
    """TGN or JODIE with its memory, for externally sampled blocks.

    Args:
        model: a model that sends mail only to the ends of events.
        memory: the model's memory; grows when new nodes appear.

    Attributes:
        layout, uses_time, dim, num_layers: read by the training loop.

    Raises:
        ConfigError: the model sends mail to neighbours, as APAN does, or the memory's layout does
            not match the model.
    """

    layout: Literal["mfg"] = "mfg"
    uses_time: bool = True
    num_layers: int = 1

    def __init__(self, model: MemoryModel, memory: NodeMemory) -> None:
        super().__init__()
        if model.slots != 1:
            raise ConfigError(
                f"Hooked: expected a model that keeps one message a node, such as TGN, got "
                f"{type(model).__name__}, which sends mail to neighbours; train it with a Pipeline"
            )
        layout = memory.layout
        if (layout.dim, layout.mail_dim, layout.slots) != (model.dim, model.mail_dim, 1):
            raise ConfigError(f"memory: expected rows for {type(model).__name__}, got {layout}")
        self.model, self.memory, self.dim = model, memory, model.dim

    def forward(self, sample: Any, inputs: Any) -> Float[Tensor, "num_roots dim"]:
        """Embeds the roots.

        Args:
            sample: an object whose `layers[0]` is a `TemporalBlock`.
            inputs: an object whose `edges[0]` has `values`, rows of features, and `index`, the row
                of each sampled edge; ignored if the model has no edge features.

        Raises:
            DataError: features are missing or of another width.
        """
        block = sample.layers[0]
        if self.memory.start is None and len(block.roots):
            self.memory.begin_at(block.root_times.min().item())
        sampled = Sampled.of(block, self.memory.start or 0.0)
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
        """Resets the memory."""
        self.memory.reset()

    @torch.no_grad()
    def commit(self, events: Any) -> None:
        """Updates the memory with events: applies the mail of their ends, then sends new mail.

        Args:
            events: an object with `src`, `dst`, `t` and `features`, by time; each event is to be
                committed once, in order.
        """
        if not len(events):
            return
        # A rank embeds its share of the first events, and commits all of them.
        if self.memory.start is None or events.t[0] < self.memory.start:
            self.memory.begin_at(events.t[0].item())
        nodes, roots = index_of(torch.cat([events.src, events.dst]))
        self._grow(nodes)
        none, no_rows = torch.empty(0), torch.empty(0, dtype=torch.int64)
        sampled = Sampled(
            nodes, roots, events.t.double().repeat(2), no_rows, none.double(), no_rows,
            torch.zeros(len(roots) + 1, dtype=torch.int64), self.memory.start or 0.0,
        )  # fmt: skip
        state = self.memory.read(nodes)
        updated = self.model.update(state)
        rows = events.features if self.model.edge_dim else torch.empty(len(events), 0)
        new = self.model.mail(sampled, torch.arange(len(nodes)), state, updated, events.t, rows)
        self.memory.write(nodes, *new)

    def state(self) -> dict[str, Tensor]:
        """A copy of the memory."""
        return self.memory.snapshot()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restores the memory from a result of `state`."""
        self.memory.restore(state)

    def _grow(self, nodes: Tensor) -> None:
        # A root may have any id; a new node gets an initial row.
        if len(nodes) and int(nodes[-1]) >= self.memory.num_nodes:
            self.memory.grow(max(int(nodes[-1]) + 1, 3 * self.memory.num_nodes // 2))
