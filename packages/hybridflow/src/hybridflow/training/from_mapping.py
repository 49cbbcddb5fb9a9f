"""Converts a recipe into the mapping search's input, and its result into a recipe's placement."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from hybridflow.algorithms.registry import LOOPS
from hybridflow.mapping import Mapping, ModelPlan, ModelSpec, Workload
from hybridflow.models.config import read_config
from hybridflow.training.config import Recipe
from hybridflow.training.placement import ModelPlace, Placement
from hybridflow.training.sources import find_task, is_model
from shared.errors import ConfigError

__all__ = ["describe_models", "describe_workload", "place_models"]


def describe_models(recipe: Recipe) -> list[ModelSpec]:
    """The models that a recipe's step runs, named by their roles.

    Raises:
        ConfigError: if a model cannot be read, or a rollout or server generates.
    """
    if LOOPS.get(recipe.loop.kind).is_apart or recipe.server.kind:
        raise ConfigError(
            "loop: the search supports only steps in which the actor generates; set loop=null and "
            "server=null"
        )
    found = [_spec(recipe.model, "actor", "actor")]
    found += [_spec(recipe.model, "critic", name) for name in recipe.spec.kind.critics]
    if recipe.beta:
        found.append(_spec(recipe.model, "reference", "reference"))
    for role in ("reward", "cost"):
        target = getattr(recipe, role)
        if target and is_model(target):
            found.append(_spec(target, role, role))
    return found


def _spec(model: str, role: str, name: str) -> ModelSpec:
    config = read_config(model)
    heads = {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return ModelSpec.from_config(SimpleNamespace(**{**config.raw, **heads}), role, name)


def describe_workload(recipe: Recipe) -> Workload:
    """The workload of a recipe's step; all prompts and responses count as the longest.

    The longest prompt of a task is that of some sampled prompts; of a file, the recipe's limit.

    Raises:
        ConfigError: if the recipe's task does not exist.
    """
    task = find_task(recipe)
    if task is None:
        prompt, response = recipe.max_prompt_tokens, recipe.max_new_tokens
    else:
        prompt = int(task.batch(0, 64)["prompt_lengths"].max())
        response = recipe.max_new_tokens or task.num_new_tokens
    return Workload(
        algorithm=recipe.spec.step, global_batch_size=recipe.batch_size,
        prompt_tokens=prompt, response_tokens=response, num_updates=recipe.num_updates,
        micro_batch_tokens=recipe.max_tokens, group_size=recipe.num_samples,
    )  # fmt: skip


def place_models(recipe: Recipe, mapping: Mapping, engine: str) -> Recipe:
    """Returns the recipe with its models placed as in a mapping.

    Args:
        recipe: the recipe given to `describe_models`.
        mapping: result of `hybridflow.mapping.search` for these models.
        engine: name of the engine that starts the ranks.
    """
    names = [f"pool-{k}" for k in range(len(mapping.sets))]
    places = {
        model.name: _place(model, name)
        for name, group in zip(names, mapping.sets, strict=True)
        for model in group.models
    }
    pools = {name: group.num_gpus for name, group in zip(names, mapping.sets, strict=True)}
    return replace(recipe, placement=Placement(engine=engine, pools=pools, models=places))


def _place(model: ModelPlan, pool: str) -> ModelPlace:
    generate = ""
    if model.generation_tp is not None:
        generate = f"{model.generation_pp}-{model.generation_tp}"
    return ModelPlace(pool=pool, train=f"{model.pp}-{model.tp}-{model.dp}", generate=generate)
