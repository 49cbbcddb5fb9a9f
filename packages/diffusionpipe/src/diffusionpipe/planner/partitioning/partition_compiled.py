"""Inner loops of the stage partitions, compiled."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from shared.kernels.jit import compiled

__all__ = ["count_fewest_devices", "find_stages", "pair_stages"]


@compiled
def count_fewest_devices(time_s, cut_s, num_stages, limit_s):
    """Fewest devices on which the first layers run in so many stages, each within a limit.

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
            if j < layers and cut_s[j] > limit_s:
                continue
            for i in range(s - 1, j):
                needed = fewest[s - 1, i] + own[i, j]
                fewest[s, j] = min(fewest[s, j], needed)
    return fewest


@compiled
def _insert(front, size, label):
    """Adds a label to a Pareto front unless one of it is as good; drops those that are no better.

    Args:
        front: labels as columns (period, sync, next layer, replicas, next label), by rising period
            and falling sync.
        size: their number; there is room for one more.
        label: the new one.

    Returns:
        The new number.
    """
    first = 0
    while first < size and front[0, first] < label[0]:
        first += 1
    if first and front[1, first - 1] <= label[1]:
        return size
    if first < size and front[0, first] == label[0] and front[1, first] <= label[1]:
        return size
    last = first
    while last < size and front[1, last] >= label[1]:
        last += 1
    if last == first:
        for k in range(size, first, -1):
            front[:, k] = front[:, k - 1]
    elif last > first + 1:
        for k in range(last, size):
            front[:, first + 1 + k - last] = front[:, k]
    front[:, first] = label
    return size + 1 - (last - first)


@compiled
def _make_room(fronts, size):
    """Copies fronts [front, row, label] into an array with room for more labels than `size` in each."""
    if size < fronts.shape[2]:
        return fronts
    larger = np.empty((fronts.shape[0], fronts.shape[1], 2 * size + 2))
    larger[:, :, : fronts.shape[2]] = fronts
    return larger


@compiled
def find_stages(
    time_s, backward_s, sync_s, cut_s, fixed_bytes, flight_bytes, limit_bytes,
    num_stages, num_micro_batches, weight, low_s, limit_s, bound_s, is_greedy, stops, replicas,
):  # fmt: skip
    """The stages with the least weight x period + exposed sync, if that is below a bound.

    Works from the last stage to the first. A state is (stages left, first layer, devices left); its
    labels are pairs (period, sync): the longest stage or used cut so far, and the seconds by which
    the longest sum of gradients exceeds the backward passes of the stages before it that are part of
    the state. Both only grow with those of the rest, so dominated labels can go.

    Args:
        time_s, backward_s, sync_s: of layers i to j on r devices: seconds of a micro-batch's passes,
            of its backward pass, of the sum of gradients [i, j, r].
        cut_s: seconds of the cut before layer i [i].
        fixed_bytes: bytes of layers i to j whatever is computed [i, j].
        flight_bytes: bytes that a micro-batch in flight keeps there [i, j, r].
        limit_bytes: memory of a device. A stage with s stages from it to the last keeps min(s,
            micro-batches) in flight.
        num_stages, num_micro_batches: of the pipeline.
        weight: micro-batches + 2 stages - 2.
        low_s: shorter periods count as this.
        limit_s: longest period of interest.
        bound_s: least objective that is of no interest.
        is_greedy: keep one label a state, which finds a good solution and perhaps not the best.
        stops: written: layer behind each stage.
        replicas: written: devices of each stage.

    Returns:
        The objective, or infinity.
    """
    layers, devices = time_s.shape[0] - 1, time_s.shape[2] - 1
    fewest = count_fewest_devices(time_s, cut_s, num_stages, limit_s)
    pool, pool_size = np.empty((5, 1024)), 0
    begins = np.zeros((num_stages + 1, layers + 1, devices + 1), np.int64)
    counts = np.zeros((num_stages + 1, layers + 1, devices + 1), np.int64)
    # Fronts of all numbers of devices of one (stages left, first layer).
    fronts, sizes = np.empty((devices + 1, 5, 16)), np.zeros(devices + 1, np.int64)
    label = np.empty(5)
    for s in range(1, num_stages + 1):
        before = num_stages - s
        flights = min(s, num_micro_batches)
        for i in range(before, (layers - s if before else 0) + 1):
            if fewest[before, i] > devices - s:
                continue
            # Backward passes of the stages before hide part of the sums; each is within the period.
            hidden_s = min(backward_s[0, i, 1], before * limit_s)
            most = devices - int(fewest[before, i])
            least = s if before else devices
            sizes[:] = 0
            for j in range(i + 1 if s > 1 else layers, layers - s + 2):
                cut = 0.0 if j == layers else cut_s[j]
                if cut > limit_s:
                    continue
                for r in range(1, most - s + 2):
                    own_s = max(time_s[i, j, r], cut, low_s)
                    sync = sync_s[i, j, r]
                    if own_s > limit_s or weight * own_s + max(0.0, sync - hidden_s) >= bound_s:
                        continue
                    if fixed_bytes[i, j] + flights * flight_bytes[i, j, r] > limit_bytes:
                        continue
                    label[2], label[3] = j, r
                    if s == 1:
                        if least <= r:
                            label[0], label[1], label[4] = own_s, sync, 0
                            fronts = _make_room(fronts, sizes[r])
                            sizes[r] = _insert(fronts[r], sizes[r], label)
                        continue
                    for rest in range(max(s - 1, least - r), most - r + 1):
                        first = begins[s - 1, j, rest]
                        for k in range(first, first + counts[s - 1, j, rest]):
                            label[0] = max(own_s, pool[0, k])
                            label[1] = max(sync, pool[1, k] - backward_s[i, j, r])
                            objective = weight * label[0] + max(0.0, label[1] - hidden_s)
                            if objective >= bound_s:
                                continue
                            label[4] = k
                            d = rest + r
                            if is_greedy and sizes[d]:
                                exposed_s = max(0.0, fronts[d, 1, 0] - hidden_s)
                                if objective < weight * fronts[d, 0, 0] + exposed_s:
                                    fronts[d, :, 0] = label
                                continue
                            fronts = _make_room(fronts, sizes[d])
                            sizes[d] = _insert(fronts[d], sizes[d], label)
            for d in range(least, most + 1):
                size = sizes[d]
                pool = _make_room(pool.reshape(1, 5, -1), pool_size + size)[0]
                pool[:, pool_size : pool_size + size] = fronts[d, :, :size]
                begins[s, i, d], counts[s, i, d] = pool_size, size
                pool_size += size
    best, best_k = np.inf, -1
    first = begins[num_stages, 0, devices]
    for k in range(first, first + counts[num_stages, 0, devices]):
        objective = weight * pool[0, k] + pool[1, k]
        if objective < best:
            best, best_k = objective, k
    if best_k >= 0:
        for s in range(num_stages):
            stops[s], replicas[s] = pool[2, best_k], pool[3, best_k]
            best_k = int(pool[4, best_k])
    return best


