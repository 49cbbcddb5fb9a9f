"""The command line. torch is imported only when a subcommand runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from bytecheckpoint.tools.writers.registry import WRITERS
from shared.cli import DemoOptions, JsonOption, choice, draw_table, run_command
from shared.errors import DataError
from shared.training.progress import show_progress

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["main"]

_ABOUT = """Manage checkpoints: list, check, compare, convert and clean up.

RUN is a folder of steps and CHECKPOINT one checkpoint, as a path or URL (s3://bucket/run7); a RUN
given as CHECKPOINT means its newest step. Hugging Face folders (*.safetensors) and folders of
torch.distributed.checkpoint (.metadata) are read as well.

Exit status: 0 done; 1 failed, damaged or different; 2 wrong usage.
"""

# Rows of differences that are listed without --all.
_MAX_ROWS = 20
_FORMATS = "; ".join(f"{name}: {WRITERS.about(name)}" for name in WRITERS)
_Run = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
_Checkpoint = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
_New = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NEW")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ls(JsonOption):
    """List the checkpoints of a run: step, size, ranks, tensors.

    Examples:
        bytecheckpoint ls /nfs/run7
        bytecheckpoint ls s3://bucket/run7 --json
    """

    run: _Run
    """Folder of steps, or one checkpoint."""

    def execute(self) -> int:
        """Prints the table; 1 if a checkpoint is damaged. Having none is an error."""
        from bytecheckpoint.tools.inventory import list_checkpoints
        from shared.units import format_bytes

        found = list_checkpoints(self.run)
        table = _make_table(
            "checkpoint", "step>", "size>", "ranks>", "files>", "tensors>", "damage"
        )
        for one in found:
            numbers = (one.step, one.num_bytes, one.world_size, one.num_files, one.num_tensors)
            step, size, *rest = ("-" if n is None else n for n in numbers)
            size = size if isinstance(size, str) else format_bytes(size)
            table.add_row(one.path or ".", *map(str, (step, size, *rest)), one.damage)
        is_damaged = any(one.damage for one in found)
        if not is_damaged:
            table.columns.pop()
        if found or self.json:
            self.print_result({"checkpoints": [one._asdict() for one in found]}, draw_table(table))
        if not found:
            raise _missing(self.run)
        return int(is_damaged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect(JsonOption):
    """Show the tensors of a checkpoint: name, type, shape, size, chunks.

    Examples:
        bytecheckpoint inspect /nfs/run7/step_00000100 --filter '*layers.3.*'
        bytecheckpoint inspect /nfs/run7 --values
    """

    checkpoint: _Checkpoint
    """Checkpoint, or a run for its newest."""
    filter: str = "*"
    """Only names that match this pattern with * and ?; without either, names that contain it."""
    values: bool = False
    """Also show non-tensor values, as JSON."""

    def execute(self) -> int:
        """Prints the table; 1 if nothing matches."""
        import json

        from bytecheckpoint.loading.checkpoint import open as open_checkpoint
        from bytecheckpoint.tools.inventory import find_newest
        from shared.units import format_bytes

        with open_checkpoint(find_newest(self.checkpoint)) as checkpoint:
            index = checkpoint.index
            table = _make_table("tensor", "type", "shape", "size>", "chunks>")
            total, tensors = 0, []
            wanted = _make_matcher(self.filter)
            for at in sorted(range(len(index.names)), key=index.names.__getitem__):
                if not wanted(index.names[at]):
                    continue
                rows = slice(int(index.rows[at]), int(index.rows[at + 1]))
                num_bytes = int(index.num_bytes[rows].sum())
                total += num_bytes
                record = {
                    "name": index.names[at],
                    "type": index.dtypes[at],
                    "shape": list(index.shapes[at]),
                    "num_bytes": num_bytes,
                    "num_chunks": rows.stop - rows.start,
                }
                tensors.append(record)
                shape = "x".join(map(str, index.shapes[at])) or "scalar"
                size, chunks = format_bytes(num_bytes), str(record["num_chunks"])
                table.add_row(index.names[at], index.dtypes[at], shape, size, chunks)
            aliases = {name: to for name, to in sorted(index.aliases.items()) if wanted(name)}
            for alias, target in aliases.items():
                table.add_row(alias, "", f"tied to {target}", "", "")
            count = f"{len(tensors)} of {len(index.names)} tensors, {format_bytes(total)}"
            result = {"kind": checkpoint.kind, "tensors": tensors, "aliases": aliases}
            text = f"{draw_table(table)}\n{count}"
            if self.values:
                extra = {key: checkpoint.source.extra[key] for key in ("tree", "ranks")}
                result |= extra
                text += f"\n{json.dumps(extra, indent=1)}"
            self.print_result(result, text)
        return int(not table.row_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify(JsonOption):
    """Check that checkpoints are complete and undamaged; list all damage.

    Examples:
        bytecheckpoint verify /nfs/run7 --deep
        bytecheckpoint verify /nfs/run7/step_00000100
    """

    run: _Run
    """Run, to check all its checkpoints, or one checkpoint."""
    deep: bool = False
    """Also read every byte and compare checksums, beyond sizes, headers and checksum tables."""

    def execute(self) -> int:
        """Prints the damage found; 1 if there is any. Having no checkpoint is an error."""
        from bytecheckpoint.tools.inventory import list_checkpoints
        from bytecheckpoint.tools.verify import verify
        from shared.units import format_bytes

        found = list_checkpoints(self.run)
        total = sum(one.num_bytes or 0 for one in found)
        damages, lines = [], []
        with show_progress("reading", total, is_bytes=True, is_shown=self.deep) as progress:
            for one in found:
                for damage in verify(one.url, deep=self.deep, progress=progress.advance):
                    damages.append({"checkpoint": one.path or self.run, **damage._asdict()})
                    block = "" if damage.block is None else f", block {damage.block}"
                    lines.append(f"{one.path or self.run}: {damage.file}{block}: {damage.what}")
                    if damage.tensors:
                        lines.append(f"    holds parts of {_shorten(damage.tensors)}")
        how = "every byte" if self.deep else "sizes, headers and tables, not their content (--deep)"
        if not any(one.has_checksums for one in found):
            how = "only its structure: the format has no checksums"
        if found and not damages:
            lines = [f"whole checkpoints: {len(found)}, {format_bytes(total)}; looked at {how}"]
        if lines or self.json:
            self.print_result({"num_checkpoints": len(found), "damages": damages}, "\n".join(lines))
        if not found:
            raise _missing(self.run)
        if damages:
            print(f"damages: {len(damages)}, checkpoints: {len(found)}", file=sys.stderr)
        return int(bool(damages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff(JsonOption):
    """Compare two checkpoints, of any formats and layouts, bit by bit.

    Examples:
        bytecheckpoint diff /nfs/run7/step_00000100 /nfs/run8/step_00000100
        bytecheckpoint diff /nfs/run7 ./hub --filter embed
    """

    a: _Checkpoint
    """One checkpoint, a file of torch.save too, or a run for its newest."""
    b: _Checkpoint
    """The other."""
    filter: str = "*"
    """Only names that match, as for inspect."""
    all: bool = False
    """List every difference, not the first 20 only."""

    def execute(self) -> int:
        """Prints what differs; 1 if anything does."""
        from bytecheckpoint.loading.checkpoint import open_any
        from bytecheckpoint.tools.diff import compare
        from bytecheckpoint.tools.inventory import find_newest

        with open_any(find_newest(self.a)) as a, open_any(find_newest(self.b)) as b:
            wanted = None if self.filter == "*" else _make_matcher(self.filter)
            total = a.index.total_bytes
            with show_progress("comparing", total, is_bytes=True) as progress:
                found = compare(a, b, wanted, progress.advance)
        table = _make_table("tensor", "differs in", "A", "B", "elements>", "max abs>")
        for one in found.tensors:
            is_near = one.what == "values"
            far = (f"{one.num_different:,}", f"{one.max_abs:.3g}") if is_near else ("", "")
            table.add_row(one.name, one.what, one.a, "same" if is_near else one.b, *far)
        for path, *two in found.values:
            table.add_row(path, "value", *(f"{value!r:.40}" for value in two), "", "")
        lines = draw_table(table).splitlines() if table.row_count else []
        if not self.all and table.row_count > _MAX_ROWS:
            lines[1 + _MAX_ROWS :] = [f"and {table.row_count - _MAX_ROWS} more: add --all"]
        record = found._asdict() | {
            "tensors": [one._asdict() for one in found.tensors],
            "values": [{"path": path, "a": one, "b": two} for path, one, two in found.values],
        }
        self.print_result(record, "\n".join([*lines, *found.summarize()]))
        return int(table.row_count > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert(JsonOption):
    """Write a checkpoint in another format.

    Examples:
        bytecheckpoint convert /nfs/run7/step_00000100 ./hub --to safetensors
        bytecheckpoint convert /nfs/run7 ./weights.pt --to torch
    """

    src: _Checkpoint
    """Checkpoint of any format, a file of torch.save too, or a run for its newest."""
    dst: _New
    """Path to write: a folder, or for torch a file. Must not exist."""
    to: Annotated[str, choice(WRITERS), tyro.conf.arg(help=_FORMATS)]
    prefix: str | None = None
    """For safetensors: write only tensors whose names begin with this prefix, and strip it."""
    config: Path | None = None
    """For safetensors: folder of the model's config.json, which is copied with the tokenizer beside
    it. Default: the source, where it is a Hugging Face folder."""

    def execute(self) -> int:
        """Converts, with a progress bar."""
        from bytecheckpoint.loading.checkpoint import open_any
        from bytecheckpoint.tools.convert import convert
        from bytecheckpoint.tools.inventory import find_newest

        src = find_newest(self.src)
        with open_any(src) as checkpoint:
            total = checkpoint.index.total_bytes
        with show_progress("writing", total, is_bytes=True) as progress:
            convert(
                src,
                self.dst,
                self.to,
                prefix=self.prefix,
                config=self.config,
                progress=progress.advance,
            )
        self.print_result({"dst": self.dst, "format": self.to, "num_bytes": total}, self.dst)
        if self.to == "safetensors" and not (Path(self.dst) / "config.json").exists():
            print(
                "these are weights alone; from_pretrained wants the model's config.json too: copy it "
                "there, or convert with --config FOLDER",
                file=sys.stderr,
            )
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard(JsonOption):
    """Rewrite a checkpoint as files of equal size, one per rank, without starting ranks.

    Loading on another number of ranks does not need this. It speeds up a checkpoint that is read
    often, and adds checksums to checkpoints of other formats. Tensors of a Hugging Face folder are
    named model.NAME in the new one, so that it loads into {"model": model}.

    Examples:
        bytecheckpoint reshard /nfs/run7/step_00000100 /nfs/for64 --world 64
        bytecheckpoint reshard ./hub /nfs/for2 --world 2
    """

    src: _Checkpoint
    """Checkpoint of any format, or a run for its newest."""
    dst: _New
    """Folder or URL of the new checkpoint."""
    world: int
    """Number of ranks to write files for."""

    def execute(self) -> int:
        """Rewrites, with a progress bar."""
        from bytecheckpoint.loading.checkpoint import open as open_checkpoint
        from bytecheckpoint.tools.inventory import find_newest
        from bytecheckpoint.tools.reshard import reshard
        from shared.units import format_bytes

        src = find_newest(self.src)
        with open_checkpoint(src) as checkpoint:
            total = checkpoint.index.total_bytes
        with show_progress("writing", total, is_bytes=True) as progress:
            sizes = reshard(src, self.dst, self.world, progress=progress.advance)
        smallest, largest = (format_bytes(pick(sizes, default=0)) for pick in (min, max))
        self.print_result(
            {"dst": self.dst, "file_bytes": sizes},
            f"{self.dst}: {len(sizes)} files of {smallest} to {largest}",
        )
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline(JsonOption):
    """Show how long each stage of a save took, rank by rank.

    Examples:
        bytecheckpoint timeline /nfs/run7 --out report/bytecheckpoint/timeline
        bytecheckpoint timeline /nfs/run7/step_00000100 --json
    """

    checkpoint: _Checkpoint
    """Checkpoint, or a run for its newest."""
    out: Path | None = None
    """Folder to write trace.json (for chrome://tracing or ui.perfetto.dev) and heat.svg (seconds by
    rank and stage) to."""

    def execute(self) -> int:
        """Prints seconds by stage and writes the files; 1 if the checkpoint has no trace."""
        import json

        from bytecheckpoint.loading.checkpoint import open as open_checkpoint
        from bytecheckpoint.tools import report
        from bytecheckpoint.tools.inventory import find_newest
        from shared.units import format_bytes, format_s

        url = find_newest(self.checkpoint)
        with open_checkpoint(url) as checkpoint:
            spans = report.parse_spans(checkpoint.source.extra.get("trace", []))
        if not spans:
            print(f"{url}: was saved without a trace", file=sys.stderr)
            return 1
        stages = []
        table = _make_table("stage", "median>", "slowest>", "on rank>", "bytes>", "GB/s a rank>")
        for one in report.sum_stages(spans):
            slowest = float(one.seconds.max())
            busy = float(one.seconds.sum())
            rate = f"{one.num_bytes / busy / 1e9:.2f}" if one.num_bytes and busy else ""
            moved = format_bytes(one.num_bytes) if one.num_bytes else ""
            median = float(sorted(one.seconds)[len(one.seconds) // 2])
            shown = (format_s(median), format_s(slowest), str(one.slowest), moved, rate)
            table.add_row(one.stage, *shown)
            stages.append(
                {
                    "stage": one.stage,
                    "median_s": median,
                    "slowest_s": slowest,
                    "slowest_rank": one.slowest,
                    "num_bytes": one.num_bytes,
                }
            )
        paths = []
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "trace.json").write_text(json.dumps(report.make_chrome_trace(spans)))
            report.draw_heat(spans, f"save of {url}", self.out / "heat.svg")
            paths = [str(self.out / "trace.json"), str(self.out / "heat.svg")]
        self.print_result(
            {"checkpoint": url, "stages": stages, "files": paths},
            "\n".join([draw_table(table), *paths]),
        )
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gc(JsonOption):
    """Remove the files of saves that were not committed; without --yes only list them.

    A save in progress looks the same: run this only when there is none.

    Examples:
        bytecheckpoint gc /nfs/run7
        bytecheckpoint gc /nfs/run7 --yes
    """

    run: _Run
    """Folder of steps, or one checkpoint."""
    yes: bool = False
    """Remove the files, instead of listing them."""

    def execute(self) -> int:
        """Removes it, or prints what would be removed."""
        from bytecheckpoint.storage import open_storage
        from bytecheckpoint.storage.files.commit import find_garbage, remove_garbage

        storage = open_storage(self.run)
        found = find_garbage(storage)
        # Prints each path when it is removed, so that after an error it is clear what is gone.
        for path in found if self.yes else []:
            remove_garbage(storage, [path])
            if not self.json:
                print(f"removed {path}", flush=True)
        if self.json or not (found and self.yes):
            lines = [f"would remove {path}" for path in found] or ["nothing to remove"]
            self.print_result({"paths": found, "is_removed": self.yes}, "\n".join(lines))
        if found and not self.yes:
            print("nothing was removed; add --yes when no save is in progress", file=sys.stderr)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(DemoOptions):
    """Kill a training run and resume it on other numbers of ranks; compare saves with torch's.

    Examples:
        bytecheckpoint demo --out report/bytecheckpoint
        bytecheckpoint demo --full
    """

    out: Path = Path("report/bytecheckpoint")
    """Folder for demo.json and the figure."""
    full: bool = False
    """Run the long form, with a larger model and more steps."""

    def execute(self) -> int:
        """Runs the demo; 1 if a result is not correct."""
        from bytecheckpoint.demo import demo

        return self.run_demo(demo.run)


_COMMANDS = {
    "ls": Ls,
    "inspect": Inspect,
    "verify": Verify,
    "diff": Diff,
    "convert": Convert,
    "reshard": Reshard,
    "timeline": Timeline,
    "gc": Gc,
    "demo": Demo,
}


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status.

    Args:
        argv: command-line arguments; None: those of the process.
    """
    return run_command(_COMMANDS, prog="bytecheckpoint", about=_ABOUT, argv=argv)


def _missing(run: str) -> DataError:
    from bytecheckpoint.loading.source import describe_folder
    from bytecheckpoint.storage import open_storage

    told = describe_folder(open_storage(run).list(""))
    return DataError(f"{run}: expected a run's folder of steps or a checkpoint, {told}")


def _make_matcher(pattern: str) -> Callable[[str], bool]:
    if not set("*?[") & set(pattern):
        pattern = f"*{pattern}*"
    return lambda name: fnmatchcase(name, pattern)


def _shorten(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _make_table(*columns: str) -> Table:
    """A table without lines; columns whose names end in > hold numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column.endswith(">")
        table.add_column(
            column.removesuffix(">"), justify="right" if is_number else "left", overflow="fold"
        )
    return table
