"""Bytes of a model on each GPU: resident state, working memory, and cache per sequence.

Resident bytes are summed over the models of a set; working bytes are used by one model at a time,
so only the largest counts. Shares are those of the largest pipeline stage. Parameters of embeddings
and head are spread evenly over the stages like layers, an approximation that is exact only on
average. Bytes are integers, so that sums do not depend on their order.
"""

from __future__ import annotations

import math

from hybridflow.mapping.degrees import GenerationLayout, layer_share
from hybridflow.mapping.models import ModelSpec
from hybridflow.mapping.workload import Workload
from hybridflow.workers.batch.layout import Layout

__all__ = ["generation_bytes", "kv_bytes_per_sequence", "resident_bytes", "working_bytes"]

WEIGHT_BYTES = 2
"""Bytes of a parameter in bfloat16, the type of activations and cached keys and values too."""

GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient, in float32."""

OPTIMIZER_STEP_BYTES = 30
"""Bytes per parameter that a step of Adam reads and writes.

It reads gradient, master copy and moments, and writes master copy, moments and the weight.
"""

# Weights, gradients, and the optimizer's master copy and two moments in float32.
_TRAINED_BYTES = WEIGHT_BYTES + GRADIENT_BYTES + 3 * 4


def resident_bytes(model: ModelSpec, layout: Layout) -> int:
    """Bytes that a GPU always holds: 18 per parameter if the model is trained, else 2."""
    per_param = _TRAINED_BYTES if model.is_trained else WEIGHT_BYTES
    return math.ceil(per_param * model.num_params * layer_share(layout, model) / layout.tp)


def working_bytes(model: ModelSpec, layout: Layout, workload: Workload) -> int:
    """Bytes of activations: of training for trained models, of a forward pass for others.

    A token stores per layer, in bfloat16, the inputs and outputs of both norms, queries, keys,
    values and the output of attention (6 h + 2 h_kv) and the three products of the feed-forward
    part; attention stores no scores, and sequence parallelism divides everything by t. The first
    stage of a 1F1B pipeline stores at most as many micro-batches as there are stages. Logits are
    stored twice in float32; a forward pass stores them once, and one layer.
    """
    num_tokens = micro_batch_sequences(workload) * workload.sequence_tokens
    kv_size = model.num_kv_heads * model.head_size
    layer = WEIGHT_BYTES * (6 * model.hidden_size + 2 * kv_size + 3 * model.ffn_size)
    if not model.is_trained:
        return math.ceil(num_tokens * (layer + 4 * model.logits_size) / layout.tp)
    sequences = math.ceil(workload.sequences_per_update / layout.dp)
    in_flight = min(layout.pp, math.ceil(sequences / micro_batch_sequences(workload)))
    num_layers = math.ceil(model.num_layers / layout.pp)
    per_token = layer * num_layers * in_flight + 2 * 4 * model.logits_size
    return math.ceil(num_tokens * per_token / layout.tp)


def generation_bytes(model: ModelSpec, layout: Layout, generation: GenerationLayout) -> int:
    """Bytes of generation's weights minus the training shard, which they include."""
    stage = math.ceil(model.num_layers / generation.pp) / model.num_layers
    share = stage / generation.tp - layer_share(layout, model) / layout.tp
    return math.ceil(WEIGHT_BYTES * model.num_params * share)


def kv_bytes_per_sequence(
    model: ModelSpec, generation: GenerationLayout, workload: Workload
) -> int:
    """Bytes of a whole sequence's keys and values on each GPU of a replica."""
    num_layers = math.ceil(model.num_layers / generation.pp)
    num_heads = math.ceil(model.num_kv_heads / generation.tp)
    per_token = 2 * WEIGHT_BYTES * num_layers * num_heads * model.head_size
    return per_token * workload.sequence_tokens


def micro_batch_sequences(workload: Workload) -> int:
    """Sequences of a micro-batch: as many as its tokens allow, at least one."""
    return max(1, workload.micro_batch_tokens // workload.sequence_tokens)
