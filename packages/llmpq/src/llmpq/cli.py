"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from llmpq.checks import (
    check_at_least,
    check_group_size,
    check_inputs,
    check_limit,
    check_output,
    is_first_rank,
)
from llmpq.integrations.commands import ExportPlan, find_model
from llmpq.planner import BASELINES
from llmpq.profiler.commands import (
    PROFILES,
    Activations,
    Dtype,
    MeasureDevice,
    MeasureSensitivity,
    Width,
)
from shared.cli import DemoOptions, JsonOption, choice, run_command
from shared.errors import ConfigError
from shared.training.progress import show_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmpq.planner.plan import Plan
    from llmpq.profiler.planner_inputs import PlannerInputs
    from llmpq.runtime.answer_file import AnswerFile

__all__ = ["main"]

_ABOUT = """One language model over unequal devices, planned for a quality you can name.

Start with, on all machines (`torchrun ...` stands for your launcher's options):
  torchrun ... -m llmpq plan ./model --cluster cluster.yaml --prompts prompts.jsonl --max-kl 0.02
  torchrun ... -m llmpq run report/llmpq/plan.json --prompts prompts.jsonl --out answers.jsonl

or plan on one machine, from profiles that `llmpq profile` has measured on one of each kind:
  llmpq plan ./model --cluster cluster.yaml --prompts prompts.jsonl --max-kl 0.02

Exit status: 0 done; 1 failed; 2 wrong usage.
"""


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
    bits: tuple[Width, ...] = (3, 4, 8, 16)
    """Weight widths to choose from; 16 leaves weights as they are."""
    group_size: int = 128
    """Input columns that share a scale; -1 gives each row one."""
    dtype: Dtype = "float32"
    """Type of activations, and of weights of 16 bits."""
    activations: Activations = "float"
    """int8 lets products round activations to 8 bits where that is fastest. What that costs is measured,
    a pass over the text a layer and width, and added to the loss."""
    profiles: Path = PROFILES
    """Folder of measurements."""
    force: bool = False
    """Take profiles that another version of torch or another processor gave."""

    def __post_init__(self) -> None:
        check_at_least(1, batch=self.batch, new_tokens=self.new_tokens)
        check_group_size(self.group_size)
        check_limit("max_kl", self.max_kl, least=0, advice="leave it out for no limit")

    def check_files(self) -> None:
        """Refuses inputs that are missing, and a folder of measurements that cannot be written."""
        check_inputs(
            model=(self.model / "config.json", "a model's configuration")
            if self.model.is_dir()
            else (self.model, "a model's folder with config.json"),
            cluster=(self.cluster, "a cluster as YAML"),
            prompts=(self.prompts, "prompts as JSON Lines"),
        )
        check_output("profiles", self.profiles, is_folder=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan(_Planning):
    """Choose widths, split, order of devices and micro-batches, and write plan.json.

    Under torchrun, with a rank for each device of the cluster, the first rank of each kind of device
    measures it (a minute, once). In one process, kinds need a profile from `llmpq profile`, unless
    all devices are of this machine's kind.

    Examples:
        llmpq plan ./model --cluster cluster.yaml --prompts prompts.jsonl --max-kl 0.02
        torchrun --nproc-per-node 2 -m llmpq plan ./model --cluster cluster.yaml --prompts prompts.jsonl
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
    out: Path = Path("report/llmpq/plan.json")
    """Where the plan is written."""

    def execute(self) -> None:
        """Measures what is missing, plans, explains, and writes the plan."""
        is_first = is_first_rank()
        if is_first:
            self.check_files()
            check_output("out", self.out)

        from dataclasses import replace
        from functools import partial

        from llmpq.evaluation import plan_as_measured
        from llmpq.planner.baselines import plan_baseline
        from llmpq.planner.search import plan
        from llmpq.profiler.planner_inputs import calibration_batches, loss_of_plans
        from llmpq.runtime.loader import check_codes_path, round_for

        codes = self.out.with_suffix(".safetensors")
        if self.method == "gptq":
            check_codes_path(codes, self.model)
        # Under torchrun, one line of progress is enough.
        with show_progress("starting", is_shown=is_first) as status:
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
            written = replace(
                result.plan, folder=str(self.model), forms=known.profile.forms,
                predicted={**result.plan.predicted, "batch": self.batch},
            )  # fmt: skip
            self.out.parent.mkdir(parents=True, exist_ok=True)
            if self.method == "gptq":
                written = round_for(
                    written,
                    self.model,
                    calibration_batches(known.texts, num_tokens=8192, length=512),
                    codes,
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
class Run(JsonOption):
    """Answer a file of prompts by a plan; every rank runs it, under torchrun or alone.

    After an interruption the same command resumes with the prompts not yet answered.

    Examples:
        llmpq run report/llmpq/plan.json --prompts prompts.jsonl --out answers.jsonl
        torchrun --nproc-per-node 2 -m llmpq run report/llmpq/plan.json --prompts prompts.jsonl --out answers.jsonl
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

    def __post_init__(self) -> None:
        check_at_least(1, batch=self.batch, new_tokens=self.new_tokens)
        check_limit(
            "temperature", self.temperature, least=0, advice="give 0 for the most probable token"
        )
        check_limit("top_p", self.top_p, least=0, most=1, advice="give 1 to draw from all tokens")
        if self.top_p == 0:
            raise ConfigError("--top-p: expected a number above 0, got 0; 1 leaves no token out")

    def execute(self) -> None:
        """Loads this rank's stage and answers."""
        from contextlib import ExitStack

        from llmpq.planner.plan import Plan
        from llmpq.runtime.answer_file import AnswerFile

        plan = Plan.load(self.plan)
        folder = find_model(plan, self.plan, self.model)
        answers = AnswerFile(self.out)
        with ExitStack() as stack:
            if is_first_rank():
                check_inputs(prompts=(self.prompts, "prompts as JSON Lines"))
                stack.enter_context(answers)
            self._answer(plan, folder, answers)

    def _answer(self, plan: Plan, folder: Path, answers: AnswerFile) -> None:
        """Answers what the file, which rank 0 has locked, lacks."""
        import time
        from contextlib import ExitStack

        from llmpq.data import read_ends
        from llmpq.runtime.answers import answer, digest, find_unanswered, read_requests
        from llmpq.runtime.loader import check_plan, check_weights
        from llmpq.runtime.pipeline import Pipeline
        from shared.comms import tree
        from shared.comms.init import joined
        from shared.training import log_resumed

        check_plan(plan, folder)
        requests, decode, told = [], None, None
        known = {"new_tokens": 32, "batch": plan.predicted.get("num_prompts", 32), **plan.predicted}
        settings: dict[str, Any] = {
            "max_new_tokens": int(known["new_tokens"] if self.new_tokens is None else self.new_tokens),
            "eos_token_id": read_ends(folder),
            "temperature": self.temperature, "top_p": self.top_p, "seed": self.seed,
        }  # fmt: skip
        with ExitStack() as stack:
            group = stack.enter_context(joined())
            is_first = group.rank == 0
            if is_first:
                check_weights(folder)
                requests, decode = read_requests(folder, self.prompts)
                made_under = digest(plan, folder, **settings)
                told = b"%d" % len(find_unanswered(requests, self.out, made_under))
            num_left = int(tree.broadcast(group.control(), told))
            if not num_left:
                if is_first:
                    self._tell(0, len(requests), f"all are in {self.out} already")
                return
            if is_first and num_left < len(requests):
                log_resumed(len(requests) - num_left, self.out, unit="prompt")
            pipe = stack.enter_context(Pipeline(plan, folder))
            progress = show_progress("answering", num_left, is_shown=is_first)
            bar = stack.enter_context(progress)
            begun = time.perf_counter()
            count = answer(
                pipe, requests, answers,
                wave_size=int(known["batch"] if self.batch is None else self.batch),
                decode=decode, on_answered=bar.advance, **settings,
            )  # fmt: skip
            taken_s = time.perf_counter() - begun
        if is_first:
            self._tell(count, len(requests), f"{self.out}, in {taken_s:.3g} s")

    def _tell(self, num_answered: int, num_prompts: int, about: str) -> None:
        record = {"num_answered": num_answered, "num_prompts": num_prompts, "out": str(self.out)}
        self.print_result(record, f"answered {num_answered} of {num_prompts} prompts: {about}")

    def how_to_resume(self) -> str:
        """What to do after Ctrl-C, as the end of a sentence."""
        if not self.out.exists():
            return "nothing was answered yet: start again by the same command"
        return f"resume from {self.out} by the same command"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare(_Planning):
    """Plan, plan as the baselines do, and run all of these in turns on the same prompts.

    Writes a figure of the seconds of each stage by phase, predicted beside measured.

    Examples:
        torchrun --nproc-per-node 2 -m llmpq compare ./model --cluster cluster.yaml --prompts prompts.jsonl
        torchrun --nproc-per-node 2 -m llmpq compare ./model --cluster cluster.yaml --prompts prompts.jsonl --max-kl 0.02 --rounds 5
    """

    rounds: int = 3
    """Turns of each plan."""
    out: Path = Path("report/llmpq/compare")
    """Folder of the figure and the plans."""

    def __post_init__(self) -> None:
        _Planning.__post_init__(self)
        check_at_least(1, rounds=self.rounds)

    def execute(self) -> None:
        """Plans, runs in turns, prints a table and draws."""
        if is_first_rank():
            self.check_files()
            check_output("out", self.out, is_folder=True)

        import pickle
        from dataclasses import asdict, replace

        from llmpq.evaluation import compare_plans
        from llmpq.planner.baselines import plan_all
        from llmpq.report import draw_stages, timing_table
        from llmpq.runtime.answers import pad_left
        from llmpq.runtime.messages import all_through
        from shared.comms import tree
        from shared.comms.init import joined

        with (
            joined() as group,
            show_progress("starting", is_shown=group.rank == 0) as status,
        ):
            told = None
            with all_through(group, "plan"):
                known = _inputs(self, status.update)
                if known is not None:
                    status.update("planning")
                    plans = plan_all(*known.given, **known.settings)
                    forms, prompts = known.profile.forms, known.planned_texts
                    written = {name: replace(one.plan, forms=forms) for name, one in plans.items()}
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

    Examples:
        llmpq simulate report/llmpq/plan.json
        llmpq simulate report/llmpq/plan.json --prompts 64 --new-tokens 100
    """

    plan: tyro.conf.Positional[Path]
    """The plan."""
    prompts: int | None = None
    """Prompts in the batch; those planned for by default."""
    new_tokens: int | None = None
    """Tokens of each answer; those planned for by default."""

    def __post_init__(self) -> None:
        check_at_least(1, prompts=self.prompts, new_tokens=self.new_tokens)

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
class Demo(DemoOptions):
    """Plan and run SmolLM2 on two unlike ranks of this machine, beside an even split.

    Examples:
        llmpq demo --out report/llmpq
        llmpq demo --full
    """

    out: Path = Path("report/llmpq")
    """Folder for demo.json and pictures."""
    full: bool = False
    """The long form: all widths and baselines."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from llmpq import demo

        return self.run_demo(demo.run)


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


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    commands = {
        "plan": MakePlan, "run": Run, "export": ExportPlan, "compare": Compare, "simulate": Simulate,
        "profile": MeasureDevice, "sensitivity": MeasureSensitivity, "demo": Demo,
    }  # fmt: skip
    return run_command(commands, prog="llmpq", about=_ABOUT, argv=argv)
