"""Analytic cost model: simulated seconds of one model's part of a step, without measurements.

Training and forward passes are bound by arithmetic, decoding by reading weights and caches, after
HybridFlow's analytic simulators (arXiv 2409.19256); the formulas are our own. A replica's
micro-batches are pipelined over its stages, so m of them take m + p - 1 turns. Gradients are
reduced during the last micro-batch's backward pass, and only the time that exceeds it counts. All
sequences have equal length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hybridflow.mapping import memory
from hybridflow.mapping.degrees import GenerationLayout, layer_share
from hybridflow.mapping.hardware import Efficiency, Hardware
from hybridflow.mapping.models import ModelSpec
from hybridflow.mapping.workload import Workload
from hybridflow.workers.batch.layout import Layout
from shared.topology import Link
from shared.topology.cost import all_gather_s, ring_all_reduce_s

__all__ = ["CostModel"]

_TOKEN_ID_BYTES = 8
_SCORE_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Times on given hardware for a given workload.

    Attributes:
        hardware: the cluster's hosts, devices and links.
        workload: of one step.
        efficiency: achieved shares of peak rates.
    """

    hardware: Hardware
    workload: Workload
    efficiency: Efficiency = field(default_factory=Efficiency)

    @property
    def usable_bytes(self) -> int:
        """Bytes of each GPU that models may fill."""
        return math.floor(self.hardware.device.memory_bytes * self.efficiency.memory)

    def train_s(self, model: ModelSpec, layout: Layout) -> float:
        """Seconds of all updates of a step; none for a model that is not trained."""
        if not model.is_trained:
            return 0.0
        sequences = math.ceil(self.workload.sequences_per_update / layout.dp)
        num_micro = math.ceil(sequences / memory.micro_batch_sequences(self.workload))
        # Backward passes take twice a forward pass's arithmetic, and its collectives once more.
        tokens = self.workload.sequence_tokens
        hop = self._hop(layout)
        forward_s, link_s = self._turn_s(model, layout, sequences / num_micro, tokens, hop)
        forward_s *= self.efficiency.inference / self.efficiency.training
        turn_s = 3 * forward_s + 2 * link_s
        backward_s = 2 * forward_s + link_s
        reduce_s = self._reduce_gradients_s(model, layout)
        exposed_s = max(0.0, reduce_s - backward_s)
        update_s = (num_micro + layout.pp - 1) * turn_s + exposed_s
        return self.workload.num_updates * (update_s + self._optimizer_s(model, layout))

    def prepare_s(self, model: ModelSpec, layout: Layout) -> float:
        """Seconds of the model's forward pass over what it scores."""
        sequences = math.ceil(self.workload.num_prepared(model) / layout.dp)
        tokens = self.workload.sequence_tokens
        return self._forward_s(model, layout, sequences, tokens, self._hop(layout))

    def num_waves(
        self, model: ModelSpec, layout: Layout, generation: GenerationLayout, kv_bytes: int
    ) -> int | None:
        """Number of times a replica fills its cache of `kv_bytes`; None if no sequence fits."""
        per_sequence = memory.kv_bytes_per_sequence(model, generation, self.workload)
        capacity = kv_bytes // per_sequence
        if capacity < 1:
            return None
        return math.ceil(self.replica_sequences(layout, generation) / capacity)

    def replica_sequences(self, layout: Layout, generation: GenerationLayout) -> int:
        """Most sequences that a generation replica generates."""
        num_replicas = layout.num_ranks // (generation.pp * generation.tp)
        return math.ceil(self.workload.num_generated / num_replicas)

    def generate_s(
        self, model: ModelSpec, layout: Layout, generation: GenerationLayout, num_waves: int
    ) -> float:
        """Seconds of gathering weights and generating, in waves of equal numbers of sequences."""
        num_sequences = math.ceil(self.replica_sequences(layout, generation) / num_waves)
        num_prompts = math.ceil(num_sequences / self.workload.group_size)
        replica = Layout(pp=generation.pp, tp=generation.tp, dp=1)
        hop = self._hop(layout)
        prefill_s = self._forward_s(model, replica, num_prompts, self.workload.prompt_tokens, hop)
        step_s = self._decode_step_s(model, generation, num_sequences, hop)
        decode_s = self.workload.response_tokens * step_s
        return self.reshard_s(model, layout, generation) + num_waves * (prefill_s + decode_s)

    def reshard_s(self, model: ModelSpec, layout: Layout, generation: GenerationLayout) -> float:
        """Seconds until each GPU has its generation shard: an all-gather in its micro-DP group.

        It receives M (p t - p_g t_g) / (p_g t_g p t) bytes of the M that the weights have.
        """
        merged_pp, merged_tp = layout.pp // generation.pp, layout.tp // generation.tp
        shard_bytes = memory.WEIGHT_BYTES * model.num_params / (layout.pp * layout.tp)
        # The group's stages are t ranks apart, and in each of them its ranks are neighbours.
        per_host = max(1, self.hardware.devices_per_host // layout.tp) * merged_tp
        link = self.hardware.ring(merged_pp, layout.tp, per_host)
        return all_gather_s(link, shard_bytes, merged_pp * merged_tp)

    def transfer_s(self, num_gpus: int) -> float:
        """Seconds in which a model in another set receives its sequences and returns scores."""
        num_bytes = self.workload.num_generated * (
            _TOKEN_ID_BYTES * self.workload.sequence_tokens
            + _SCORE_BYTES * self.workload.response_tokens
        )
        if self.hardware.num_hosts == 1:
            return self.hardware.local.time_s(num_bytes)
        num_hosts = max(1, num_gpus // self.hardware.devices_per_host)
        return self.hardware.network.time_s(num_bytes / num_hosts)

    def _forward_s(
        self, model: ModelSpec, layout: Layout, sequences: int, tokens: int, hop: Link
    ) -> float:
        if not sequences:
            return 0.0
        num_micro = math.ceil(sequences / max(1, self.workload.micro_batch_tokens // tokens))
        compute_s, link_s = self._turn_s(model, layout, sequences / num_micro, tokens, hop)
        return (num_micro + layout.pp - 1) * (compute_s + link_s)

    def _turn_s(
        self, model: ModelSpec, layout: Layout, sequences: float, tokens: int, hop: Link
    ) -> tuple[float, float]:
        """Forward seconds of a micro-batch in the fullest stage: arithmetic, and links.

        Each tensor rank sends its part of the activations to the next stage.
        """
        width = model.num_heads * model.head_size
        # Two products (queries by keys, weights by values), halved by the causal mask.
        attention = 2 * model.num_layers * width * tokens
        flops = sequences * tokens * (2 * model.num_params + attention)
        share = layer_share(layout, model) / layout.tp
        flops_per_s = self.hardware.device.flops_per_s * self.efficiency.inference
        num_layers = math.ceil(model.num_layers / layout.pp)
        num_bytes = memory.WEIGHT_BYTES * sequences * tokens * model.hidden_size
        link_s = 2 * num_layers * ring_all_reduce_s(self.hardware.local, num_bytes, layout.tp)
        if layout.pp > 1:
            link_s += hop.time_s(num_bytes)
        return flops * share / flops_per_s, link_s

    def _hop(self, layout: Layout) -> Link:
        """The slowest link between two stages of a replica."""
        is_local = layout.pp * layout.tp <= self.hardware.devices_per_host
        return self.hardware.local if is_local else self.hardware.network

    def _reduce_gradients_s(self, model: ModelSpec, layout: Layout) -> float:
        share = layer_share(layout, model) / layout.tp
        num_bytes = memory.GRADIENT_BYTES * model.num_params * share
        link = self.hardware.ring(layout.dp, layout.pp * layout.tp)
        return ring_all_reduce_s(link, num_bytes, layout.dp)

    def _optimizer_s(self, model: ModelSpec, layout: Layout) -> float:
        device, share = self.hardware.device, layer_share(layout, model) / layout.tp
        rate = device.memory_bytes_per_s * self.efficiency.memory_bandwidth
        return memory.OPTIMIZER_STEP_BYTES * model.num_params * share / rate

    def _decode_step_s(
        self, model: ModelSpec, generation: GenerationLayout, sequences: int, hop: Link
    ) -> float:
        """Seconds of one token for every sequence of a replica.

        The sequences are divided among the stages, which all work at once; a step is over when
        each part has gone through each stage.
        """
        part = math.ceil(sequences / generation.pp)
        share = math.ceil(model.num_layers / generation.pp) / model.num_layers / generation.tp
        per_sequence = memory.kv_bytes_per_sequence(model, generation, self.workload)
        # On average half of the response is cached.
        cached = 1 - self.workload.response_tokens / self.workload.sequence_tokens / 2
        num_bytes = memory.WEIGHT_BYTES * model.num_params * share + part * per_sequence * cached
        device = self.hardware.device
        read_s = num_bytes / (device.memory_bytes_per_s * self.efficiency.memory_bandwidth)
        flops_per_s = device.flops_per_s * self.efficiency.inference
        compute_s = 2 * model.num_params * share * part / flops_per_s
        message_bytes = memory.WEIGHT_BYTES * part * model.hidden_size
        num_layers = math.ceil(model.num_layers / generation.pp)
        reduce_s = ring_all_reduce_s(self.hardware.local, message_bytes, generation.tp)
        stage_s = max(read_s, compute_s) + 2 * num_layers * reduce_s
        if generation.pp > 1:
            stage_s += hop.time_s(message_bytes)
        host_s = self.efficiency.decode_step_s + sequences * self.efficiency.decode_sequence_s
        return host_s + generation.pp * stage_s
