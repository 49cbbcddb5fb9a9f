"""Discrete-event replay: start and end times of a plan's operations on devices and links.

Devices' streams and directions of links are queues, which run one operation at a time. Operations
wait for others, on any queue, and for their turn on each queue they hold. This is the core of the
replayer of dPRO (arXiv 2205.02473, "A Generic Performance Diagnosis and Optimization Toolkit for
Expediting Distributed DNN Training"): a clock for each queue and a count of unmet dependencies for
each operation. If the order on every queue is given, no events are needed: start times are then
longest paths, found in one sweep.

All times are in seconds from 0, when the replay begins.
"""

from shared.topology.replay.graph import Operation, Order
from shared.topology.replay.simulator import Replay
from shared.topology.replay.timeline import CriticalStep, QueueUse, Timeline

__all__ = ["CriticalStep", "Operation", "Order", "QueueUse", "Replay", "Timeline"]