@compiled
def pair_stages(down_s, up_s, link_s, num_stages, is_folded, stops, starts):
    """Pairs a span from the front with one from the back on each device; least longest device.

    Args:
        down_s: seconds of a device that holds layers a to b from the front [a, b]; infinite where it
            must not.
        up_s: seconds of layers a to b from the back [a, b].
        link_s: seconds of a micro-batch's messages between the devices that hold the layers before
            a and from b, and the others [a, b].
        num_stages: devices.
        is_folded: both are of one chain, and the last device holds all that is left between; else
            there are two chains, and each ends on the last device.
        stops: written: end of each device's span from the front.
        starts: written: begin of each device's span from the back.

    Returns:
        Seconds of the longest device or message, or infinity.
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
                if is_folded and c <= b:
                    continue
                is_last = left == 0
                if is_last and (b < num_down or c > 0):
                    continue
                link = 0.0 if is_last else link_s[b, c]
                for a in range(s - 1, b):
                    if s == 1 and a > 0:
                        break
                    for d in range(c + 1, num_up - s + 2):
                        if s == 1 and d < num_up:
                            continue
                        if best[s - 1, a, d] >= best[s, b, c]:
                            continue
                        longest = max(best[s - 1, a, d], down_s[a, b] + up_s[c, d], link)
                        if longest < best[s, b, c]:
                            best[s, b, c] = longest
                            origin[s, b, c, 0], origin[s, b, c, 1] = a, d
    a, d, result = num_down, 0, best[num_stages, num_down, 0]
    if is_folded:
        result = np.inf
        for b in range(num_down + 1):
            for c in range(b + 1, num_up + 1):
                longest = max(best[paired, b, c], down_s[b, c])
                if longest < result:
                    result, a, d = longest, b, c
        stops[num_stages - 1] = d
        starts[num_stages - 1] = d
    if result < np.inf:
        for s in range(paired, 0, -1):
            stops[s - 1], starts[s - 1] = a, d
            a, d = origin[s, a, d, 0], origin[s, a, d, 1]
    return result
