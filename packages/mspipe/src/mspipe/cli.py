"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mspipe.registry import CUTS, MODELS, MODES
from shared.cli import CheckpointOption, Command, DemoOptions, JsonOption, choice, run_command
from shared.data.cli import ABOUT_DATA, Data, EventOptions
from shared.data.prediction import PredictOptions, save_run
from shared.errors import ConfigError, DataError
from shared.files import write_atomically
from shared.training import check_device
from shared.training.progress import ScalarWriter
from shared.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim import Optimizer

    from mspipe.data.batching import Batch
    from mspipe.data.events import Events
    from mspipe.pipeline.pipeline import Pipeline
    from mspipe.pipeline.report import Report
    from mspipe.planner import Plan
    from mspipe.training import Settings
    from shared.comms import Group

__all__ = ["main"]

_ABOUT = f"""Train temporal graph networks that remember, their memory's traffic off the critical path.

{ABOUT_DATA}

Exit status: 0 done; 1 failed; 2 wrong usage.
"""

_SHARES = (0.7, 0.15)  # of a stream that is trained on, and validated on
_Mode = Annotated[str, choice(MODES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run(EventOptions):
    """Settings that `train`, `profile` and `trace` share."""

    model: Annotated[str, choice(MODELS)] = "tgn"
    """The memory model."""
    dim: int = 100
    """Width of a node's state and of an embedding."""
    fanout: int = 10
    """Number of newest neighbours sampled for each node."""
    batch_size: int = 600
    """Events in a batch."""
    mode: _Mode = "forward"
    """forward is exact and hides the memory's traffic; the other modes are for comparison."""
    max_staleness: int | None = None
    """In mode stale: maximum age of memory in iterations; 1 is exact. Default: as stages need."""
    place: str = "cpu"
    """Where the memory is stored: cpu, pinned, cuda, shm:NAME, tcp://host:port."""
    device: str = "cpu"
    """Device that trains the model: cpu, cuda, cuda:1."""
    rate: float = 1e-3
    """Learning rate of Adam."""
    seed: int = 0
    """Seed of weights, dropout and negatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(_Run, CheckpointOption):
    """Train on the first part of a stream, and evaluate on the rest.

    Rates leave out the first batch, in which kernels are compiled.

    On several workers, which share each batch: torchrun --nproc-per-node 2 -m mspipe train flights

    Examples:
        mspipe train flights --limit 60000 --epochs 3 --checkpoint report/mspipe/run1
        mspipe train zipf:1000:20000 --epochs 1 --model jodie
    """

    data: Data
    """The events."""
    epochs: int = 3
    """Passes over the first part."""
    cut: Annotated[str, choice(CUTS)] = "uniform"
    """How the stream is cut into batches; adaptive ones grow as long as memory stays as fresh."""
    num_negatives: int = 100
    """Negatives per event in the test, for MRR."""
    tensorboard: Path | None = None
    """Folder for TensorBoard's files, over batches: their loss, and scores of each epoch."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError(f"epochs: expected 1 or more, got {self.epochs}")

    def execute(self) -> None:
        """Prints a line an epoch, the report of the last, and the test."""
        events = _read(self, self.data)
        from mspipe.evaluation import EdgeBank, evaluate
        from mspipe.training import fit

        train, validate, test = events.split(*_SHARES)
        group = _join_group(self.device)
        is_first = group is None or not group.rank

        def tell(line: str) -> None:
            if is_first:
                print(line, file=sys.stderr if self.json else sys.stdout, flush=True)

        record: dict[str, Any] = {"epochs": [], "test": {}}
        num_batches, scalars = 0, ScalarWriter(self.tensorboard if is_first else None)
        pipe, optimizer = _make_pipeline(self, events, group=group)
        epochs = fit(pipe, optimizer, train, validate, self.settings, checkpoint=self.checkpoint)
        # Shared memory outlives a process that does not close it.
        with scalars, closing(pipe.memory):
            for epoch in epochs:
                scores = {"loss": epoch.loss, "seconds": epoch.seconds} | epoch.scores
                record["epochs"].append(scores)
                for loss in epoch.losses:
                    scalars.write(num_batches, {"loss": loss})
                    num_batches += 1
                scalars.write(num_batches, {f"epoch/{name}": v for name, v in scores.items()})
                told = ", ".join(f"{name.upper()} {v:.4f}" for name, v in epoch.scores.items())
                rate = f", {epoch.events_per_s:,.0f} events/s" if epoch.events_per_s else ""
                tell(f"epoch {epoch.index}: loss {epoch.loss:.4f}, {told}{rate}")
            tell(str(pipe.report()))
            for _ in pipe.score(_batches(validate, self.batch_size)):
                pass  # the memory moves on to the first event of the test
            past = events[: len(train) + len(validate)]
            for kind in ("random", "historical", "inductive"):
                options: dict[str, Any] = {"negatives": kind, "num_negatives": self.num_negatives}
                found = evaluate(pipe, test, history=past, **options)
                bank = EdgeBank().evaluate(past, test, **options)
                record["test"][kind] = {"model": found, "edgebank": bank}
                told = ", ".join(
                    f"{name.upper()} {value:.4f} ({bank[name]:.4f})"
                    for name, value in found.items()
                )
                tell(f"test, {kind} negatives (EdgeBank's in brackets): {told}")
        if self.json and is_first:
            self.print_result(record, "")
        if self.checkpoint is not None and is_first:
            save_run(self.checkpoint, "train", self, self.data, events)
            print(f"to score new rows: mspipe predict NEW --run {self.checkpoint}", file=sys.stderr)

    @property
    def settings(self) -> Settings:
        """Settings of the passes."""
        from mspipe.training import Settings

        return Settings(
            epochs=self.epochs, batch_size=self.batch_size, cut=self.cut, seed=self.seed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict(PredictOptions):
    """Score new rows by a saved run: how likely each pair is, after all that the run has seen.

    Examples:
        mspipe predict new.csv --run run1 --out scores.csv
        mspipe predict new.parquet --run run1 --out scores.parquet
    """

    out: Path = Path("report/mspipe/scores.csv")
    """Table to write, .csv or .parquet: ends, time and score of each row."""
    device: str = "cpu"
    """Device that computes: cpu, cuda, cuda:1."""

    def execute(self) -> None:
        """Writes the scores and says where they are."""
        from mspipe.evaluation import score_links
        from mspipe.training import restore

        run = self.open_run({"train": Train})
        command = replace(run.command, place="cpu", mode="sync", device=self.device)
        past = _read(command, run.data)
        queries = self.read_queries(run, past)
        last = past.t[-1].item()
        if queries.events.t[0] < last:
            raise DataError(
                f"{self.data}: expected times from {last} on, when the run's data ends, got "
                f"{queries.events.t[0].item()}; the memory knows all of it, so earlier rows cannot be "
                "scored"
            )
        train, *rest = past.split(*_SHARES)
        pipe, _ = _make_pipeline(command, past)
        restore(pipe, train, command.settings, self.run)
        for part in filter(len, rest):
            for _ in pipe.score(_batches(part, command.batch_size)):
                pass  # the memory moves on to the end of the data
        asked = queries.events
        self.write_scores(queries, score_links(pipe, asked.src, asked.dst, asked.t).sigmoid())


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(_Run):
    """Measure the stages on your stream, one after another, and plan their overlap.

    Examples:
        mspipe profile zipf:1000:20000
        mspipe profile flights --place tcp://10.0.0.2:7000
    """

    data: Data
    """The events."""
    num_batches: int = 30
    """Batches to run."""

    def execute(self) -> None:
        """Prints stage times and the plan."""
        report = _run_batches(self, self.data, "sync", self.num_batches)
        record = {"stage_s": report.stage_s, "period_s": report.period_s}
        self.print_result(
            record | {"plan": _plan_record(report.plan)}, f"{report}\nplan, in s:\n{report.plan}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(_Run):
    """Write a run's timeline as a Chrome trace, for chrome://tracing or ui.perfetto.dev.

    Examples:
        mspipe trace zipf:1000:20000
        mspipe trace flights --mode stale --out report/mspipe/stale.json
    """

    data: Data
    """The events."""
    out: Path = Path("report/mspipe/trace.json")
    """File to write."""
    num_batches: int = 30
    """Batches to run."""

    def execute(self) -> None:
        """Prints the report and where the trace is."""
        report = _run_batches(self, self.data, self.mode, self.num_batches)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        report.trace(self.out)
        record = {"trace": str(self.out), "stage_s": report.stage_s, "period_s": report.period_s}
        self.print_result(record, f"{report}\ntrace: {self.out}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStages(JsonOption):
    """Compute the ideal period for five stage times, and the staleness that it needs.

    Examples:
        mspipe plan --stages 2,3,2,8,2
        mspipe plan --stages 0.1,0.4,0.9,1.2,0.3 --json
    """

    stages: str
    """Sample, fetch features, fetch memory, train, write back: numbers with commas, in any unit."""

    def execute(self) -> None:
        """Prints the plan."""
        found = _read_plan(self.stages)
        self.print_result(_plan_record(found), found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate(JsonOption):
    """Replay many iterations of five stages whose times vary.

    Examples:
        mspipe simulate --stages 2,3,2,8,2 --jitter 0.2 --mode stale
        mspipe simulate --stages 2,3,2,8,2 --mode forward --depth 2
    """

    stages: str
    """Sample, fetch features, fetch memory, train, write back: numbers with commas."""
    mode: _Mode = "stale"
    """How stages overlap."""
    max_staleness: int | None = None
    """In mode stale: maximum age of the memory in iterations. Default: the plan's k_min."""
    depth: int = 4
    """In mode forward: iterations whose written rows are kept."""
    eager: bool = False
    """In mode stale: fetch as soon as allowed instead of as late as training permits."""
    iterations: int = 1000
    """Iterations to replay."""
    jitter: float = 0.0
    """Share in [0, 1): each stage time varies uniformly by up to this share up or down."""
    seed: int = 0
    """Seed of the jitter."""
    trace: Path | None = None
    """File for a Chrome trace."""

    def execute(self) -> None:
        """Prints period, staleness and how busy the resources are."""
        import json

        import numpy as np

        from mspipe.simulator import simulate

        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter: expected a share in [0, 1), got {self.jitter}")
        if self.trace is not None:
            self.trace.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
        draw = np.random.default_rng(self.seed).uniform(-1, 1, (self.iterations, 5))
        times = np.array(_read_plan(self.stages).stage_s) * (1 + self.jitter * draw)
        found = simulate(
            times, mode=self.mode, max_staleness=self.max_staleness, depth=self.depth,
            is_delayed=not self.eager,
        )  # fmt: skip
        idle = {name: use.idle_share_within for name, use in found.timeline.queues.items()}
        lines = [
            f"period {found.period_s:g}, training waits {100 * found.stall_share:.1f} %",
            f"staleness {found.histogram}",
            *(f"{name}: idle {100 * share:.1f} %" for name, share in idle.items()),
        ]
        record = {"period": found.period_s, "stall_share": found.stall_share, "idle_share": idle}
        self.print_result(record | {"staleness": found.histogram}, "\n".join(lines))
        if self.trace is not None:
            write_atomically(self.trace, json.dumps(found.timeline.to_chrome_trace()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeMemory:
    """Serve a memory that other processes read and write over TCP, until interrupted.

    Examples:
        mspipe serve-memory
        mspipe serve-memory --bind 0.0.0.0:7000 --max-bytes 64GiB
    """

    bind: str = "127.0.0.1:7000"
    """Address and port. Without a key, anyone who can connect can read and write."""
    key_file: Path | None = None
    """File with a key that clients must have too, by MSPIPE_KEY_FILE or MSPIPE_KEY. Default: those."""
    max_bytes: str | None = None
    """Largest table, and largest request, as 64GiB. Default: what the machine has."""
    max_clients: int = 1024
    """Connections at a time at most; each process that trains has two."""
    timeout_s: float = 30.0
    """Seconds for a new connection's first request, and for which a message may stand still."""

    def execute(self) -> None:
        """Prints the address, and serves."""
        from mspipe.memory.server import MemoryServer, parse_address
        from mspipe.memory.shared_key import read_key

        server = MemoryServer(
            *parse_address(self.bind),
            max_bytes=None if self.max_bytes is None else parse_bytes(self.max_bytes),
            max_clients=self.max_clients,
            timeout_s=self.timeout_s,
            key=read_key(self.key_file),
        )
        print(f"serving at {server.address}", flush=True)
        try:
            server.serve_forever()
        finally:
            server.close()

    def how_to_resume(self) -> str:
        """What to do after Ctrl-C, which is how a server ends."""
        return "its tables are gone: start again by the same command, and resume the training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Train TGN on real flights, its memory behind a modelled slow link, with and without overlap.

    Examples:
        mspipe demo --out report/mspipe
        mspipe demo --full
    """

    out: Path = Path("report/mspipe")
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: 120,000 flights."""

    def execute(self) -> int:
        """Runs the demo and prints its claims."""
        from mspipe import demo

        return self.run_demo(demo.run)


_COMMANDS: dict[str, type[Command]] = {
    "train": Train,
    "predict": Predict,
    "plan": PlanStages,
    "simulate": Simulate,
    "profile": Profile,
    "serve-memory": ServeMemory,
    "trace": Trace,
    "demo": Demo,
}


def _plan_record(plan: Plan) -> dict[str, Any]:
    return {
        "stages": plan.stage_s,
        "sequential_period": plan.sequential_period,
        "ideal_period": plan.ideal_period,
        "k_min": plan.k_min,
        "periods": {k: plan.period(k) for k in range(1, plan.k_min + 1)},
    }


def _read_plan(stages: str) -> Plan:
    from mspipe.planner import plan

    try:
        return plan([float(part) for part in stages.split(",")])
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"stages: expected five numbers, got {stages!r}; give them with commas, as in 2,3,2,8,2"
        ) from error


def _read(settings: _Run, data: str) -> Events:
    events = settings.read(data)
    from mspipe.data.events import Events

    return Events.wrap(events)


def _join_group(device: str) -> Group | None:
    """The group of all workers if torchrun started this process, else None."""
    import os

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    from shared.comms import init_from_env

    return init_from_env(backend="nccl" if device.startswith("cuda") else "gloo")


def _make_pipeline(
    settings: _Run, events: Events, mode: str | None = None, group: Group | None = None
) -> tuple[Pipeline, Optimizer]:
    from inspect import signature

    import torch

    from mspipe.data.sampler import Sampler
    from mspipe.memory.node_memory import NodeMemory
    from mspipe.pipeline.pipeline import Pipeline

    check_device("device", settings.device)
    if not len(events):
        raise ConfigError("expected a stream with events, got an empty one")
    if ":" in settings.device:
        torch.cuda.set_device(settings.device)  # kernels are launched there
    torch.manual_seed(settings.seed)
    kind = MODELS.get(settings.model)
    looks_around = "fanout" in signature(kind).parameters
    options: dict[str, Any] = {"fanout": settings.fanout} if looks_around else {}
    model = kind(settings.dim, events.edge_dim, **options).to(settings.device)
    memory = NodeMemory(
        events.num_nodes, model.dim, model.mail_dim, model.slots, settings.place, events.t[0].item()
    )
    mode = mode or settings.mode
    pipe = Pipeline(
        model, memory, Sampler(events, [model.fanout]), events.features, mode=mode,
        max_staleness=settings.max_staleness if MODES.get(mode).is_stale else None, group=group,
    )  # fmt: skip
    return pipe, torch.optim.Adam(model.parameters(), settings.rate)


def _batches(events: Events, size: int) -> Iterator[Batch]:
    from mspipe.data.batching import batches

    return batches(events, size, num_negatives=0)


def _run_batches(settings: _Run, data: str, mode: str, num_batches: int) -> Report:
    events = _read(settings, data)
    from itertools import islice

    from mspipe.data.batching import batches

    pipe, optimizer = _make_pipeline(settings, events, mode)
    pipe.memory.reset()
    for out in pipe.train(islice(batches(events, settings.batch_size), num_batches)):
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    pipe.memory.close()
    return pipe.report()


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status."""
    return run_command(_COMMANDS, prog="mspipe", about=_ABOUT, argv=argv)
