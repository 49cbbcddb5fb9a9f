"""What a run is started with; imported without torch, so that mistakes are said at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import ConfigError

__all__ = ["Launch", "Settings"]

_LONGEST_S = 1e7
"""Of any time: about four months, which all clocks and messages can count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for.

    Attributes:
        num_ranks: ranks of the run.
        min_ranks: fewest ranks to go on with when spares are used up; num_ranks: never fewer.
        wait_s: how long to wait for a spare then.
        backend: of the ranks' messages.
        timeout_s: how long one message may take.
        most_failures: losses in a row, without a step between them or before the first world, after
            which the run stops.
    """

    num_ranks: int
    min_ranks: int
    wait_s: float = 300.0
    backend: str = "gloo"
    timeout_s: float = 600.0
    most_failures: int = 5

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if not 1 <= self.min_ranks <= self.num_ranks:
            raise ConfigError(
                f"--min-ranks: expected 1 to the {self.num_ranks} ranks, got {self.min_ranks}; leave it out "
                f"to wait for a spare"
            )
        if not 0 < self.timeout_s <= _LONGEST_S or not self.wait_s >= 0:
            raise ConfigError(
                f"expected a --timeout above 0 s, of at most {_LONGEST_S:g} s, and a --wait of at least 0 s, "
                f"got {self.timeout_s:g} and {self.wait_s:g}; leave them out for 600 and 300"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a host starts.

    Attributes:
        script: the user's, and its arguments.
        host: number of this host.
        ranks: those that it starts.
        num_spares: processes that wait beside them; used ones are replaced.
        world_size: ranks of all hosts.
        heartbeat_s: silence after which a process is taken for lost.
        preload: modules that processes have imported when they start.
        env: more environment variables.
    """

    script: Sequence[str]
    host: int
    ranks: Sequence[int]
    num_spares: int
    world_size: int
    heartbeat_s: float
    preload: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what can be checked before anything is started."""
        if not self.script or not Path(self.script[0]).is_file():
            raise ConfigError(
                f"script: expected a Python file, got {self.script[0] if self.script else 'none'}; name the "
                f"one that trains, as in `meshyard-swift run -n 4 --spares 1 train.py`"
            )
        _expect_python(Path(self.script[0]))
        if self.num_spares < 0 or not 0 < self.heartbeat_s <= _LONGEST_S:
            raise ConfigError(
                f"expected --spares of 0 or more and a --heartbeat above 0 s and of at most {_LONGEST_S:g} s, "
                f"got {self.num_spares} and {self.heartbeat_s:g}; leave them out for 1 and 5"
            )


def _expect_python(script: Path) -> None:
    if script.suffix != ".py":
        return
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OSError) as error:
        raise ConfigError(
            f"script: expected a Python file, got {error} in {script}; correct it there"
        ) from error
