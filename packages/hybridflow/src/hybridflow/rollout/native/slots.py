"""State of decoding: which sample is at which place, its position, and which samples wait.

All ranks of a replica derive the same state from the drawn tokens, so only tokens are sent. All
memory that a pass reads and writes stays at fixed addresses, and only `SlotTable.settle` waits for
the device, so that a pass can be replayed as a CUDA graph.
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
    """All samples, those of a prompt adjacent.

    Attributes:
        tokens: prompt and response, int64 [samples, longest + 1]; the last column is scratch.
        prompt_lengths, lengths: of the prompt, and of both once a sample has ended.
        first: first token of each response.
        num_done: number of samples that have ended.
    """

    def __init__(self, prompts: Tensor, lengths: Tensor, sampling: Sampling) -> None:
        """Allocates rows for responses to prompts, int64 [prompts, width], padded on the right."""
        self.sampling, n = sampling, sampling.num_samples
        self.prompt_lengths = lengths.repeat_interleave(n).to(prompts.device)
        self.lengths = self.prompt_lengths + 1
        shape = (len(prompts) * n, prompts.shape[1] + sampling.max_new_tokens + 1)
        self.tokens = prompts.new_full(shape, _NO_TOKEN)
        self.tokens[:, : prompts.shape[1]] = prompts.repeat_interleave(n, 0)
        self.first = prompts.new_empty(len(self.tokens))
        self.num_done = 0
        self._ends = prompts.new_tensor(sampling.end_tokens)
        self._waiting = self.first[:0]

    def begin(self, first: Tensor) -> None:
        """Stores the samples' first tokens; samples that end with them are done."""
        self.first = first
        self.tokens[torch.arange(len(first), device=first.device), self.prompt_lengths] = first
        is_over = self.is_over(first, torch.ones_like(first))
        self._waiting = torch.nonzero(~is_over)[:, 0]
        self.num_done = len(first) - len(self._waiting)

    def is_over(self, tokens: Tensor, num_made: Tensor) -> Tensor:
        """Whether samples end with these tokens, each sample's num_made-th."""
        is_over = num_made >= self.sampling.max_new_tokens
        if not len(self._ends):
            return is_over
        return is_over | (tokens[:, None] == self._ends).any(1)

    @property
    def num_waiting(self) -> int:
        """Number of samples that have had no place yet."""
        return len(self._waiting)

    def take(self, count: int) -> Tensor:
        """Removes and returns the next waiting samples, at most `count`."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


class SlotRows(NamedTuple):
    """Inputs of a pass over the first places; int64 [rows] each.

    Attributes:
        sample: sample at each place.
        newest: its last token, the model's input.
        positions: position of that token.
        column: column of the next token in tables of samples; the scratch one for idle places.
        num_made: number of tokens that each sample has generated.
        read: the parts of the cache that each place attends to.
    """

    sample: Tensor
    newest: Tensor
    positions: Tensor
    column: Tensor
    num_made: Tensor
    read: decode.Places


class SlotTable:
    """Places whose samples go through the model together; places in use precede idle ones.

    An idle place may pad a pass: it has a slot of its own, attends to no prompt, and its tokens go
    to the scratch column. All idle places restart whenever a place becomes idle, so that none
    reaches the end of its slot.
    """

    def __init__(self, samples: SampleTable, slots: range) -> None:
        """Gives each slot of the cache a waiting sample."""
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
        """Inputs of the first `count` places, at least as many as are in use."""
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
        """Appends each sample's next token."""
        rows.newest.copy_(tokens)
        self._samples.tokens[rows.sample, rows.column] = tokens
        rows.read.made.copy_(rows.num_made)
        self._is_over[: len(tokens)] = self._samples.is_over(tokens, rows.num_made + 1)

    def settle(self) -> None:
        """Gives the places of samples that have ended to waiting samples."""
        free = torch.nonzero(self._is_over[: self._num_used].cpu())[:, 0]
        if len(free):
            there = free.to(self._table.device)
            length = self._prompt_lengths[there] + self._made[there] + 1
            self._samples.lengths[self._sample[there]] = length
            self._samples.num_done += len(free)
            self._fill(free)

    def _fill(self, free: Tensor) -> None:
        """Gives places (indices on the host) to waiting samples; places left over become idle."""
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
