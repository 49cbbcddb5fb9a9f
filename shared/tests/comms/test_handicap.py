"""Ranks that are made older or slower than their machine."""

import os
import sys
import time
from pathlib import Path

import numba
import pytest
import torch

from shared.comms import RankPool
from shared.comms.handicap import HandicapUnavailable, handicap, read_words
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


@numba.njit
def double(x):
    return 2 * x


def describe_numba():
    double(1)
    features = double.targetctx.codegen().magic_tuple()[2]
    return "+avx512f" in features, os.getppid()


def is_imported(name):
    return name in sys.modules


@pytest.mark.slow
def test_modules_are_imported_once_for_all_ranks(monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", "colorsys")
    with RankPool(1, modules=["colorsys"]) as pool:
        assert pool.run(is_imported, "colorsys").results == [True]
    with RankPool(1) as pool:
        assert pool.run(is_imported, "this").results == [False]


@pytest.mark.parametrize(
    "preloaded",
    [(), pytest.param(("numba", "shared.kernels.weight_matmul"), marks=pytest.mark.slow)],
)
def test_ranks_of_one_pool_differ(preloaded, monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", str(preloaded))  # so that no other pool's template serves it
    last = max(os.sched_getaffinity(0))
    words = [[], handicap(isa="AVX2", cores=[last])]
    with RankPool(2, prefix=words, modules=preloaded) as pool:
        (own, _, cores, _), (capped, isa, pinned, _) = pool.run(describe).results
        (is_wide, parent), (is_wide_too, other_parent) = pool.run(describe_numba).results
    assert parent == other_parent != os.getpid(), "both are forked from one template"
    assert not is_wide_too
    assert is_wide == ("avx512" in torch.backends.cpu.get_cpu_capability().lower())
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], ({}, set())),
        (["env", "A=1", "B=x=y", "taskset", "-c", "0,2"], ({"A": "1", "B": "x=y"}, {0, 2})),
        (["taskset", "-c", "1"], ({}, {1})),
        (["env", "A=1", "nice"], None),
        (["ip", "netns", "exec", "a", "env", "A=1"], None),
        (["taskset", "-c", "1", "sh"], None),
    ],
)
def test_words_that_only_set_something_are_read(words, told):
    assert read_words(words) == told


def test_nothing_asked_for_is_nothing_said():
    assert handicap() == []


def test_instructions_that_the_processor_lacks_are_not_asked_for():
    has_them = "avx512f" in Path("/proc/cpuinfo").read_text().split()
    assert bool(handicap(isa="AVX512")) == has_them
    assert handicap(isa="AVX2")
