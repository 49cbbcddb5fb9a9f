"""Which sample stands at which place, how far it is, and who comes next.

Every rank of a replica keeps these books alike, from the tokens that its last stage draws, so that
nothing but tokens has to be told.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.rollout.sampling import Sampling
from shared.kernels import decode

__all__ = ["Places", "Samples"]

_NO_TOKEN = 0


class Samples:
    """All samples, those of a prompt one after another.

    Attributes:
        tokens: prompt and response, int64 [samples, longest].
        prompt_lengths, lengths: of the prompt, and of both once a sample has ended.
        first: the token that each begins with.
        num_done: how many have ended.
    """

    def __init__(self, prompts: Tensor, lengths: Tensor, sampling: Sampling) -> None:
        """Makes room for responses to prompts, int64 [prompts, width], of some lengths."""
        self.sampling, n = sampling, sampling.num_samples
        self.prompt_lengths = lengths.repeat_interleave(n).to(prompts.device)
        self.lengths = self.prompt_lengths + 1
        shape = (len(prompts) * n, prompts.shape[1] + sampling.max_new_tokens)
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


class Places:
    """Places whose samples go through the model together.

    Attributes:
        sample: at each place.
        newest: its last token, which the model is to read.
    """

    def __init__(self, samples: Samples, slots: range) -> None:
        """Gives each slot of the cache a sample that waits."""
        self._samples = samples
        device = samples.tokens.device
        self._slots = torch.arange(slots.start, slots.stop, device=device)
        self.sample, self.newest, self._prompts, self._prompt_lengths, self._made = (
            torch.zeros_like(self._slots) for _ in range(5)
        )
        self._fill(torch.arange(len(slots), device=device))

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def read(self) -> decode.Places:
        """What each place reads of the cache."""
        return decode.Places(self._slots, self._prompts, self._prompt_lengths, self._made)

    @property
    def positions(self) -> Tensor:
        """Where the newest tokens stand."""
        return self._prompt_lengths + self._made

    @property
    def num_made(self) -> Tensor:
        """Tokens that each sample has."""
        return self._made + 1

    def advance(self, tokens: Tensor) -> None:
        """Gives each sample its next token, and the places of those that have ended to others."""
        self.newest = tokens
        self._made += 1
        at = self.positions
        self._samples.tokens[self.sample, at] = tokens
        is_over = self._samples.is_over(tokens, self.num_made)
        if is_over.any():
            self._samples.lengths[self.sample[is_over]] = at[is_over] + 1
            free = torch.nonzero(is_over)[:, 0]
            self._samples.num_done += len(free)
            self._fill(free)

    def _fill(self, free: Tensor) -> None:
        """Gives places to samples that wait; those for which there is none are given up."""
        fresh = self._samples.take(len(free))
        places, left = free[: len(fresh)], free[len(fresh) :]
        self.sample[places], self.newest[places] = fresh, self._samples.first[fresh]
        self._prompts[places] = fresh // self._samples.sampling.num_samples
        self._prompt_lengths[places] = self._samples.prompt_lengths[fresh]
        self._made[places] = 0
        if len(left):
            is_kept = torch.ones_like(self.sample, dtype=torch.bool)
            is_kept[left] = False
            for name in ("sample", "newest", "_slots", "_prompts", "_prompt_lengths", "_made"):
                setattr(self, name, getattr(self, name)[is_kept])
