"""The demo's baseline: GRPO as a plain loop around a transformers model, without this package.

Generation is the model's own `generate`, training its own forward pass and torch's AdamW.
Advantages are a few lines of torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from hybridflow.roles.state.export import export
from hybridflow.training.runtime import Run
from hybridflow.workers.batch.batch import Batch

__all__ = ["PlainGRPO"]


class PlainGRPO:
    """The same model, data and updates as a run's, in plain transformers and torch."""

    def __init__(self, run: Run) -> None:
        """Copies the run's weights."""
        from transformers import AutoModelForCausalLM

        self._run, self._recipe = run, run.recipe
        self._sampling = run.algorithm.sampling
        # Typed as what it is at run time: transformers' own stubs take generate for another's.
        with TemporaryDirectory() as folder:
            export(run.algorithm.actor, f"{folder}/model")
            self._model: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
        self._model.generation_config.pad_token_id = 0
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=0.0, weight_decay=0.0, fused=True
        )
        self._num_steps = 0

    @torch.no_grad()
    def generate(self, prompts: Batch, *, is_greedy: bool = False) -> Tensor:
        """Generates tokens [prompts x samples, W]; all prompts must have one length."""
        asked = prompts["prompts"].repeat_interleave(self._sampling.num_samples, 0)
        choice = {"do_sample": False} if is_greedy else {"do_sample": True, "top_k": 0}
        return self._model.generate(
            asked, attention_mask=torch.ones_like(asked),
            max_new_tokens=self._sampling.max_new_tokens, **choice,
        )  # fmt: skip

    def step(self, prompts: Batch) -> None:
        """Generates responses, and takes the recipe's optimizer steps on them."""
        self._learn(prompts, self.generate(prompts))

    def _learn(self, prompts: Batch, tokens: Tensor) -> list[float]:
        """Trains on responses; returns the gradient norm of each update."""
        n, start = self._sampling.num_samples, prompts["prompts"].shape[1]
        rows = prompts.repeat(n)
        wanted = [sorted(digits) for digits in rows["digits"]]
        tokenizer = self._run.task.tokenizer  # type: ignore[union-attr]
        found = [tokenizer.decode(row) for row in tokens[:, start:].tolist()]
        scores = torch.tensor(
            [
                sum(a == b for a, b in zip(text, right, strict=False)) / len(right)
                for text, right in zip(found, wanted, strict=True)
            ]
        )
        groups = scores.view(-1, n)
        gains = (groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-6)
        advantages = gains.flatten()[:, None]
        with torch.no_grad():
            old = self._log_probs(tokens, start)
        norms = []
        for part in torch.arange(len(tokens)).chunk(self._recipe.num_updates):
            now = self._log_probs(tokens[part], start)
            ratio = (now - old[part]).exp()
            bounded = ratio.clamp(1 - self._recipe.clip_low, 1 + self._recipe.clip_high)
            gain = advantages[part]
            loss = torch.maximum(-ratio * gain, -bounded * gain).mean()
            self._optimizer.zero_grad()
            loss.backward()
            limit = self._recipe.optimizer.max_grad_norm
            norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), limit)
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate()
            self._optimizer.step()
            norms.append(float(norm))
        return norms

    def _rate(self) -> float:
        """The learning rate by the recipe's warm-up and cosine schedule."""
        settings = self._recipe.optimizer
        total = self._recipe.steps * self._recipe.num_updates
        warmup = round(settings.warmup_share * total)
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if step < warmup:
            return settings.lr * (step + 1) / warmup
        return settings.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    def _log_probs(self, tokens: Tensor, start: int) -> Tensor:
        logits = self._model(tokens[:, :-1], logits_to_keep=tokens.shape[1] - start).logits
        return logits.float().log_softmax(-1).gather(2, tokens[:, start:, None])[..., 0]

    def generates_as(self, prompts: Batch) -> bool:
        """Whether the run's greedy responses are the same."""
        sampling = replace(self._sampling, temperature=0)
        ours = self._run.algorithm.actor.generate(prompts, sampling).result()
        return torch.equal(ours["tokens"], self.generate(prompts, is_greedy=True))

    def learns_as(self, prompts: Batch) -> bool:
        """Whether a step on the same responses has the same gradients; both models take the step.

        Compares gradient norms, as the loss is about 0: a group's advantages add up to 0.
        """
        roll = self._run.algorithm.rollout(prompts, 0)
        tokens = roll.result()["tokens"]
        ours = self._run.algorithm.learn(roll)
        plain = self._learn(prompts, tokens)
        return math.isclose(ours["grad_norm"], sum(plain) / len(plain), rel_tol=1e-3)
