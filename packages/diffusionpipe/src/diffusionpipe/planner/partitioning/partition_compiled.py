"""Inner loops of the stage partitions, compiled."""

# Conditional expressions: numba compiles them to vector instructions.
# ruff: noqa: ANN001, ANN201, ANN202, FURB136
from __future__ import annotations

import numpy as np

from shared.kernels.jit import compiled

__all__ = ["count_fewest_devices", "find_stages", "pair_stages"]


@compiled
def count_fewest_devices(time_s, cut_s, num_stages, limit_s):
    """Counts the fewest devices on which the first layers run, each stage within a time limit.

    Args:
        time_s: seconds of layers i to j on r devices [i, j, r].
        cut_s: seconds of the cut before layer i [i].
        num_stages: most stages.
        limit_s: longest time of a stage or a used cut.

    Returns:
        Devices by stages and layers [num_stages + 1, layers + 1]; infinite where there is no way.
    """
    layers, devices = time_s.shape[0] - 1, time_s.shape[2] - 1
    own = np.full((layers + 1, layers + 1), np.inf)
    for i in range(layers):
        for j in range(i + 1, layers + 1):
            for r in range(1, devices + 1):
                if time_s[i, j, r] <= limit_s:
                    own[i, j] = r
                    break
    fewest = np.full((num_stages + 1, layers + 1), np.inf)
    fewest[0, 0] = 0.0
    for s in range(1, num_stages + 1):
        for j in range(s, layers + 1):
            if j == layers or cut_s[j] <= limit_s:
                for i in range(s - 1, j):
                    fewest[s, j] = min(fewest[s, j], fewest[s - 1, i] + own[i, j])
    return fewest


@compiled
def find_stages(
    time_s, backward_s, sync_s, cut_s, fixed_bytes, flight_bytes, limit_bytes,
    num_stages, devices, num_micro_batches, limit_s, most_exposed_s, stops, replicas,
):  # fmt: skip
    """Finds the stages within a period whose sums of gradients are exposed for the shortest time.

    Works from the last stage to the first. A state is (stages from here to the last, first layer,
    devices for them); its value is the time by which the longest sum among these stages exceeds the
    backward passes of the earlier ones among them. The passes of the stages still to come only
    lower it, so the least value of each state is enough.

    Args:
        time_s, backward_s, sync_s: of layers i to j on r devices: seconds of a micro-batch's passes,
            of its backward pass, of the sum of gradients [i, j, r].
        cut_s: seconds of the cut before layer i [i].
        fixed_bytes: bytes of layers i to j on r devices whatever is computed [i, j, r].
        flight_bytes: bytes that a micro-batch in flight keeps there [i, j, r].
        limit_bytes: least memory of devices i to i + r [i, r]; stages take the devices in order. A stage
            with s stages from it to the last keeps min(s, micro-batches) in flight.
        num_stages, devices, num_micro_batches: of the pipeline.
        limit_s: longest period allowed.
        most_exposed_s: solutions that expose as much or more are of no interest.
        stops: written: layer behind each stage.
        replicas: written: devices of each stage.

    Returns:
        Seconds exposed, or infinity if there is no such solution.
    """
    layers, max_replicas = time_s.shape[0] - 1, time_s.shape[2] - 1
    fewest, least_limit = (
        count_fewest_devices(time_s, cut_s, num_stages, limit_s),
        limit_bytes.min(),
    )
    late_s = np.full((num_stages + 1, layers + 1, devices + 1), np.inf)
    # The finite values of a state's layer lie between these numbers of devices.
    first = np.full((num_stages + 1, layers + 1), devices + 1)
    last = np.full((num_stages + 1, layers + 1), -1)
    late_s[0, layers, 0], first[0, layers], last[0, layers] = 0.0, 0, 0
    for s in range(1, num_stages + 1):
        before = num_stages - s
        for i in range(before, layers - s + 1 if before else 1):
            if fewest[before, i] > devices - s:
                continue
            most = devices - int(fewest[before, i])
            hidden_s = min(backward_s[0, i, 1], before * limit_s)
            for j in range(i + 1 if s > 1 else layers, layers - s + 2):
                if last[s - 1, j] < 0 or (j < layers and cut_s[j] > limit_s):
                    continue
                low = first[s - 1, j]
                for r in range(1, min(max_replicas, most - low) + 1):
                    sync = sync_s[i, j, r]
                    if time_s[i, j, r] > limit_s or sync - hidden_s >= most_exposed_s:
                        continue
                    need = fixed_bytes[i, j, r] + min(s, num_micro_batches) * flight_bytes[i, j, r]
                    stop = min(last[s - 1, j], most - r) + 1
                    rest, own = late_s[s - 1, j, low:stop], late_s[s, i, low + r : stop + r]
                    back = backward_s[i, j, r]
                    if need <= least_limit:
                        for k in range(len(rest)):
                            late = rest[k] - back
                            late = sync if late < sync else late
                            own[k] = late if late < own[k] else own[k]
                        continue
                    for k in range(len(rest)):
                        if need <= limit_bytes[devices - low - k - r, r]:
                            own[k] = min(own[k], max(rest[k] - back, sync))
            for d in range(s, most + 1):
                if late_s[s, i, d] - hidden_s >= most_exposed_s:
                    late_s[s, i, d] = np.inf
                elif late_s[s, i, d] < np.inf:
                    first[s, i] = min(first[s, i], d)
                    last[s, i] = d
    result = late_s[num_stages, 0, devices]
    if result == np.inf:
        return result
    i, d = 0, devices
    for s in range(num_stages, 0, -1):
        # Of the ways to the same value, the one with the shortest stage.
        own_s, next_layer, count = np.inf, 0, 0
        for j in range(i + 1, layers + 1):
            for r in range(1, min(max_replicas, d) + 1):
                if time_s[i, j, r] > limit_s or (j < layers and cut_s[j] > limit_s):
                    continue
                need = fixed_bytes[i, j, r] + min(s, num_micro_batches) * flight_bytes[i, j, r]
                if need > limit_bytes[devices - d, r]:
                    continue
                late = max(sync_s[i, j, r], late_s[s - 1, j, d - r] - backward_s[i, j, r])
                if late == late_s[s, i, d] and time_s[i, j, r] < own_s:
                    own_s, next_layer, count = time_s[i, j, r], j, r
        stops[num_stages - s], replicas[num_stages - s] = next_layer, count
        i, d = next_layer, d - count
    return result


