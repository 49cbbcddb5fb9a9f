"""The command line. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from shared.cli import DemoOptions, JsonOption, run_command
from shared.training.progress import show_progress

if TYPE_CHECKING:
    from memo.planner.addresses import Trace

__all__ = ["main"]

_ABOUT = """Train at the length you want in the memory you have.

What fits on a device that you do not have yet, from a model's configuration alone:
  memo fit --model ./model --device H100 --store 200GiB --ranks 8

Training is five lines of Python: see the README.

Exit status: 0 done; 1 failed; 2 wrong usage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(JsonOption):
    """Say what fits on a device, what is kept, swapped and recomputed, and how long a step takes.

    Nothing is run and nothing measured: bytes are counted on tensors without memory, seconds follow from the
    device's data sheet.

    Examples:
        memo fit --model llama-7b --device H100 --store 200GiB --ranks 8
        memo fit --model ./model --device A100_40 --tokens 8192 65536
    """

    model: str
    """Folder of a Hugging Face causal LM, its config.json, or llama-7b, llama-8b, llama-1b."""
    device: str = "H100"
    """Name of a preset: H200, H100, A100_80, A100_40, A800, L4, V100_32, P100_12, T4, CPU."""
    store: str = "0"
    """Pinned host memory of each rank, such as 200GiB; 0 swaps nothing."""
    memory: str | None = None
    """Memory of each device that may be used, such as 70GiB; 92 % of the data sheet's by default."""
    ranks: int = 1
    """Devices that share each sequence (ring attention) and the parameters (FSDP)."""
    optimizer: Literal["adamw", "sgd", "none"] = "adamw"
    """Whose states are on the device: adamw (two float32), sgd (a momentum), none."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of parameters and activations; optimizers keep a float32 copy of half types."""
    link: str | None = None
    """Rate of the device's link to the store, such as 25GB/s; PCIe's of the device by default."""
    tokens: tuple[int, ...] = ()
    """Tokens of a sequence; 8K to 1M by default."""

    def execute(self) -> None:
        """Prints a row a length, and the longest length that fits."""
        from shared.units import format_bytes

        with show_progress("reading the model"):
            from memo.config import Budget
            from memo.profiler.analytic.analysis import Analysis
            from memo.profiler.analytic.fit import LENGTHS, fit
            from memo.profiler.analytic.model_shapes import read_config

            analysis = Analysis(
                read_config(self.model),
                self.device,
                dtype=self.dtype,
                ranks=self.ranks,
                optimizer=self.optimizer,
                link_bytes_per_s=_rate(self.link),
            )
            memory = self.memory or int(0.92 * analysis.device.memory_bytes)
            budget = Budget(device=memory, store=self.store)
            found = fit(analysis, budget, self.tokens or LENGTHS)
        title = (
            f"{_count(analysis.num_parameters)} parameters, {self.dtype}, {self.optimizer}, on "
            f"{self.ranks} x {self.device}: {format_bytes(budget.device_bytes)} of device and "
            f"{format_bytes(budget.store_bytes)} of store each; simulated from the data sheet"
        )
        lines = [
            title,
            found.table(),
            *(["loss: in blocks, without all logits in memory"] if found.has_block_loss else []),
            f"longest: {found.longest:,} tokens"
            if found.longest
            else f"nothing fits: {found.rows[0].missing}",
        ]
        self.print_result(found.to_json(), "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack(JsonOption):
    """Plan the addresses of all tensors of a recorded step, so that nothing is lost between them.

    Record one by torch.cuda.memory._record_memory_history() and _dump_snapshot("snapshot.pickle"), or write a
    CSV of lower,upper,size lines.

    Examples:
        memo pack snapshot.pickle --time-limit-s 10
        memo pack trace.csv --align 64 --out offsets.txt
    """

    trace: tyro.conf.Positional[Path]
    """A CUDA memory snapshot, or a .csv of intervals."""
    align: int = 512
    """Addresses are multiples of it."""
    time_limit_s: float = 5.0
    """Seconds to search, where the first way found is not proven best."""
    out: Path | None = None
    """Write offsets here, one a line, in the order of the trace."""

    def execute(self) -> None:
        """Prints the peak beside the lower bound."""
        from memo import pack
        from shared.units import format_bytes

        trace = _read_trace(self.trace)
        found = pack(trace.intervals, align=self.align, time_limit_s=self.time_limit_s)
        if self.out is not None:
            _write(self.out, "".join(f"{offset}\n" for offset in found.offsets))
        record = {
            "num_tensors": len(trace.intervals),
            "peak_bytes": found.peak,
            "lower_bound_bytes": found.lower_bound,
            "is_optimal": found.is_optimal,
        }
        ratio = found.peak / max(found.lower_bound, 1)
        text = (
            f"{len(trace.intervals):,} tensors in {format_bytes(found.peak)}: "
            f"{ratio:.4f}x what they need at once"
            + (", which no other addresses better" if found.is_optimal else "")
        )
        self.print_result(record, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(JsonOption):
    """Say how much memory three allocators would reserve for a recorded step.

    Examples:
        memo replay snapshot.pickle
        memo replay trace.csv --json
    """

    trace: tyro.conf.Positional[Path]
    """A CUDA memory snapshot, or a .csv of intervals."""

    def execute(self) -> None:
        """Prints reserved bytes by allocator, beside the most that is needed at once."""
        from memo import emulate
        from shared.units import format_bytes

        trace = _read_trace(self.trace)
        reserved = {
            name: emulate(trace, allocator=name).reserved_bytes
            for name in ("caching", "expandable", "planned")
        }
        lines = [f"needed at once  {format_bytes(trace.load_bytes)}"]
        lines += [
            f"{name:<14}  {format_bytes(num_bytes)}  {num_bytes / max(trace.load_bytes, 1):.2f}x"
            for name, num_bytes in reserved.items()
        ]
        record = {"load_bytes": trace.load_bytes, "reserved_bytes": reserved}
        self.print_result(record, "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alpha(JsonOption):
    """Compute the published fraction of rows to swap, unrounded: what hides and what the store holds.

    Examples:
        memo alpha --whole 512MiB --rows 4GiB --link 3GiB --store 60GiB --layers 32
        memo alpha --whole 512MiB --rows 4GiB --layers 32
    """

    whole: str
    """Bytes a layer that go whole: its input and attention."""
    rows: str
    """Bytes a layer of everything else."""
    layers: int
    """Number of layers."""
    link: str | None = None
    """Bytes that the link moves during one layer's forward; no limit by default."""
    store: str | None = None
    """Bytes of the store; no limit by default."""

    def execute(self) -> None:
        """Prints the fraction."""
        from memo import alpha
        from memo.config import read_bytes

        found = alpha(
            whole_bytes=read_bytes("whole", self.whole),
            row_bytes=read_bytes("rows", self.rows),
            link_bytes=None if self.link is None else read_bytes("link", self.link),
            store_bytes=None if self.store is None else read_bytes("store", self.store),
            num_layers=self.layers,
        )
        self.print_result({"alpha": found}, f"{found:.4f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Train a Llama under a limit of memory where plain training fails, beside full recomputation.

    Examples:
        memo demo --out report/memo
        memo demo --full
    """

    out: Path = Path("report/memo")
    """Folder for demo.json and a picture."""
    full: bool = False
    """The long form: more steps."""

    def execute(self) -> int:
        """Runs the demo and prints its claims; 1 if a result is not correct."""
        from memo import demo

        return self.run_demo(demo.run)


def _read_trace(path: Path) -> Trace:
    from memo import Trace

    return Trace.from_csv(path) if path.suffix == ".csv" else Trace.from_cuda_snapshot(path)


def _write(path: Path, text: str) -> None:
    from shared.errors import DataError, DiskFullError
    from shared.files import write_atomically

    try:
        write_atomically(path, text)
    except DiskFullError:
        raise
    except OSError as error:
        raise DataError(
            f"out: expected a file that can be written, got {path}: {error.strerror}; name one in a folder that is there"
        ) from error


def _rate(link: str | None) -> float | None:
    from shared.errors import ConfigError
    from shared.units import parse_rate

    try:
        return None if link is None else parse_rate(link)
    except ConfigError as error:
        raise ConfigError(f"link: {error}") from error


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status: 0 done, 1 failed. Usage errors exit with 2.
    """
    commands = {"fit": Fit, "pack": Pack, "replay": Replay, "alpha": Alpha, "demo": Demo}
    return run_command(commands, prog="memo", about=_ABOUT, argv=argv)
