"""Ranks as processes of this machine: `RankPool` starts them and runs one function after another.

`pool` is the public class, `forking` forks ranks from a template process that has imported torch,
and `shipping` locates functions by module and file for another process. `rank` and `template` are
the entry points of the processes started. A rank ties its life to its parent's before it imports
torch.
"""

from shared.comms.launch.pool import KEEP_MEMORY, RankPool, RunResult

__all__ = ["KEEP_MEMORY", "RankPool", "RunResult"]
