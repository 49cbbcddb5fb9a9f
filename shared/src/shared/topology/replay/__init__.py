"""Discrete-event replay: when each operation of a plan runs, on devices and links given as queues.

A queue is a device's stream or one direction of a link and runs one operation at a time. Operations
wait for others, on any queue, and for their turn on each queue they hold. This is the replayer of
dPRO (arXiv 2205.02473, "A Generic Performance Diagnosis and Optimization Toolkit for Expediting
Distributed DNN Training") reduced to its core, a clock for each queue and a count of unmet
dependencies for each operation. Where the order on every queue is settled beforehand, no events
are needed: start times are then longest paths, found in one sweep.

All times are in seconds from 0, when the replay begins.
"""

from shared.topology.replay.graph import Operation, Order
from shared.topology.replay.simulator import Replay
from shared.topology.replay.timeline import CriticalStep, QueueUse, Timeline

__all__ = ["CriticalStep", "Operation", "Order", "QueueUse", "Replay", "Timeline"]
