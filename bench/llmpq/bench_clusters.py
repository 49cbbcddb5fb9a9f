"""Simulated: batches on the eleven clusters of LLM-PQ's evaluation, from data sheets alone.

Nothing here was measured on such devices. A layer's seconds follow from a device's published peaks,
operations at 60 % and bytes at 80 % of them; links carry 10 GB/s inside a host. Plans are made by the
package's planner and by its baselines on these seconds, and each is replayed event by event. The
sensitivity of layers is drawn, as none was measured for these models. Clusters and models are those
of the published evaluation (arXiv 2403.01136): 32 prompts of 512 tokens, 100 new ones.
"""

import time

import numpy as np
import pytest

from llmpq.config import ModelSpec, Quality, Workload
from llmpq.planner.baselines import plan_all
from llmpq.simulator import simulate_plan
from shared.claims import Claim
from shared.topology.device import PRESETS

BITS = (3, 4, 8, 16)
WORK = Workload(num_prompts=32, prompt_tokens=512, new_tokens=100)
COMMAND = "hatch run bench llmpq -k clusters"
PEERS = [
    {
        "peer": "even, pipeedge, adabits",
        "setting": "the best of all orders, widths and micro-batches within the same memory and nats",
        "why": "what differs is what is planned jointly, and nothing else",
    }
]


def opt(layers, hidden, heads):
    return {
        "model_type": "opt", "num_hidden_layers": layers, "hidden_size": hidden,
        "ffn_dim": 4 * hidden, "num_attention_heads": heads, "vocab_size": 50272,
        "word_embed_proj_dim": hidden, "max_position_embeddings": 2048,
    }  # fmt: skip


MODELS = {
    "OPT-13b": opt(40, 5120, 40),
    "OPT-30b": opt(48, 7168, 56),
    "OPT-66b": opt(64, 9216, 72),
    "BLOOM-176b": {
        "model_type": "bloom", "n_layer": 70, "hidden_size": 14336, "n_head": 112,
        "vocab_size": 250880,
    },
}  # fmt: skip
CLUSTERS = {
    1: ("OPT-13b", {"V100_32": 1}),
    2: ("OPT-13b", {"A100_40": 1}),
    3: ("OPT-30b", {"T4": 3, "V100_32": 1}),
    4: ("OPT-30b", {"P100_12": 3, "V100_32": 1}),
    5: ("OPT-66b", {"T4": 4, "V100_32": 2}),
    6: ("OPT-66b", {"V100_32": 2, "A100_40": 2}),
    7: ("BLOOM-176b", {"V100_32": 4, "A100_40": 4}),
    8: ("BLOOM-176b", {"V100_32": 4, "A100_80": 2}),
    9: ("OPT-30b", {"T4": 4}),
    10: ("OPT-66b", {"V100_32": 4}),
    11: ("BLOOM-176b", {"A100_80": 4}),
}


class RooflineCosts:
    """Seconds of layers from the published peaks of devices."""

    bits = BITS

    def __init__(self, model, names):
        self.model, self.names = model, names
        self.num_devices = len(names)

    def kind(self, device):
        return self.names[device]

    def layer_s(self, device, bits, tokens, cache_bytes):
        sheet = PRESETS[self.names[device]]
        operations = self.model.layer_bytes(16, None) * tokens  # two for each weight of 2 bytes
        moved = self.model.layer_bytes(bits) + cache_bytes
        unpacked = 0.0 if bits == 16 else 0.1 * operations / sheet.flops_per_s
        return (
            5e-5
            + unpacked
            + max(operations / (0.6 * sheet.flops_per_s), moved / (0.8 * sheet.memory_bytes_per_s))
        )

    def prefill_s(self, device, bits, *, batch, tokens):
        return self.layer_s(device, bits, batch * tokens, 0)

    def decode_s(self, device, bits, *, batch, past):
        return self.layer_s(device, bits, batch, self.model.kv_bytes(batch, past))

    def ends_s(self, device, *, batch, tokens):
        sheet = PRESETS[self.names[device]]
        return 1e-4 + self.model.embedding_bytes / (0.8 * sheet.memory_bytes_per_s)

    def send_s(self, sender, receiver, num_bytes):
        return 0.0 if sender == receiver else 5e-5 + num_bytes / 10e9

    def memory_bytes(self, device):
        return int(0.92 * PRESETS[self.names[device]].memory_bytes)


def replayed(found):
    return simulate_plan(found.plan).makespan_s


@pytest.mark.parametrize("number", CLUSTERS)
def bench_clusters_simulated(benchmark, record_claim, number):
    name, devices = CLUSTERS[number]
    model = ModelSpec.from_hf(MODELS[name])
    names = [kind for kind, count in devices.items() for _ in range(count)]
    draw = np.random.default_rng(number)
    noise = np.exp(draw.normal(0, 0.7, model.num_layers))[:, None] * [0.01, 0.0025, 1e-5, 0.0]
    # Room for what 4 bits everywhere cost: no model but the smallest fits at 8 bits everywhere.
    quality = Quality(max_kl=1.05 * float(noise[:, 1].sum()))
    given = (model, RooflineCosts(model, names), noise, WORK, quality)

    def planned():
        begun = time.perf_counter()
        found = plan_all(*given, bits=BITS, dtype="float16")
        return found, time.perf_counter() - begun

    found, seconds = benchmark.pedantic(planned, rounds=1)
    spans = {name: replayed(one) for name, one in found.items()}
    rivals = {name: span for name, span in spans.items() if name != "plan"}
    best = min(rivals, key=rivals.__getitem__) if rivals else "plan"
    ours = found["plan"]
    cluster = ", ".join(f"{count} {kind}" for kind, count in devices.items())
    record_claim(
        Claim(
            name=f"simulated batch, cluster {number}: {name} on {cluster}",
            unit="s",
            ours=spans["plan"],
            baseline=spans[best],
            baseline_name="best of even, pipeedge, adabits" if rivals else "none fits: ours again",
            higher_is_better=False,
            correct=ours.nats <= 1.05 * float(noise[:, 1].sum()) * (1 + 1e-9)
            and ours.problem.is_feasible(ours.solution.bounds, ours.solution.choice),
            detail="simulated from data sheets; "
            + ", ".join(f"{name} {span:.4g} s" for name, span in spans.items())
            + f"; formula says {ours.seconds:.4g} s, gap {100 * ours.gap:.1f} %, planned in "
            f"{seconds:.1f} s",
            source=COMMAND,
        )
    )
