"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import tyro

from shared.cli import DemoOptions, JsonOption, run_command
from shared.errors import ConfigError
from shared.training.progress import show_progress

__all__ = ["main"]

_FLEXSP = {"a": 5.128e-9, "b": 1.8396e-4, "c": 0.629}
"""Coefficients that FlexSP published for a model of 7 billion weights."""

_ABOUT = """Documents of any length, every rank finishing at the same time.

What would change for your documents, without any GPU:
  hydraulis compare --lengths lengths.txt --gpus 64 --model ./model

Groups of ranks for one step's documents:
  hydraulis plan lengths.txt --ranks 64 --cap 8192

Training is a few lines of Python: see the README.

Exit status: 0 done; 1 failed; 2 wrong usage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGroups(JsonOption):
    """Plan groups of ranks for one step's documents: long ones on several ranks, short ones on one.

    Examples:
        hydraulis plan lengths.txt --ranks 64 --cap 8192
        hydraulis plan lengths.txt --ranks 64 --cap 8192 --a 5.1e-9 --b 1.8e-4 --c 0.6
    """

    lengths: tyro.conf.Positional[Path]
    """Text file, a document's tokens on each line."""
    ranks: int
    """Ranks in all."""
    cap: int
    """Most tokens that a rank holds."""
    a: float | None = None
    """Seconds for each token squared; by default 5.128e-9, FlexSP's for a model of 7 billion weights."""
    b: float | None = None
    """Seconds for each token; by default FlexSP's 1.8396e-4."""
    c: float | None = None
    """Seconds of any micro-batch; by default FlexSP's 0.629."""
    message: float = 0.0
    """Seconds of messages for each token in groups of several ranks."""
    cost: Path | None = None
    """File of a measured cost, in place of a, b and c."""

    def __post_init__(self) -> None:
        _check_least(self, 1, "ranks", "cap")
        _check_least(self, 0, "a", "b", "c", "message")
        if self.a == 0 and self.b == 0:
            raise ConfigError("--a, --b: expected one of them above 0, got 0 for both")
        given = [f"--{name}" for name in ("a", "b", "c") if getattr(self, name) is not None]
        if self.cost is not None and given:
            raise ConfigError(
                f"--cost: expected a file alone, got {', '.join(given)} too; leave one out"
            )

    def execute(self) -> None:
        """Prints the groups, the step's seconds and how far from the best they can be."""
        import numpy as np

        from hydraulis.config import Cost
        from hydraulis.data import read_lengths
        from hydraulis.planner.degrees import DegreeCost, plan_degrees

        lengths = read_lengths(self.lengths)
        degrees = {2**power: self.message for power in range(1, 32)}
        if self.cost is None:
            given = {name: getattr(self, name) for name in _FLEXSP}
            known = {name: value for name, value in given.items() if value is not None}
            a, b, c = (_FLEXSP | known).values()
            alone = Cost(a=a, b=b, c=c)
        else:
            alone = Cost.load(self.cost)
        cost = DegreeCost(cost=alone, cap=self.cap, message_s=degrees)
        plan = plan_degrees(lengths, self.ranks, cost)
        seconds = plan.seconds(lengths, cost)
        lines = [f"{'ranks':>6}  {'groups':>6}  {'documents':>9}  {'longest':>8}"]
        groups = []
        for degree in np.unique(plan.degree_of)[::-1].tolist():
            mine = np.isin(plan.group_of, np.flatnonzero(plan.degree_of == degree))
            row = {
                "ranks": degree,
                "groups": int((plan.degree_of == degree).sum()),
                "documents": int(mine.sum()),
                "longest": int(lengths[mine].max(initial=0)),
            }
            groups.append(row)
            lines.append(
                f"{degree:>6}  {row['groups']:>6}  {row['documents']:>9}  {row['longest']:>8}"
            )
        busy = float((seconds * plan.degree_of).sum() / (self.ranks * plan.makespan_s))
        lines.append(f"{plan.makespan_s:.4g} s for the step, ranks idle {1 - busy:.1%} of it")
        lines.append(f"no plan of this kind is faster by more than {plan.gap:.2%}")
        record = {"seconds": plan.makespan_s, "bound_s": plan.bound_s, "groups": groups}
        self.print_result(record, "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareStrategies(JsonOption):
    """What steps on documents of your lengths take under every strategy, by a cost model; no GPU needed.

    Padded, packed, balanced, one context degree for all, degrees that follow the documents: seconds of a
    step, how long ranks wait, and how far each is from the best there could be. Simulated: seconds are
    operations of the model over a share of the device's peak, and bytes over links.

    Examples:
        hydraulis compare --gpus 16 --steps 2
        hydraulis compare --lengths lengths.txt --gpus 64 --model ./model
    """

    lengths: Path | None = None
    """Text file, a document's tokens on each line; by default Python's own source files, a token for
    four bytes."""
    gpus: int = 64
    """Ranks."""
    model: str = "llama-7b"
    """Folder of a Hugging Face model or its config.json, or llama-7b."""
    device: str = "H100"
    """A preset, see `shared.topology`: H100, H200, A100_80, A100_40, A800, L4, ..."""
    efficiency: float = 0.5
    """Share of the device's peak that is reached."""
    gpus_per_node: int = 8
    """Ranks that the faster link connects."""
    node_gb_per_s: float = 200.0
    """GB/s of a rank inside a node."""
    network_gb_per_s: float = 20.0
    """GB/s of a rank between nodes."""
    max_tokens: int = 16_384
    """Most tokens that a rank holds at once."""
    tokens_per_step: int | None = None
    """Tokens of a step over all ranks; by default what fills half of them all."""
    fixed_s: float = 0.02
    """Seconds of any micro-batch."""
    steps: int = 4
    """Steps, drawn in a shuffle."""
    strategies: tuple[str, ...] = ()
    """Names of strategies, as the table has them; all by default. hydraulis is always among them."""
    flexsp_s: float = 1.0
    """Seconds that FlexSP's program may take for each of its micro-batches; it finds better plans in 5."""
    seed: int = 0
    """Of the shuffle."""
    out: Path = Path("report/hydraulis/compare")
    """Folder for strategies.svg."""

    def __post_init__(self) -> None:
        _check_least(self, 1, "gpus", "gpus_per_node", "max_tokens", "tokens_per_step", "steps")
        _check_least(self, 0, "fixed_s", "seed")
        for name in ("efficiency", "node_gb_per_s", "network_gb_per_s", "flexsp_s"):
            _check_least(self, 0, name)
            if not getattr(self, name):
                raise ConfigError(f"{_flag(name)}: expected more than 0, got 0")
        if self.efficiency > 1:
            raise ConfigError(f"--efficiency: expected a share of at most 1, got {self.efficiency}")

    def execute(self) -> None:
        """Prints a table and draws a step's ranks."""
        from dataclasses import asdict

        from hydraulis.data import python_source, read_lengths
        from hydraulis.profiler.analytic import degree_cost, read_config
        from hydraulis.report import draw_ranks, strategy_table
        from hydraulis.simulator import compare

        config = read_config(self.model)
        cost = degree_cost(
            config, device=self.device, efficiency=self.efficiency, max_tokens=self.max_tokens,
            num_ranks=self.gpus, ranks_per_node=self.gpus_per_node,
            node_bytes_per_s=1e9 * self.node_gb_per_s,
            network_bytes_per_s=1e9 * self.network_gb_per_s, fixed_s=self.fixed_s,
        )  # fmt: skip
        if self.lengths is None:
            lengths: Any = [max(1, len(text) // 4) for text in python_source()]
        else:
            lengths = read_lengths(self.lengths)
        half = self.gpus * self.max_tokens // 2
        names = [name for name in self.strategies if name != "hydraulis"]
        with show_progress("simulating") as status:
            outcomes = compare(
                lengths, self.gpus, cost, tokens_per_step=self.tokens_per_step or half,
                num_steps=self.steps, seed=self.seed, flexsp_s=self.flexsp_s,
                names=[*names, "hydraulis"] if names else (),
                on_progress=lambda name: status.update(f"simulating: {name}"),
            )  # fmt: skip
        self.out.mkdir(parents=True, exist_ok=True)
        draw_ranks(outcomes, self.out / "strategies.svg")
        said = (
            f"{strategy_table(outcomes)}\n\n"
            f"simulated: {self.gpus} {self.device} at {self.efficiency:.0%} of their peak, "
            f"{self.max_tokens} tokens each, {self.node_gb_per_s:g} GB/s inside and "
            f"{self.network_gb_per_s:g} GB/s between nodes of {self.gpus_per_node}\n"
            f"FlexSP's program: at most {self.flexsp_s:g} s for each of its micro-batches\n"
            f"gap: how much shorter the best step there could be is, at most\n"
            f"wrote {self.out}/strategies.svg"
        )
        ours = outcomes[-1]
        if ours.gap < 0.01 and ours.idle_shares[0] > 0.1:
            said += (
                "\nranks wait although no plan is faster: a long document alone takes as long on all the "
                "ranks that help; more tokens in a step fill their time"
            )
        self.print_result({"outcomes": [asdict(one) for one in outcomes]}, said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Balance Python's own source files over ranks, beside published ways.

    Examples:
        hydraulis demo --out report/hydraulis
        hydraulis demo --full
    """

    out: Path = Path("report/hydraulis")
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: more repeats."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from hydraulis import demo

        return self.run_demo(demo.run)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_least(command: Any, least: int, *names: str) -> None:
    """Refuses options below their least value, infinite ones and NaN.

    Raises:
        ConfigError: one is; names it.
    """
    for name in names:
        value = getattr(command, name)
        if value is not None and not (isfinite(value) and value >= least):
            raise ConfigError(f"{_flag(name)}: expected at least {least}, got {value}")


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    commands = {"plan": PlanGroups, "compare": CompareStrategies, "demo": Demo}
    return run_command(commands, prog="hydraulis", about=_ABOUT, argv=argv)
