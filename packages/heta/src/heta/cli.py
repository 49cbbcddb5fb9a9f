"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from heta.config import (
    COUNTS,
    GraphOptions,
    PlanOptions,
    RowRule,
    TrainConfig,
    WireFormat,
    read_counts,
    read_rates,
    read_recipe,
)
from shared.cli import CheckpointOption, DemoOptions, JsonOption, run_command
from shared.errors import ConfigError
from shared.files import check_exists, read_json, read_text, write_atomically
from shared.training.progress import is_progress_hidden, show_progress
from shared.units import format_bytes, parse_bytes, parse_rate

if TYPE_CHECKING:
    from heta.graph.hetero_graph import HeteroGraph
    from heta.partitioning.plan import Plan

__all__ = ["main", "print_epoch"]

_ABOUT = """Train graphs of many types and relations on several hosts.

GRAPH is flights[:TASK[:DAYS]] (real flights of 2013; tasks late15, cancelled, carrier),
mag_like:SCALE (generated), a YAML file that names tables, or file.py:function or module:function of
a function that returns a HeteroGraph, PyG's HeteroData or a DGL graph.

Exit status: 0 done; 1 failed; 2 wrong usage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan(PlanOptions):
    """Say which strategy is fastest for a graph, and what each sends, holds and takes.

    Examples:
        heta plan flights:late15 --network-rate 100Mbit/s
        heta plan mag_like:0.05 --parts 2 --no-uses-dst --out report/heta/plan.json
    """

    out: Path | None = None
    """JSON file to write the plan to, for `heta partition --plan`."""

    def execute(self) -> None:
        """Prints the explanation."""
        if self.rates is not None:
            check_exists(self.rates, "rates that `heta profile` measured")
        is_counts = self.graph.endswith(COUNTS)
        plan = self.make_plan(read_counts(self.graph) if is_counts else self.read_graph())
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.out, plan.to_json() + "\n")
        record = {
            "strategy": plan.strategy,
            "step_s": plan.step_s,
            "sent_bytes": plan.sent_bytes,
            "alternatives": [asdict(each) for each in plan.alternatives],
            "parts": [[list(root) for root in part.roots] for part in plan.parts],
        }
        self.print_result(record, plan.explain())


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(PlanOptions):
    """Write each host's folder: its relations' edges, features, labels and masks.

    Examples:
        heta partition flights:late15 --out report/heta/flights
        heta partition mag_like:0.01 --parts 2 --strategy raf --out report/heta/mag
    """

    out: str
    """Folder to write, or an fsspec URL; every host reads its own folder below it."""
    plan: Path | None = None
    """JSON file of `heta plan --out`, in place of planning options."""

    def execute(self) -> None:
        """Writes the folders and says what was written."""
        if self.plan is not None:
            check_exists(self.plan, "a plan that `heta plan --out` wrote")
        graph = self.read_graph()
        plan = self._choose_plan(graph)
        with show_progress(f"writing {plan.num_parts} parts"):
            plan.write(graph, self.out)
        folders = [] if "://" in self.out else sorted(Path(self.out).glob("part*"))
        sizes = {path.name: sum(file.stat().st_size for file in path.iterdir()) for path in folders}
        lines = [f"{self.out}: {plan.strategy} on {plan.num_parts} hosts"]
        lines += [f"  {name}: {format_bytes(size)}" for name, size in sizes.items()]
        record = {"out": self.out, "strategy": plan.strategy, "bytes": sizes}
        self.print_result(record, "\n".join(lines))

    def _choose_plan(self, graph: HeteroGraph) -> Plan:
        if self.plan is None:
            return self.make_plan(graph)
        from heta.partitioning.plan import Plan

        return Plan.from_json(read_text(self.plan, "a plan that `heta plan --out` wrote"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnParts(JsonOption):
    """Options of commands that run on parts."""

    folder: Annotated[str, tyro.conf.Positional]
    """Folder that `heta partition` wrote, or an fsspec URL of one."""
    ranks: int | None = None
    """Ranks to start on this machine, by default one a host of the plan; torchrun starts its own."""

    def count_ranks(self) -> int:
        """The ranks to start; refuses a folder without parts."""
        if self.ranks is not None and self.ranks < 1:
            raise ConfigError(f"ranks: expected 1 or more, got {self.ranks}")
        if "://" in self.folder:
            return self.ranks or 1
        check_exists(self.folder, "a folder that `heta partition` wrote")
        plan = read_json(Path(self.folder, "plan.json"), "a plan that `heta partition` wrote")
        return self.ranks or plan["num_parts"]


@dataclass(frozen=True, kw_only=True)
class Train(_OnParts, CheckpointOption):
    """Train a model over the parts, on ranks of this machine or under torchrun, and score it.

    Examples:
        heta train report/heta/flights --model rgcn --epochs 5
        torchrun --nproc-per-node 2 -m heta train report/heta/flights --checkpoint report/heta/run
    """

    recipe: Path | None = None
    """YAML file of settings; those given here stand above it."""
    model: str | None = None
    """rgcn, rgat, hgt, bghgnn, or file.py:function or module:function of a function (part, hidden,
    num_classes) that makes a HeteroModel; by default rgcn."""
    epochs: int | None = None
    """Passes over the training nodes; by default 10."""
    lr: float | None = None
    """Learning rate of the parameters; by default 0.01."""
    row_lr: float | None = None
    """Learning rate of learnable rows; by default 0.01."""
    row_rule: RowRule | None = None
    """Optimizer of learnable rows; by default adam."""
    batch_size: int | None = None
    """Seeds of a step over all ranks; by default the plan's."""
    fanouts: tuple[int, ...] = ()
    """In-edges drawn of a node and relation; by default the plan's."""
    wire: WireFormat | None = None
    """Form in which merged rows travel; by default float32."""
    device: str | None = None
    """Where the model lies: cpu, cuda (each rank's GPU) or cuda:N; by default cpu."""
    cache: str | None = None
    """Memory as 256MB: with an edge-cut for other hosts' features, else on the GPU for rows of the
    host; by default none."""
    seed: int | None = None
    """Seed of initial values, of the order of nodes and of all draws; by default 0."""

    def execute(self) -> None:
        """Trains, with a line an epoch on stderr, and prints a table."""
        settings = {each.name: getattr(self, each.name) for each in fields(TrainConfig)}
        given = {name: value for name, value in settings.items() if value not in (None, ())}
        config = read_recipe(self.recipe, given)
        num_ranks = self.count_ranks()
        from heta.training.jobs.reports import draw_epochs
        from heta.training.jobs.training_run import train

        outcome = train(self.folder, config, self.checkpoint, num_ranks, print_epoch)
        if outcome is not None:
            epochs, test = outcome
            self.print_result({"epochs": epochs, "test": test}, draw_epochs(epochs, test))


