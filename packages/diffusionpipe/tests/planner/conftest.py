"""Made profiles of a chain, with skips or without, and an interpreter of static lists."""

import pytest

from diffusionpipe.profiler.job_profile import ChainProfile, JobProfile


@pytest.fixture(scope="session")
def make_profile():
    return build_profile


def build_chain(
    layers, *, skips=False, forward_s=0.01, backward_s=0.02, sizes=(1, 8), gradient_bytes=1_000_000,
    hidden_bytes=1000, saved_bytes=1000, forward_by_layer=None,
):  # fmt: skip
    """Layer i writes h{i}; with skips, layer i also writes s{i}, which layer L - 1 - i reads."""
    reads, writes = [], []
    for i in range(layers):
        own = ["x"] if i == 0 else [f"h{i - 1}"]
        out = ["output"] if i == layers - 1 else [f"h{i}"]
        if i == 0:
            out.append("emb")
        else:
            own.append("emb")
        mirror = layers - 1 - i
        if skips and i < mirror:
            out.append(f"s{i}")
        if skips and mirror < i:
            own.append(f"s{mirror}")
        reads.append(tuple(own))
        writes.append(tuple(out))
    keys = [key for own in writes for key in own]
    forward = forward_by_layer or [forward_s] * layers
    return ChainProfile(
        layers=tuple(f"layer{i}" for i in range(layers)),
        reads=tuple(reads),
        writes=tuple(writes),
        differentiable=tuple(keys),
        feeds={"x": ("z",), "target": ("z",)},
        forward_s=tuple(tuple(each * size for size in sizes) for each in forward),
        backward_s=tuple(
            tuple(each / forward_s * backward_s * size for size in sizes) for each in forward
        ),
        parameter_bytes=(gradient_bytes,) * layers,
        gradient_bytes=(gradient_bytes,) * layers,
        saved_bytes=(saved_bytes,) * layers,
        value_bytes={
            **{key: hidden_bytes * (10 if key.startswith("s") else 1) for key in keys},
            "x": hidden_bytes,
            "emb": 10,
            "target": hidden_bytes,
        },
    )


def build_profile(layers=8, *, frozen_s=0.1, chains=1, sizes=(1, 8), **options):
    """Seconds a sample: forward_s and backward_s a layer, frozen_s in one component."""
    chain = build_chain(layers, sizes=sizes, **options)
    return JobProfile(
        sizes=sizes,
        chains=(chain,) * chains,
        frozen_s={"z": tuple(frozen_s * size for size in sizes)} if frozen_s else {},
        frozen_outputs={"z": ("z",)} if frozen_s else {},
        frozen_bytes={"z": 500},
        frozen_parameter_bytes={"z": 2_000_000} if frozen_s else {},
        step_s_per_byte=1e-10,
        self_conditioning=0.0,
        device="made",
        num_ranks=1,
    )


@pytest.fixture(scope="session")
def execute():
    return execute_lists


def execute_lists(order, chains):
    """Runs static lists as ranks do: each device waits for what its next action needs.

    Args:
        order: passes by device.
        chains: numbers of stages of each backbone.

    Returns:
        Actions in the order in which they ran. Fails if all devices wait.
    """
    first, last = {}, {}
    begin = 0
    for count in chains:
        first |= dict.fromkeys(range(begin, begin + count), begin)
        last |= dict.fromkeys(range(begin, begin + count), begin + count - 1)
        begin += count
    done, ran = set(), []
    position = [0] * len(order)
    is_moving = True
    while is_moving:
        is_moving = False
        for device, actions in enumerate(order):
            while position[device] < len(actions):
                action = actions[position[device]]
                kind, stage, m = action[:3]
                if kind == "forward":
                    needed = {("forward", stage - 1, m)} if stage > first[stage] else set()
                elif stage < last[stage]:
                    needed = {("backward", stage + 1, m), ("forward", stage, m)}
                else:
                    needed = {("forward", stage, m)}
                if not needed <= done:
                    break
                done.add((kind, stage, m))
                ran.append(action)
                position[device] += 1
                is_moving = True
    assert position == [len(actions) for actions in order], "all devices wait"
    return ran
