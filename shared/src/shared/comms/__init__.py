"""Ranks and the messages between them: launching, groups, collectives, rounds, byte counts.

Names are imported lazily, so that a rank's entry point can tie its life to its parent's before it
imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.comms.collectives import (
        all_gather,
        all_gather_into,
        all_gather_v,
        all_reduce,
        all_to_all_v,
        barrier,
        broadcast,
        gather_v,
        scatter_v,
    )
    from shared.comms.courier import post_rounds
    from shared.comms.exchange import PendingExchange, start_exchange
    from shared.comms.group import Group, ProcessGroup
    from shared.comms.init import init_from_env
    from shared.comms.launch import RankPool, RunResult
    from shared.comms.ledger import Ledger, LedgerSnapshot, Traffic
    from shared.comms.merging import merge_all_reduce
    from shared.comms.netlab import HostCounters, NetLab, NetLabUnavailable
    from shared.comms.rounds import PendingRounds, Round
    from shared.comms.tree import Tree

__all__ = [
    "Group",
    "HostCounters",
    "Ledger",
    "LedgerSnapshot",
    "NetLab",
    "NetLabUnavailable",
    "PendingExchange",
    "PendingRounds",
    "ProcessGroup",
    "RankPool",
    "Round",
    "RunResult",
    "Traffic",
    "Tree",
    "all_gather",
    "all_gather_into",
    "all_gather_v",
    "all_reduce",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "gather_v",
    "init_from_env",
    "merge_all_reduce",
    "post_rounds",
    "scatter_v",
    "start_exchange",
]

_HOME = {
    "Group": "group",
    "ProcessGroup": "group",
    "init_from_env": "init",
    "Ledger": "ledger",
    "LedgerSnapshot": "ledger",
    "Traffic": "ledger",
    "PendingExchange": "exchange",
    "start_exchange": "exchange",
    "PendingRounds": "rounds",
    "Round": "rounds",
    "post_rounds": "courier",
    "merge_all_reduce": "merging",
    "RankPool": "launch",
    "RunResult": "launch",
    "HostCounters": "netlab",
    "NetLab": "netlab",
    "NetLabUnavailable": "netlab",
    "Tree": "tree",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"shared.comms.{_HOME.get(name, 'collectives')}"), name)
