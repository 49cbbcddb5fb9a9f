"""Finds a recipe's task, tokenizer, and rewards in user files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.tasks.base import Task
from hybridflow.tasks.registry import TASKS
from hybridflow.tasks.rewards import Reward
from hybridflow.tasks.tokenizers import as_tokenizer
from hybridflow.training.config import Recipe
from shared.errors import ConfigError

__all__ = ["find_reward", "find_task", "find_tokenizer", "is_model"]


_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")


def find_task(recipe: Recipe) -> Task | None:
    """A recipe's task; None if prompts come from a file.

    Raises:
        ConfigError: if `task` names neither a task nor a file of prompts.
    """
    name, _, size = recipe.task.partition(":")
    if name in TASKS:
        if not size.isdecimal():
            raise ConfigError(f"task: expected {name}:NUMBER, got {recipe.task!r}")
        return TASKS.get(name)(int(size), recipe.seed)
    if not Path(recipe.task).is_file():
        known = ", ".join(f"{name}:NUMBER" for name in TASKS)
        raise ConfigError(f"task: expected {known}, or a file of prompts, got {recipe.task!r}")
    return None


def find_tokenizer(model: str) -> Any:
    """A model's tokenizer: bytes for a preset, else the tokenizer in the model's folder.

    Raises:
        ConfigError: if the folder has no tokenizer, or transformers, which reads it, is not installed.
    """
    if model.startswith("config:"):
        from hybridflow.tasks.tokenizers import ByteTokenizer

        return ByteTokenizer()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "model: the tokenizer of a Hugging Face folder is read by transformers; "
            "pip install 'meshyard-hybridflow[transformers]'"
        ) from error
    # Asked first: transformers would take a folder without one for a name to download.
    if not any((Path(model) / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(
            f"model: expected a tokenizer beside the weights in {model!r}, got none of "
            f"{', '.join(_TOKENIZERS)}; copy the tokenizer's files there, or train on a task"
        )
    return as_tokenizer(AutoTokenizer.from_pretrained(model, local_files_only=True))


def is_model(target: str) -> bool:
    """Whether a reward or cost is a model, otherwise it is a function."""
    return target.startswith("config:") or Path(target).is_dir()


def find_reward(target: str, key: str) -> Reward:
    """Imports a reward named "file.py:function" or "module:function".

    Args:
        target: the name.
        key: the recipe's key, for messages.

    Raises:
        ConfigError: if there is no such file, module or reward.
    """
    place, _, name = target.rpartition(":")
    if not place:
        raise ConfigError(f"{key}: expected 'file.py:function' or a model's folder, got {target!r}")
    try:
        module = _import(place, key)
    except ImportError as error:
        raise ConfigError(f"{key}: {place} cannot be imported: {error}") from error
    except SystemExit as error:
        raise ConfigError(
            f"{key}: expected {place} to define functions, and it called exit({error.code!r}) when "
            "it was imported; put what it runs under `if __name__ == '__main__':`"
        ) from error
    found = getattr(module, name, None)
    if not isinstance(found, Reward):
        raise ConfigError(
            f"{key}: expected {place} to have a {name!r} marked with @hybridflow.reward, got "
            f"{'none' if found is None else f'a {type(found).__name__}'}"
        )
    return found


def _import(place: str, key: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None or not Path(place).is_file():
        raise ConfigError(f"{key}: there is no file {place}")
    module = importlib.util.module_from_spec(spec)
    # So that the file's own imports, and pickles of its functions, work here and in workers.
    sys.modules[spec.name] = module
    sys.path.append(str(Path(place).parent.absolute()))
    spec.loader.exec_module(module)
    return module
