"""What the process holds, and what its heap may come to hold again."""

import subprocess
import sys

# Runs in a process of its own: the heap of one that has run other tests may have gone on elsewhere.
HOLES = """
import ctypes
import sys
from types import ModuleType

sys.modules["torch"] = ModuleType("torch")  # takes seconds to import, and is not needed

from memo.runtime.device_memory import hole_bytes

MiB = 1 << 20
BLOCK_BYTES, NUM_BLOCKS = 100 << 10, 400

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]


def fill():
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    for one in blocks:
        ctypes.memset(one, 1, BLOCK_BYTES)
    return blocks


blocks = fill()
full = hole_bytes()
*inner, last = blocks  # the last one stays, or the heap would become shorter
for one in inner:
    libc.free(one)
libc.malloc_trim(0)
with_holes = hole_bytes()
assert with_holes > full + 0.8 * BLOCK_BYTES * NUM_BLOCKS, (with_holes, full)
blocks = fill()
filled = hole_bytes()
assert filled < with_holes - 0.8 * BLOCK_BYTES * NUM_BLOCKS + MiB, (filled, with_holes)
print("holes are counted")
"""


def test_what_a_heap_gave_back_from_its_middle_may_be_resident_again():
    done = subprocess.run(
        [sys.executable, "-c", HOLES], check=False, capture_output=True, text=True
    )
    assert done.stdout == "holes are counted\n", done.stderr
