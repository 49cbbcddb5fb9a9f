"""Runs a recipe: sets up models and algorithm, iterates over steps, saves and resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from hybridflow.algorithms import loops
from hybridflow.algorithms.dataflow import Algorithm, AlgorithmInputs
from hybridflow.algorithms.loops.loop_spec import LoopInputs
from hybridflow.algorithms.registry import LOOPS
from hybridflow.rollout.sampling import EndTokens, Sampling
from hybridflow.tasks.base import Task
from hybridflow.tasks.prompts import Prompts
from hybridflow.tasks.tokenizers import Tokenizer
from hybridflow.training.build_models import Models, start_workers
from hybridflow.training.checkpoints.checkpoint import Checkpoint
from hybridflow.training.config import Recipe
from hybridflow.training.sources import find_reward, find_task, find_tokenizer, is_model
from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.controller import Workers
from hybridflow.workers.timeline import Span, seconds_by_method
from hybridflow.workers.worker_group import WorkerGroup
from shared.errors import ConfigError
from shared.training import log_resumed

__all__ = ["Run", "start_workers"]

_MAY_CHANGE = ("placement", "server", "steps", "max_tokens", "cache_bytes")
"""Recipe keys that may change when a run resumes."""
# What recipes were that were saved before these could be chosen.
_UNSAID = {"column": "prompt"}


@dataclass
class Run:
    """A run whose models are placed; `steps` trains.

    Attributes:
        recipe: recipe of the run.
        algorithm: the algorithm, with its models placed.
        prompts: function from a step to its prompts.
        task: None if prompts come from a file.
        tokenizer: of prompts and responses.
        groups: worker groups that checkpoints save, by role.
        workers: ranks that the groups run on.
        loop: the loop of generation and training; None for the synchronous one.
        rollout: generates in the synchronous loop; None: the actor does.
        spans: calls on each rank in the last step.
    """

    recipe: Recipe
    algorithm: Any
    prompts: Callable[[int], Batch]
    task: Task | None
    tokenizer: Tokenizer
    groups: dict[str, WorkerGroup]
    workers: Workers
    loop: loops.OneStep | loops.Asynchronous | None = None
    rollout: Any = None
    spans: list[Span] = field(default_factory=list)

    @staticmethod
    def set_up(recipe: Recipe, workers: Workers) -> Run:
        """Places the models of a recipe.

        Raises:
            ConfigError: if the recipe cannot be run.
        """
        task = find_task(recipe)
        if task is not None:
            tokenizer: Any = task.tokenizer
            prompts: Callable[[int], Batch] = partial(task.batch, batch_size=recipe.num_prompts)
        else:
            tokenizer = find_tokenizer(recipe.model)
            prompts = Prompts(
                recipe.task, tokenizer, column=recipe.column, batch_size=recipe.num_prompts,
                seed=recipe.seed,
                max_prompt_tokens=recipe.max_prompt_tokens,
            ).batch  # fmt: skip
        new_tokens = recipe.max_new_tokens or (task.num_new_tokens if task else 0)
        if not new_tokens:
            raise ConfigError(
                "max_new_tokens: expected the longest response's tokens for prompts of a file, got "
                "0; set it"
            )
        end = EndTokens.OF_MODEL if task is None else task.end_token
        sampling = Sampling(
            max_new_tokens=new_tokens, num_samples=recipe.num_samples, seed=recipe.seed,
            temperature=recipe.temperature, end_token=end,
        )  # fmt: skip
        models = Models(recipe, workers, tokenizer.vocab_size)
        score = _score(recipe, models, task, tokenizer)
        algorithm = _algorithm(recipe, models, score, sampling, tokenizer)
        run = Run(recipe, algorithm, prompts, task, tokenizer, models.groups, workers)
        run._take_turns(models.rollouts())
        return run

    def _take_turns(self, rollouts: list[Any]) -> None:
        settings = self.recipe.loop
        correct = None
        if settings.correct:
            correct = loops.Correction(
                actor=self.algorithm.actor, temperature=self.recipe.temperature,
                level=settings.correct, cap=settings.cap,
            )  # fmt: skip
        build = LOOPS.get(settings.kind).build
        if build is None:
            self.rollout = rollouts[0] if rollouts else None
        else:
            self.loop = build(
                LoopInputs(
                    algorithm=self.algorithm, prompts=self.prompts, rollouts=rollouts,
                    correct=correct, eta=settings.eta,
                )
            )  # fmt: skip

    def steps(
        self, checkpoint: Checkpoint | None = None, every: int = 50
    ) -> Iterator[dict[str, float]]:
        """Trains; yields the metrics of each step.

        Besides the algorithm's metrics there are "seconds" of the step, and for each method of a
        group the seconds of its slowest rank, such as "actor.generate_s". Groups on different pools
        work at once, so these may add up to more than the step.

        Args:
            checkpoint: to resume from, and to save to; None: neither.
            every: steps between saves; the last step is saved too.
        """
        start = 0
        if checkpoint is not None and checkpoint.latest() is not None:
            # The recipe is compared before anything is loaded.
            start = self._resume(checkpoint.load({}))
            checkpoint.load(self.groups)
            log_resumed(start, checkpoint.folder)
        total = self.recipe.steps
        self.workers.take_spans()
        begun = time.perf_counter()
        for step, metrics in enumerate(self._told(start, total - start), start):
            self.spans = self.workers.take_spans()
            spent = {f"{name}_s": taken for name, taken in seconds_by_method(self.spans).items()}
            yield {"step": step, **metrics, "seconds": time.perf_counter() - begun, **spent}
            if checkpoint is not None and ((step + 1) % every == 0 or step + 1 == total):
                checkpoint.save(step + 1, self.groups, self._remembered(step + 1))
                self.workers.take_spans()
            begun = time.perf_counter()

    def _told(self, start: int, count: int) -> Iterator[dict[str, float]]:
        if self.loop is not None:
            return self.loop.run(count)
        return loops.run(
            self.algorithm, self.prompts, steps=count, start=start, rollout=self.rollout
        )

    def _remembered(self, step: int) -> dict[str, Any]:
        """State to resume from besides the models; prompts and draws depend only on the step."""
        kept: dict[str, Any] = {"step": step, "recipe": asdict(self.recipe)}
        for name in ("beta", "multiplier"):
            value = getattr(self.algorithm, name, None)
            if hasattr(value, "state_dict"):
                kept[name] = value.state_dict()
        if self.loop is not None:
            kept["loop"] = self.loop.state()
        return kept

    def _resume(self, kept: dict[str, Any]) -> int:
        ours, theirs = asdict(self.recipe), _UNSAID | kept["recipe"]
        changed = [key for key in ours if key not in _MAY_CHANGE and ours[key] != theirs.get(key)]
        if changed:
            raise ConfigError(
                f"{changed[0]}: the checkpoint was made with {theirs.get(changed[0])!r}, and the "
                f"recipe has {ours[changed[0]]!r}; use another folder to start a new run"
            )
        for name in ("beta", "multiplier"):
            if name in kept:
                value = getattr(self.algorithm, name)
                setattr(self.algorithm, name, type(value).from_state_dict(kept[name]))
        if self.loop is not None:
            self.loop.load_state(kept["loop"])
        return int(kept["step"])

    def greedy(self, num: int = 256) -> float:
        """Share of a task's evaluation prompts whose greedy response is exactly right.

        Raises:
            ConfigError: if prompts come from a file, which has no answers.
        """
        if self.task is None:
            raise ConfigError("prompts of a file have no right answers to compare with")
        sampling = replace(self.algorithm.sampling, temperature=0, num_samples=1)
        roll = self.algorithm.actor.generate(self.task.evaluation(num), sampling)
        return self.task.exact_match(roll.result())


def _score(recipe: Recipe, models: Models, task: Task | None, tokenizer: Any) -> Any:
    """The reward of responses: a task's own, a function, or a model."""
    if not recipe.reward:
        if task is None:
            raise ConfigError(
                "reward: prompts of a file need a reward, 'file.py:function' or a reward model"
            )
        found = task.token_rewards if recipe.per_token else task.score
        return partial(found, tokenizer=tokenizer)
    if is_model(recipe.reward):
        return models.reward().scores
    return partial(find_reward(recipe.reward, "reward"), tokenizer=tokenizer)


def _cost(recipe: Recipe, models: Models, tokenizer: Any) -> Any:
    if is_model(recipe.cost):
        return models.cost().scores
    cost = partial(find_reward(recipe.cost, "cost"), tokenizer=tokenizer)
    return lambda roll: _renamed(cost(roll))


def _renamed(costs: Batch) -> Batch:
    """Renames scores to costs; keeps the mark of dropped rows."""
    return costs.drop("scores") | Batch(costs=costs["scores"])


def _algorithm(
    recipe: Recipe, models: Models, score: Any, sampling: Sampling, tokenizer: Any
) -> Algorithm:
    actor, reference = models.actor(), models.reference()
    kind = recipe.spec.kind
    critics = {role: models.critic(role, k) for k, role in enumerate(kind.critics, 1)}
    inputs = AlgorithmInputs(
        actor=actor, reference=reference, critics=critics, score=score, sampling=sampling,
        cost=_cost(recipe, models, tokenizer) if kind.has_cost else None,
        num_updates=recipe.num_updates, clip=(recipe.clip_low, recipe.clip_high), beta=recipe.beta,
    )  # fmt: skip
    return recipe.spec.build(inputs)
