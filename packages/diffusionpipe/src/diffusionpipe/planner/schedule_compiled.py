"""Inner loop of the schedules that are read off a simulation, compiled."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np

from shared.kernels.jit import compiled

__all__ = ["run_window"]


@compiled
def run_window(device_of, duration_s, message_s, num_micro_batches, window, order):
    """Runs micro-batches through passes; a device takes the ready pass that is farthest along.

    Args:
        device_of: device of each pass of a micro-batch, in the order of the passes.
        duration_s: seconds of each pass.
        message_s: seconds between passes on two devices.
        num_micro_batches: of a step.
        window: most micro-batches in flight.
        order: written: micro-batch and pass [micro-batches x passes, 2], in the order of their starts.

    Returns:
        Seconds until all have ended.
    """
    passes = len(device_of)
    free_s = np.zeros(passes)  # by device
    ready_s = np.full(num_micro_batches, np.inf)  # of a micro-batch's next pass
    ready_s[:window] = 0.0
    following = np.zeros(num_micro_batches, np.int64)
    low, high, end_s = 0, min(window, num_micro_batches), 0.0
    for number in range(num_micro_batches * passes):
        chosen, start_s, least = -1, np.inf, 0
        for m in range(low, high):
            if ready_s[m] == np.inf:
                continue
            begin_s = max(ready_s[m], free_s[device_of[following[m]]])
            # The farthest pass runs first, then the earliest micro-batch.
            priority = m - following[m] * num_micro_batches
            if begin_s < start_s or (begin_s == start_s and priority < least):
                chosen, start_s, least = m, begin_s, priority
        own = following[chosen]
        order[number, 0], order[number, 1] = chosen, own
        done_s = start_s + duration_s[own]
        free_s[device_of[own]] = done_s
        end_s = max(end_s, done_s)
        following[chosen] += 1
        if own + 1 < passes:
            is_near = device_of[own] == device_of[own + 1]
            ready_s[chosen] = done_s if is_near else done_s + message_s
            continue
        ready_s[chosen] = np.inf
        if chosen + window < num_micro_batches:
            ready_s[chosen + window] = done_s
            high = max(high, chosen + window + 1)
        while low < num_micro_batches and following[low] == passes:
            low += 1
    return end_s
