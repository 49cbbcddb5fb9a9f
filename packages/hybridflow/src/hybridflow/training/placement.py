"""Where a recipe's models run, and how generation and training alternate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from hybridflow.algorithms.registry import LOOPS
from hybridflow.rl.registry import LEVELS
from hybridflow.rollout.servers.registry import SERVERS
from shared.errors import ConfigError
from shared.registry import Registry

if TYPE_CHECKING:
    from hybridflow.workers.controller import Workers

__all__ = ["ENGINES", "ROLES", "Loop", "ModelPlace", "Placement", "Server", "is_set"]

ROLES = ("actor", "critic", "cost-critic", "reference", "reward", "cost", "rollout")
"""Names of a recipe's models."""

ENGINES: Registry[str, Callable[[int, str], Workers]] = Registry("placement.engine")
"""Engines by name: functions of the number of ranks and a cluster's address to workers."""
for _name, _about in (
    ("inline", "this process"),
    ("local", "processes of this machine"),
    ("ray", "actors of Ray, on one machine or many"),
    ("torchrun", "the processes that torchrun has started"),
):
    ENGINES.add(_name, f"hybridflow.training.build_models:start_{_name}", _about)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """Where one model runs.

    Attributes:
        pool: name of its pool; models of one pool take turns on its ranks.
        train: layout "p-t-d" of training; all ranks are replicas when empty.
        generate: layout "p-t" of an actor's or rollout's generation; as training when empty.
        is_sharded: whether an actor's replicas shard its parameters (FSDP2).
    """

    pool: str
    train: str = ""
    generate: str = ""
    is_sharded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where all models run.

    Attributes:
        engine: a name of `ENGINES`.
        address: of a running Ray cluster; when empty, as `Workers.ray` without an address.
        num_ranks: ranks of the single pool, if there are no `pools`.
        train, generate, is_sharded: as in `ModelPlace`, for models without a place of their own,
            which run on the first pool.
        pools: number of ranks of each pool, by name, in the order of the ranks.
        models: places by role, see `ROLES`.
    """

    engine: str = "inline"
    address: str = ""
    num_ranks: int = 1
    train: str = ""
    generate: str = ""
    is_sharded: bool = False
    pools: dict[str, int] = field(default_factory=dict)
    models: dict[str, ModelPlace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ENGINES.check(self.engine)
        if self.address and self.engine != "ray":
            raise ConfigError(f"placement.address: engine {self.engine!r} has none; only ray has")
        if self.pools and self.num_ranks != 1:
            raise ConfigError("placement: expected num_ranks or pools, got both")
        for name, size in self.sizes.items():
            if size < 1:
                key = f"pools.{name}" if self.pools else "num_ranks"
                raise ConfigError(f"placement.{key}: expected 1 rank or more, got {size}")
        for role, place in self.models.items():
            _one_of("placement.models", role, ROLES)
            _one_of(f"placement.models.{role}.pool", place.pool, tuple(self.sizes))
        if self.engine == "inline" and self.num_ranks_in_all > 1:
            raise ConfigError(
                f"placement: expected one rank with the inline engine, got "
                f"{self.num_ranks_in_all}; use engine local, ray or torchrun"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks of each pool."""
        return self.pools or {"all": self.num_ranks}

    @property
    def num_ranks_in_all(self) -> int:
        """Number of ranks of all pools."""
        return sum(self.sizes.values())

    def of(self, role: str) -> ModelPlace:
        """The place of a model."""
        return self.models.get(role) or ModelPlace(
            pool=next(iter(self.sizes)), train=self.train, generate=self.generate,
            is_sharded=self.is_sharded,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How generation and training alternate; see `hybridflow.loops`.

    Attributes:
        kind: a name of `LOOPS`: "sync", or "one-step" or "async", which need a "rollout" on a pool
            of its own.
        eta: for "async": bound on staleness, in steps between the weights that generated a
            response and those trained on it.
        correct: level of the importance weights that correct for stale weights, a name of `LEVELS`;
            empty: no correction.
        cap: upper bound of an importance weight.
    """

    kind: str = "sync"
    eta: int = 1
    correct: str = ""
    cap: float = 2.0

    def __post_init__(self) -> None:
        LOOPS.check(self.kind)
        _one_of("loop.correct", self.correct, ("", *LEVELS))
        if self.eta < 0:
            raise ConfigError(f"loop.eta: expected 0 or more, got {self.eta}")
        if self.correct and not LOOPS.get(self.kind).is_apart:
            raise ConfigError(
                f"loop.correct: loop {self.kind!r} trains the weights that generated, so there is "
                f"nothing to correct; leave it out"
            )
        if is_set(self, "eta") and not LOOPS.get(self.kind).has_eta:
            known = ", ".join(name for name in LOOPS if LOOPS.get(name).has_eta)
            raise ConfigError(f"loop.eta: loop {self.kind!r} has no eta; only {known} has")
        if is_set(self, "cap") and not self.correct:
            raise ConfigError("loop.cap: it bounds the weights of loop.correct, which is not set")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server that generates in place of the actor.

    Attributes:
        kind: a name of `hybridflow.rollout.servers.registry`; empty: there is none.
        url: http://HOST:PORT.
        folder: for weights; the actor's first rank and the server must see it under one path.
        log_probs_mode: the value of --logprobs-mode that vLLM was started with.
    """

    kind: str = ""
    url: str = ""
    folder: str = ""
    log_probs_mode: str = "raw_logprobs"

    def __post_init__(self) -> None:
        if self.kind:
            SERVERS.check(self.kind)
        if bool(self.kind) != bool(self.url) or bool(self.kind) != bool(self.folder):
            raise ConfigError("server: kind, url and folder go together; give all or none")
        if is_set(self, "log_probs_mode") and self.kind != "vllm":
            raise ConfigError(
                f"server.log_probs_mode: it applies only to kind 'vllm', got kind {self.kind!r}"
            )


def is_set(record: Any, name: str) -> bool:
    """Whether a field of a dataclass has another value than its default."""
    default = next(item.default for item in fields(record) if item.name == name)
    return getattr(record, name) != default


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        told = ", ".join(name or "'' (none)" for name in known)
        raise ConfigError(f"{key}: expected one of {told}, got {value!r}")
