"""Rows that lie on the model's device, so that a step does not fetch them from the host.

Features are copied there. Learnable rows move there with their optimizer's state, and the host's are
out of date until `write_back`. After the cache of Heta (PVLDB 18(9)), which holds both kinds.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

__all__ = ["DeviceRows"]


class DeviceRows:
    """Some of a table's rows, on a device.

    Args:
        rows: the table [owned rows, dim], on the host.
        state: the optimizer's, by name, of the same rows.
        where: positions in the table, each once.
        device: where they go.

    Attributes:
        rows: their values there [positions, dim].
        state: the optimizer's, there.
    """

    def __init__(
        self,
        rows: Float[Tensor, "owned dim"],
        state: dict[str, Tensor],
        where: Int64[Tensor, " positions"],
        device: torch.device,
    ) -> None:
        self._host, self._host_state, self._where = rows, state, where
        self._slot = torch.full((len(rows),), -1, dtype=torch.int32)
        self._slot[where] = torch.arange(len(where), dtype=torch.int32)
        self.rows = rows[where].to(device)
        self.state = {name: values[where].to(device) for name, values in state.items()}

    def slots(self, where: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Returns where rows of the table lie in `rows`; -1 for those that lie on the host."""
        return self._slot[where].long()

    def write_back(self) -> None:
        """Copies rows and state to the host."""
        self._host[self._where] = self.rows.to(self._host.device)
        for name, values in self.state.items():
            self._host_state[name][self._where] = values.to(self._host.device)

    def read_again(self) -> None:
        """Copies rows and state from the host, where they have changed."""
        self.rows.copy_(self._host[self._where])
        for name, values in self.state.items():
            values.copy_(self._host_state[name][self._where])
