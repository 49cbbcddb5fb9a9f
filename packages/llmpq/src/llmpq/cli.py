"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from llmpq.integrations import EXPORTS
from llmpq.planner import BASELINES
from llmpq.profiler import SENSITIVITIES
from shared.cli import JsonOption, choice, run_command
from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmpq.planner.plan import Plan
    from llmpq.profiler.planner_inputs import PlannerInputs

__all__ = ["main"]

_ABOUT = """One language model over unequal devices, planned for a quality you can name.

Start with, on all machines (`torchrun ...` stands for your launcher's options):
  torchrun ... -m llmpq plan ./model --cluster cluster.yaml --prompts prompts.jsonl --max-kl 0.02
  torchrun ... -m llmpq run plan.json --prompts prompts.jsonl --out answers.jsonl

or plan on one machine, from profiles that `llmpq profile` has measured on one of each kind:
  llmpq plan ./model --cluster cluster.yaml --prompts prompts.jsonl --max-kl 0.02

Exit status: 0 done; 1 failed; 2 wrong usage.
"""

_PROFILES = Path("report/llmpq/profiles")
_Width = Literal[3, 4, 8, 16]
_Activations = Literal["float", "int8"]
_Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planning(JsonOption):
    """What `plan` and `compare` share: model, devices, prompts, quality."""

    model: tyro.conf.Positional[Path]
    """Folder of a Hugging Face causal LM with safetensors."""
    cluster: Path
    """YAML file of hosts, devices (with the bytes that each may hold) and links."""
    prompts: Path
    """JSON Lines: strings, or objects with "prompt", "messages" or "token_ids"."""
    max_kl: float | None = None
    """Highest expected loss of quality, in nats a token; no limit by default."""
    new_tokens: int = 32
    """Tokens generated for each prompt."""
    batch: int = 32
    """Prompts at once; longer files are answered in waves."""
    bits: tuple[_Width, ...] = (3, 4, 8, 16)
    """Weight widths to choose from; 16 leaves weights as they are."""
    group_size: int = 128
    """Input columns that share a scale."""
    dtype: _Dtype = "float32"
    """Type of activations, and of weights of 16 bits."""
    activations: _Activations = "float"
    """int8 lets products round activations to 8 bits where that is fastest. What that costs is measured,
    a pass over the text a layer and width, and added to the loss."""
    profiles: Path = _PROFILES
    """Folder of measurements."""
    force: bool = False
    """Take profiles that another version of torch or another processor gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan(_Planning):
    """Choose widths, split, order of devices and micro-batches, and write plan.json.

    Example: llmpq plan ./model --cluster cluster.yaml --prompts prompts.jsonl --max-kl 0.02

    Under torchrun, with a rank for each device of the cluster, the first rank of each kind of device
    measures it (a minute, once). In one process, kinds need a profile from `llmpq profile`, unless
    all devices are of this machine's kind.
    """

    solver: Literal["auto", "milp", "heuristic"] = "auto"
    """auto, milp (proves the gap) or heuristic (about a second)."""
    method: Literal["nearest", "gptq"] = "nearest"
    """How weights are rounded. gptq loses less than nearest; it needs the whole model in memory once,
    and writes codes beside the plan."""
    baseline: Annotated[str, choice(BASELINES)] | None = None
    """Plan as this baseline does, for comparison."""
    measure: bool = True
    """With --max-kl: round the model by the plan, measure its loss on other prompts, and plan anew while
    that is above the limit. Needs the whole model in memory."""
    out: Path = Path("plan.json")
    """Where the plan is written."""

    def execute(self) -> None:
        """Measures what is missing, plans, explains, and writes the plan."""
        import os
        from dataclasses import replace
        from functools import partial

        from rich.console import Console

        from llmpq.evaluation import plan_as_measured
        from llmpq.planner.baselines import plan_baseline
        from llmpq.planner.search import plan
        from llmpq.profiler.planner_inputs import calibration_batches, loss_of_plans
        from llmpq.runtime.gptq import round_for

        # Under torchrun, one line of progress is enough.
        console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
        with console.status("starting") as status:
            known = _inputs(self, status.update)
            if known is None:
                return
            status.update("planning")
            make = partial(plan, solver=self.solver)
            if self.baseline is not None:
                make = partial(plan_baseline, self.baseline)
            choose = partial(known.plan_by, make)
            measured = None
            if self.measure and self.max_kl is not None:
                loss = loss_of_plans(self.model, known, on_progress=status.update)
                result, measured = plan_as_measured(choose, known.noise, self.max_kl, loss)
            else:
                result = choose(known.noise)
            written = replace(result.plan, folder=str(self.model), forms=known.profile.forms)
            if self.method == "gptq":
                written = round_for(
                    written,
                    self.model,
                    calibration_batches(known.texts, num_tokens=8192, length=512),
                    self.out.with_suffix(".safetensors"),
                    on_layer=lambda number: status.update(f"rounding layer {number}"),
                )
        written.save(self.out)
        names = ("seconds", "tokens_per_s", "nats", "gap", "is_optimal")
        record = {"plan": str(self.out), **{name: getattr(result, name) for name in names}}
        lines = [result.explain(), f"wrote {self.out}"]
        if measured is not None:
            record["measured_nats"] = measured
            lines.insert(1, f"measured loss: {measured:.4g} nats a token, on prompts of this file")
        if written.codes is not None:
            lines[-1] += (
                f" and {written.codes}; GPTQ usually loses less than what is expected above"
            )
        self.print_result(record, "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Answer a file of prompts by a plan; every rank runs it, under torchrun or alone.

    Example: torchrun --nproc-per-node 2 -m llmpq run plan.json --prompts prompts.jsonl --out
    answers.jsonl

    After an interruption the same command resumes with the prompts not yet answered.
    """

    plan: tyro.conf.Positional[Path]
    """The plan."""
    prompts: Path
    """JSON Lines of prompts, on rank 0."""
    out: Path
    """JSON Lines of answers, written on rank 0."""
    model: Path | None = None
    """Folder of the Hugging Face model on this rank; the one that was planned for by default."""
    new_tokens: int | None = None
    """Most tokens of an answer; those planned for by default."""
    batch: int | None = None
    """Prompts at once; those planned for by default."""
    temperature: float = 0.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    """Share of probability that is drawn from."""
    seed: int = 0
    """Of the draws; they are the same under any plan."""

    def execute(self) -> None:
        """Loads this rank's stage and answers."""
        import time
        from contextlib import ExitStack

        from rich.console import Console
        from rich.progress import Progress

        from llmpq.data import read_ends
        from llmpq.planner.plan import Plan
        from llmpq.runtime.answers import answer, digest, find_unanswered, read_requests
        from llmpq.runtime.pipeline import Pipeline
        from shared.comms import tree
        from shared.comms.init import joined
        from shared.training import log_resumed

        plan = Plan.load(self.plan)
        folder = _folder(plan, self.plan, self.model)
        requests, decode, told = [], None, None
        known = {"new_tokens": 32, "num_prompts": 32, **plan.predicted}
        settings: dict[str, Any] = {
            "max_new_tokens": int(known["new_tokens"] if self.new_tokens is None else self.new_tokens),
            "eos_token_id": read_ends(folder),
            "temperature": self.temperature, "top_p": self.top_p, "seed": self.seed,
        }  # fmt: skip
        with ExitStack() as stack:
            group = stack.enter_context(joined())
            is_first = group.rank == 0
            if is_first:
                requests, decode = read_requests(folder, self.prompts)
                told = b"%d" % len(find_unanswered(requests, self.out, digest(plan, **settings)))
            num_left = int(tree.broadcast(group.control(), told))
            if not num_left:
                if is_first:
                    print(f"answered 0 of {len(requests)} prompts: all are in {self.out} already")
                return
            if is_first and num_left < len(requests):
                log_resumed(len(requests) - num_left, self.out, unit="prompt")
            pipe = stack.enter_context(Pipeline(plan, folder))
            progress = Progress(console=Console(stderr=True), disable=not is_first)
            bar = stack.enter_context(progress).add_task("answering", total=num_left)
            begun = time.perf_counter()
            count = answer(
                pipe, requests, self.out,
                wave_size=int(known["num_prompts"] if self.batch is None else self.batch),
                decode=decode, on_answered=lambda number: progress.advance(bar, number), **settings,
            )  # fmt: skip
            taken_s = time.perf_counter() - begun
        if is_first:
            print(f"answered {count} of {len(requests)} prompts in {taken_s:.3g} s: {self.out}")

    def how_to_resume(self) -> str:
        """What to do after Ctrl-C, as the end of a sentence."""
        if not self.out.exists():
            return "nothing was answered yet: start again by the same command"
        return f"resume from {self.out} by the same command"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare(_Planning):
    """Plan, plan as the baselines do, and run all of these in turns on the same prompts.

    Example: torchrun --nproc-per-node 2 -m llmpq compare ./model --cluster cluster.yaml --prompts
    prompts.jsonl --max-kl 0.02

    Writes a figure of the seconds of each stage by phase, predicted beside measured.
    """

    rounds: int = 3
    """Turns of each plan."""
    out: Path = Path("report/llmpq/compare")
    """Folder of the figure and the plans."""

    def execute(self) -> None:
        """Plans, runs in turns, prints a table and draws."""
        import pickle
        from dataclasses import asdict, replace

        from rich.console import Console

        from llmpq.evaluation import compare_plans
        from llmpq.planner.baselines import plan_all
        from llmpq.report import draw_stages, timing_table
        from llmpq.runtime.answers import pad_left
        from llmpq.runtime.messages import all_through
        from shared.comms import tree
        from shared.comms.init import joined

        with joined() as group:
            console = Console(stderr=True, quiet=group.rank > 0)
            with console.status("starting") as status:
                told = None
                with all_through(group, "plan"):
                    known = _inputs(self, status.update)
                    if known is not None:
                        status.update("planning")
                        plans = plan_all(*known.given, **known.settings)
                        forms, prompts = known.profile.forms, known.texts[: self.batch]
                        written = {
                            name: replace(one.plan, forms=forms) for name, one in plans.items()
                        }
                        told = pickle.dumps((written, prompts))
                plans, texts = pickle.loads(tree.broadcast(group.control(), told))
                status.update(f"answering in turns: {', '.join(plans)}")
                timings = compare_plans(
                    plans,
                    self.model,
                    *pad_left(texts),
                    new_tokens=self.new_tokens,
                    rounds=self.rounds,
                )
        if group.rank:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        for name, plan in plans.items():
            replace(plan, folder=str(self.model)).save(self.out / f"{name}.json")
        draw_stages(timings, self.out / "stages.svg")
        self.print_result(
            {"timings": [asdict(replace(one, tokens=None)) for one in timings]},
            f"{timing_table(timings)}\nwrote {self.out}/stages.svg and the plans",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate(JsonOption):
    """Replay a batch under a plan event by event, from the stage seconds that were predicted.

    Example: llmpq simulate plan.json --prompts 64 --new-tokens 100
    """

    plan: tyro.conf.Positional[Path]
    """The plan."""
    prompts: int | None = None
    """Prompts in the batch; those planned for by default."""
    new_tokens: int | None = None
    """Tokens of each answer; those planned for by default."""

    def execute(self) -> None:
        """Prints the batch's seconds and how busy each stage is."""
        from llmpq.planner.plan import Plan
        from llmpq.simulator import simulate_plan

        plan = Plan.load(self.plan)
        timeline = simulate_plan(plan, num_prompts=self.prompts, new_tokens=self.new_tokens)
        busy = {
            stage.rank: timeline.queues[f"stage{number}"].busy_s / timeline.makespan_s
            for number, stage in enumerate(plan.stages)
        }
        lines = [f"{timeline.makespan_s:.4g} s for the batch"]
        for rank, (low, high) in ((stage.rank, stage.layers) for stage in plan.stages):
            lines.append(f"rank {rank}, layers {low} to {high - 1}: {busy[rank]:.0%} busy")
        self.print_result({"seconds": timeline.makespan_s, "busy": busy}, "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureDevice(JsonOption):
    """Measure this device with a model's shape, for plans made elsewhere.

    Example: llmpq profile ./model --kind T4
    """

    model: tyro.conf.Positional[Path]
    """Folder of the Hugging Face model; config.json is enough."""
    kind: str
    """Name of the kind of device, as in the cluster's description."""
    bits: tuple[_Width, ...] = (3, 4, 8, 16)
    """Weight widths."""
    group_size: int = 128
    """Input columns that share a scale."""
    dtype: _Dtype = "float32"
    """Type of activations."""
    activations: _Activations = "float"
    """int8 has products timed too that round activations to 8 bits."""
    batch: int = 32
    """Most prompts at once."""
    prompt_tokens: int = 512
    """Longest prompts."""
    new_tokens: int = 128
    """Most tokens generated."""
    profiles: Path = _PROFILES
    """Folder where the measurement is written."""

    def execute(self) -> None:
        """Measures and writes the profile."""
        from rich.console import Console

        from llmpq.config import Workload
        from llmpq.profiler.cache import find_profile, profile_path

        workload = Workload(
            num_prompts=self.batch, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens
        )
        path = profile_path(
            self.profiles, self.model, self.kind, self.dtype, self.group_size, self.activations
        )
        with Console(stderr=True).status(f"measuring {self.kind}") as status:
            found = find_profile(
                self.profiles, self.model, self.kind, bits=self.bits, group_size=self.group_size,
                dtype=self.dtype, activations=self.activations, workload=workload, is_here=True,
                on_progress=status.update,
            )  # fmt: skip
        self.print_result({"file": str(path)}, f"{found.explain(self.prompt_tokens)}\nwrote {path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSensitivity(JsonOption):
    """Measure how much each layer's rounding costs, in nats a token.

    Example: llmpq sensitivity ./model --prompts prompts.jsonl --bits 3 4
    """

    model: tyro.conf.Positional[Path]
    """Folder of the Hugging Face model."""
    prompts: Path
    """JSON Lines of text like that to come."""
    method: Annotated[str, choice(SENSITIVITIES)] = "fisher"
    """How noise is measured."""
    bits: tuple[_Width, ...] = (3, 4, 8)
    """Weight widths."""
    group_size: int = 128
    """Input columns that share a scale."""
    profiles: Path = _PROFILES
    """Folder of measurements."""

    def execute(self) -> None:
        """Prints a line for each layer."""
        from rich.console import Console

        from llmpq.data import read_prompts, tokenise
        from llmpq.profiler.cache import find_sensitivity
        from llmpq.profiler.planner_inputs import calibration_batches

        texts = tokenise(self.model, read_prompts(self.prompts))
        with Console(stderr=True).status("measuring"):
            found = find_sensitivity(
                self.profiles, self.model, calibration_batches(texts),
                bits=self.bits, group_size=self.group_size, method=self.method,
            )  # fmt: skip
        lines = ["layer  " + "  ".join(f"{f'{width} bits':>9}" for width in found.bits)]
        for layer, row in enumerate(found.noise):
            lines.append(f"{layer:>5}  " + "  ".join(f"{value:>9.3g}" for value in row))
        lines.append("  all  " + "  ".join(f"{value:>9.3g}" for value in found.noise.sum(axis=0)))
        record = {"bits": list(found.bits), "noise": found.noise.tolist(), "method": found.method}
        self.print_result(record, "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Write a plan for another engine: a folder it loads, or the settings it takes.

    Example: llmpq export plan.json --to compressed-tensors
    """

    plan: tyro.conf.Positional[Path]
    """The plan."""
    to: Annotated[str, choice(EXPORTS)]
    """The engine."""
    model: Path | None = None
    """Folder of the Hugging Face model; the one that was planned for by default."""
    out: Path | None = None
    """Folder, or for settings alone the file; beside the plan by default, named after both."""

    def execute(self) -> None:
        """Writes it and says how to use it."""
        from llmpq.integrations import SUFFIXES, export
        from llmpq.planner.plan import Plan

        plan = Plan.load(self.plan)
        name = f"{self.plan.stem}-{self.to}{SUFFIXES.get(self.to, '')}"
        out = self.out or self.plan.with_name(name)
        print("\n".join(export(plan, self.to, _folder(plan, self.plan, self.model), out)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Plan and run SmolLM2 on two unlike ranks of this machine, beside an even split.

    Example: llmpq demo --out report/llmpq
    """

    out: Path = Path("report/llmpq")
    """Folder for demo.json and pictures."""
    full: bool = False
    """The long form: all widths and baselines."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from llmpq import demo

        return int(not demo.run(self.out, is_full=self.full))


def _inputs(options: _Planning, on_progress: Callable[[str], None]) -> PlannerInputs | None:
    """What a plan is made from; None on ranks that were only measured."""
    from llmpq.profiler.planner_inputs import measure_inputs
    from shared.comms.init import joined

    with joined():
        return measure_inputs(
            options.model, options.cluster, options.prompts,
            bits=options.bits, group_size=options.group_size, dtype=options.dtype,
            activations=options.activations, max_kl=options.max_kl, num_prompts=options.batch, new_tokens=options.new_tokens,
            profiles=options.profiles, force=options.force, on_progress=on_progress,
        )  # fmt: skip


def _folder(plan: Plan, path: Path, given: Path | None) -> Path:
    """The model's folder: as given, else as planned."""
    folder = given or plan.folder
    if folder is None:
        raise ConfigError(f"{path}: expected the plan to name its model's folder; give --model")
    return Path(folder)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    commands = {
        "plan": MakePlan, "run": Run, "export": Export, "compare": Compare, "simulate": Simulate,
        "profile": MeasureDevice, "sensitivity": MeasureSensitivity, "demo": Demo,
    }  # fmt: skip
    return run_command(commands, prog="llmpq", about=_ABOUT, argv=argv)
