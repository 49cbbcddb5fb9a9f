"""Profiles as files, and as what a planner asks."""

import json
from dataclasses import replace

import pytest

from llmpq.config import Workload
from llmpq.planner.costs import Costs
from llmpq.profiler.profile import DeviceProfile, Profile
from shared.errors import ConfigError, DataError
from shared.topology.link import Link

from .planted import planted_profile


def test_a_file_gives_the_profile_back(tmp_path):
    expected = planted_profile()
    expected.save(tmp_path / "a.json")
    assert DeviceProfile.load(tmp_path / "a.json") == expected


@pytest.mark.parametrize("text", ["", "[]", '{"version": 0}', '{"version": 2, "kind": "a"}'])
def test_what_is_no_profile_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises((ConfigError, DataError), match=r"a\.json: expected a profile"):
        DeviceProfile.load(path)


def test_no_time_is_read_from_a_file_that_lacks_a_phase(tmp_path):
    path = tmp_path / "a.json"
    planted_profile().save(path)
    tree = json.loads(path.read_text())
    del tree["decode"]
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="decode"):
        DeviceProfile.load(path)


def test_a_cluster_answers_a_planner():
    fast, slow = planted_profile(), planted_profile((3, 4), kind="b", slow=3.0)
    link = Link.from_rate(1e6, alpha_s=0.01)
    profile = Profile(devices=(fast, slow), memory={0: 100, 1: 50}, links={(0, 1): link})
    assert isinstance(profile, Costs)
    assert profile.bits == (4,)
    assert profile.prefill_s(1, 4, batch=2, tokens=50) == pytest.approx(6e-4)
    assert profile.decode_s(0, 4, batch=5, past=10) == pytest.approx(1.5e-4)
    assert profile.ends_s(0, batch=4, tokens=8) == pytest.approx(1e-5 + 32e-8 + 1.4e-4)
    assert profile.send_s(1, 0, 1000) == pytest.approx(0.011)
    assert profile.send_s(1, 1, 1000) == 0.0
    assert (profile.memory_bytes(0), profile.memory_bytes(1)) == (100, 50)
    assert profile.forms == {"0": {"4": [[1, "packed"]]},
                             "1": {"3": [[1, "packed"]], "4": [[1, "packed"]]}}  # fmt: skip


def test_a_width_that_was_not_measured_is_named_with_its_device():
    profile = Profile(devices=(planted_profile(),), memory={0: 1})
    with pytest.raises(ConfigError, match=r"device 0 \(a\): expected a decode measured at 8 bits"):
        profile.decode_s(0, 8, batch=1, past=1)


def test_devices_of_a_kind_with_other_memory_are_of_another():
    one = planted_profile()
    same = Profile(devices=(one, one), memory={0: 10**9, 1: 10**9})
    assert {same.kind(0), same.kind(1)} == {"a"}
    other = Profile(devices=(one, one), memory={0: 10**9, 1: 2 * 10**9})
    assert [other.kind(0), other.kind(1)] == ["a of 1 GB", "a of 2 GB"]


def test_each_device_needs_its_bytes():
    with pytest.raises(ConfigError, match=r"none of \[1\]"):
        Profile(devices=(planted_profile(),) * 2, memory={0: 1})


def test_merging_adds_widths():
    both = planted_profile((4,)).merge(planted_profile((8, 16), slow=2.0))
    assert sorted(both.prefill) == sorted(both.decode) == [4, 8, 16]
    assert sorted(both.forms) == ["4", "8"]
    few = Workload(num_prompts=1, prompt_tokens=128, new_tokens=1)
    assert both.covers((4, 8), few)
    assert not both.covers((3,), few)
    assert not both.covers((4,), replace(few, prompt_tokens=129))
    assert not both.covers((4,), replace(few, num_prompts=99))
