"""Documents and their lengths, and a batch sampler whose ranks finish together."""

from __future__ import annotations

import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hydraulis.config import (
    MOST_TOKENS,
    Cost,
    SequenceTooLong,
    check_cost,
    check_count,
    check_lengths,
)
from hydraulis.planner.steps import SYNCS, cut_steps, plan_ranks
from shared.errors import ConfigError, DataError
from shared.files import read_text

__all__ = ["BalancedBatchSampler", "python_source", "read_lengths"]

_LOG = logging.getLogger(__name__)


def python_source(limit: int | None = None) -> list[bytes]:
    """The standard library's own files as documents of bytes: real ones, with a long tail.

    They come with every Python; about 1,700 files, half of them below 7 KB, the largest over 700 KB.

    Args:
        limit: most documents, in the order of their paths; None for all.

    Raises:
        DataError: this Python has no source files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, inner, names in os.walk(root):
        # What others installed may be many times Python's own.
        inner[:] = set(inner) - {"site-packages", "dist-packages"}
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths.sort()
    found = [text for text in (path.read_bytes() for path in paths[:limit]) if text]
    if not found:
        raise DataError(f"{root}: expected Python's own source files, got none")
    return found


def read_lengths(path: str | Path) -> np.ndarray:
    """Lengths from a text file, a whole number above 0 on each line.

    Raises:
        DataError: the file cannot be read or is empty, or a line is no such number; names the line.
    """
    path = Path(path)
    lines = read_text(path, "lengths, a number on each line").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text:
            # Python refuses to read numbers of thousands of digits.
            is_number = text.isdecimal() and len(text) < 20
            if not is_number or not 0 < int(text) <= MOST_TOKENS:
                raise DataError(
                    f"{path}:{number}: expected a whole number of tokens above 0, got {text:.40}; at most "
                    f"{MOST_TOKENS} stand on each line, a document's tokens, and no header"
                )
            found.append(int(text))
    if not found:
        raise DataError(f"{path}: expected lengths, a number on each line, got blank lines")
    return np.array(found)


class BalancedBatchSampler:
    """Micro-batches of one rank, so that all ranks finish together; for a DataLoader's `batch_sampler`.

    A seeded shuffle is cut into steps; each step's documents are dispatched to the ranks and packed
    under the cap. All ranks make the same plan from the same arguments, so nothing is sent. Each document
    comes once an epoch.

    Ranks have the same number of micro-batches in a step where documents allow it. Where they do not (three
    documents above half the cap on two ranks), ranks' numbers differ with sync="step": take `steps()`, and
    let ranks meet once a step. Under DDP a loop over the sampler itself, where ranks meet in each
    micro-batch, would pair micro-batches of different steps and wait for ever at the end; a warning says
    so. With sync="micro-batch" some micro-batches are then empty lists, which a
    rank has to take part in with a row that nothing is learned of.
    """

    def __init__(
        self,
        lengths: Sequence[float] | np.ndarray,
        *,
        tokens_per_step: int,
        num_ranks: int,
        rank: int,
        cost: Cost,
        cap: int,
        seed: int = 0,
        sync: str = "step",
    ) -> None:
        """Checks the arguments; epochs are planned when they are iterated.

        Args:
            lengths: tokens of all documents.
            tokens_per_step: tokens of a step over all ranks, exceeded by part of a document.
            num_ranks: ranks.
            rank: this one.
            cost: seconds of a micro-batch.
            cap: most tokens of a micro-batch.
            seed: of the shuffle; the epoch is added.
            sync: "step" where ranks wait for one another after each step, "micro-batch" where they
                do after each micro-batch, as under FSDP and where gradients are summed in each.

        Raises:
            SequenceTooLong: a document exceeds the cap.
            ConfigError: an argument is invalid, or there are fewer documents than ranks.
        """
        for name, value in {
            "tokens_per_step": tokens_per_step, "num_ranks": num_ranks, "cap": cap,
        }.items():  # fmt: skip
            check_count(name, value)
        check_cost(cost, is_required=True)
        self.lengths = check_lengths(lengths)
        if isinstance(rank, bool) or rank not in range(num_ranks):
            raise ConfigError(f"rank: expected 0 to {num_ranks - 1}, got {rank!r}")
        if sync not in SYNCS:
            raise ConfigError(f"sync: expected one of {', '.join(SYNCS)}, got {sync!r}")
        if len(self.lengths) < num_ranks:
            raise ConfigError(
                f"expected at least a document for each of {num_ranks} ranks, got {len(self.lengths)}"
            )
        if self.lengths.max() > cap:
            at = int(self.lengths.argmax())
            raise SequenceTooLong(at, int(self.lengths[at]), cap)
        self.tokens_per_step, self.num_ranks, self.rank = tokens_per_step, num_ranks, rank
        self.cost, self.cap, self.seed, self.sync = cost, cap, seed, sync
        self._epoch = 0
        self._counted: tuple[int, int] | None = None
        self._has_warned = False

    def set_epoch(self, epoch: int) -> None:
        """Shuffles anew from the next iteration on."""
        self._epoch = epoch

    def steps(self) -> Iterator[list[list[int]]]:
        """This rank's micro-batches, step by step: indices of documents."""
        for ranks in self._plan_steps():
            yield ranks[self.rank]

    def __len__(self) -> int:
        """This rank's micro-batches in the epoch that was set, for which all of them are planned."""
        if self._counted is None or self._counted[0] != self._epoch:
            self._counted = self._epoch, sum(map(len, self.steps()))
        return self._counted[1]

    def __iter__(self) -> Iterator[list[int]]:
        for ranks in self._plan_steps():
            counts = sorted(set(map(len, ranks)))
            if len(counts) > 1 and not self._has_warned:
                self._has_warned = True
                _LOG.warning(
                    "ranks have %d to %d micro-batches in a step: a loop in which ranks meet in each one mixes "
                    "steps and hangs; take steps() and let ranks meet once a step, or sync='micro-batch'",
                    counts[0], counts[-1],
                )  # fmt: skip
            yield from ranks[self.rank]

    def _plan_steps(self) -> Iterator[list[list[list[int]]]]:
        """Documents of each step, by rank and micro-batch."""
        draw = np.random.default_rng((self.seed, self._epoch))
        order = draw.permutation(len(self.lengths))
        for step in cut_steps(self.lengths, order, self.tokens_per_step, self.num_ranks):
            planned = plan_ranks(self.lengths[step], self.num_ranks, self.cost, self.cap, self.sync)
            yield [[step[part].tolist() for part in parts] for parts in planned]
