"""Cost of one set of models in given layouts, computed model by model.

The search computes with arrays; the costs that it reports are computed again here, so that a plan
and a hand-made set are compared by the same formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridflow.mapping import memory
from hybridflow.mapping.cost import CostModel
from hybridflow.mapping.front import Choice
from hybridflow.mapping.plan import ModelPlan, SetPlan
from shared.errors import TopologyError
from shared.units import format_bytes

__all__ = ["evaluate"]


def evaluate(costs: CostModel, choices: Sequence[Choice], first_rank: int = 0) -> SetPlan:
    """Compute bytes and seconds of a set of models in given layouts.

    Args:
        costs: hardware, workload and efficiency.
        choices: each model of the set with a layout of as many GPUs as the others'.
        first_rank: the first GPU of the set.

    Returns:
        The set with bytes and simulated seconds of each model.

    Raises:
        TopologyError: the models do not fit into the memory of their GPUs, or their layouts have
            different numbers of GPUs.
    """
    sizes = {choice.layout.num_ranks for choice in choices}
    if len(sizes) != 1:
        raise TopologyError(f"expected layouts of one number of GPUs in a set, got {sizes}")
    num_gpus = sizes.pop()
    resident = [memory.resident_bytes(choice.model, choice.layout) for choice in choices]
    plans = tuple(_model_plan(costs, choice, sum(resident)) for choice in choices)
    is_apart = all(choice.generation is None for choice in choices)
    transfers_s = len(choices) * costs.transfer_s(num_gpus) if is_apart else 0.0
    generate_s, prepare_s, train_s = (
        sum(plan.stage_s[stage] for plan in plans) for stage in range(3)
    )
    found = SetPlan(
        first_rank=first_rank,
        num_gpus=num_gpus,
        models=plans,
        stage_s=(generate_s, prepare_s + transfers_s, train_s),
    )
    if found.peak_bytes > costs.usable_bytes:
        raise _too_large(costs, choices, found.peak_bytes)
    return found


def _model_plan(costs: CostModel, choice: Choice, all_resident_bytes: int) -> ModelPlan:
    model, layout, generation = choice.model, choice.layout, choice.generation
    generate_s, num_waves, generation_bytes = 0.0, None, 0
    if generation is not None:
        weights = memory.generation_bytes(model, layout, generation)
        free_bytes = costs.usable_bytes - all_resident_bytes - weights
        num_waves = costs.num_waves(model, layout, generation, free_bytes)
        per_sequence = memory.kv_bytes_per_sequence(model, generation, costs.workload)
        if num_waves is None:
            raise _too_large(costs, [choice], all_resident_bytes + weights + per_sequence)
        generate_s = costs.generate_s(model, layout, generation, num_waves)
        num_cached = math.ceil(costs.replica_sequences(layout, generation) / num_waves)
        generation_bytes = weights + num_cached * per_sequence
    return ModelPlan(
        name=model.name,
        role=model.role,
        pp=layout.pp,
        tp=layout.tp,
        dp=layout.dp,
        generation_pp=generation.pp if generation else None,
        generation_tp=generation.tp if generation else None,
        num_waves=num_waves,
        resident_bytes=memory.resident_bytes(model, layout),
        working_bytes=memory.working_bytes(model, layout, costs.workload),
        generation_bytes=generation_bytes,
        stage_s=(generate_s, costs.prepare_s(model, layout), costs.train_s(model, layout)),
    )


def _too_large(costs: CostModel, choices: Sequence[Choice], num_bytes: float) -> TopologyError:
    names = ", ".join(choice.model.name for choice in choices)
    return TopologyError(
        f"expected at most {format_bytes(costs.usable_bytes)} of each GPU for {names}, got "
        f"{format_bytes(num_bytes)}; choose more shards or another set"
    )
