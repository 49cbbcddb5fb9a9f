"""One rank's micro-batches of an epoch, the same number in every step and every epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hydraulis.config import Cost, check_lengths, keep_fitting
from hydraulis.planner.steps import count_steps, cut_epoch, plan_slots

__all__ = ["StepSampler"]


class StepSampler:
    """Indices of the documents of each micro-batch; some micro-batches may be empty.

    Every document that is kept is in exactly one micro-batch of an epoch.

    Attributes:
        all_lengths: tokens of all documents.
        lengths: the same, cut to the cap.
        longest: tokens of the longest document that is kept, cut to the cap.
        num_steps: steps of every epoch.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        cost: Cost,
        cap: int,
        num_ranks: int,
        rank: int,
        slots: int,
        seed: int,
        too_long: str,
    ) -> None:
        """Counts the steps; an epoch is cut into them when it is iterated.

        Args:
            lengths: tokens of all documents.
            cost: seconds of a micro-batch.
            cap: most tokens of a micro-batch.
            num_ranks: ranks.
            rank: this one.
            slots: micro-batches of a step on each rank.
            seed: of the shuffle; the epoch is added.
            too_long: what becomes of documents above the cap, see `keep_fitting`.

        Raises:
            SequenceTooLong: a document exceeds the cap, unless it is to be dropped or cut.
            ConfigError: a length is invalid, or no document is left.
        """
        self.all_lengths = check_lengths(lengths)
        self._kept = keep_fitting(self.all_lengths, cap, too_long)
        self.lengths = np.minimum(self.all_lengths, cap)
        self.longest = int(self.lengths[self._kept].max())
        self.num_steps = count_steps(self.lengths, self._kept, cap, num_ranks * slots)
        self._cost, self._cap, self._num_ranks, self._rank = cost, cap, num_ranks, rank
        self._slots, self._seed = slots, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Shuffles anew from the next iteration on."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Micro-batches of an epoch on this rank."""
        return self.num_steps * self._slots

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng((self._seed, self._epoch)).permutation(self._kept)
        num_slots = self._num_ranks * self._slots
        for step in cut_epoch(self.lengths, order, self.num_steps, self._cap, num_slots):
            planned = plan_slots(
                self.lengths[step], self._num_ranks, self._cost, self._cap, self._slots,
                may_be_empty=True,
            )  # fmt: skip
            assert planned is not None, "steps are cut to what fits"
            for part in planned[self._rank]:
                yield step[part].tolist()
