"""Cache policies by name: which row is evicted when another is admitted.

Each id counts once per batch, at its first position. Ids whose rows are held when the batch arrives are
hits; the others are misses, which are admitted together after the lookup:

    lru     the cache holds the ids used last, in the order of batches and of ids within a batch, as
            single accesses would leave it. Of a batch larger than the cache the last ids stay.
    keep    LRU with a tuned number of pinned slots, often zero. Training that replays the past
            passes over more rows than fit, again and again, and LRU has always just lost what comes
            next. A row that would leave is pinned instead while more pinned rows are wanted, and
            the row pinned longest leaves while fewer are. Once twice as many rows as fit have
            missed, more are wanted if pinned rows (and some ids that left, as if pinned) had more
            hits each than the oldest quarter of the others, and fewer if not. None are where a
            batch takes up half of the cache.
    lfu     a hit adds one to the id's count, an id enters with one and loses its count on leaving.
            The misses, the last ones if there are more than slots, replace those that were there of
            least count, of equal counts the one used longest ago.

An entry is the number by which the compiled code knows the policy. Adding one takes a number here and
its branches in `gnnflow.features.slots_compiled`: there, a policy is a few lines in loops that touch
each row once, which a call a row would make ten times slower.
"""

from shared.registry import Registry

__all__ = ["CACHE_POLICIES", "KEEP", "LFU", "LRU"]

KEEP, LRU, LFU = range(3)

CACHE_POLICIES: Registry[str, int] = Registry("cache policy")
CACHE_POLICIES.add("keep", KEEP, "LRU with a tuned number of pinned slots, often zero")
CACHE_POLICIES.add("lru", LRU, "the row used longest ago leaves")
CACHE_POLICIES.add("lfu", LFU, "the row used least often leaves")
