"""A recipe: all settings of a run, as a YAML file and as frozen dataclasses.

An unknown key is an error that names the nearest known one. Contradictory keys, and keys without
effect, are refused before any rank starts.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from hybridflow.algorithms.registry import ALGORITHMS, LOOPS
from hybridflow.training.placement import Loop, Placement, Server, is_set
from shared.errors import ConfigError
from shared.files import read_text, write_atomically

if TYPE_CHECKING:
    from hybridflow.algorithms.dataflow import AlgorithmSpec

__all__ = [
    "OptimizerSettings",
    "Recipe",
    "built_in",
    "format_recipe",
    "read_recipe",
    "write_recipe",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Settings of the optimizers of actor and critic; the schedule spans the whole run.

    Attributes:
        lr, weight_decay, max_grad_norm, schedule: as in `hybridflow.AdamW`.
        warmup_share: share of the optimizer's steps over which the learning rate rises.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: str = "cosine"
    warmup_share: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All settings of a run.

    Attributes:
        algorithm: a name of `hybridflow.algorithms.registry`.
        model: "config:NAME" for a randomly initialised model, or a local Hugging Face folder.
        task: "NAME:NUMBER" of `hybridflow.tasks.registry`, such as "digit-sort:2", or a .jsonl or
            .parquet file of prompts.
        column: column of the prompts in that file.
        reward: "file.py:function" or "module:function" of a `hybridflow.reward`, or a reward model:
            a Hugging Face folder, or "config:NAME"; empty: the task's own reward.
        cost: the same for the cost of Safe-RLHF.
        per_token: whether a task rewards each right token, instead of the whole answer.
        steps: training steps.
        batch_size: responses per step, which is prompts times `num_samples`.
        num_samples: responses per prompt; 2 or more for algorithms that compare a group.
        max_new_tokens: longest response in tokens; 0: as long as the task needs.
        max_prompt_tokens: longest prompt of a file in tokens; longer ones are left out.
        temperature: of sampling; divides the logits.
        num_updates: optimizer steps per training step.
        clip_low, clip_high: how far the probability ratio may go below and above 1.
        beta: weight of the KL penalty against the reference; 0: no reference model.
        seed: of all random numbers.
        optimizer: settings for actor and critic.
        placement: of the models on ranks.
        loop: how generation and training alternate.
        server: that generates in place of the actor.
        max_tokens: most tokens of a micro-batch, padding included.
        cache_bytes: bytes that keys and values of a generation may take on a rank: prompts are
            generated in waves that fit; 0: all at once.
    """

    algorithm: str
    model: str = "config:tiny-llama"
    task: str = "digit-sort:2"
    column: str = "prompt"
    reward: str = ""
    cost: str = ""
    per_token: bool = False
    steps: int = 100
    batch_size: int = 256
    num_samples: int = 1
    max_new_tokens: int = 0
    max_prompt_tokens: int = 1024
    temperature: float = 1.0
    num_updates: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.0
    seed: int = 0
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    placement: Placement = field(default_factory=Placement)
    loop: Loop = field(default_factory=Loop)
    server: Server = field(default_factory=Server)
    max_tokens: int = 16384
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        ALGORITHMS.check(self.algorithm)
        for name in ("steps", "batch_size", "num_samples", "num_updates", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.cache_bytes < 0:
            raise ConfigError(f"cache_bytes: expected 0 or more, got {self.cache_bytes}")
        if self.spec.kind.is_grouped and self.num_samples < 2:
            raise ConfigError(
                f"num_samples: {self.algorithm} compares the responses to a prompt, so it needs 2 "
                f"or more, got {self.num_samples}"
            )
        if self.spec.kind.has_greedy and self.num_samples != 1:
            raise ConfigError(
                f"num_samples: expected 1, as {self.algorithm} takes one response per prompt, got "
                f"{self.num_samples}"
            )
        if self.batch_size % self.num_samples:
            raise ConfigError(
                f"batch_size: expected a multiple of num_samples {self.num_samples}, got "
                f"{self.batch_size}"
            )
        if self.spec.kind.has_cost and not self.cost:
            raise ConfigError(
                f"cost: {self.algorithm} needs a cost, 'file.py:function' or a cost model"
            )
        if self.beta and not self.spec.has_reference:
            raise ConfigError(
                f"beta: {self.algorithm} has no KL penalty against a reference; set it to 0"
            )
        self._check_all_is_used()
        self._check_rollout()

    def _check_all_is_used(self) -> None:
        """Refuses settings that would have no effect."""
        # Imported here, because it imports torch, which listing the built-in recipes does not need.
        from hybridflow.tasks.registry import TASKS

        if self.cost and not self.spec.kind.has_cost:
            known = [name for name in ALGORITHMS if ALGORITHMS.get(name).kind.has_cost]
            raise ConfigError(f"cost: {self.algorithm} has none, only {', '.join(known)} has")
        name, colon, _ = self.task.partition(":")
        is_task = bool(colon) and name in TASKS
        if self.per_token and (self.reward or not is_task):
            raise ConfigError(
                "per_token: expected a task's own reward, which can reward tokens, got "
                + (f"reward {self.reward!r}" if self.reward else f"prompts of {self.task!r}")
            )
        for key, use in (("max_prompt_tokens", "limits"), ("column", "names")):
            if is_task and is_set(self, key):
                raise ConfigError(
                    f"{key}: it {use} prompts of a file, and {self.task} is a task; leave it out"
                )
        used = {"actor", "rollout", *self.spec.kind.critics}
        used |= {"reference"} if self.beta else set()
        used |= {role for role in ("reward", "cost") if getattr(self, role)}
        unused = sorted(self.placement.models.keys() - used)
        if unused:
            raise ConfigError(
                f"placement.models.{unused[0]}: this run has no such model; {self.algorithm} with "
                f"this beta, reward and cost has {', '.join(sorted(used))}"
            )

    def _check_rollout(self) -> None:
        """Refuses a loop whose two sides would deadlock, or in which nothing generates."""
        place, is_apart = self.placement, LOOPS.get(self.loop.kind).is_apart
        if "rollout" not in place.models:
            if is_apart or self.server.kind:
                who = "a server" if self.server.kind else f"loop {self.loop.kind!r}"
                raise ConfigError(
                    f"placement.models.rollout: {who} needs a rollout with a pool of "
                    f"its own; add a pool to placement.pools, and set rollout: {{pool: NAME}}"
                )
            return
        if place.of("rollout").pool == place.of("actor").pool:
            raise ConfigError(
                "placement.models.rollout.pool: expected another pool than the actor's; leave out "
                "the rollout to generate with the actor"
            )
        used = {*place.models, *self.spec.kind.critics} - {"rollout"}
        beside = [role for role in used if place.of(role).pool == place.of("rollout").pool]
        if is_apart and beside:
            raise ConfigError(
                f"placement.models.{min(beside)}.pool: {place.of('rollout').pool!r} is the "
                f"rollout's; in loop {self.loop.kind!r} the model would wait for all generation "
                f"there, so give it another pool"
            )
        if self.server.kind and place.sizes[place.of("rollout").pool] != 1:
            raise ConfigError(
                "placement.models.rollout.pool: expected a pool of one rank, which sends requests "
                "to the server"
            )

    def without_rollout(self) -> Recipe:
        """The same recipe with generation on the actor, for programs that need no rollout."""
        models = {role: at for role, at in self.placement.models.items() if role != "rollout"}
        return replace(
            self, loop=Loop(), server=Server(), placement=replace(self.placement, models=models)
        )

    @property
    def spec(self) -> AlgorithmSpec:
        """The algorithm's entry in the registry."""
        return ALGORITHMS.get(self.algorithm)

    @property
    def num_prompts(self) -> int:
        """Prompts per step."""
        return self.batch_size // self.num_samples


def built_in() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    folder = Path(__file__).parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_recipe(source: str | Path, changes: Mapping[str, str] | None = None) -> Recipe:
    """Reads a recipe.

    Files and folders that a recipe names are looked for beside it first, then in the working
    directory; those of `changes` in the working directory only.

    Args:
        source: a YAML file, or the name of a built-in recipe.
        changes: values by key that replace the file's; "null" restores the default. Nested keys
            are written as "optimizer.lr".

    Raises:
        ConfigError: if a key or value in it is wrong.
        DataError: if there is no such recipe, or the file is no text.
    """
    path = built_in().get(str(source), Path(source))
    others = "" if path.exists() else f", or one of {', '.join(built_in())}"
    tree = _yaml(read_text(path, f"a recipe as YAML{others}"), str(path)) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected keys and values, got a {type(tree).__name__}")
    _find_files(tree, path.absolute().parent)
    for key, value in (changes or {}).items():
        *outer, leaf = key.split(".")
        at = tree
        for name in outer:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{key}: {name} is {at!r}, which has no keys in it")
        at[leaf] = _yaml(value, key)
        if at[leaf] is None:
            del at[leaf]
    return _made(Recipe, tree, "")


def _yaml(text: str, where: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: expected YAML: {error}") from error


def _find_files(tree: dict[str, Any], folder: Path) -> None:
    """Replaces names of files and folders beside the recipe by their absolute paths."""
    for key in ("model", "task", "reward", "cost"):
        value = tree.get(key)
        if not isinstance(value, str) or value.startswith("config:"):
            continue
        # "rewards.py:score" names a function in a file.
        place, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
        if place and (folder / place).exists():
            tree[key] = f"{folder / place}{colon}{name}"


def format_recipe(recipe: Recipe, *, is_whole: bool = False) -> str:
    """A recipe as YAML.

    Args:
        recipe: to format.
        is_whole: with fields at their defaults, which are left out otherwise.
    """
    import yaml

    tree = asdict(recipe) if is_whole else _changed(recipe)
    return yaml.safe_dump(tree, sort_keys=False)


def write_recipe(recipe: Recipe, path: str | Path) -> None:
    """Writes a recipe as YAML; fields at their defaults are left out."""
    write_atomically(path, format_recipe(recipe))


def _changed(record: Any) -> dict[str, Any]:
    """Fields of a dataclass that are not at their defaults."""
    tree: dict[str, Any] = {}
    for item in fields(record):
        value = getattr(record, item.name)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if value == default:
            continue
        if is_dataclass(value):
            tree[item.name] = _changed(value)
        elif isinstance(value, dict):
            tree[item.name] = {
                key: _changed(inner) if is_dataclass(inner) else inner
                for key, inner in value.items()
            }
        else:
            tree[item.name] = value
    return tree


def _made(kind: type, tree: Mapping[str, Any], where: str) -> Any:
    """A dataclass from a tree of YAML."""
    known = {item.name: item for item in fields(kind)}
    kinds = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}{key}: there is no such key; {hint}")
        values[key] = _value(kinds[key], value, f"{where}{key}")
    missing = [
        name
        for name, item in known.items()
        if name not in values and item.default is MISSING and item.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"{where}{missing[0]}: expected a value, got none; it has no default")
    return kind(**values)


def _value(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind) or get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected keys and values, got {value!r}")
        if is_dataclass(kind):
            return _made(kind, value, f"{where}.")
        inner = get_args(kind)[1]
        return {str(key): _value(inner, item, f"{where}.{key}") for key, item in value.items()}
    # YAML reads 1e-3 as text, because it requires a decimal point in floats.
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{where}: expected {kind.__name__}, got {value!r}")
    return value
