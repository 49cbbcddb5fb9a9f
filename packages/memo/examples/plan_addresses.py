"""Plans the addresses of a recorded step's tensors: python plan_addresses.py snapshot.pickle"""

import sys

import memo

if len(sys.argv) > 1:
    trace = memo.Trace.from_cuda_snapshot(sys.argv[1])
else:  # four layers whose tensors grow, as sequences of growing length make them
    events = []
    for length in range(1, 5):
        names = [f"{length}.{part}" for part in range(3)]
        events += [("alloc", name, length * (1 << 20)) for name in names]
        events += [("free", name) for name in names]
    trace = memo.Trace.from_events(events)

packing = memo.pack(trace.intervals)
print(f"needed at once {packing.lower_bound:,} bytes, planned {packing.peak:,}")
for allocator in ("caching", "expandable", "planned"):
    print(
        f"{allocator:>10}  {memo.emulate(trace, allocator=allocator).reserved_bytes:,} bytes reserved"
    )
