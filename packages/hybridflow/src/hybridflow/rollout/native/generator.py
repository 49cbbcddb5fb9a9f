"""Generation with the trainer's own weights, in the trainer's own process.

Each prompt is prefilled once for all of its samples, which share its keys and values. A place whose
sample ends takes the next sample at once (continuous batching), so that long responses do not leave
places idle. Log-probabilities are of the distribution that tokens are drawn from. If the model has
pipeline stages, places are split into as many groups, and each stage works on another group; see
`hybridflow.rollout.native.stage_ring`. On a GPU, decoding passes of a model without stages are
replayed as CUDA graphs; see `hybridflow.rollout.native.cuda_graphs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from hybridflow.models.decoder import Decoder
from hybridflow.models.pipeline import run_forward
from hybridflow.rollout.end_tokens import resolve_by_config
from hybridflow.rollout.native import cuda_graphs as native_graphs
from hybridflow.rollout.native.kv_cache import KVCache
from hybridflow.rollout.native.slots import SampleTable, SlotTable
from hybridflow.rollout.native.stage_ring import Ring
from hybridflow.rollout.native.waves import plan_waves
from hybridflow.rollout.sampling import Sampling, draw, uniforms
from shared.comms.collectives import all_gather, broadcast
from shared.comms.group import Group
from shared.errors import ConfigError, DataError

__all__ = ["Responses", "generate"]

# Limits of one prefill pass: tokens, and samples whose first token is drawn (or one prompt's).
_MAX_TOKENS = 16384
_MAX_DRAWN = 256
# Parts of a prefill per pipeline stage; more parts mean smaller pipeline bubbles.
_READS_A_STAGE = 4


@dataclass(frozen=True, kw_only=True)
class Responses:
    """Generated responses, one row per sample; samples of a prompt are adjacent.

    Attributes:
        tokens: prompt and response, left-aligned, int64 [samples, longest].
        prompt_lengths, lengths: of the prompt, and of prompt and response; int64 [samples].
        log_probs: of each generated token, 0 elsewhere; [samples, longest].
        num_steps: decoding passes.
    """

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    log_probs: Tensor
    num_steps: int


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Int64[Tensor, " _"]],
    sampling: Sampling,
    *,
    sample_ids: Int64[Tensor, " samples"] | None = None,
    step: int = 0,
    num_places: int = 256,
    stages: Group | None = None,
    on_token: Callable[[int], None] | None = None,
    has_graphs: bool = True,
    cache_bytes: int | None = None,
) -> Responses:
    """Generates responses to prompts.

    Args:
        model: a whole model, or this rank's stage or shard of one; all its ranks make equal calls.
        prompts: tokens of each; none may be empty.
        sampling: how tokens are drawn.
        sample_ids: ids of the samples, prompt by prompt; 0, 1, ... when not given.
        step: training step; random numbers differ between steps.
        num_places: samples decoded at once.
        stages: group of the model's pipeline stages, in order; None if there is one stage.
        on_token: called after each step with the number of samples that are done.
        has_graphs: whether CUDA graphs are used where possible.
        cache_bytes: bytes that keys and values may take on a rank; prompts are generated in waves
            that fit. None: all prompts at once.

    Returns:
        The responses; they do not depend on `num_places` and `cache_bytes`, up to rounding.

    Raises:
        DataError: if there is no prompt, one is empty, or there is not one id per sample.
        ConfigError: if prompt and response do not fit into the model's positions, one of each does
            not fit into `cache_bytes`, `stages` is not the group of the model's stages, or an end
            token is not one of the model's.
    """
    sampling = resolve_by_config(sampling, model.config)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    if not len(prompts) or int(lengths.min()) < 1:
        empty = [k for k, prompt in enumerate(prompts) if not len(prompt)]
        raise DataError(
            f"expected prompts of at least one token, got "
            f"{f'an empty one at {empty[0]}' if empty else 'none'}; begin them with a start token"
        )
    num_samples = len(prompts) * sampling.num_samples
    if sample_ids is not None and len(sample_ids) != num_samples:
        raise DataError(
            f"expected {num_samples} sample_ids, {sampling.num_samples} for each prompt, got "
            f"{len(sample_ids)}"
        )
    num_stages = 1 if stages is None else stages.world_size
    if num_stages != model.shard.num_stages:
        raise ConfigError(
            f"the model is one of {model.shard.num_stages} stages, and `stages` has {num_stages} "
            f"ranks; give the group of its pipeline"
        )
    longest = int(lengths.max()) + sampling.max_new_tokens
    if longest > model.config.max_positions:
        raise ConfigError(
            f"prompts of up to {int(lengths.max())} tokens and {sampling.max_new_tokens} new ones "
            f"take {longest} positions, and the model has {model.config.max_positions}"
        )
    ids = torch.arange(num_samples) if sample_ids is None else sample_ids
    width, n = int(lengths.max()), sampling.num_samples
    found: list[Responses] = []
    for wave in plan_waves(model, len(prompts), width, sampling, num_places, cache_bytes):
        rows, (start, stop, _) = wave.prompts, wave.prompts.indices(len(prompts))
        run = _Run(
            model, prompts[rows], lengths[rows], sampling, ids[start * n : stop * n], step,
            wave.num_places, stages,
        )  # fmt: skip
        for _ in run.steps(has_graphs=has_graphs):
            if on_token is not None:
                on_token(start * n + run.samples.num_done)
        found.append(run.responses())
    return _joined(found)


def _joined(found: Sequence[Responses]) -> Responses:
    if len(found) == 1:
        return found[0]
    width = max(one.tokens.shape[1] for one in found)

    def rows(name: str) -> Tensor:
        return torch.cat([
            pad(values, (0, width - values.shape[1])) for values in (getattr(one, name) for one in found)
        ])  # fmt: skip

    return Responses(
        tokens=rows("tokens"),
        prompt_lengths=torch.cat([one.prompt_lengths for one in found]),
        lengths=torch.cat([one.lengths for one in found]),
        log_probs=rows("log_probs"),
        num_steps=sum(one.num_steps for one in found),
    )


class _Run:
    """One call of `generate` on one rank."""

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Tensor],
        lengths: Tensor,
        sampling: Sampling,
        ids: Tensor,
        step: int,
        num_places: int,
        stages: Group | None,
    ) -> None:
        self.model, self.sampling, self.stages = model, sampling, stages
        device = model.cos.device
        padded = pad_sequence(list(prompts), batch_first=True).to(device)
        self.samples = SampleTable(padded, lengths, sampling)
        total, longest = self.samples.tokens.shape
        self.log_probs = torch.zeros(total, longest, dtype=_float(model), device=device)
        self.numbers = (
            None
            if sampling.is_greedy
            else uniforms(sampling.seed, step, ids.to(device), sampling.max_new_tokens)
        )
        num_places = min(num_places, total)
        # The last token of a response is never fed back to the model.
        num_own = max(1, sampling.max_new_tokens - 1)
        num_prompts, width = padded.shape
        self.cache = KVCache(model, num_prompts, width, num_places, num_own)
        self._prefill(padded)
        num_groups = model.shard.num_stages
        bounds = [
            min(num_places, self.samples.num_waiting) * k // num_groups
            for k in range(num_groups + 1)
        ]
        self.places = [SlotTable(self.samples, range(*bound)) for bound in pairwise(bounds)]
        self.ring = Ring(stages, model, self.places)
        self.num_steps = 0

    def _prefill(self, padded: Tensor) -> None:
        """Prefills each prompt once, and draws all of its samples' first tokens."""
        n, shard = self.sampling.num_samples, self.model.shard
        share = _READS_A_STAGE * shard.num_stages if shard.num_stages > 1 else 1
        most = min(_MAX_TOKENS // padded.shape[1], max(1, _MAX_DRAWN // n))
        num_rows = max(1, min(most, -(-len(padded) // share)))
        last = self.samples.prompt_lengths[::n] - 1
        first = torch.zeros_like(self.samples.prompt_lengths)

        def draw_first(k: int, hidden: Tensor) -> None:
            rows = slice(k * num_rows, k * num_rows + len(hidden))
            ends = hidden[torch.arange(len(hidden), device=hidden.device), last[rows]]
            logits = self._logits(ends).repeat_interleave(n, 0)
            samples = torch.arange(rows.start * n, rows.stop * n, device=hidden.device)
            columns, num_made = self.samples.prompt_lengths[samples], torch.zeros_like(samples)
            first[samples] = self._draw(logits, samples, num_made, columns)

        run_forward(
            self.model,
            self.stages,
            padded.split(num_rows),
            draw_first,
            lambda k: self.cache.reading(slice(k * num_rows, (k + 1) * num_rows)),
        )
        if self.stages is not None:
            broadcast(self.stages, first, self.stages.world_size - 1)
        self.samples.begin(first)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.model.head_weight.t()
        group = self.model.shard.group
        if group is not None:
            logits = torch.cat(all_gather(group, logits.contiguous()), -1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        temperature = self.sampling.temperature
        return logits if temperature in (0, 1) else logits / temperature

    def _draw(self, logits: Tensor, samples: Tensor, num_made: Tensor, columns: Tensor) -> Tensor:
        """Draws the samples' next tokens, and stores their log-probabilities."""
        numbers = None if self.numbers is None else self.numbers[samples, num_made]
        tokens, log_probs = draw(logits, numbers)
        self.log_probs[samples, columns] = log_probs
        return tokens

    def steps(self, *, has_graphs: bool) -> Iterator[None]:
        """Draws one more token for a group's places in use at each iteration."""
        passes = self._passes(has_graphs=has_graphs)
        for number in count():
            # Sends the result of the previous pass, and receives this pass's input.
            self.ring.turn(number - 1)
            at = number % len(self.places)
            places = self.places[at]
            if number >= len(self.places) and len(places):
                if self.stages is not None:
                    tokens = self.ring.messages[at].tokens[: len(places)]
                    places.push(places.rows(len(places)), tokens)
                places.settle()
                yield
            if self.samples.num_done == len(self.samples.tokens):
                self.ring.turn(number)
                return
            if len(places):
                self.num_steps += 1
                passes[at](len(places))

    def _passes(self, *, has_graphs: bool) -> list[Callable[[int], None]]:
        """By group, the function that runs a pass over its places in use."""
        plain = [partial(self._pass, at) for at in range(len(self.places))]
        if not has_graphs or not native_graphs.can_capture(self.log_probs.device, self.model.shard):
            return list(plain)
        return [
            native_graphs.Replayed(run, len(places))
            for run, places in zip(plain, self.places, strict=True)
        ]

    def _pass(self, at: int, count: int) -> None:
        """Runs the newest tokens of a group's first `count` places through this stage.

        It can be captured as a CUDA graph if the model has one stage: so it must not change the
        host's state or synchronise with the device, and must write results to persistent memory.
        """
        shard, places, message = self.model.shard, self.places[at], self.ring.messages[at]
        rows = places.rows(count)
        x = rows.newest if shard.is_first else message.hidden[:count]
        attend = self.cache.decoding(rows.read)
        hidden = self.model(x[:, None], attend, rows.positions[:, None])[:, 0]
        if not shard.is_last:
            message.hidden[:count] = hidden
            return
        tokens = self._draw(self._logits(hidden), rows.sample, rows.num_made, rows.column)
        if self.stages is None:
            places.push(rows, tokens)
        else:
            message.tokens[:count] = tokens

    def responses(self) -> Responses:
        if self.stages is not None:
            broadcast(self.stages, self.log_probs, self.stages.world_size - 1)
        width = int(self.samples.lengths.max())
        return Responses(
            tokens=self.samples.tokens[:, :width],
            prompt_lengths=self.samples.prompt_lengths,
            lengths=self.samples.lengths,
            log_probs=self.log_probs[:, :width],
            num_steps=self.num_steps,
        )


def _float(model: Decoder) -> torch.dtype:
    is_double = model.cos.dtype == torch.float64
    return torch.float64 if is_double else torch.float32
