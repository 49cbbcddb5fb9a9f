"""Ranks as processes of this machine: `RankPool` starts them and runs one function after another.

`pool` is what users open, `forking` starts ranks from a process that has imported torch already, and
`shipping` names functions so that another process finds them. `rank` and `template` are the entry
points of the processes started. Nothing here imports torch before a rank has armed itself.
"""

from shared.comms.launch.pool import KEEP_MEMORY, RankPool, RunResult

__all__ = ["KEEP_MEMORY", "RankPool", "RunResult"]
