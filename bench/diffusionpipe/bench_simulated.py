"""Simulated: published models on 8 and 64 A100 or H200, over networks of 10 to 400 Gbit/s, beside the paper's gains.

Nothing runs: seconds of layers are floating-point operations on meta tensors over 0.4 of the bf16 peak, and
the planner's replay adds messages, sums and idle time; how well the replay predicts real steps is
measured by diffusionpipe/plans. 8 devices are two hosts of 4, 64 are eight hosts of 8; a host's devices share its link. Baselines are
plans of the same search: data parallelism and the fastest pipeline, frozen parts first. The paper reports
1.28x over data parallelism and 1.41x over pipelines, of other models and another network.
"""

import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

import diffusionpipe as dp
from shared.claims import Claim
from shared.errors import ConfigError
from shared.topology import Cluster, Link
from shared.topology.device import A100_80, H200
from shared.units import Gbps

sys.path.insert(0, str(Path(__file__).parent))

from published import EFFICIENCY, MODELS, count_published, make_profile

CLUSTERS, RATES = {8: (2, 4), 64: (8, 8)}, (10, 100, 400)
"""Hosts and devices of each by number of devices; Gbit/s of a host's link."""
DEVICES = {"A100": (A100_80, 2.5e11), "H200": (H200, 4e11)}
"""Device, and bytes a second between two of a host."""
ROWS = {"SD 2.1": 8, "ControlNet": 8, "SDXL": 4, "SD3": 4, "Flux": 1}
"""Samples a device and step."""
RATIOS = {"SD 2.1": 0.49, "ControlNet": 0.73, "SDXL": 0.25, "SD3": 0.22, "Flux": 0.044}
"""Frozen over trained operations, as counted by others."""
PAPER = {"data parallelism": 1.28, "the fastest pipeline": 1.41}
NOTABLE, CLOSE, MARGIN = 1.05, 0.3, 1.03
"""A gain worth naming; how near ratios must be to others'; by how much a choice of data parallelism may be slower."""
COMMAND = "hatch run bench diffusionpipe/simulated"


class Outcome(NamedTuple):
    """A simulated cluster: the plan in words, and gains over the baselines that fit into memory."""

    where: str
    plan: str
    step_s: float
    gains: dict[str, float]


def simulate(model, profile, device, num_devices, rate, rows):
    hosts, per_host = CLUSTERS[num_devices]
    preset, local = DEVICES[device]
    cluster = Cluster.uniform(
        hosts, per_host, preset, local=Link.from_rate(local, alpha_s=1e-5),
        network=Link.from_rate(rate * Gbps, alpha_s=3e-5),
    )  # fmt: skip
    batch = rows * num_devices
    gains, where = {}, f"{num_devices} {device}, {rate} Gbit/s"
    try:
        plan = dp.plan(None, profile, cluster, batch_size=batch)
    except ConfigError as error:
        return Outcome(where, f"no plan: {str(error)[:60]}", float("nan"), {})
    for name, placements in (
        ("data parallelism", ["data"]),
        ("the fastest pipeline", ["chain", "folded"]),
    ):
        unfilled = []
        for placement in placements:
            if placement == plan.placement:
                unfilled.append(plan.unfilled_s)
                continue
            try:
                peer = dp.plan(None, profile, cluster, batch_size=batch, placement=placement)
            except ConfigError:
                continue  # does not fit into memory
            unfilled.append(peer.unfilled_s)
        if unfilled:
            gains[name] = min(unfilled) / plan.predicted_s
    words = f"{plan.placement} of {plan.num_stages}, {plan.num_micro_batches} micro-batches"
    return Outcome(where, words, plan.predicted_s, gains)


@pytest.mark.parametrize("name", list(MODELS))
def bench_simulated(benchmark, record_claim, name):
    def run():
        model = count_published(name)
        return model, [
            simulate(model, make_profile(model, preset), device, num_devices, rate, ROWS[name])
            for num_devices in CLUSTERS
            for device, (preset, _) in DEVICES.items()
            for rate in RATES
        ]

    model, found = benchmark.pedantic(run, rounds=1)
    is_right = abs(model.ratio / RATIOS[name] - 1) <= CLOSE
    for peer, published in PAPER.items():
        gains = [one.gains[peer] for one in found if peer in one.gains]
        rows = []
        for one in found:
            gain = one.gains.get(peer)
            words = f"{one.where}: {one.plan}"
            if gain is None:
                words += f", {peer} does not fit into memory"
            else:
                words += f", {gain:.2f}x" + ("" if gain >= NOTABLE else " (no gain worth naming)")
            rows.append(words)
        if not gains:
            continue
        record_claim(
            Claim(
                name=f"simulated step of {name} on 8 and 64 GPUs", unit="of ours", ours=1.0,
                baseline=median(gains), baseline_name=f"{peer}, frozen part first",
                higher_is_better=False, correct=is_right and min(gains) >= 1 / MARGIN,
                kind="simulated",
                detail=f"{ROWS[name]} samples a device; frozen part {model.ratio:.2f} of the trained part's "
                f"operations; all layers at {EFFICIENCY} of the bf16 peak; gradients are summed in float32, data parallelism's too; the paper reports {published}x; "
                + "; ".join(rows),
                source=f'{COMMAND} -k "{name.replace(" ", " and ")}"',
            ),
            spread=(min(gains), max(gains)),
        )  # fmt: skip
