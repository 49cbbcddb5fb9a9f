"""FlexSP's planner: lengths in buckets, and groups of unequal sequence-parallel degrees by a program.

After FlexSP (arXiv 2412.01523), whose published solver it restates, as a baseline:
`hydraulis.planner.degrees` is what this package plans with.
"""

from hydraulis.planner.flexsp.bucketing import Buckets, buckets
from hydraulis.planner.flexsp.program import plan

__all__ = ["Buckets", "buckets", "plan"]
