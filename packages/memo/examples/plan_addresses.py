"""Plans the addresses of a recorded step's tensors, beside what allocators reserve for them.

    python plan_addresses.py snapshot.pickle
    python plan_addresses.py                  # four layers whose tensors grow

SNAPSHOT is what `torch.cuda.memory._dump_snapshot("snapshot.pickle")` wrote.
"""

import argparse
from pathlib import Path

import memo


def growing() -> memo.Trace:
    """Layers whose tensors grow, as sequences of growing length make them."""
    events = []
    for length in range(1, 5):
        names = [f"{length}.{part}" for part in range(3)]
        events += [("alloc", name, length * (1 << 20)) for name in names]
        events += [("free", name) for name in names]
    return memo.Trace.from_events(events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("snapshot", nargs="?", type=Path)
    given = parser.parse_args()
    trace = growing() if given.snapshot is None else memo.Trace.from_cuda_snapshot(given.snapshot)
    packing = memo.pack(trace.intervals)
    print(f"needed at once {packing.lower_bound:,} bytes, planned {packing.peak:,}")
    for allocator in ("caching", "expandable", "planned"):
        reserved = memo.emulate(trace, allocator=allocator).reserved_bytes
        print(f"{allocator:>10}  {reserved:,} bytes reserved")


if __name__ == "__main__":
    main()
