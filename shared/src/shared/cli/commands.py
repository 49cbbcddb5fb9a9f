"""Common parts of all packages' command lines: parsing, exit statuses, errors and JSON output.

A command is a frozen dataclass whose fields are its options, with a method `execute` that prints
results to stdout and progress to stderr. Its docstring is its help, with a section `Examples:` of
lines that work. Every command line also has `--version`, `-v` for log lines and tracebacks, `-q` for no progress,
and tyro's shell completion (`--tyro-print-completion bash`). Parsing is tyro's. Nothing heavy is
imported here.

What a user can mend is one sentence on stderr, also where several ranks of torchrun meet it.

Exit statuses: 0 done; 1 failed; 2 wrong usage; 130 interrupted; 141 broken pipe at stdout.
"""

import io
import json
import math
import os
import platform
import re
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, make_dataclass
from datetime import timedelta
from functools import reduce
from inspect import getdoc
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from shared.cli.interrupts import Interrupts
from shared.errors import (
    CommError,
    ConfigError,
    DataError,
    MeshyardError,
    describe_mistake,
    list_causes,
)
from shared.files import find_folders, naming_full_disk
from shared.registry import Registry
from shared.training import show_resumed
from shared.training.log_lines import show_log_lines
from shared.training.progress import hidden_progress
from shared.units import format_s

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "CheckpointOption",
    "Choice",
    "Command",
    "DemoOptions",
    "JsonOption",
    "choice",
    "draw_table",
    "read_examples",
    "run_command",
]

_INTERRUPTED, _NOBODY_READS = 130, 141

# Seconds to wait for torchrun's store, and for another rank to tell what led to a lost message.
_STORE_S, _OTHERS_S = 5.0, 1.0


class Command(Protocol):
    """The interface of a subcommand."""

    def execute(self) -> int | None:
        """Executes the command.

        Returns:
            The exit status; None for 0.
        """
        ...


@runtime_checkable
class Resumable(Protocol):
    """A subcommand that can resume what was interrupted."""

    def how_to_resume(self) -> str:
        """What to do after Ctrl-C, as the end of a sentence."""
        ...


def run_command(
    commands: Mapping[str, Callable[..., Command]],
    *,
    prog: str,
    about: str,
    argv: list[str] | None = None,
) -> int:
    """Parses arguments into a command and executes it.

    Errors that a user can fix are printed to stderr without a traceback: Meshyard's own, those of
    the operating system (a missing file, a full disk) and a lack of memory; of several ranks that
    torchrun started, one prints it. Any other error is a bug in the program and keeps its traceback.

    Args:
        commands: dataclasses by the names of subcommands, in the order of the help.
        prog: name of the program.
        about: what the help begins with.
        argv: the arguments; the process's own when left out.

    Returns:
        The exit status, for `sys.exit`.

    Raises:
        SystemExit: usage is wrong (status 2), or help was asked for (status 0).
    """
    words = sys.argv[1:] if argv is None else argv
    package = next(iter(commands.values())).__module__.partition(".")[0]
    if "--version" in words[: words.index("--") if "--" in words else None]:
        sys.stdout.write(f"{_versions(package)}\n")
        return 0
    with _telling_settings(prog):
        options = _parse(commands, words, prog, about)
    command: Command = options.command
    interrupts = Interrupts()
    try:
        # Writers that do not name what they write belong to the command's output.
        output = getattr(command, "out", None) or Path()
        compiled_s = _compile_s()
        with (
            interrupts,
            show_resumed(prog),
            naming_full_disk(output, is_guess=True),
            show_log_lines((package, "shared") if options.verbose else ()),
            hidden_progress(options.quiet),
        ):
            status = command.execute()
        compiled_s = _compile_s() - compiled_s
        if compiled_s >= 1 and not options.quiet:
            told = f"{format_s(compiled_s)} went into compiling kernels, which later runs load"
            print(f"{prog}: {told}", file=sys.stderr)
        sys.stdout.flush()
    except (KeyboardInterrupt, Exception) as error:
        # Libraries that are interrupted may raise an error of their own.
        if interrupts.have_come or any(
            isinstance(cause, KeyboardInterrupt) for cause in list_causes(error)
        ):
            advice = "start again by the same command"
            if isinstance(command, Resumable):
                advice = command.how_to_resume()
            _tell(prog, f"interrupted; {advice}")
            return _INTERRUPTED
        if isinstance(error, BrokenPipeError) and _has_lost_its_reader():
            return _NOBODY_READS
        mistake = describe_mistake(error)
        if mistake is None and not isinstance(error, MeshyardError):
            raise
        if options.verbose:
            traceback.print_exception(error)
        _tell(prog, mistake or str(error), is_consequence=isinstance(error, CommError))
        return 1
    return status or 0


