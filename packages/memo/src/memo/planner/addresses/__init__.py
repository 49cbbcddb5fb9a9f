"""Static addresses: traces of a step, their packing, and the allocators they are compared with."""

from memo.planner.addresses.emulator import ALLOCATORS, Emulation, emulate
from memo.planner.addresses.packing import Packing, pack
from memo.planner.addresses.trace import Trace

__all__ = ["ALLOCATORS", "Emulation", "Packing", "Trace", "emulate", "pack"]
