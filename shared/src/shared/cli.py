"""Common parts of all packages' command lines: parsing, exit statuses, errors and JSON output.

A command is a frozen dataclass whose fields are its options, with a method `execute` that prints
results to stdout and progress to stderr. Parsing is tyro's. Nothing heavy is imported here.

Exit statuses: 0 done; 1 failed; 2 wrong usage; 130 interrupted; 141 broken pipe at stdout.
"""

import json
import math
import os
import select
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from shared.errors import ConfigError, MeshyardError
from shared.registry import Registry

__all__ = ["Choice", "Command", "JsonOption", "choice", "run_command"]

_INTERRUPTED, _NOBODY_READS = 130, 141


class Command(Protocol):
    """The interface of a subcommand."""

    def execute(self) -> int | None:
        """Executes the command.

        Returns:
            The exit status; None for 0.
        """
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
    the operating system (a missing file) and a lack of memory. Any other error is a bug in the
    program and keeps its traceback.

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
    command: Command = tyro.extras.subcommand_cli_from_dict(
        dict(commands), prog=prog, description=about, args=argv
    )
    try:
        status = command.execute()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (MeshyardError, OSError, MemoryError) as error:
        if isinstance(error, BrokenPipeError) and _has_lost_its_reader():
            return _NOBODY_READS
        print(f"{prog}: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    return status or 0


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
