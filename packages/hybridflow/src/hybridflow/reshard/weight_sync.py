"""Sends the actor's weights to a rollout on other ranks: the controller's side.

Weights are received into a second copy of the rollout's shard, which replaces the first only once
all ranks have received all of it: a failed sync leaves the old version in use, and no replica ever
mixes two versions. Receiving in place, bucket by bucket, would save that copy, but would leave an
interrupted replica with parts of two versions. A rank runs one call at a time, so it does not
generate during a sync; the second copy is released when the sync ends.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from hybridflow.reshard.exchange import WeightRoute
from hybridflow.reshard.planner import Plan
from hybridflow.reshard.vote import GIVEN_UP
from hybridflow.workers.pool import ResourcePool
from shared.errors import CommError, ConfigError, RankFailure

__all__ = ["Receiver", "Sender", "plan_sync", "sync_weights"]


@runtime_checkable
class Sender(Protocol):
    """A worker group that holds trained weights, as `hybridflow.Actor` does.

    Attributes:
        name: of the group.
        pool: its ranks.
    """

    name: str
    pool: ResourcePool

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method on the group's ranks: here "holding" and "send_weights"."""


@runtime_checkable
class Receiver(Protocol):
    """A worker group that serves with weights it receives, as `hybridflow.Rollout` does.

    Attributes:
        name: of the group.
        pool: its ranks.
        version: of the weights it serves with, in the sender's optimizer steps.
    """

    name: str
    pool: ResourcePool
    version: int

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls "holding", "stage_weights", "use_weights" or "drop_weights" on its ranks."""


def plan_sync(actor: Sender, rollout: Receiver) -> Plan:
    """Plans the transfers of `sync_weights`, and their bytes.

    Returns:
        The plan; its ranks are indices into both groups' ranks in ascending order.

    Raises:
        ConfigError: as `sync_weights`.
    """
    return _route(actor, rollout, 1).plan()


def sync_weights(actor: Sender, rollout: Receiver, *, bucket_bytes: int = 64 << 20) -> int:
    """Sends the actor's weights to a rollout, after all calls that both received before.

    The two sides cannot deadlock: every rank runs its calls in the order in which the program made
    them, and each call waits only for earlier ones.

    Args:
        actor: the group that sends its weights.
        rollout: the group that receives them, on other ranks.
        bucket_bytes: bytes of the weights that are sent together; a layer is never split.

    Returns:
        Their version: the actor's number of optimizer steps.

    Raises:
        ConfigError: if the groups share ranks, or differ in model or dtype.
        RankFailure: if a rank raised. The rollout keeps its old version, and weights can be synced
            again; but if a message was interrupted, these ranks have to be restarted first.
        CommError: if a checksum differs. The rollout keeps its old version.
    """
    route = _route(actor, rollout, bucket_bytes)
    under_way = (actor.call("send_weights", route), rollout.call("stage_weights", route))
    answers, errors = [], []
    for future in under_way:
        try:
            answers.append(future.result())
        except RankFailure as error:
            errors.append(error)
    serving = f"{rollout.name} goes on with version {rollout.version}"
    if errors:
        # A rank that had to give up reports the consequence, not the cause.
        errors.sort(key=lambda error: GIVEN_UP in str(error))
        told = "\n".join(map(str, errors))
        raise RankFailure(f"weights were not synced; {serving}: {told}", rank=errors[0].rank)
    sent = {key: found for _, sums in answers[0] for key, found in sums.items()}
    received = {key: found for sums in answers[1] for key, found in sums.items()}
    wrong = sorted(key for key in sent | received if sent.get(key) != received.get(key))
    if wrong:
        rollout.call("drop_weights").result()
        bucket, src, dst = wrong[0]
        raise CommError(
            f"bucket {bucket} of the weights from rank {route.ranks[src]} to {route.ranks[dst]}: "
            f"expected checksum {sent.get(wrong[0])}, got {received.get(wrong[0])}, and "
            f"{len(wrong) - 1} more differ; {serving}. Sync again"
        )
    version = answers[0][0][0]
    rollout.call("use_weights", version).result()
    rollout.version = version
    return version


def _route(actor: Sender, rollout: Receiver, bucket_bytes: int) -> WeightRoute:
    is_apart = not set(actor.pool.ranks) & set(rollout.pool.ranks)
    if actor.pool.workers is not rollout.pool.workers or not is_apart:
        raise ConfigError(
            f"expected {actor.name} and {rollout.name} on different pools of the same workers, got "
            f"ranks {list(actor.pool.ranks)} and {list(rollout.pool.ranks)}; on one pool, let the "
            f"actor generate"
        )
    src, dst = actor.call("holding").result(), rollout.call("holding").result()
    if src.config != dst.config or src.dtype != dst.dtype:
        raise ConfigError(
            f"{rollout.name} has another model than {actor.name}, {dst.config} in {dst.dtype} and "
            f"{src.config} in {src.dtype}; make both from one model and dtype"
        )
    return WeightRoute(src=src, dst=dst, bucket_bytes=bucket_bytes)
