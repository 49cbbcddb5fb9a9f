"""Finds the mapping of RLHF models to GPUs with the least simulated time of a step.

After the auto-mapping of "HybridFlow: A Flexible and Efficient RLHF Framework" (arXiv 2409.19256):
every partition of the models into sets, every division of the GPUs among the sets, every layout of
each model. The time of a step is the sum over its stages of the slowest set's time; that of a set
is the sum over its models. We differ in two ways, both exact: a set has a Pareto front of ways
instead of one best way per model; and the division of GPUs is not enumerated, since models that
only score need the least number of GPUs that keeps them within a time, which leaves a table over
the sets that are trained.

Sets have whole hosts, or a host divided by its prime factors (`Hardware.set_sizes`): the only
restriction of the search space. GPUs of the cluster may stay idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hybridflow.mapping.cost import CostModel
from hybridflow.mapping.division import Curve, Division, divide, lower_bound_s
from hybridflow.mapping.evaluation import evaluate
from hybridflow.mapping.front import Ways
from hybridflow.mapping.hardware import Efficiency, Hardware
from hybridflow.mapping.models import ModelSpec
from hybridflow.mapping.plan import Alternative, Mapping, SetPlan
from hybridflow.mapping.workload import Workload
from shared.errors import ConfigError, TopologyError
from shared.topology import Cluster
from shared.units import format_bytes

__all__ = ["search"]

_Partition = tuple[tuple[ModelSpec, ...], ...]

# Number of larger clusters to try when the cluster is too small, for the error message.
_LARGER = 64


def search(
    models: Sequence[ModelSpec],
    cluster: Cluster,
    workload: Workload,
    efficiency: Efficiency | None = None,
) -> Mapping:
    """Find the fastest mapping. All times are simulated.

    Takes O(2^models x sizes x ways of a set) for the fronts and O(partitions x sizes^2) for the
    divisions, sizes being the possible numbers of GPUs of a set.

    Args:
        models: the algorithm's models, in any order.
        cluster: equal hosts of equal GPUs.
        workload: of one step.
        efficiency: achieved shares of peak rates; defaults when not given.

    Returns:
        The plan with the least `step_s` of all that fit into memory.

    Raises:
        ConfigError: the models are not the algorithm's.
        TopologyError: hosts differ, or no mapping fits into memory.
    """
    if not models:
        raise ConfigError("models: expected an actor at least, got none")
    workload.check(models)
    hardware = Hardware.of(cluster)
    costs = CostModel(hardware=hardware, workload=workload, efficiency=efficiency or Efficiency())
    # Sorted, so that ties are broken in the same way whatever the order given.
    ordered = tuple(sorted(models, key=lambda model: model.name))
    partitions = list(_partitions(ordered))
    curves = _curves(partitions, Ways(costs), hardware)
    possible = [part for part in partitions if all(len(curves[group]) for group in part)]
    bounds = {part: lower_bound_s([curves[g] for g in part], hardware) for part in possible}
    best: dict[_Partition, Division] = {}
    least_s = np.inf
    for part in sorted(possible, key=lambda part: bounds[part]):
        # Partitions of the alternatives are divided even if they cannot be the best.
        if len(part) > 2 and len(part) < len(models) and bounds[part] >= least_s:
            continue
        found = divide([curves[group] for group in part], hardware)
        if found is not None:
            best[part] = found
            least_s = min(least_s, found.step_s)
    if not best:
        raise _too_small(ordered, costs)
    return _mapping(best, partitions, costs)


def _partitions(models: tuple[ModelSpec, ...]) -> Iterator[_Partition]:
    if not models:
        yield ()
        return
    first, rest = models[0], models[1:]
    for part in _partitions(rest):
        yield ((first,), *part)
        for index, group in enumerate(part):
            yield (*part[:index], (first, *group), *part[index + 1 :])


def _curves(
    partitions: list[_Partition], ways: Ways, hardware: Hardware
) -> dict[tuple[ModelSpec, ...], Curve]:
    groups = dict.fromkeys(group for part in partitions for group in part)
    return {
        group: Curve.over(
            {num_gpus: ways.front(group, num_gpus) for num_gpus in hardware.set_sizes()}
        )
        for group in groups
    }


def _mapping(
    best: dict[_Partition, Division], partitions: list[_Partition], costs: CostModel
) -> Mapping:
    hardware = costs.hardware
    # Fewer sets first where times are equal.
    chosen = min(best, key=lambda part: (best[part].step_s, len(part)))
    sets = _laid_out(best[chosen], costs)
    stage_s = _slowest(sets)
    step_s = best[chosen].step_s
    assert np.isclose(sum(stage_s), step_s), f"priced {sum(stage_s)} s, found {step_s} s"
    num_models = sum(len(group) for group in chosen)
    counts = _num_divisions(hardware, num_models)
    placements = {part: counts[len(part)] for part in partitions}
    return Mapping(
        num_gpus=hardware.num_gpus,
        usable_bytes=costs.usable_bytes,
        sets=sets,
        stage_s=stage_s,
        alternatives=_alternatives(best, num_models, costs),
        num_placements=sum(placements.values()),
        num_ruled_out=sum(count for part, count in placements.items() if part not in best),
    )


def _laid_out(division: Division, costs: CostModel) -> tuple[SetPlan, ...]:
    sets, first_rank = [], 0
    # By descending size, each set starts at a multiple of its size: see Hardware.set_sizes.
    for choices in sorted(
        division.choices, key=lambda choices: (-choices[0].layout.num_ranks, choices[0].model.name)
    ):
        sets.append(evaluate(costs, choices, first_rank))
        first_rank += sets[-1].num_gpus
    return tuple(sets)


def _slowest(sets: Sequence[SetPlan]) -> tuple[float, float, float]:
    generate_s, prepare_s, train_s = (
        max(found.stage_s[stage] for found in sets) for stage in range(3)
    )
    return generate_s, prepare_s, train_s


def _alternatives(
    best: dict[_Partition, Division], num_models: int, costs: CostModel
) -> tuple[Alternative, ...]:
    # With one or two models some kinds coincide, and the last name here is used.
    kinds = {num_models: "standalone", 2: "split", 1: "colocated"}
    found = []
    for num_sets, kind in sorted(kinds.items()):
        divisions = [best[part] for part in best if len(part) == num_sets]
        if num_sets > num_models:
            continue
        if not divisions:
            found.append(Alternative(kind=kind, sets=(), stage_s=None))
            continue
        sets = _laid_out(min(divisions, key=lambda division: division.step_s), costs)
        names = tuple((tuple(m.name for m in group.models), group.num_gpus) for group in sets)
        found.append(Alternative(kind=kind, sets=names, stage_s=_slowest(sets)))
    return tuple(found)


def _num_divisions(hardware: Hardware, num_models: int) -> list[int]:
    """Number of divisions of at most all GPUs, by the number of sets."""
    sizes = hardware.set_sizes()
    ending = [1] + [0] * hardware.num_gpus
    counts = [1]
    for _ in range(num_models):
        ending = [
            sum(ending[total - size] for size in sizes if size <= total)
            for total in range(hardware.num_gpus + 1)
        ]
        counts.append(sum(ending))
    return counts


def _too_small(models: tuple[ModelSpec, ...], costs: CostModel) -> TopologyError:
    hardware, ways = costs.hardware, Ways(costs)
    wanted = min(ways.front(models, size).least_bytes for size in hardware.set_sizes())
    message = (
        f"{', '.join(model.name for model in models)} on {hardware.num_gpus} x "
        f"{hardware.device.name}: expected at most {format_bytes(costs.usable_bytes)} to be needed "
        f"of a GPU ({costs.efficiency.memory:.0%} of {format_bytes(hardware.device.memory_bytes)}),"
        f" got {format_bytes(wanted)} with all models on all GPUs"
    )
    # Adds host after host; in larger steps if the cluster is large.
    steps = -(-hardware.num_hosts // 8)
    hosts = range(hardware.num_hosts + steps, hardware.num_hosts + _LARGER * steps + 1, steps)
    for larger in (number * hardware.devices_per_host for number in hosts):
        if ways.front(models, larger).choices:
            return TopologyError(f"{message}; take {larger} such GPUs or more, or larger ones")
    return TopologyError(f"{message}; even {larger} such GPUs are too small, take larger ones")
