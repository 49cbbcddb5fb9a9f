"""Devices that sleep run the same instructions and send the same bytes as real ones."""

import pytest

from diffusionpipe.profiler.job_profile import ChainProfile, JobProfile
from diffusionpipe.runtime.virtual import run_virtual

from .test_instructions import FEEDS, compile_programs, list_messages, make_flow
from .toy import BATCH, NUM_LAYERS, PLANS, make_model

VALUE_BYTES = {"sample": 10, "timestep": 8, "text": 20, "target": 10, "output": 10, "emb": 7}


def make_profile(forward_s=0.001):
    layers = make_model().list_layers()
    keys = {key for layer in layers for key in layer.writes}
    chain = ChainProfile(
        layers=tuple(layer.name for layer in layers),
        reads=tuple(layer.reads for layer in layers),
        writes=tuple(layer.writes for layer in layers),
        differentiable=tuple(keys),
        feeds=FEEDS,
        forward_s=((forward_s,),) * NUM_LAYERS,
        backward_s=((2 * forward_s,),) * NUM_LAYERS,
        parameter_bytes=(400,) * NUM_LAYERS,
        gradient_bytes=(400,) * NUM_LAYERS,
        saved_bytes=(100,) * NUM_LAYERS,
        value_bytes={**dict.fromkeys(keys, 30), **VALUE_BYTES},
    )
    return JobProfile(
        sizes=(1,), chains=(chain,), frozen_s={"z": (0.001,), "text": (0.0005,)},
        frozen_outputs={"z": ("z",), "text": ("text",)}, frozen_bytes={"z": 10, "text": 20},
        frozen_parameter_bytes={"z": 0, "text": 0}, step_s_per_byte=1e-7, self_conditioning=0.0,
        device="a device that sleeps", num_ranks=1,
    )  # fmt: skip


def count_bytes(name):
    """Bytes of a step by edge, from the messages that follow from the plan."""
    sizes = {**make_profile().chains[0].value_bytes, "z": 10, "text": 20}
    edges = {}
    for message in list_messages(compile_programs(PLANS[name](), make_flow())):
        num_rows = sum(stop - first for first, stop in message.ranges)
        num_bytes = num_rows * sum(sizes[key] for key in message.keys)
        edge = message.sender, message.receiver
        edges[edge] = edges.get(edge, 0) + num_bytes
    return edges


def sleep(name, num_steps):
    return run_virtual(PLANS[name](), make_profile(), num_steps)


@pytest.mark.parametrize(
    "name",
    [
        "folded 4",
        "chain of 2, replicated",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("chain of 4", "data 4")),
    ],
)
def test_virtual_devices_send_what_the_plan_says(ranks, name):
    for report in ranks.run(sleep, name, 3).results:
        assert [len(steps) for steps in report.steps] == [3] * 4
        encoded = sum(
            1 for steps in report.steps for action in steps[0].actions if action.kind == "encode"
        )
        assert encoded == 2 * BATCH
        # The first batch's frozen outputs are sent before step 0, and every step sends the next's.
        expected = count_bytes(name)
        assert set(report.edges) == set(expected)
        for edge, count in expected.items():
            assert count <= report.edges[edge] <= count * 4 / 3
