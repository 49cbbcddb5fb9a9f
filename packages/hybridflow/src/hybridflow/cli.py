"""The command line; subcommands import torch only when they run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hybridflow.algorithms.registry import ALGORITHMS, LOOPS
from hybridflow.mapping.models import LLAMA_SIZES
from hybridflow.mapping.steps import STEPS
from hybridflow.training.config import built_in
from hybridflow.training.placement import ENGINES
from shared.cli import (
    CheckpointOption,
    DemoOptions,
    JsonOption,
    choice,
    draw_table,
    run_command,
)
from shared.errors import ConfigError, DataError
from shared.training.progress import ScalarWriter, show_progress

if TYPE_CHECKING:
    from hybridflow.mapping import ModelSpec, Workload
    from hybridflow.training.config import Recipe
    from shared.topology import Cluster

__all__ = ["main"]

# If given several times, all values count; by default tyro silently keeps the last.
_Changes = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]

_ABOUT = """RLHF as straight-line code on any placement of its models.

Start with: hybridflow train grpo-sort

Built-in recipes: {recipes}.

Algorithms of recipes: {algorithms}.
Loops (loop.kind): {loops}.

Exit status: 0 done; 1 failed; 2 wrong usage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(JsonOption, CheckpointOption):
    """Train by a recipe: a YAML file, or the name of a built-in one.

    With --checkpoint DIR an interrupted run resumes, on the same ranks or others, with the same
    result.

    `hybridflow --help` lists the recipes and algorithms.

    Examples:
        hybridflow train grpo-sort
        hybridflow train ppo-sort --set steps=200 optimizer.lr=5e-4 --out report/hybridflow/run1
    """

    recipe: tyro.conf.Positional[str]
    """YAML file, or name of a built-in recipe."""
    set: _Changes = ()
    """KEY=VALUE pairs that replace the recipe's, such as optimizer.lr=1e-4."""
    out: Path | None = None
    """Folder for metrics.jsonl."""
    tensorboard: Path | None = None
    """Folder for TensorBoard's files: the same metrics, by step."""
    every: int = 50
    """Steps between saved checkpoints."""

    def execute(self) -> None:
        """Trains, with a progress bar on stderr, and prints the final accuracy.

        Raises:
            DataError: code of the run called `exit`.
        """
        from hybridflow.training.config import read_recipe

        if self.every < 1:
            raise ConfigError(f"every: expected 1 or more, got {self.every}")
        recipe = read_recipe(self.recipe, _pairs(self.set))
        try:
            share = self._train(recipe)
        except SystemExit as error:  # its status may be that of a run that has finished
            raise DataError(
                f"training ended before its last step, as code of the run called exit({error.code!r})"
            ) from error
        if share is not None or self.json:
            self.print_result(
                {"steps": recipe.steps, "greedy_share": share},
                f"right answers to prompts never trained on: {share:.3f}"
                if share is not None
                else "",
            )

    def _train(self, recipe: Recipe) -> float | None:
        """Trains; returns the share of right answers, if the task can tell."""
        from hybridflow.training.checkpoints.checkpoint import Checkpoint
        from hybridflow.training.metrics_log import Journal
        from hybridflow.training.runtime import Run, start_workers

        with (
            ScalarWriter(self.tensorboard) as scalars,
            start_workers(recipe) as workers,
            show_progress(recipe.algorithm, recipe.steps) as progress,
        ):
            run = Run.set_up(recipe, workers)
            journal = None if self.out is None else Journal(self.out)
            kept = None if self.checkpoint is None else Checkpoint(self.checkpoint)
            for told in run.steps(kept, self.every):
                if journal is not None:
                    journal.write(told)
                scalars.write(int(told["step"]), told)
                text = f"{recipe.algorithm}, reward {told['reward']:.3f}"
                progress.reach(int(told["step"]) + 1, text)
            if journal is not None:
                journal.close()
            return None if run.task is None else run.greedy()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowRecipe(JsonOption):
    """Print a recipe with the values of all its keys, or list those that come with the package.

    Examples:
        hybridflow recipe show grpo-sort
        hybridflow recipe list
    """

    action: tyro.conf.Positional[Literal["show", "list"]]
    """show prints one, list the names of the built-in ones."""
    recipe: tyro.conf.Positional[str] = ""
    """YAML file, or name of a built-in recipe."""
    set: _Changes = ()
    """KEY=VALUE pairs that replace the recipe's."""

    def __post_init__(self) -> None:
        if self.action == "show" and not self.recipe:
            raise ConfigError(
                "recipe: expected a file or a name to show, got none; `hybridflow recipe list` has "
                "the names"
            )

    def execute(self) -> None:
        """Prints YAML, which is a recipe again."""
        if self.action == "list":
            about = {
                name: path.read_text().splitlines()[0].removeprefix("# ")
                for name, path in built_in().items()
            }
            self.print_result(about, "\n".join(f"{name}: {line}" for name, line in about.items()))
            return
        from hybridflow.training.config import format_recipe, read_recipe

        text = format_recipe(read_recipe(self.recipe, _pairs(self.set)), is_whole=True)
        self.print_result({"recipe": text}, text.rstrip("\n"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReshard(JsonOption):
    """Print the bytes each rank receives when a model moves from training's to generation's layout.

    Examples:
        hybridflow plan 1-4-2 1-2
        hybridflow plan 1-4-2 1-2 --model ./model
    """

    train: tyro.conf.Positional[str]
    """Layout of training, p-t-d: pipeline stages, tensor shards, replicas."""
    generate: tyro.conf.Positional[str]
    """Layout of generation, p-t or p-t-d."""
    model: str = "config:small-llama"
    """A local Hugging Face folder, or config:NAME."""
    itemsize: int = 2
    """Bytes of a weight's element."""
    sharded: bool = False
    """Training's replicas shard the weights (FSDP2)."""

    def execute(self) -> None:
        """Prints groups and bytes."""
        from hybridflow.models.config import read_config
        from hybridflow.models.pieces import num_bytes
        from hybridflow.reshard import plan
        from hybridflow.workers.batch.layout import Layout, generation_layout

        found = plan(
            self.train, self.generate, self.model, itemsize=self.itemsize, is_sharded=self.sharded
        )
        whole = num_bytes(read_config(self.model), self.itemsize)
        tree = {
            "model_bytes": whole,
            "received_bytes": found.received_bytes,
            "sent_bytes": found.sent_bytes,
            "held_bytes": list(found.held),
            "generating_bytes": list(found.wanted),
        }
        if self.generate.count("-") != 2:
            groups = generation_layout(Layout.parse(self.train), self.generate)
            tree |= {"micro_dp": groups.micro_dp, "tp": groups.tp, "pp": groups.pp}
        lines = [f"weights of {whole:,} bytes, {self.train} -> {self.generate}"]
        for key in ("micro_dp", "tp", "pp"):
            if key in tree:
                lines.append(f"{key} groups: {tree[key]}")
        lines.append("rank  has          wants        receives     sends")
        rows = zip(found.held, found.wanted, found.received_bytes, found.sent_bytes, strict=True)
        for rank, row in enumerate(rows):
            lines.append(f"{rank:<5} " + " ".join(f"{count:<12,}" for count in row))
        self.print_result(tree, "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Map(JsonOption):
    """Search for the placement and the layouts of an algorithm's models on a cluster (simulated).

    With --recipe the search takes models and workload from a recipe, and --out writes that recipe
    with the placement found: hybridflow map --recipe ppo-sort --gpus 8 --out placed.yaml

    Examples:
        hybridflow map --actor 13B --critic 70B --gpus 128
        hybridflow map --recipe ppo-sort --gpus 8 --out placed.yaml
    """

    recipe: str = ""
    """A recipe, instead of the models and numbers below."""
    set: _Changes = ()
    """KEY=VALUE pairs that replace the recipe's."""
    out: Path | None = None
    """File for the recipe with its models placed."""
    engine: Annotated[str, choice(ENGINES)] = "local"
    """Engine that starts the ranks, written to the placed recipe."""
    actor: Annotated[str, choice(LLAMA_SIZES)] = "7B"
    """Llama size of actor and reference."""
    critic: Annotated[str, choice(LLAMA_SIZES)] = "7B"
    """Llama size of critic and reward model."""
    algorithm: Annotated[str, choice(STEPS)] = "ppo"
    """Algorithm whose models and stages are placed."""
    gpus: int = 16
    """Number of GPUs, in hosts of `per_host`."""
    per_host: int = 8
    """GPUs per host."""
    device: str = "A100_80"
    """Name of a device preset."""
    cluster: Path | None = None
    """YAML file of a cluster, instead of the three above."""
    batch: int = 1024
    """Responses per step."""
    prompt: int = 1024
    """Tokens of a prompt."""
    response: int = 1024
    """Tokens of a response."""
    group: int = 8
    """Responses per prompt, for algorithms that compare a group."""

    def execute(self) -> None:
        """Prints the mapping and its estimated times."""
        from hybridflow.mapping import search

        if self.out is not None and not self.recipe:
            raise ConfigError("out: expected --recipe too, as --out writes that recipe; add it")
        if not self.recipe:
            found = search(self._models(), self._cluster(), self._workload())
            print(found.to_json() if self.json else found)
            return
        # These import torch, which takes longer than most searches.
        from hybridflow.training.config import read_recipe, write_recipe
        from hybridflow.training.from_mapping import (
            describe_models,
            describe_workload,
            place_models,
        )

        recipe = read_recipe(self.recipe, _pairs(self.set))
        found = search(describe_models(recipe), self._cluster(), describe_workload(recipe))
        print(found.to_json() if self.json else found)
        if self.out is not None:
            write_recipe(place_models(recipe, found, self.engine), self.out)

    def _cluster(self) -> Cluster:
        from shared.topology import Cluster, Link
        from shared.topology.device import PRESETS
        from shared.units import GB, Gbps

        if self.cluster is not None:
            return Cluster.from_yaml(self.cluster)
        if self.device not in PRESETS:
            raise ConfigError(f"device: expected one of {', '.join(PRESETS)}, got {self.device!r}")
        if min(self.gpus, self.per_host) < 1 or self.gpus % min(self.gpus, self.per_host):
            raise ConfigError(
                f"gpus: expected whole hosts of {self.per_host} GPUs, got {self.gpus} GPUs"
            )
        return Cluster.uniform(
            -(-self.gpus // self.per_host), min(self.gpus, self.per_host),
            PRESETS[self.device], local=Link.from_rate(300 * GB, alpha_s=1e-5),
            network=Link.from_rate(200 * Gbps, alpha_s=2e-5),
        )  # fmt: skip

    def _models(self) -> list[ModelSpec]:
        from hybridflow.mapping import ModelSpec

        kind = STEPS.get(self.algorithm)
        # A model's name tells apart several models of one role.
        models = [("actor", "actor"), ("reference", "reference")]
        models += [("critic", name) for name in kind.critics[:1]]
        models += [("reward", "reward"), *([("cost", "cost")] if kind.has_cost else [])]
        models += [("critic", name.replace("-", " ")) for name in kind.critics[1:]]
        return [
            ModelSpec.llama(
                self.actor if role in ("actor", "reference") else self.critic, role, name
            )
            for role, name in models
        ]

    def _workload(self) -> Workload:
        from hybridflow.mapping import Workload

        return Workload(
            algorithm=self.algorithm, global_batch_size=self.batch, prompt_tokens=self.prompt,
            response_tokens=self.response, group_size=self.group if STEPS.get(self.algorithm).is_grouped else 1,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(JsonOption):
    """Measure the time of a recipe's step on this machine, in all and by model.

    Examples:
        hybridflow bench grpo-sort
        hybridflow bench grpo-sort --set placement.engine=local placement.num_ranks=2
    """

    recipe: tyro.conf.Positional[str]
    """YAML file, or name of a built-in recipe."""
    set: _Changes = ()
    """KEY=VALUE pairs that replace the recipe's."""
    steps: int = 10
    """Steps to measure, after two warm-up steps."""
    out: Path | None = None
    """Folder for bench.json, and timeline.svg of the calls on each rank in the last steps."""

    def execute(self) -> None:
        """Prints a table."""
        from dataclasses import asdict

        from hybridflow.training.config import read_recipe
        from hybridflow.training.profiler import measure

        if self.steps < 1:
            raise ConfigError(f"steps: expected 1 or more, got {self.steps}")
        recipe = read_recipe(self.recipe, _pairs(self.set))
        place = recipe.placement
        title = f"{self.recipe}, engine {place.engine}, {place.num_ranks_in_all} ranks"
        found = measure(recipe, self.steps, self.out, title)
        self.print_result(asdict(found), draw_table(found.table(f"{title}: {self.steps} steps")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(JsonOption):
    """Write the actor of a checkpoint as a Hugging Face folder, the next recipe's model.

    Examples:
        hybridflow export grpo-sort --checkpoint run1 --out sorter
        hybridflow export my.yaml --checkpoint run2 --out model --set steps=200
    """

    recipe: tyro.conf.Positional[str]
    """The recipe that the checkpoint was made with."""
    checkpoint: Path
    """Folder of the checkpoint."""
    out: Path
    """Folder to write; must be empty or not exist."""
    set: _Changes = ()
    """KEY=VALUE pairs that replaced the recipe's in training."""
    group: str = "actor"
    """Model to export, by its name in the checkpoint."""

    def execute(self) -> None:
        """Loads the checkpoint and writes the folder."""
        from hybridflow.roles.state.export import check_folder, export
        from hybridflow.training.checkpoints.checkpoint import Checkpoint
        from hybridflow.training.config import read_recipe
        from hybridflow.training.runtime import Run, start_workers

        check_folder(self.out)
        recipe = read_recipe(self.recipe, _pairs(self.set)).without_rollout()
        with start_workers(recipe) as workers:
            run = Run.set_up(recipe, workers)
            if self.group not in run.groups:
                raise ConfigError(
                    f"group: expected one of {', '.join(run.groups)}, got {self.group!r}"
                )
            Checkpoint(self.checkpoint).load(run.groups)
            path = str(export(run.groups[self.group], self.out, tokenizer=run.tokenizer))
            self.print_result({"folder": path}, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Train PPO and GRPO to sort digits, and measure the time of generation and training.

    Examples:
        hybridflow demo --out report/hybridflow
        hybridflow demo --full
    """

    out: Path = Path("report/hybridflow")
    """Folder for demo.json and a picture."""
    full: bool = False
    """Run the long form: three digits, more repeats."""

    def execute(self) -> int:
        """Runs the demo and prints its claims."""
        from hybridflow.demo import demo

        return self.run_demo(demo.run)


def _pairs(changes: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    texts = [text for given in changes for text in given]
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"set: expected KEY=VALUE, got {text!r}")
    return dict(text.split("=", 1) for text in texts)  # type: ignore[arg-type]


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    commands = {
        "train": Train, "recipe": ShowRecipe, "map": Map, "plan": PlanReshard, "bench": Bench, "export": Export,
        "demo": Demo,
    }  # fmt: skip
    about = _ABOUT.format(
        recipes=", ".join(built_in()), algorithms=", ".join(ALGORITHMS), loops=", ".join(LOOPS)
    )
    return run_command(commands, prog="hybridflow", about=about, argv=argv)