def print_epoch(epoch: dict[str, Any]) -> None:
    """Prints an epoch's loss and scores on stderr, as soon as it ends, unless progress is hidden."""
    if is_progress_hidden():
        return
    from heta.training.jobs.reports import describe_scores

    scores = describe_scores(epoch["val"])
    sys.stderr.write(
        f"epoch {epoch['epoch']}: loss {epoch['loss']:.4f}, {epoch['seconds']:.1f} s"
        f"{', val ' + scores if scores else ''}\n"
    )
    sys.stderr.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict(_OnParts):
    """Write the classes of nodes, with probabilities, by your own ids.

    Examples:
        heta predict report/heta/flights --checkpoint report/heta/run
        heta predict report/heta/flights --checkpoint report/heta/run --nodes wanted.csv
    """

    checkpoint: Path
    """Folder that the run had as --checkpoint."""
    nodes: Path | None = None
    """Table with a column id of the nodes to score, in this order; all nodes if left out."""
    out: Path = Path("report/heta/predictions.csv")
    """Table to write, .csv or .parquet: id, class, probability, and those of all classes."""

    def execute(self) -> None:
        """Writes the table and says where it is."""
        num_ranks = self.count_ranks()
        check_exists(self.checkpoint, "a run that `heta train --checkpoint` saved")
        if self.nodes is not None:
            check_exists(self.nodes, "a table")
        from heta.graph.part_files import read_target_names
        from heta.training.jobs.predictions import predict_logits, select_nodes, tabulate
        from shared.data.frames import check_output, write_frame

        inputs = [path for path in (self.nodes, self.checkpoint) if path is not None]
        check_output(self.out, [*inputs, self.folder])
        names = read_target_names(self.folder)
        selection = select_nodes(names, self.nodes)
        known = selection.nodes[selection.nodes >= 0]
        logits = predict_logits(self.folder, self.checkpoint, known.tolist(), num_ranks)
        if logits is None:
            return
        write_frame(tabulate(selection, logits, names), self.out)
        num_unknown = len(selection.nodes) - len(known)
        lines = [f"classes of {len(known):,} nodes: {self.out}"]
        if num_unknown:
            lines.append(f"rows without a class, as the graph lacks their ids: {num_unknown:,}")
        record = {"num_scored": len(known), "num_unknown": num_unknown, "out": str(self.out)}
        self.print_result(record, "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(JsonOption):
    """Measure what this machine takes for each unit of a step's work, for a few seconds.

    Examples:
        heta profile --out report/heta/rates.json
        heta profile --threads 4
    """

    out: Path | None = None
    """JSON file to write, for `heta plan --rates`."""
    threads: int = 1
    """Threads of a rank."""

    def execute(self) -> None:
        """Prints the rates, and writes them."""
        if self.threads < 1:
            raise ConfigError(f"threads: expected 1 or more, got {self.threads}")
        import torch

        from heta.profiler import measure_rates

        torch.set_num_threads(self.threads)
        with show_progress("measuring"):
            rates = asdict(measure_rates())
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.out, json.dumps(rates, indent=1) + "\n")
        self.print_result(rates, "\n".join(f"{name}: {s:.3g}" for name, s in rates.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate(JsonOption):
    """Predict steps on many hosts from counts alone: a table of the strategies by number of hosts.

    Examples:
        heta simulate mag240m --hosts 4 16 64
        heta simulate igb-het --network-rate 25Gbit/s --memory 256GiB
    """

    counts: Annotated[str, tyro.conf.Positional]
    """mag240m or igb-het as published, or a .json file that Schema.to_json gives."""
    hosts: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Numbers of hosts."""
    layers: int = 2
    """Layers of the model."""
    batch_size: int = 2048
    """Seeds of a step over all hosts."""
    hidden: int = 64
    """Width of hidden and learnable rows."""
    uses_dst: bool = False
    """Modules read their destination's row."""
    network_rate: str = "10Gbit/s"
    """Rate of the slowest link between two hosts."""
    memory: str | None = None
    """Memory of each host, as 256GiB; by default without a limit."""
    rates: Path | None = None
    """JSON file of this kind of machine's rates, written by `heta profile`."""

    def execute(self) -> None:
        """Prints the table."""
        if self.counts.endswith(COUNTS):
            check_exists(self.counts, "counts as Schema.to_json gives them")
        if self.rates is not None:
            check_exists(self.rates, "rates that `heta profile` measured")
        from heta.simulator import PUBLISHED, format_table, simulate
        from shared.topology import Link

        is_file = self.counts.endswith(COUNTS)
        schema = read_counts(self.counts) if is_file else PUBLISHED.get(self.counts)()
        results = simulate(
            schema,
            self.hosts,
            rates=None if self.rates is None else read_rates(self.rates),
            link=Link.from_rate(parse_rate(self.network_rate), 5e-5),
            layers=self.layers,
            batch_size=self.batch_size,
            hidden=self.hidden,
            uses_dst=self.uses_dst,
            memory_bytes=None if self.memory is None else int(parse_bytes(self.memory)),
        )
        record = [
            {"hosts": each.hosts, "strategy": each.strategy}
            | {"forecasts": [asdict(forecast) for forecast in each.forecasts]}
            for each in results
        ]
        title = f"Steps at {self.counts}'s counts, simulated, {self.network_rate} between hosts"
        self.print_result({"hosts": record}, format_table(results, title))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(GraphOptions):
    """Time steps of each strategy in turns on ranks of this machine, beside predicted ones.

    Examples:
        heta bench flights:late15:60 --turns 3 --no-uses-dst
        heta bench mag_like:0.01 --rate 100mbit
    """

    model: str = "rgcn"
    """As of `heta train`."""
    turns: int = 5
    """Timed turns of each strategy; one more warms up."""
    steps: int = 5
    """Steps in a turn."""
    rate: str | None = None
    """Rate of emulated links, as 100mbit, with each rank on an emulated host (Linux, root); without,
    ranks use this machine's loopback."""

    def execute(self) -> None:
        """Prints the table."""
        if self.parts < 2 or self.turns < 1 or self.steps < 1:
            raise ConfigError(
                f"parts, turns, steps: expected 2 or more, 1 or more and 1 or more, got {self.parts}, "
                f"{self.turns} and {self.steps}"
            )
        config = TrainConfig(model=self.model, seed=self.seed)
        graph = self.read_graph()
        from heta.training.jobs.comparison import compare_strategies
        from heta.training.jobs.reports import draw_comparison

        comparison = compare_strategies(
            graph,
            config,
            self.parts,
            self.list_settings(),
            turns=self.turns,
            steps_per_turn=self.steps,
            rate=self.rate,
        )
        record, text = draw_comparison(comparison)
        self.print_result(record, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Train flights on two ranks by each strategy, and compare losses, bytes and seconds.

    Examples:
        heta demo --out report/heta
        heta demo --full
    """

    out: Path = Path("report/heta")
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: the whole year and more steps."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from heta import demo

        return self.run_demo(demo.run)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; None: those of the process.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    return run_command(
        {
            "plan": MakePlan,
            "partition": Partition,
            "train": Train,
            "predict": Predict,
            "profile": Profile,
            "simulate": Simulate,
            "bench": Bench,
            "demo": Demo,
        },
        prog="heta",
        about=_ABOUT,
        argv=argv,
    )