@contextmanager
def _telling_settings(prog: str) -> Iterator[None]:
    """Makes a ConfigError of a command's settings one sentence, in place of tyro's box of it."""
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            yield
    except (MeshyardError, SystemExit) as ending:
        # tyro ends the process while it handles the error.
        ours = [cause for cause in list_causes(ending) if isinstance(cause, MeshyardError)]
        if not ours:
            sys.stderr.write(told.getvalue())
            raise
        _tell(prog, str(ours[0]))
        raise SystemExit(2) from None


def _tell(prog: str, sentence: str, *, is_consequence: bool = False) -> None:
    """Prints to stderr, unless another rank of torchrun's has.

    Args:
        prog: name of the program.
        sentence: what is printed.
        is_consequence: that of another rank's error, which is given a second to tell its own.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and _has_been_told(is_consequence):
        return
    print(f"{prog}: {sentence}", file=sys.stderr)


def _has_been_told(is_consequence: bool) -> bool:
    try:
        from shared.comms.init import open_torchrun_store

        store = open_torchrun_store("told", timedelta(seconds=_STORE_S))
        if is_consequence:
            time.sleep(_OTHERS_S)
        return store.add("sentences", 1) > 1
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError):
        return False  # torchrun's own process has ended, or Ctrl-C came while torch was imported


# Without slots, so that a command can inherit from this and from JsonOption.
@dataclass(frozen=True, kw_only=True)
class CheckpointOption:
    """A command that inherits from this has `--checkpoint`, and says at Ctrl-C how to resume."""

    checkpoint: Path | None = None
    """Folder to write checkpoints to, and to resume from."""

    def how_to_resume(self) -> str:
        """What to do after Ctrl-C, as the end of a sentence."""
        folder = self.checkpoint
        if folder is None:
            return "nothing was saved: give --checkpoint DIR, and the same command can resume"
        found = find_folders(folder.parent, folder.name).values()
        if any(any(path.iterdir()) for path in found):
            return f"resume from {folder} by the same command"
        return f"{folder} has no checkpoint yet: start again by the same command"


def read_examples(command: Callable[..., Command]) -> list[str]:
    """Reads the lines of the section `Examples:` of a command's docstring."""
    section = (getdoc(command) or "").partition("\nExamples:\n")[2]
    lines = []
    for line in section.lstrip("\n").splitlines():
        if not line.startswith(" "):
            break
        lines.append(line.strip())
    return lines


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What every command line takes, before or after the subcommand's name."""

    version: bool = False
    """Print the versions of the package, shared, torch and Python, and exit."""
    verbose: Annotated[bool, tyro.conf.arg(aliases=["-v"])] = False
    """Also print log lines, and an error's traceback, on stderr."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """Show no progress."""


def _parse(
    commands: Mapping[str, Callable[..., Command]], words: list[str], prog: str, about: str
) -> Any:
    """The options of `_Options`, and the subcommand's in `command`."""
    # The list of subcommands has a sentence for each; a subcommand's own help has all of its text.
    kinds: list[Any] = [
        Annotated[
            Any,
            tyro.conf.subcommand(
                name,
                constructor=kind,
                prefix_name=False,
                description=_describe(kind, is_whole=name in words),
            ),
        ]
        for name, kind in commands.items()
    ]
    if len(kinds) == 1:
        kinds.append(Annotated[None, tyro.conf.Suppress])  # one kind alone would be no subcommand
    command: Any = reduce(or_, kinds)
    options = make_dataclass(
        "Options",
        [("command", Annotated[command, tyro.conf.arg(name="")], field(kw_only=True))],
        bases=(_Options,),
        frozen=True,
    )
    examples = "".join(
        f"\n  {line}" for kind in commands.values() for line in read_examples(kind)[:1]
    )
    return tyro.cli(
        options,
        prog=prog,
        description=f"{about.rstrip()}\n\nExamples:{examples}" if examples else about,
        args=words,
        config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.FlagCreatePairsOff),
    )


