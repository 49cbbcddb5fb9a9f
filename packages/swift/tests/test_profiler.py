"""What is measured of a pipeline: computation without waiting, and bytes of both directions."""

import json
import math
import operator
import time

import pytest
import torch
from small_stages import BATCH, DIM, MICRO_BATCHES, batch, make_stage
from torch import nn

from shared.comms import Group, RankPool
from shared.comms.init import alone
from shared.errors import ConfigError, DataError
from swift import cli
from swift.pipeline.profile import Profile
from swift.profiler import measure

SLEEP_S = 0.004
SLEPT_S = [2 * MICRO_BATCHES * SLEEP_S * (1 + rank) for rank in range(2)]
"""Seconds that both passes of a step sleep, by stage."""
MOST_S = [slept_s + MICRO_BATCHES * SLEEP_S for slept_s in SLEPT_S]
"""Bounds that the first stage would pass if its waiting counted."""


class Sleeping(torch.autograd.Function):
    """Sleeps in both passes, one stage longer than another."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        time.sleep(ctx.seconds)
        return grads[0], None


class Slow(nn.Module):
    def __init__(self, module, seconds):
        super().__init__()
        self.module, self.seconds = module, seconds

    def forward(self, x):
        return Sleeping.apply(self.module(x), self.seconds)


def measured(folder):
    group = Group.world()
    stage = make_stage(folder, group, log=False)
    stage.module = Slow(stage.module, SLEEP_S * (1 + group.rank))
    profiles = []
    # Other processes may lengthen a measurement: it is repeated until one of each stage is undisturbed.
    while len(profiles) < 20 and any(map(operator.gt, quickest(profiles), MOST_S)):
        profiles.append(measure(stage, group, lambda: stage.step(*batch(stage.iteration)), 2, 1e9))
    return profiles


def quickest(profiles):
    """The shortest computation of each stage."""
    return [min((one.replay_s[rank] for one in profiles), default=math.inf) for rank in range(2)]


@pytest.mark.slow
def test_profile_of_sleeping_stages(tmp_path):
    with RankPool(2) as pool:
        profiles, others = pool.run(measured, tmp_path).results
    assert profiles == others
    first = profiles[0]
    for found_s, slept_s, most_s in zip(quickest(profiles), SLEPT_S, MOST_S, strict=True):
        assert slept_s <= found_s <= most_s
    # The first stage waits for the second, which is not its computation.
    assert first.step_s >= SLEPT_S[1]
    assert first.boundary_bytes == [2 * BATCH * DIM * 4]
    path = tmp_path / "profile.json"
    path.write_text(first.to_json())
    assert Profile.load(path) == first


def test_profiles_are_planned_with(tmp_path, capsys):
    profile = Profile(
        replay_s=[1.0, 1.0, 1.0], boundary_bytes=[10, 30], bytes_per_s=1.0, step_s=4.0
    )
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    asked = ["plan-logs", str(path), "--budget", "35", "--interval", "1", "--json"]
    assert cli.main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    # Without the first boundary: 2/3 (2 + 10) + 1/3 1.
    assert found["logged"] == [False, True]
    assert found["expected_replay_s"] == pytest.approx(25 / 3)
    assert found["log_bytes"] == 30
    assert cli.main(asked[:-1]) == 0
    assert "stages 0-1|2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("{", r"profile.json: expected a profile of swift.profiler.measure as JSON, got Expecting"),
        ("[]", "profile.json: expected a profile with .*, got list"),
        ('{"replay_s": []}', "got replay_s; measure one"),
    ],
)
def test_files_that_are_no_profiles_are_refused(tmp_path, text, got):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(DataError, match=got):
        Profile.load(path)


@pytest.mark.parametrize(("num_steps", "rate"), [(0, 1.0), (1, 0.0)])
def test_a_measurement_needs_steps_and_a_rate(tmp_path, num_steps, rate):
    with alone() as group:
        stage = make_stage(tmp_path, group, log=False)
        with pytest.raises(ConfigError, match=f"above 0, got {num_steps} and {rate}"):
            measure(stage, group, lambda: None, num_steps, rate)
