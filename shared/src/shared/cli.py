"""Common parts of all packages' command lines: parsing, exit statuses, errors and JSON output.

A command is a frozen dataclass whose fields are its options, with a method `execute` that prints
results to stdout and progress to stderr. Parsing is tyro's. Nothing heavy is imported here.

What a user can mend is one sentence on stderr, also where several ranks of torchrun meet it.

Exit statuses: 0 done; 1 failed; 2 wrong usage; 130 interrupted; 141 broken pipe at stdout.
"""

import io
import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from shared.errors import CommError, ConfigError, MeshyardError, describe_mistake, list_causes
from shared.files import find_folders, naming_full_disk
from shared.registry import Registry
from shared.training import show_resumed

__all__ = ["CheckpointOption", "Choice", "Command", "JsonOption", "choice", "run_command"]

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
    with _telling_settings(prog):
        command: Command = tyro.extras.subcommand_cli_from_dict(
            dict(commands), prog=prog, description=about, args=argv
        )
    try:
        # Writers that do not name what they write belong to the command's output.
        output = getattr(command, "out", None) or Path()
        with show_resumed(prog), naming_full_disk(output, is_guess=True):
            status = command.execute()
        sys.stdout.flush()
    except (KeyboardInterrupt, Exception) as error:
        # Libraries that are interrupted may raise an error of their own.
        if any(isinstance(cause, KeyboardInterrupt) for cause in list_causes(error)):
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
    from shared.comms.init import open_torchrun_store

    try:
        store = open_torchrun_store("told", timedelta(seconds=_STORE_S))
        if is_consequence:
            time.sleep(_OTHERS_S)
        return store.add("sentences", 1) > 1
    except (OSError, RuntimeError, ValueError):
        return False  # torchrun's own process has ended


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
