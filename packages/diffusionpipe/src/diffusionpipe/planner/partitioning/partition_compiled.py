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
def _insert(fronts, d, size, period, sync, stop, replicas, origin):
    """Adds a label to a Pareto front unless one of it is as good; drops those that are no better.

    Plain loops over entries: numba compiles slices much slower.

    Args:
        fronts: labels (period, sync, next layer, replicas, next label) by rising period and falling
            sync [front, label, entry].
        d: the front.
        size: its labels; there is room for one more.
        period, sync, stop, replicas, origin: the new label.

    Returns:
        The new number.
    """
    first = 0
    while first < size and fronts[d, first, 0] < period:
        first += 1
    if first and fronts[d, first - 1, 1] <= sync:
        return size
    if first < size and fronts[d, first, 0] == period and fronts[d, first, 1] <= sync:
        return size
    last = first
    while last < size and fronts[d, last, 1] >= sync:
        last += 1
    shift = 1 - (last - first)
    if shift > 0:
        for k in range(size - 1, last - 1, -1):
            for entry in range(5):
                fronts[d, k + 1, entry] = fronts[d, k, entry]
    elif shift < 0:
        for k in range(last, size):
            for entry in range(5):
                fronts[d, k + shift, entry] = fronts[d, k, entry]
    fronts[d, first, 0], fronts[d, first, 1] = period, sync
    fronts[d, first, 2], fronts[d, first, 3], fronts[d, first, 4] = stop, replicas, origin
    return size + shift


@compiled
def _make_room(fronts, size):
    """Copies fronts into an array with room for more labels than `size` in each."""
    if size < fronts.shape[1]:
        return fronts
    larger = np.empty((fronts.shape[0], 2 * size + 2, 5))
    for d in range(fronts.shape[0]):
        for k in range(fronts.shape[1]):
            for entry in range(5):
                larger[d, k, entry] = fronts[d, k, entry]
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
    # All labels, as one front.
    pool, pool_size = np.empty((1, 1024, 5)), 0
    begins = np.zeros((num_stages + 1, layers + 1, devices + 1), np.int64)
    counts = np.zeros((num_stages + 1, layers + 1, devices + 1), np.int64)
    # Fronts of all numbers of devices of one (stages left, first layer).
    fronts, sizes = np.empty((devices + 1, 16, 5)), np.zeros(devices + 1, np.int64)
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
            for d in range(devices + 1):
                sizes[d] = 0
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
                    if s == 1:
                        if least <= r:
                            fronts = _make_room(fronts, sizes[r])
                            sizes[r] = _insert(fronts, r, sizes[r], own_s, sync, j, r, 0)
                        continue
                    for rest in range(max(s - 1, least - r), most - r + 1):
                        first = begins[s - 1, j, rest]
                        for k in range(first, first + counts[s - 1, j, rest]):
                            period = max(own_s, pool[0, k, 0])
                            late_s = max(sync, pool[0, k, 1] - backward_s[i, j, r])
                            objective = weight * period + max(0.0, late_s - hidden_s)
                            if objective >= bound_s:
                                continue
                            d = rest + r
                            if is_greedy and sizes[d]:
                                exposed_s = max(0.0, fronts[d, 0, 1] - hidden_s)
                                if objective >= weight * fronts[d, 0, 0] + exposed_s:
                                    continue
                                sizes[d] = 0
                            fronts = _make_room(fronts, sizes[d])
                            sizes[d] = _insert(fronts, d, sizes[d], period, late_s, j, r, k)
            for d in range(least, most + 1):
                size = sizes[d]
                pool = _make_room(pool, pool_size + size)
                for k in range(size):
                    for entry in range(5):
                        pool[0, pool_size + k, entry] = fronts[d, k, entry]
                begins[s, i, d], counts[s, i, d] = pool_size, size
                pool_size += size
    best, best_k = np.inf, -1
    first = begins[num_stages, 0, devices]
    for k in range(first, first + counts[num_stages, 0, devices]):
        objective = weight * pool[0, k, 0] + pool[0, k, 1]
        if objective < best:
            best, best_k = objective, k
    if best_k >= 0:
        for s in range(num_stages):
            stops[s], replicas[s] = int(pool[0, best_k, 2]), int(pool[0, best_k, 3])
            best_k = int(pool[0, best_k, 4])
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
