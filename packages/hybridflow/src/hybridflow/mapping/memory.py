"""Bytes that a model takes of each GPU: what stays, what its work needs, what a sequence caches.

What stays is summed over the models of a set; what work needs is taken by one model at a time, so
only the largest counts. Shares are those of the fullest pipeline stage. Parameters of embeddings
and head are spread over the stages like layers, which is right on the mean and not for each stage.
Bytes are whole, so that sums come out alike in whatever order they are taken.
"""

from __future__ import annotations

import math

from hybridflow.mapping.degrees import GenerationLayout, layer_share
from hybridflow.mapping.models import ModelSpec
from hybridflow.mapping.workload import Workload
from hybridflow.workers.batch.layout import Layout

__all__ = ["generation_bytes", "kv_bytes_per_sequence", "resident_bytes", "working_bytes"]

WEIGHT_BYTES = 2
"""Of each parameter, in bfloat16; activations and cached keys and values are of it too."""

GRADIENT_BYTES = 4
"""Of each parameter, in float32."""

OPTIMIZER_STEP_BYTES = 30
"""Of each parameter, read and written by a step of Adam.

Read are gradient, master copy and moments; written are master copy, moments and the weight.
"""

# Weights, gradients, and the optimizer's master copy and two moments in float32.
_TRAINED_BYTES = WEIGHT_BYTES + GRADIENT_BYTES + 3 * 4


def resident_bytes(model: ModelSpec, layout: Layout) -> int:
    """Bytes a GPU holds all the time: 18 a parameter when trained, 2 when not."""
    per_param = _TRAINED_BYTES if model.is_trained else WEIGHT_BYTES
    return math.ceil(per_param * model.num_params * layer_share(layout, model) / layout.tp)


def working_bytes(model: ModelSpec, layout: Layout, workload: Workload) -> int:
    """Bytes of activations, of training for trained models and of a forward pass for others.

    A token keeps per layer, in bfloat16, the inputs and outputs of both norms, queries, keys,
    values and the output of attention (6 h + 2 h_kv) and the three products of the feed-forward
    part; attention keeps no scores and sequence parallelism divides everything by t. The first
    stage of a one-forward-one-backward pipeline keeps as many micro-batches as there are stages,
    if there are as many. Logits are held twice in float32, and in a forward pass once, next to one
    layer.
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
    """Bytes of generation weights beyond the training shard, which is part of them."""
    stage = math.ceil(model.num_layers / generation.pp) / model.num_layers
    share = stage / generation.tp - layer_share(layout, model) / layout.tp
    return math.ceil(WEIGHT_BYTES * model.num_params * share)


def kv_bytes_per_sequence(
    model: ModelSpec, generation: GenerationLayout, workload: Workload
) -> int:
    """Bytes that keys and values of a whole sequence take of each GPU of a replica."""
    num_layers = math.ceil(model.num_layers / generation.pp)
    num_heads = math.ceil(model.num_kv_heads / generation.tp)
    per_token = 2 * WEIGHT_BYTES * num_layers * num_heads * model.head_size
    return per_token * workload.sequence_tokens


def micro_batch_sequences(workload: Workload) -> int:
    """Sequences of a micro-batch: as many as its tokens allow, at least one."""
    return max(1, workload.micro_batch_tokens // workload.sequence_tokens)