@compiled
def pair_stages(down_s, up_s, link_s, memory, num_stages, is_folded, stops, starts):
    """Pairs a span from the front with one from the back on each device; least longest device.

    Args:
        down_s: seconds of layers a to b from the front [a, b].
        up_s: seconds of layers a to b from the back [a, b].
        link_s: seconds of a micro-batch's messages between the devices that hold the layers before
            a and from b, and the others [a, b].
        memory: a `PairMemory`.
        num_stages: devices.
        is_folded: both are of one chain, and the last device holds all that is left between; else
            there are two chains, and each ends on the last device.
        stops: written: end of each device's span from the front.
        starts: written: begin of each device's span from the back.

    Returns:
        Seconds of the longest device or message, or infinity if no stages fit into memory.
    """
    num_down, num_up = down_s.shape[0] - 1, up_s.shape[0] - 1
    best = np.full((num_stages + 1, num_down + 1, num_up + 1), np.inf)
    origin = np.zeros((num_stages + 1, num_down + 1, num_up + 1, 2), np.int64)
    best[0, 0, num_up] = 0.0
    paired = num_stages - 1 if is_folded else num_stages
    for s in range(1, paired + 1):
        left = num_stages - s
        for b in range(s, num_down - left + 1):
            for c in range(left, num_up - s + 1):
                if (is_folded and c <= b) or (left == 0 and (b < num_down or c > 0)):
                    continue
                link = link_s[b, c] if left else 0.0
                for a in range(s - 1, b if s > 1 else 1):
                    for d in range(c + 1 if s > 1 else num_up, num_up - s + 2):
                        longest = max(best[s - 1, a, d], down_s[a, b] + up_s[c, d], link)
                        if longest < best[s, b, c] and _fits(memory, s - 1, a, b, c, d):
                            best[s, b, c] = longest
                            origin[s, b, c, 0], origin[s, b, c, 1] = a, d
    a, d, result = num_down, 0, best[num_stages, num_down, 0]
    if is_folded:
        result = np.inf
        for b in range(num_down + 1):
            for c in range(b + 1, num_up + 1):
                longest = max(best[paired, b, c], down_s[b, c])
                if longest < result and _fits(memory, paired, b, c, c, c):
                    result, a, d = longest, b, c
        stops[num_stages - 1], starts[num_stages - 1] = d, d
    if result < np.inf:
        for s in range(paired, 0, -1):
            stops[s - 1], starts[s - 1] = a, d
            a, d = origin[s, a, d, 0], origin[s, a, d, 1]
    return result


@compiled
def _fits(memory, device, a, b, c, d):
    """Whether layers a to b from the front and c to d from the back fit into a device's memory."""
    first = memory.down_flights[device] * memory.down_flight_bytes[a, b]
    second = memory.up_flights[device] * memory.up_flight_bytes[c, d]
    need = memory.down_bytes[a, b] + memory.up_bytes[c, d]
    need += max(first, second) if memory.takes_turns else first + second
    outputs = memory.down_outputs[a, b] | memory.up_outputs[c, d]
    for number in range(len(memory.output_bytes)):
        if (outputs >> number) & 1:
            need += memory.output_bytes[number]
    return need <= memory.limit_bytes[device]
