"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.cli import DemoOptions, JsonOption, run_command

__all__ = ["main"]

_ABOUT = """Train a diffusers model over slow links and small devices, its frozen parts filling idle time.

Measure, choose how to train, train:
  torchrun --nproc-per-node 2 -m diffusionpipe profile --build train.py:build
  diffusionpipe plan --cluster cluster.yaml --batch-size 64
  torchrun --nproc-per-node 2 -m diffusionpipe train --build train.py:build --num-steps 100

Exit status: 0 done; 1 failed; 2 wrong usage.
"""

_FOLDER = Path("report/diffusionpipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileJob(JsonOption):
    """Measure a job's layers and frozen parts; under torchrun on all ranks at once.

    Examples:
        torchrun --nproc-per-node 2 -m diffusionpipe profile --build packages/diffusionpipe/examples/train_two_ranks.py:build
        torchrun --nproc-per-node 2 -m diffusionpipe profile --build packages/diffusionpipe/examples/train_two_ranks.py:build --out report/diffusionpipe/two_ranks.json
    """

    build: str
    """module:function or file.py:function, which returns a job and its batches."""
    out: Path = _FOLDER / "profile.json"
    """Where the profile is written."""

    def execute(self) -> None:
        """Measures with the first batch, and writes the profile."""
        from diffusionpipe import profile
        from diffusionpipe.config import build_job
        from shared.comms.init import joined
        from shared.errors import DataError
        from shared.training.progress import show_progress
        from shared.units import format_s

        with joined() as group:
            job, batches = build_job(self.build)
            is_first = group.rank == 0
            with show_progress("measuring", is_shown=is_first):
                batch = next(iter(batches), None)
                if batch is None:
                    raise DataError(
                        f"{self.build}: expected a batch to measure with, got none; do return some"
                    )
                measured = profile(job, batch)
            if not is_first:
                return
            self.out.parent.mkdir(parents=True, exist_ok=True)
            measured.save(self.out)
            trained_s = sum(
                row[-1] for each in measured.chains for row in (*each.forward_s, *each.backward_s)
            )
            frozen_s = sum(row[-1] for row in measured.frozen_s.values())
            record = {"profile": str(self.out), "trained_s": trained_s, "frozen_s": frozen_s}
            text = (
                f"{measured.sizes[-1]} samples on {measured.device}: {format_s(trained_s)} trained, "
                f"{format_s(frozen_s)} frozen; written to {self.out}"
            )
            self.print_result(record, text)


@dataclass(frozen=True, kw_only=True)
class _Search(JsonOption):
    cluster: Path
    """Hosts, devices and links, as YAML."""
    batch_size: int
    """Samples of a step, over all ranks."""
    profile: Path = _FOLDER / "profile.json"
    """What `diffusionpipe profile` wrote."""


@dataclass(frozen=True, kw_only=True)
class MakePlan(_Search):
    """Choose how to train, say why, and write the plan.

    Examples:
        diffusionpipe plan --cluster packages/diffusionpipe/examples/two_hosts.yaml --batch-size 16
        diffusionpipe plan --cluster packages/diffusionpipe/examples/two_hosts.yaml --batch-size 16 --placement folded --out report/diffusionpipe/folded.json
    """

    num_stages: int | None = None
    """Devices of a pipeline; any by default."""
    num_micro_batches: int | None = None
    """Micro-batches of a step; any by default."""
    placement: str | None = None
    """data, chain, folded or opposite; any by default."""
    out: Path = _FOLDER / "plan.json"
    """Where the plan is written."""

    def execute(self) -> None:
        """Searches, explains, and writes the plan."""
        from diffusionpipe import JobProfile, plan
        from shared.topology import Cluster

        chosen = plan(
            None,
            JobProfile.load(self.profile),
            Cluster.from_yaml(self.cluster),
            batch_size=self.batch_size,
            num_stages=self.num_stages,
            num_micro_batches=self.num_micro_batches,
            placement=self.placement,
        )
        self.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.save(self.out)
        names = ("placement", "num_stages", "num_micro_batches", "predicted_s", "limit_s")
        record = {"plan": str(self.out)} | {name: getattr(chosen, name) for name in names}
        self.print_result(record, f"{chosen.explain()}\nwritten to {self.out}")


@dataclass(frozen=True, kw_only=True)
class ComparePlacements(_Search):
    """Predict the best plan of each placement: filled, frozen parts first, cached.

    Examples:
        diffusionpipe compare --cluster packages/diffusionpipe/examples/two_hosts.yaml --batch-size 16
        diffusionpipe compare --cluster packages/diffusionpipe/examples/two_hosts.yaml --batch-size 16 --json
    """

    def execute(self) -> None:
        """Prints a row for each placement."""
        from rich.table import Table

        from diffusionpipe import JobProfile, plan
        from shared.cli import draw_table
        from shared.errors import ConfigError
        from shared.topology import Cluster
        from shared.units import format_bytes, format_s

        measured, cluster = JobProfile.load(self.profile), Cluster.from_yaml(self.cluster)
        names = ("data", "opposite") if len(measured.chains) > 1 else ("data", "chain", "folded")
        columns = ("placement", "filled", "frozen first", "cached", "memory")
        table, rows = Table(*columns, title="predicted seconds of a step"), []
        errors: dict[str, ConfigError] = {}
        for name in names:
            try:
                best = plan(None, measured, cluster, batch_size=self.batch_size, placement=name)
            except ConfigError as error:
                errors[name] = error
                rows.append({"placement": name, "error": str(error)})
                table.add_row(name, "no plan", "", "", "")
                continue
            peak = max(rank.peak_bytes for rank in best.ranks)
            seconds = best.predicted_s, best.unfilled_s, best.cached_s
            rows.append(
                {"placement": name, "filled_s": seconds[0], "first_s": seconds[1],
                 "cached_s": seconds[2], "peak_bytes": peak}
            )  # fmt: skip
            words = f"{name}, {best.num_stages} x {best.num_micro_batches}"
            table.add_row(words, *map(format_s, seconds), format_bytes(peak))
        if len(errors) == len(names):
            raise errors[names[0]]
        reasons = [f"No plan of placement {name}: {error}" for name, error in errors.items()]
        self.print_result({"plans": rows}, "\n".join([draw_table(table), *reasons]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate(JsonOption):
    """Simulate 1F1B and frozen jobs from a few numbers of seconds.

    Examples:
        diffusionpipe simulate --forward 1 1 --backward 2 2 --num-micro-batches 2 --frozen 6 --job 1
        diffusionpipe simulate --forward 1 1 --backward 2 2 --num-micro-batches 2 --frozen 6 --job 1 --fill first
    """

    forward: tuple[float, ...]
    """Seconds of a micro-batch's forward pass by stage."""
    backward: tuple[float, ...]
    """The same of the backward pass."""
    num_micro_batches: int
    """Micro-batches of the step."""
    link: float = 0.0
    """Seconds of a message."""
    frozen: float = 0.0
    """Seconds of the whole batch's frozen part on one device."""
    job: float = 0.0
    """Seconds of a frozen job; 0 for any division."""
    fill: str = "owned"
    """first, owned or paper."""

    def execute(self) -> None:
        """Prints what the step takes."""
        from diffusionpipe import simulate

        step = simulate(
            self.forward, self.backward, self.num_micro_batches, link_s=self.link,
            frozen_s=self.frozen, job_s=self.job, fill=self.fill,
        )  # fmt: skip
        names = ("makespan_s", "bubble_share", "in_flight", "busy_s")
        record = {name: getattr(step, name) for name in names}
        text = (
            f"{step.makespan_s:.4g} s a step (simulated), {step.bubble_share:.1%} idle; most "
            f"micro-batches in flight by stage: {', '.join(map(str, step.in_flight))}"
        )
        self.print_result(record, text)


@dataclass(frozen=True, kw_only=True)
class Train(JsonOption):
    """Train a job by a plan, on the ranks of torchrun.

    Examples:
        torchrun --nproc-per-node 2 -m diffusionpipe train --build packages/diffusionpipe/examples/train_two_ranks.py:build --num-steps 3
        torchrun --nproc-per-node 2 -m diffusionpipe train --build packages/diffusionpipe/examples/train_two_ranks.py:build --num-steps 3 --learning-rate 3e-4
    """

    build: str
    """module:function or file.py:function, which returns a job and its batches."""
    num_steps: int
    """Steps to train."""
    plan: Path = _FOLDER / "plan.json"
    """What `diffusionpipe plan` wrote."""
    learning_rate: float = 1e-4
    """Of AdamW."""
    seed: int = 0
    """Of all draws."""
    out: Path = _FOLDER / "trained"
    """Folder for the trained model."""

    def execute(self) -> None:
        """Trains, and writes the model as diffusers reads it."""
        from itertools import islice

        import torch

        from diffusionpipe import Engine, Plan
        from diffusionpipe.config import build_job
        from shared.comms.init import joined
        from shared.errors import ConfigError, DataError

        if self.num_steps < 1:
            raise ConfigError(f"num_steps: expected 1 or more, got {self.num_steps}")
        with joined() as group:
            job, batches = build_job(self.build)
            engine = Engine(
                job,
                Plan.load(self.plan),
                lambda parameters: torch.optim.AdamW(parameters, self.learning_rate),
                seed=self.seed,
            )
            losses = [float(loss) for loss in engine.steps(islice(batches, self.num_steps))]
            if not losses:
                raise DataError(
                    f"{self.build}: expected a batch to train with, got none; do return some"
                )
            engine.export(self.out)
            report = engine.report()
            if group.rank == 0:
                record = {"losses": losses, "step_s": report.step_s, "out": str(self.out)}
                self.print_result(record, f"{report}\nlast loss {losses[-1]:.4g}; {self.out}")


@dataclass(frozen=True, kw_only=True)
class TracePlan(JsonOption):
    """Draw the predicted step of one copy of a plan's pipeline, and write it as a Chrome trace.

    Examples:
        diffusionpipe trace --cluster packages/diffusionpipe/examples/two_hosts.yaml
        diffusionpipe trace --cluster packages/diffusionpipe/examples/two_hosts.yaml --out report/diffusionpipe/two_hosts.json
    """

    cluster: Path
    """Hosts, devices and links, as YAML."""
    plan: Path = _FOLDER / "plan.json"
    """What `diffusionpipe plan` wrote."""
    profile: Path = _FOLDER / "profile.json"
    """What `diffusionpipe profile` wrote."""
    out: Path = _FOLDER / "step.json"
    """Where the trace is written; the picture lies beside it."""

    def execute(self) -> None:
        """Replays one step, draws and writes it."""
        from diffusionpipe import JobProfile, Plan
        from diffusionpipe.planner.costs import PlanInputs
        from diffusionpipe.planner.replay import PlanReplay
        from diffusionpipe.report import draw_steps, list_planned_bars, write_trace
        from shared.errors import ConfigError
        from shared.topology import Cluster

        made, profile = Plan.load(self.plan), JobProfile.load(self.profile)
        inputs = PlanInputs(profile, Cluster.from_yaml(self.cluster))
        if made.num_ranks != inputs.cluster.num_ranks:
            raise ConfigError(
                f"{self.cluster}: expected the {made.num_ranks} ranks of {self.plan}, got "
                f"{inputs.cluster.num_ranks}; name the cluster that it was made for"
            )
        num_layers = [made.spans[made.list_backbone(b)[-1]][1] for b in sorted(set(made.backbones))]
        if num_layers != [len(each.layers) for each in profile.chains] or (
            made.owners.keys() != profile.frozen_s.keys()
        ):
            raise ConfigError(
                f"{self.profile}: expected the layers and frozen parts of {self.plan}, got others; name "
                "the profile that it was made from"
            )
        queues = [f"rank {rank}" for rank in made.list_group(0)]
        steps = {"planned": list_planned_bars(PlanReplay(made, inputs).run(), queues)}
        picture = self.out.with_suffix(".svg")
        write_trace(steps, self.out)
        draw_steps(steps, picture, "A step as planned")
        record = {"trace": str(self.out), "picture": str(picture)}
        self.print_result(record, f"written to {self.out} and {picture}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Train a small Stable Diffusion pipeline on digits, frozen parts first and filled in turns.

    Examples:
        diffusionpipe demo --out report/diffusionpipe
        diffusionpipe demo --full
    """

    out: Path = _FOLDER
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: more turns."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from diffusionpipe import demo

        return self.run_demo(demo.run)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    return run_command(
        {
            "profile": ProfileJob,
            "plan": MakePlan,
            "simulate": Simulate,
            "compare": ComparePlacements,
            "train": Train,
            "trace": TracePlan,
            "demo": Demo,
        },
        prog="diffusionpipe",
        about=_ABOUT,
        argv=argv,
    )