def _describe(command: Callable[..., Command], *, is_whole: bool) -> str:
    """A command's docstring up to its arguments, or the first paragraph of it."""
    text = (getdoc(command) or "").partition("\n\nArgs:\n")[0]
    # Lines of a paragraph are wrapped for the source; indented ones stay as they are.
    text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
    return text if is_whole else text.partition("\n\n")[0]


def _versions(package: str) -> str:
    """A line each for the package, shared, torch (which is not imported) and Python."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    found = {name: getattr(sys.modules[name], "__version__", "?") for name in (package, "shared")}
    found |= {"torch": torch, "python": platform.python_version()}
    return "\n".join(f"{name} {number}" for name, number in found.items())


def _compile_s() -> float:
    """Seconds that kernels were compiled in this process so far."""
    jit = sys.modules.get("shared.kernels.jit")
    return 0.0 if jit is None else jit.compile_s()


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOption:
    """A command that inherits from this has `--json`, and prints its result by `print_result`."""

    json: bool = False
    """Print the result as one JSON object."""

    def print_result(self, record: Mapping[str, Any], text: object) -> None:
        """Prints the result of the command to stdout; progress belongs on stderr.

        Args:
            record: printed with `--json`: texts, numbers, lists and dictionaries. Numbers that are
                not finite become null, as JSON cannot represent them.
            text: printed without `--json`.
        """
        print(json.dumps(_finite(record)) if self.json else text)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions(JsonOption):
    """What every package's demo takes."""

    out: Path
    """Folder for demo.json and pictures."""
    full: bool = False
    """Run the long form."""

    def run_demo(self, run: Callable[..., bool]) -> int:
        """Runs a demo, and prints its claims with `--json`; lines about them are on stderr anyway.

        Args:
            run: a function of (folder, is_full) that ends with `shared.claims.finish`.

        Returns:
            The exit status: 1 if a result is not correct.

        Raises:
            DataError: the folder is a file, or lies in one.
        """
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise DataError(f"{self.out}: expected a folder, got a file; name another") from error
        if not self.json:
            return int(not run(self.out, is_full=self.full))
        with redirect_stdout(sys.stderr):
            is_correct = run(self.out, is_full=self.full)
        from shared.claims import read_demo

        claims = [claim.to_json() for claim in read_demo(self.out).claims]
        self.print_result({"claims": claims}, "")
        return int(not is_correct)


class Choice(PrimitiveConstructorSpec[Any]):
    """An option's type that takes the names of a registry, read when the command line is parsed."""

    def __init__(self, registry: Registry[Any, Any]) -> None:
        def parse(texts: list[str]) -> Any:
            try:
                return registry.parse(texts[0])
            except ConfigError as error:
                raise ValueError(str(error)) from error

        # The base class is frozen, and has these names as fields of fixed values.
        for name, value in (
            ("_registry", registry),
            ("nargs", 1),
            ("instance_from_str", parse),
            ("is_instance", lambda value: value in registry),
            ("str_from_instance", lambda value: [str(value)]),
        ):
            object.__setattr__(self, name, value)

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names registered so far."""
        return tuple(map(str, self._registry))  # type: ignore[attr-defined]

    @property
    def metavar(self) -> str:  # type: ignore[override]
        """The names, as the help shows them."""
        return "{" + ",".join(self.choices) + "}"


def draw_table(table: "Table") -> str:
    """Draws a table of rich's as text: as wide as the terminal, unwrapped in a file or pipe."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=10**6)
    with console.capture() as captured:
        console.print(table, soft_wrap=not console.is_terminal)
    return captured.get().rstrip("\n")


def choice(registry: Registry[Any, Any]) -> Choice:
    """Makes an option take the names of a registry: `Annotated[str, choice(POLICIES)]`.

    Names that are registered later, also from outside the package, are in the help and accepted; any
    other is refused as wrong usage. In a tuple, `tuple[Annotated[str, choice(POLICIES)], ...]`, it
    takes several.
    """
    return Choice(registry)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _has_lost_its_reader() -> bool:
    """Whether stdout is a broken pipe; if so, redirects it to os.devnull."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return True
