"""From a recipe to a run: workers, models, an algorithm, and steps that tell how they went."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow import algos, loops
from hybridflow.actor import Actor
from hybridflow.batch import Batch
from hybridflow.checkpoint import Checkpoint
from hybridflow.controller import Workers
from hybridflow.critic import Critic
from hybridflow.models.config import PRESETS
from hybridflow.models.optimizer import AdamW
from hybridflow.prompts import Prompts
from hybridflow.recipe import Recipe
from hybridflow.rl import lagrange, losses
from hybridflow.rollout.sampling import Sampling
from hybridflow.scoring import Reference
from hybridflow.tasks import Arithmetic, DigitSort, Task
from hybridflow.tokenizers import as_tokenizer
from shared.errors import ConfigError

__all__ = ["Run", "start_workers"]

Model = str | dict[str, Any]


def start_workers(recipe: Recipe) -> Workers:
    """The ranks that a recipe asks for."""
    place = recipe.placement
    if place.engine == "inline":
        return Workers.inline(place.num_ranks)
    if place.engine == "local":
        return Workers.local(place.num_ranks)
    return Workers.ray(num_ranks=place.num_ranks)


@dataclass
class Run:
    """A run that has been set up; `steps` goes through it.

    Attributes:
        recipe: of the run.
        algorithm: with its models placed.
        prompts: from a step to its prompts.
        task: None where prompts come from a file.
        groups: the worker groups by name, as checkpoints take them.
    """

    recipe: Recipe
    algorithm: Any
    prompts: Callable[[int], Batch]
    task: Task | None
    groups: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def set_up(recipe: Recipe, workers: Workers) -> Run:
        """Places the models of a recipe.

        Raises:
            ConfigError: if something in the recipe can not be.
        """
        task = _task(recipe)
        if task is not None:
            tokenizer: Any = task.tokenizer
            prompts: Callable[[int], Batch] = partial(task.batch, batch_size=recipe.num_prompts)
            score = task.token_rewards if recipe.per_token else task.score
        else:
            tokenizer = _tokenizer(recipe.model)
            prompts = Prompts(
                recipe.task, tokenizer, batch_size=recipe.num_prompts, seed=recipe.seed,
                max_prompt_tokens=recipe.max_prompt_tokens,
            ).batch  # fmt: skip
            if not recipe.reward:
                raise ConfigError("reward: prompts of a file need one, 'file.py:function'")
            score = _loaded(recipe.reward, "reward")
        score = partial(score, tokenizer=tokenizer)
        is_fixed = isinstance(task, DigitSort)
        new_tokens = recipe.max_new_tokens or (task.num_new_tokens if task else 0)
        if not new_tokens:
            raise ConfigError("max_new_tokens: prompts of a file need a longest response")
        sampling = Sampling(
            max_new_tokens=new_tokens, num_samples=recipe.num_samples, seed=recipe.seed,
            temperature=recipe.temperature, end_token=None if is_fixed else tokenizer.end_token,
        )  # fmt: skip
        models = _Models(recipe, workers, tokenizer.vocab_size)
        algorithm = _algorithm(recipe, models, score, sampling, tokenizer)
        return Run(recipe, algorithm, prompts, task, models.groups)

    def steps(
        self, checkpoint: Checkpoint | None = None, every: int = 50
    ) -> Iterator[dict[str, float]]:
        """Trains; yields what each step tells.

        Args:
            checkpoint: where to go on from, and where to save.
            every: steps between saves; the last step is saved too.
        """
        start = 0
        if checkpoint is not None and checkpoint.latest() is not None:
            start = self._resume(checkpoint.load(self.groups))
        total = self.recipe.steps
        told = loops.run(self.algorithm, self.prompts, steps=total - start, start=start)
        begun = time.perf_counter()
        for step, metrics in enumerate(told, start):
            yield {"step": step, **metrics, "seconds": time.perf_counter() - begun}
            if checkpoint is not None and ((step + 1) % every == 0 or step + 1 == total):
                checkpoint.save(step + 1, self.groups, self._remembered(step + 1))
            begun = time.perf_counter()

    def _remembered(self, step: int) -> dict[str, Any]:
        """What the next step needs beside the models; prompts and draws depend on its number."""
        kept: dict[str, Any] = {"step": step, "recipe": asdict(self.recipe)}
        for name in ("beta", "multiplier"):
            value = getattr(self.algorithm, name, None)
            if hasattr(value, "state_dict"):
                kept[name] = value.state_dict()
        return kept

    def _resume(self, kept: dict[str, Any]) -> int:
        ours, theirs = asdict(self.recipe), dict(kept["recipe"])
        # Where models lie may change, and how long a run is.
        changed = [
            key
            for key in ours
            if key not in ("placement", "steps", "max_tokens") and ours[key] != theirs.get(key)
        ]
        if changed:
            raise ConfigError(
                f"{changed[0]}: the checkpoint was made with {theirs.get(changed[0])!r}, and the "
                f"recipe says {ours[changed[0]]!r}; give another folder to begin anew"
            )
        for name in ("beta", "multiplier"):
            if name in kept:
                value = getattr(self.algorithm, name)
                setattr(self.algorithm, name, type(value).from_state_dict(kept[name]))
        return int(kept["step"])

    def greedy(self, num: int = 256) -> float:
        """Share of a task's evaluation prompts whose likeliest response is wholly right.

        Raises:
            ConfigError: if prompts come from a file, which has no answers.
        """
        if self.task is None:
            raise ConfigError("prompts of a file have no right answers to compare with")
        drawn = self.algorithm.sampling
        sampling = Sampling(
            max_new_tokens=drawn.max_new_tokens, temperature=0, end_token=drawn.end_token
        )
        roll = self.algorithm.actor.generate(self.task.evaluation(num), sampling)
        return self.task.exact_match(roll.result())


class _Models:
    """The models of a recipe, each placed when it is first asked for; all share one pool."""

    def __init__(self, recipe: Recipe, workers: Workers, vocab_size: int) -> None:
        self._recipe, self._pool = recipe, workers.pool(recipe.placement.num_ranks)
        self._model = _model(recipe.model, vocab_size)
        self.groups: dict[str, Any] = {}
        total = recipe.steps * recipe.num_updates
        settings = recipe.optimizer
        self._optimizer = AdamW(
            lr=settings.lr, weight_decay=settings.weight_decay, schedule=settings.schedule,
            max_grad_norm=settings.max_grad_norm, num_steps=total,
            num_warmup_steps=round(settings.warmup_share * total),
        )  # fmt: skip

    def _placed(self, name: str, kind: type, **settings: Any) -> Any:
        recipe = self._recipe
        self.groups[name] = kind(
            self._model, self._pool, name=name, train=recipe.placement.train or None,
            max_tokens=recipe.max_tokens, **settings,
        )  # fmt: skip
        return self.groups[name]

    def actor(self) -> Actor:
        place = self._recipe.placement
        return self._placed(
            "actor", Actor, optimizer=self._optimizer, seed=self._recipe.seed,
            generate=place.generate or None, is_sharded=place.is_sharded,
        )  # fmt: skip

    def critic(self, name: str, seed: int) -> Critic:
        return self._placed(name, Critic, optimizer=self._optimizer, seed=self._recipe.seed + seed)

    def reference(self) -> Reference | None:
        if not self._recipe.beta:
            return None
        return self._placed("reference", Reference, seed=self._recipe.seed)


def _algorithm(
    recipe: Recipe, models: _Models, score: Any, sampling: Sampling, tokenizer: Any
) -> Any:
    clip = (recipe.clip_low, recipe.clip_high)
    common: dict[str, Any] = {
        "actor": models.actor(), "score": score, "sampling": sampling,
        "num_updates": recipe.num_updates,
    }  # fmt: skip
    name, reference = recipe.algorithm, models.reference()
    penalized = {"reference": reference, "beta": recipe.beta, "clip": clip}
    if name == "ppo":
        return algos.PPO(critic=models.critic("critic", 1), **penalized, **common)
    if name == "safe-rlhf":
        cost = partial(_loaded(recipe.cost, "cost"), tokenizer=tokenizer)
        return algos.SafeRLHF(
            critic=models.critic("critic", 1), cost_critic=models.critic("cost-critic", 2),
            cost=lambda roll: _renamed(cost(roll)), multiplier=lagrange.Multiplier(),
            **penalized, **common,
        )  # fmt: skip
    if name == "rloo":
        return algos.RLOO(**penalized, **common)
    if name == "reinforce++":
        return algos.ReinforcePlusPlus(**penalized, **common)
    if name == "remax":
        return algos.ReMax(clip=clip, **common)
    common |= {"reference": reference, "kl_coefficient": recipe.beta}
    if name == "dr-grpo":
        return algos.GRPO(
            normalize_std=False, loss=partial(losses.ppo, clip=clip),
            mode="seq-mean-token-sum-norm", norm=float(sampling.max_new_tokens), **common,
        )  # fmt: skip
    if name == "gspo":
        loss = partial(losses.gspo, clip=clip)
        return algos.GRPO(loss=loss, mode="seq-mean-token-mean", **common)
    return algos.GRPO(
        loss=partial(losses.cispo if name == "cispo" else losses.ppo, clip=clip), **common
    )


def _renamed(costs: Batch) -> Batch:
    return Batch(costs=costs["scores"])


def _task(recipe: Recipe) -> Task | None:
    name, _, size = recipe.task.partition(":")
    if name in ("digit-sort", "arithmetic"):
        if not size.isdecimal():
            raise ConfigError(f"task: expected {name}:NUMBER, got {recipe.task!r}")
        if name == "digit-sort":
            return DigitSort(k=int(size), seed=recipe.seed)
        return Arithmetic(max_number=int(size), seed=recipe.seed)
    if not Path(recipe.task).is_file():
        raise ConfigError(
            f"task: expected digit-sort:K, arithmetic:MAX, or a file of prompts, got {recipe.task!r}"
        )
    return None


def _model(model: str, vocab_size: int) -> Model:
    """A preset takes the tokenizer's vocabulary, filled up so that shards divide it."""
    name = model.removeprefix("config:")
    if model == name or name not in PRESETS:
        return model
    return {**PRESETS[name], "vocab_size": -(-vocab_size // 16) * 16}


def _tokenizer(model: str) -> Any:
    if model.startswith("config:"):
        from hybridflow.tokenizers import ByteTokenizer

        return ByteTokenizer()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "model: the tokenizer of a Hugging Face folder is read by transformers; "
            "pip install 'meshyard-hybridflow[transformers]'"
        ) from error
    return as_tokenizer(AutoTokenizer.from_pretrained(model))


def _loaded(target: str, key: str) -> Any:
    """A function named as "file.py:function" or "module:function"."""
    place, _, name = target.rpartition(":")
    if not place:
        raise ConfigError(f"{key}: expected 'file.py:function', got {target!r}")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise ConfigError(f"{key}: there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise ConfigError(f"{key}: {place} can not be imported: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{key}: {place} has no {name!r}")
    return getattr(module, name)
