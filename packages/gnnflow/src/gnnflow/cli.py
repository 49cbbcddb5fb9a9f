"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from gnnflow.config import MODELS, Recipe
from gnnflow.features.policies import CACHE_POLICIES
from gnnflow.partitioning.methods import PARTITION_METHODS
from gnnflow.sampling.policies import SAMPLING_POLICIES
from gnnflow.training.replay_policies import REPLAY_POLICIES
from shared.cli import CheckpointOption, DemoOptions, choice, run_command
from shared.data.cli import ABOUT_DATA, Data, EventOptions
from shared.data.prediction import PredictOptions, save_run
from shared.errors import ConfigError
from shared.files import atomic_file, write_atomically
from shared.training.progress import ScalarWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gnnflow.training.continual import ContinualTrainer
    from gnnflow.training.rounds import Round
    from shared.data.events import Events

__all__ = ["main"]

_ABOUT = f"""Train temporal graph networks while their graph grows.

{ABOUT_DATA}

Exit status: 0 done; 1 failed; 2 wrong usage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training(EventOptions, CheckpointOption):
    """Options of both `train` and `continual`."""

    data: Data
    """The events."""
    model: Annotated[str, choice(MODELS)] = "tgat"
    """Model; tf-tgn reads a sequence of neighbours with a Transformer decoder."""
    dim: int = 100
    """Columns of embeddings."""
    fanouts: tuple[int, ...] = ()
    """Neighbours per hop; by default as published for the model."""
    policy: Annotated[str, choice(SAMPLING_POLICIES)] | None = None
    """Policy of sampling neighbours; by default as published for the model."""
    batch_size: int = 600
    """Events per batch."""
    grain: Literal["event", "batch"] = "event"
    """Each event at its own time; or each node once a batch, as of its first event, which is cheaper."""
    cache: float = 0.0
    """Share of the edge features that a cache holds, from 0 (no cache) to 1."""
    cache_policy: Annotated[str, choice(CACHE_POLICIES)] = "keep"
    """Which row leaves the cache when another enters."""
    negatives: Literal["random", "historical", "inductive"] = "random"
    """Destinations that events are ranked against in evaluations."""
    seed: int = 0
    """Seed of weights, draws and everything else that is random."""
    placement: Literal["cpu", "cuda", "hybrid"] = "cpu"
    """Where the graph is stored and sampled; hybrid: edges in host memory that the GPU reads."""
    tensorboard: Path | None = None
    """Folder for TensorBoard's files: scores, loss and seconds of each round."""

    def run_rounds(self, trainer: ContinualTrainer, events: Events) -> Iterator[Round]:
        """Runs a trainer, and writes TensorBoard's files if a folder is given."""
        from gnnflow.training.rounds import STAGES

        with ScalarWriter(self.tensorboard) as scalars:
            for found in trainer.run(events):
                told = {name: getattr(found, name) for name in ("loss", "ap", "auc", "mrr")}
                told |= {f"seconds/{stage}": getattr(found, f"{stage}_s") for stage in STAGES}
                scalars.write(found.index, told)
                yield found

    def make_trainer(self, events: Events) -> ContinualTrainer:
        """A trainer of a new graph, with the settings of the command."""
        raise NotImplementedError

    def save_run(self, name: str, events: Events) -> None:
        """Leaves what `predict` reads in the checkpoint's folder, and says so on stderr."""
        if self.checkpoint is None:
            return
        save_run(self.checkpoint, name, self, self.data, events)
        print(f"to score new rows: gnnflow predict NEW --run {self.checkpoint}", file=sys.stderr)

    def _make_trainer(self, events: Events, **options: Any) -> ContinualTrainer:
        from gnnflow.training.continual import ContinualTrainer

        recipe = Recipe(
            model=self.model,
            dim=self.dim,
            fanouts=self.fanouts or None,
            policy=self.policy,
            cache=self.cache,
            cache_policy=self.cache_policy,
            neighbor_times="root" if self.grain == "batch" else "edge",
            seed=self.seed,
        )
        return ContinualTrainer(
            **recipe.build(events.sorted(), placement=self.placement)._asdict(),
            batch_size=self.batch_size,
            grain=self.grain,
            negatives=self.negatives,
            seed=self.seed,
            checkpoint=self.checkpoint,
            **options,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(_Training):
    """Train on the first part of a stream in several passes, and evaluate on the rest.

    Examples:
        gnnflow train flights --limit 20000 --model tf-tgn --epochs 2
        gnnflow train zipf:1000:20000 --epochs 1 --dim 32
    """

    share: float = 0.7
    """Share of the events that are trained on first; the rest comes in two halves."""
    epochs: int = 3
    """Passes over the first part."""

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ConfigError(f"share: expected 0 or more and below 1, got {self.share}")
        if self.epochs < 1:
            raise ConfigError(f"epochs: expected 1 or more, got {self.epochs}")

    def execute(self) -> None:
        """Prints a line for each half, when it is done."""
        events = self.read(self.data)
        halves = []
        for at, found in enumerate(self.run_rounds(self.make_trainer(events), events), 1):
            halves.append(found.to_json())
            print(
                f"half {at}: {found.num_events:,} events, AP {found.ap:.4f}, AUC {found.auc:.4f}, "
                f"MRR {found.mrr:.4f}",
                file=sys.stderr if self.json else sys.stdout,
            )
        if self.json:
            self.print_result({"halves": halves}, "")
        self.save_run("train", events)

    def make_trainer(self, events: Events) -> ContinualTrainer:
        """A trainer of a new graph, that evaluates the rest in two halves."""
        rest = len(events) - int(len(events) * self.share)
        return self._make_trainer(
            events, warmup=self.share, every=max(1, -(-rest // 2)), replay=0.0,
            warmup_epochs=self.epochs,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Continual(_Training):
    """Go through a stream: evaluate each increment, then learn from it and from replayed events.

    Writes rounds.json, continual.svg and a page, continual.html; and nodes.csv, if ids are texts.

    Examples:
        gnnflow continual flights --limit 20000 --every 1D --model tf-tgn --out report/gnnflow/flights
        gnnflow continual zipf:1000:20000 --every 5000 --dim 32
    """

    out: Path = Path("report/gnnflow/continual")
    """Folder for the files."""
    warmup: float = 0.3
    """Share of the stream that is trained on first."""
    every: str = "1D"
    """Length of an increment: a time such as 12h or 7D, or a number of events."""
    replay: float = 0.05
    """Past events trained on with an increment, as a share of all past events."""
    replay_policy: Annotated[str, choice(REPLAY_POLICIES)] = "uniform"
    """Policy of choosing the past events to replay."""
    window: str | None = None
    """Edges older than this expire: a time such as 30D, or a number in the stream's own unit."""

    def execute(self) -> None:
        """Prints the last round and where the page is."""
        events = self.read(self.data)
        from gnnflow.training import report
        from shared.data.time_units import describe_dates

        trainer = self.make_trainer(events)
        self.out.mkdir(parents=True, exist_ok=True)  # before the work, not after it
        rounds = list(self.run_rounds(trainer, events))
        if events.nodes is not None:
            events.nodes.save(self.out / "nodes.csv")
        text = json.dumps([one.to_json() for one in rounds])
        write_atomically(self.out / "rounds.json", text)
        page = report.write_page(
            {self.model: rounds},
            self.out,
            title=f"{self.model} on {events.label or self.data}",
            is_unix_time=describe_dates(events) is not None,
        )
        num_events = sum(one.num_events for one in rounds)
        num_learnt = num_events + sum(one.num_replayed for one in rounds)
        rate = num_learnt / sum(one.total_s for one in rounds)
        mean = sum(one.ap * one.num_events for one in rounds) / num_events
        record = {"num_rounds": len(rounds), "mean_ap": mean, "events_per_s": rate}
        self.print_result(
            record | {"page": str(page)},
            f"{len(rounds)} rounds, mean AP {mean:.4f}, {rate:,.0f} events/s: {page}",
        )
        self.save_run("continual", events)

    def make_trainer(self, events: Events) -> ContinualTrainer:
        """A trainer of a new graph, that goes through the stream in increments."""
        return self._make_trainer(
            events,
            warmup=self.warmup,
            every=int(self.every) if self.every.isdecimal() else self.every,
            replay=REPLAY_POLICIES.get(self.replay_policy)(self.replay, seed=self.seed),
            window=self.window,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict(PredictOptions):
    """Score new rows by a saved run: how likely each pair is, as of the row's time.

    Examples:
        gnnflow predict new.csv --run runs/a --out scores.csv
        gnnflow predict new.parquet --run runs/a --out scores.parquet
    """

    out: Path = Path("report/gnnflow/scores.csv")
    """Table to write, .csv or .parquet: ends, time and score of each row."""

    def execute(self) -> None:
        """Writes the scores and says where they are."""
        run = self.open_run(_TRAINING)
        command = replace(run.command, checkpoint=self.run, placement="cpu")
        past = command.read(run.data)
        queries = self.read_queries(run, past)
        trainer = command.make_trainer(past)
        trainer.restore(past)
        self.write_scores(queries, trainer.score(queries.events).sigmoid())


_TRAINING: dict[str, type[Train | Continual]] = {"train": Train, "continual": Continual}


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(EventOptions):
    """Assign the nodes of a stream to parts, and report edge cut and balance.

    Examples:
        gnnflow partition flights --parts 4 --method fennel --out parts.npy
        gnnflow partition zipf:1000:20000 --parts 2
    """

    data: Data
    """The events."""
    parts: int
    """How many parts."""
    method: Annotated[str, choice(PARTITION_METHODS)] = "fennel"
    """How nodes are placed: all but metis decide as the stream arrives."""
    out: Path | None = None
    """File for the part of every node, as a NumPy array; their ids go to NAME.nodes.csv beside it."""

    def execute(self) -> None:
        """Prints cut edges and balance."""
        one_way = self.read(self.data)
        import numpy as np

        from gnnflow.partitioning.planner import partition, summarize
        from shared.data.events import Events

        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
        # An event's two entries lie with its two nodes.
        reverse = Events(one_way.dst, one_way.src, one_way.t, one_way.eid)
        events = Events.concat(
            [Events(one_way.src, one_way.dst, one_way.t, one_way.eid), reverse]
        ).sorted()
        owners = partition(events, self.parts, self.method)
        summary = summarize(events, owners, self.parts)
        self.print_result(asdict(summary), summary)
        if self.out is not None:
            # As `np.save` names it; it is given a file, since it would name the temporary one too.
            out = self.out if self.out.suffix == ".npy" else Path(f"{self.out}.npy")
            with atomic_file(out) as partial, partial.open("wb") as file:
                np.save(file, owners.numpy())
            if one_way.nodes is not None:
                one_way.nodes.save(out.with_suffix(".nodes.csv"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(EventOptions):
    """Measure the throughput of insertion and sampling on this machine and your stream.

    Examples:
        gnnflow bench zipf:100000:1000000
        gnnflow bench flights --fanout 20
    """

    data: Data
    """The events."""
    increment: int = 1000
    """Events per insertion."""
    fanout: int = 10
    """Neighbours per root."""

    def execute(self) -> None:
        """Prints insertions and samples a second, and what the graph takes."""
        events = self.read(self.data)
        from gnnflow.profiler import measure

        found = measure(events, self.increment, self.fanout)
        self.print_result(asdict(found), found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Info(EventOptions):
    """Summarise a stream or a saved graph (*.safetensors).

    Examples:
        gnnflow info events.parquet
        gnnflow info zipf:1000:20000 --json
    """

    data: Data
    """The events, or the graph."""

    def execute(self) -> None:
        """Prints a few lines."""
        if self.data.endswith(".safetensors"):
            from gnnflow.graph.temporal_graph import TemporalGraph

            stats = TemporalGraph.load(self.data).stats()
            self.print_result(asdict(stats), stats)
            return
        events = self.read(self.data)
        from shared.data.time_units import describe_dates

        record: dict[str, Any] = {
            "label": events.label or self.data,
            "num_events": len(events),
            "num_nodes": events.num_nodes,
            "edge_dim": 0 if events.features is None else events.features.shape[1],
        }
        lines = ["{label}: {num_events:,} events, ids below {num_nodes:,}"]
        if len(events):
            record |= {"first_t": events.t[0].item(), "last_t": events.t[-1].item()}
            lines.append("times {first_t} to {last_t}, {edge_dim} edge features")
            if dates := describe_dates(events):
                record["dates"] = dates
                lines.append("{dates}")
        self.print_result(record, "\n".join(lines).format(**record))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Grow a graph of real flights and train on it day by day, compared with baselines.

    Examples:
        gnnflow demo --out report/gnnflow
        gnnflow demo --full
    """

    out: Path = Path("report/gnnflow")
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: three months."""

    def execute(self) -> int:
        """Runs the demo and prints its claims."""
        from gnnflow import demo

        return self.run_demo(demo.run)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    commands = {
        **_TRAINING,
        "predict": Predict,
        "partition": Partition,
        "bench": Bench,
        "info": Info,
        "demo": Demo,
    }
    return run_command(commands, prog="gnnflow", about=_ABOUT, argv=argv)
