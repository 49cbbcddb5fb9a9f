"""Which sample stands at which place, how far it is, and who comes next.

Every rank of a replica keeps these books alike, from the tokens that its last stage draws, so that
nothing but tokens has to be told. All that a pass reads and writes stays where it is in memory, and
only `SlotTable.settle` waits for the device: what comes before can be replayed as a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.rollout.sampling import Sampling
from shared.kernels import decode

__all__ = ["SampleTable", "SlotRows", "SlotTable"]

_NO_TOKEN = 0


class SampleTable:
    """All samples, those of a prompt one after another.

    Attributes:
        tokens: prompt and response, int64 [samples, longest + 1]; nobody looks at the last column.
        prompt_lengths, lengths: of the prompt, and of both once a sample has ended.
        first: the token that each begins with.
        num_done: how many have ended.
    """

    def __init__(self, prompts: Tensor, lengths: Tensor, sampling: Sampling) -> None:
        """Makes room for responses to prompts, int64 [prompts, width], of some lengths."""
        self.sampling, n = sampling, sampling.num_samples
        self.prompt_lengths = lengths.repeat_interleave(n).to(prompts.device)
        self.lengths = self.prompt_lengths + 1
        shape = (len(prompts) * n, prompts.shape[1] + sampling.max_new_tokens + 1)
        self.tokens = prompts.new_full(shape, _NO_TOKEN)
        self.tokens[:, : prompts.shape[1]] = prompts.repeat_interleave(n, 0)
        self.first = prompts.new_empty(len(self.tokens))
        self.num_done = 0
        self._waiting = self.first[:0]

    def begin(self, first: Tensor) -> None:
        """Takes the samples' first tokens; those whose last it is have ended."""
        self.first = first
        self.tokens[torch.arange(len(first), device=first.device), self.prompt_lengths] = first
        is_over = self.is_over(first, torch.ones_like(first))
        self._waiting = torch.nonzero(~is_over)[:, 0]
        self.num_done = len(first) - len(self._waiting)

    def is_over(self, tokens: Tensor, num_made: Tensor) -> Tensor:
        """Whether samples end with these tokens, their num_made-th."""
        is_over = num_made >= self.sampling.max_new_tokens
        return is_over if self.sampling.end_token is None else (
            is_over | (tokens == self.sampling.end_token)
        )  # fmt: skip

    @property
    def num_waiting(self) -> int:
        """How many have no place yet."""
        return len(self._waiting)

    def take(self, count: int) -> Tensor:
        """The next samples that wait, at most so many."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


class SlotRows(NamedTuple):
    """The first places, as a pass through the model takes them; int64 [rows] each.

    Attributes:
        sample: at each place.
        newest: its last token, which the model is to read.
        positions: where that stands.
        column: of the next token, in tables of samples; the last one for a place that is idle.
        num_made: tokens that each sample has.
        read: what each place reads of the cache.
    """

    sample: Tensor
    newest: Tensor
    positions: Tensor
    column: Tensor
    num_made: Tensor
    read: decode.Places


class SlotTable:
    """SlotTable whose samples go through the model together; those in use come before idle ones.

    An idle place may go through too, to fill up a pass: it has a slot of its own and reads no prompt,
    and what is drawn for it goes where nobody looks. It begins anew when no sample is younger, so
    that it does not come to the end of its slot.
    """

    def __init__(self, samples: SampleTable, slots: range) -> None:
        """Gives each slot of the cache a sample that waits."""
        self._samples, self._num_used = samples, len(slots)
        device = samples.tokens.device
        self._table = torch.zeros(6, len(slots), dtype=torch.int64, device=device)
        self._sample, self._newest, self._slots, self._prompts, self._prompt_lengths, self._made = (
            self._table
        )
        self._is_idle, self._is_over = torch.zeros(2, len(slots), dtype=torch.bool, device=device)
        self._slots += torch.arange(slots.start, slots.stop, device=device)
        self._fill(torch.arange(len(slots)))

    def __len__(self) -> int:
        return self._num_used

    def rows(self, count: int) -> SlotRows:
        """So many of the first places, as many as are in use or more."""
        sample, newest, slots, prompts, prompt_lengths, made = self._table[:, :count].unbind()
        positions = prompt_lengths + made
        return SlotRows(
            sample=sample,
            newest=newest,
            positions=positions,
            column=(positions + 1).masked_fill_(
                self._is_idle[:count], self._samples.tokens.shape[1] - 1
            ),
            num_made=made + 1,
            read=decode.Places(slots, prompts, prompt_lengths, made),
        )

    def push(self, rows: SlotRows, tokens: Tensor) -> None:
        """Gives each sample its next token."""
        rows.newest.copy_(tokens)
        self._samples.tokens[rows.sample, rows.column] = tokens
        rows.read.made.copy_(rows.num_made)
        self._is_over[: len(tokens)] = self._samples.is_over(tokens, rows.num_made + 1)

    def settle(self) -> None:
        """Gives the places of those that have ended to others."""
        free = torch.nonzero(self._is_over[: self._num_used].cpu())[:, 0]
        if len(free):
            there = free.to(self._table.device)
            length = self._prompt_lengths[there] + self._made[there] + 1
            self._samples.lengths[self._sample[there]] = length
            self._samples.num_done += len(free)
            self._fill(free)

    def _fill(self, free: Tensor) -> None:
        """Gives places, told by the host, to samples that wait; if none does, they are given up."""
        device, used = self._table.device, self._num_used
        fresh = self._samples.take(len(free))
        places, left = free[: len(fresh)].to(device), free[len(fresh) :]
        self._sample[places], self._newest[places] = fresh, self._samples.first[fresh]
        self._prompts[places] = fresh // self._samples.sampling.num_samples
        self._prompt_lengths[places] = self._samples.prompt_lengths[fresh]
        self._made[places] = 0
        if len(left):
            is_kept = torch.ones(used, dtype=torch.bool)
            is_kept[left] = False
            order = torch.cat([torch.nonzero(is_kept)[:, 0], left]).to(device)
            self._table[:, :used] = self._table[:, order]
            self._num_used = used = used - len(left)
            self._is_idle[used:] = True
            self._prompt_lengths[used:] = self._made[used:] = 0
