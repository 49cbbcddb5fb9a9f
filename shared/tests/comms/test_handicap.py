"""Ranks that are made older or slower than their machine."""

import os
import time

import pytest
import torch

from shared.comms import RankPool
from shared.comms.handicap import HandicapUnavailable, handicap
from shared.errors import ConfigError

IS_ROOT = os.geteuid() == 0


def describe():
    begin, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < 0.5:
        pass
    return (
        torch.backends.cpu.get_cpu_capability(),
        os.environ.get("ONEDNN_MAX_CPU_ISA"),
        sorted(os.sched_getaffinity(0)),
        (time.process_time() - cpu) / (time.perf_counter() - begin),
    )


def test_ranks_of_one_pool_differ():
    last = max(os.sched_getaffinity(0))
    with RankPool(2, prefix=[[], handicap(isa="AVX2", cores=[last])]) as pool:
        (own, _, cores, _), (capped, isa, pinned, _) = pool.run(describe).results
    assert capped == "AVX2"
    assert own == torch.backends.cpu.get_cpu_capability()
    assert isa == "AVX2"
    assert pinned == [last]
    assert cores == sorted(os.sched_getaffinity(0))


def is_available():
    try:
        return bool(handicap(share=0.5))
    except HandicapUnavailable:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="needs root and the cgroup controller cpu")
def test_a_share_of_a_core_is_all_that_a_rank_gets():
    with RankPool(1, prefix=[[*handicap(isa="AVX2"), *handicap(share=0.3)]]) as pool:
        capability, _, _, used = pool.run(describe).results[0]
    assert capability == "AVX2"
    assert used < 0.4


def test_without_root_a_share_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HandicapUnavailable, match="needs root and the cgroup controller 'cpu'"):
        handicap(share=0.5)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"isa": "MMX"}, r"isa: expected one of AVX2, AVX512, got 'MMX'"),
        ({"cores": [99999]}, r"cores: expected some of .* got \[99999\]"),
        ({"cores": []}, r"cores: expected some of"),
        ({"share": 1.5}, r"share: expected a number in \(0, 1\], got 1.5"),
        ({"share": 0.0}, r"share: expected a number"),
    ],
)
def test_bad_settings(settings, told):
    with pytest.raises(ConfigError, match=told):
        handicap(**settings)


def test_nothing_asked_for_is_nothing_said():
    assert handicap() == []
