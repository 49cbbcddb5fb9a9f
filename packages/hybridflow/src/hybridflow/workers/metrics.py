"""Metrics of training steps: a mapping that waits for the steps when it is read.

So the updates of two models on different ranks run at once, although the program calls one after
the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.future import Future, Joined
from hybridflow.workers.worker_group import WorkerGroup

__all__ = ["Metrics", "steps"]


class Metrics(Mapping[str, float]):
    """Means over some optimizer steps."""

    def __init__(self, futures: Sequence[Future]) -> None:
        """Averages the steps' results, each a list with one mapping per replica."""
        self._futures = futures
        self._means: dict[str, float] | None = None

    def result(self) -> dict[str, float]:
        """Waits for all steps.

        Raises:
            RankFailure: if a rank raised or died.
        """
        if self._means is None:
            # Every replica returns the same values, already reduced over replicas.
            told = [future.result()[0] for future in self._futures]
            names = dict.fromkeys(name for step in told for name in step)
            found = {name: [step[name] for step in told if name in step] for name in names}
            self._means = {name: sum(values) / len(values) for name, values in found.items()}
        return self._means

    def __getitem__(self, name: str) -> float:
        return self.result()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.result())

    def __len__(self) -> int:
        return len(self.result())

    def __repr__(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in self.items())


def steps(
    group: WorkerGroup,
    batch: Batch | Future | Joined,
    settings: Any,
    num_updates: int,
    num_epochs: int,
) -> Metrics:
    """Starts a batch's optimizer steps: `num_updates` mini-batches in each of `num_epochs`."""
    rows = Joined([(batch, None)]) if isinstance(batch, Batch | Future) else batch
    return Metrics(
        [
            group.call("update", rows.share(k, num_updates), settings)
            for _ in range(num_epochs)
            for k in range(num_updates)
        ]
    )
