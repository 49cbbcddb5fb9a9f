"""A process's share of its host: what its control group allows, by the ranks of the host."""

import logging
import os

import pytest
import torch
from step_profiles import step_profile

from memo import Budget, DoesNotFit, autotune
from memo.runtime import host_memory
from memo.runtime.host_memory import host_share_bytes, keep_within_host

from .models import make_batch, make_model

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB, GIB = 1 << 20, 1 << 30
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def host(root, group, **limits):
    """A file system with control groups: which one the process is in, and limits by path."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    for path, limit in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return root


def test_a_machine_without_control_groups_is_all_there_is(tmp_path):
    assert host_share_bytes(tmp_path) == MACHINE


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": 3 * MIB, "a/memory.max": "max"}, 3 * MIB),
        ("0::/a/b\n", {"a/b/memory.max": 3 * MIB, "a/memory.max": 2 * MIB}, 2 * MIB),
        ("0::/a/b\n", {"memory.max": MIB}, MIB),  # a container sees its own group as the top
        ("0::/\n", {"memory.max": "max"}, MACHINE),
        (
            "4:cpu,memory:/a\n3:cpuset:/\n0::/\n",
            {"memory/a/memory.limit_in_bytes": 5 * MIB},
            5 * MIB,
        ),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": 2**63 - 4096}, MACHINE),
        ("3:cpuset:/a\n", {"memory/a/memory.limit_in_bytes": MIB}, MACHINE),
    ],
)
def test_the_least_limit_around_the_process_counts(tmp_path, group, limits, expected):
    assert host_share_bytes(host(tmp_path, group, **limits)) == expected


def test_ranks_of_a_host_share_it(tmp_path, monkeypatch):
    root = host(tmp_path, "0::/\n", **{"memory.max": 8 * GIB})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_share_bytes(root) == 2 * GIB


@pytest.mark.parametrize(
    ("device", "store", "expected"),
    [
        (CPU, "file:/tmp", (4 * GIB, 9 * GIB)),
        (CPU, "memory", (4 * GIB, 0)),
        (GPU, "pinned", (6 * GIB, 3 * GIB)),
        (GPU, "file:/tmp", (6 * GIB, 9 * GIB)),
    ],
)
def test_limits_of_ram_are_lowered_to_the_share(device, store, expected, monkeypatch, caplog):
    monkeypatch.setattr(host_memory, "host_share_bytes", lambda: 4 * GIB)
    monkeypatch.setattr(host_memory, "resident_bytes", lambda _: GIB)
    found = keep_within_host(Budget(device="6GiB", store="9GiB"), device, store)
    assert (found.device_bytes, found.store_bytes) == expected
    for name, limit, stated in zip(("device", "store"), expected, (6 * GIB, 9 * GIB), strict=True):
        assert (f"budget.{name}: expected at most" in caplog.text) == (limit < stated)


def test_a_budget_within_the_share_is_left_as_it_is(monkeypatch, caplog):
    monkeypatch.setattr(host_memory, "host_share_bytes", lambda: 4 * GIB)
    budget = Budget(device="1GiB", store="3GiB", store_at="memory")
    assert keep_within_host(budget, CPU, "memory") == budget
    assert caplog.text == ""


def test_autotune_plans_for_what_the_host_has(monkeypatch, caplog):
    monkeypatch.setattr(host_memory, "host_share_bytes", lambda: 64 * MIB)
    monkeypatch.setattr("memo.profiler.autotune.measure_profile", lambda *_, **__: step_profile())
    ids = make_batch(rows=1)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    with caplog.at_level(logging.WARNING), pytest.raises(DoesNotFit, match=r"at most 64\.0 MiB"):
        autotune(make_model("llama"), batch, Budget(device="8GiB"))
    assert "this process's share" in caplog.text
