"""Generation with the trainer's own weights, in the trainer's own process.

Each prompt is read once for all of its samples, and its keys and values are copied to the places of
its samples; a place whose sample ends is given to the next sample at once, so that long responses do
not leave the others waiting. Log-probabilities are those of the distribution that was drawn from,
and every token says which version of the weights made it.

Shapes: N prompts, S places, L positions of a place, K key heads of this shard, E a head's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn import functional as F

from hybridflow.models.decoder import Decoder, attend_causally
from hybridflow.rollout.sampling import Sampling, draw, uniforms
from shared.comms.collectives import all_gather
from shared.errors import ConfigError, DataError

__all__ = ["Responses", "generate"]

_NO_TOKEN = 0


@dataclass(frozen=True, kw_only=True)
class Responses:
    """What was generated, one row a sample; samples of a prompt follow one another.

    Attributes:
        tokens: prompt and response, left-aligned, int64 [samples, longest].
        prompt_lengths, lengths: of the prompt, and of both; int64 [samples].
        log_probs: of each generated token, 0 elsewhere; [samples, longest].
        num_steps: passes over the places' newest tokens.
    """

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    log_probs: Tensor
    num_steps: int


class _Places:
    """Keys and values of the samples under way, [layers, 2, S, K, L, E]."""

    def __init__(self, model: Decoder, num_places: int, num_positions: int) -> None:
        shard, weight = model.shard, model.get_parameter("layers.0.qkv")
        shape = (len(shard.layers), 2, num_places, shard.num_kv_heads, num_positions)
        self.values = weight.new_zeros(*shape, model.config.head_dim)
        self.rows = torch.arange(num_places, device=weight.device)
        self._places = torch.arange(num_positions, device=weight.device)
        self._first = shard.layers.start
        self.used = 0
        self.at = self.rows
        self.bias: Tensor | None = None

    def begin(self, positions: Tensor) -> None:
        """Takes the positions at which the places' next tokens stand, [S]."""
        self.at = positions
        self.used = int(positions.max()) + 1
        hidden = self._places[: self.used] > positions[:, None]
        zero = torch.zeros((), dtype=self.values.dtype, device=self.values.device)
        self.bias = torch.where(hidden, float("-inf"), zero)[:, None, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes one token's key and value a place, and looks at what is there."""
        keys, values = self.values[layer - self._first]
        keys[self.rows, :, self.at], values[self.rows, :, self.at] = k[:, 0], v[:, 0]
        # Query heads of one key head look at it together: no key is copied.
        together = q[:, 0].unflatten(1, (k.shape[2], -1))
        seen = F.scaled_dot_product_attention(
            together, keys[:, :, : self.used], values[:, :, : self.used], self.bias
        )
        return seen.flatten(1, 2).unsqueeze(1)


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Int64[Tensor, " _"]],
    sampling: Sampling,
    *,
    sample_ids: Int64[Tensor, " samples"] | None = None,
    step: int = 0,
    num_places: int = 256,
    on_token: Callable[[int], None] | None = None,
) -> Responses:
    """Generates responses to prompts.

    Args:
        model: a whole model, or this rank's shard of one; all shards call it alike.
        prompts: tokens of each; none may be empty.
        sampling: what is drawn.
        sample_ids: names of the samples, prompt by prompt; 0, 1, ... when not given.
        step: of training; draws differ between steps.
        num_places: samples under way at once.
        on_token: called after each step with the number of samples that are done.

    Returns:
        The responses, the same whatever `num_places`, up to rounding of the products.

    Raises:
        DataError: if there is no prompt, or one is empty.
        ConfigError: if prompt and response do not fit into the model's positions.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    if not len(prompts) or int(lengths.min()) < 1:
        empty = [k for k, prompt in enumerate(prompts) if not len(prompt)]
        raise DataError(
            f"expected prompts of at least one token, got "
            f"{f'an empty one at {empty[0]}' if empty else 'none'}; begin them with a start token"
        )
    if not (model.shard.is_first and model.shard.is_last):
        raise ConfigError(
            "generation with pipeline stages is not offered: choose a generation layout of one "
            "stage, generate='1-t'"
        )
    longest = int(lengths.max()) + sampling.max_new_tokens
    if longest > model.config.max_positions:
        raise ConfigError(
            f"prompts of up to {int(lengths.max())} tokens and {sampling.max_new_tokens} new ones "
            f"take {longest} positions, and the model has {model.config.max_positions}"
        )
    run = _Run(model, prompts, lengths, sampling, sample_ids, step, num_places)
    while run.is_unfinished:
        run.step()
        if on_token is not None:
            on_token(run.num_done)
    return run.responses()


class _Run:
    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Tensor],
        lengths: Tensor,
        sampling: Sampling,
        sample_ids: Tensor | None,
        step: int,
        num_places: int,
    ) -> None:
        n = sampling.num_samples
        self.model, self.sampling = model, sampling
        device = model.cos.device
        padded = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True).to(device)
        total = len(prompts) * n
        self.prompt_lengths = lengths.repeat_interleave(n).to(device)
        longest = padded.shape[1] + sampling.max_new_tokens
        self.tokens = padded.new_full((total, longest), _NO_TOKEN)
        self.tokens[:, : padded.shape[1]] = padded.repeat_interleave(n, 0)
        self.lengths = self.prompt_lengths.clone()
        self.log_probs = torch.zeros(total, longest, dtype=_float(model), device=device)
        ids = torch.arange(total) if sample_ids is None else sample_ids
        self.numbers = (
            None
            if sampling.is_greedy
            else uniforms(sampling.seed, step, ids.to(device), sampling.max_new_tokens)
        )
        self.num_steps, self.num_done, self.next = 0, 0, 0
        num_places = min(num_places, total)
        self.places = _Places(model, num_places, longest)
        self.sample = torch.full((num_places,), -1, device=device)
        self.newest = torch.zeros(num_places, dtype=torch.int64, device=device)
        self._read: list[tuple[Tensor, Tensor]] = []
        self._prefill(padded)
        self._fill(torch.arange(num_places, device=device))

    @property
    def is_unfinished(self) -> bool:
        return self.num_done < len(self.tokens)

    def _prefill(self, padded: Tensor) -> None:
        """Reads each prompt once; keeps its keys, values, and the state that draws a first token."""
        keys: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(torch.stack([k, v]).transpose(2, 3))
            return attend_causally(layer, q, k, v)

        hidden = self.model(padded, attend)
        self.prompt_keys = torch.stack(keys)
        last = self.prompt_lengths[:: self.sampling.num_samples] - 1
        self.prompt_logits = self._logits(hidden[torch.arange(len(hidden)), last])

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.model.head_weight.t()
        group = self.model.shard.group
        if group is not None:
            logits = torch.cat(all_gather(group, logits.contiguous()), -1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        temperature = self.sampling.temperature
        return logits if temperature in (0, 1) else logits / temperature

    def _fill(self, free: Tensor) -> None:
        """Gives free places to samples that wait, and draws their first tokens."""
        while len(free):
            count = min(len(free), len(self.tokens) - self.next)
            self.sample[free[count:]] = -1
            if not count:
                return
            places = free[:count]
            samples = torch.arange(self.next, self.next + count, device=free.device)
            self.next += count
            self.sample[places] = samples
            prompts = samples // self.sampling.num_samples
            width = self.prompt_keys.shape[4]
            self.places.values[:, :, places, :, :width] = self.prompt_keys[:, :, prompts]
            free = self._draw(self.prompt_logits[prompts], places)

    def _draw(self, logits: Tensor, places: Tensor) -> Tensor:
        """Draws a token for each place; returns the places whose samples have ended."""
        samples = self.sample[places]
        at = self.lengths[samples]
        made = at - self.prompt_lengths[samples]
        numbers = None if self.numbers is None else self.numbers[samples, made]
        tokens, log_probs = draw(logits, numbers)
        self.tokens[samples, at], self.log_probs[samples, at] = tokens, log_probs
        self.lengths[samples] = at + 1
        self.newest[places] = tokens
        is_over = made + 1 >= self.sampling.max_new_tokens
        if self.sampling.end_token is not None:
            is_over |= tokens == self.sampling.end_token
        ended = places[is_over]
        self.num_done += len(ended)
        return ended

    def step(self) -> None:
        """One more token for every place in use."""
        used = torch.nonzero(self.sample >= 0)[:, 0]
        if len(used) < len(self.sample):
            self._shrink(used)
        at = self.lengths[self.sample] - 1
        self.places.begin(at)
        hidden = self.model(self.newest[:, None], self.places.attend, at[:, None])
        self.num_steps += 1
        everyone = self.places.rows
        self._fill(self._draw(self._logits(hidden[:, 0]), everyone))

    def _shrink(self, used: Tensor) -> None:
        """Drops places for which no sample is left."""
        self.sample, self.newest = self.sample[used], self.newest[used]
        self.places.values = self.places.values[:, :, used]
        self.places.rows = torch.arange(len(used), device=used.device)

    def responses(self) -> Responses:
        width = int(self.lengths.max())
        return Responses(
            tokens=self.tokens[:, :width],
            prompt_lengths=self.prompt_lengths,
            lengths=self.lengths,
            log_probs=self.log_probs[:, :width],
            num_steps=self.num_steps,
        )


def _float(model: Decoder) -> torch.dtype:
    is_double = model.cos.dtype == torch.float64
    return torch.float64 if is_double else torch.float32
