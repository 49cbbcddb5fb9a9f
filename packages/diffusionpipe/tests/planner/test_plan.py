"""The plan as a file: round trip, hash, refusals; rows of micro-batches."""

import json
from dataclasses import replace

import pytest

from diffusionpipe import Plan
from diffusionpipe.planner.plan import Action
from shared.errors import ConfigError, DataError


@pytest.fixture
def small():
    order = (
        (
            Action("forward", 0, 0), Action("encode", name="vae+text h", samples=(0, 3)),
            Action("backward", 0, 0), Action("step"),
        ),
        (Action("forward", 1, 0), Action("backward", 1, 0), Action("sum", 1), Action("step")),
        (Action("forward", 1, 0), Action("backward", 1, 0), Action("sum", 1), Action("step")),
    )  # fmt: skip
    return Plan(
        placement="chain", num_stages=2, num_micro_batches=1, batch_size=4,
        spans=((0, 2), (2, 5)), devices=((0,), (1, 2)), order=order,
        owners={"vae+text h": (((0, 4),), (), ())}, edges={(0, 1): 8, (0, 2): 8},
    )  # fmt: skip


def test_a_saved_plan_is_read_back(small, tmp_path):
    small.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == small
    assert loaded.fingerprint() == small.fingerprint()
    assert "encode vae+text h 0:3" in (tmp_path / "plan.json").read_text()


def test_other_plans_have_other_fingerprints(small):
    others = [
        replace(small, batch_size=8),
        replace(small, bucket_bytes=1),
        replace(small, order=(small.order[0][:1], *small.order[1:])),
        replace(small, edges={(0, 1): 9, (0, 2): 8}),
    ]
    assert len({each.fingerprint() for each in [small, *others]}) == 5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch_size": 8}, "expected the fingerprint"),
        ({"format": 99}, "expected a plan of format 1 as Plan.save writes it, got ValueError"),
        ({"more": 1}, "unknown keys"),
        ({"order": [["fly 0 0"]]}, "fly 0 0"),
    ],
)
def test_an_edited_plan_is_refused(small, tmp_path, change, text):
    path = tmp_path / "plan.json"
    small.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=text):
        Plan.load(path)


def test_a_missing_plan_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json: expected a plan, there is nothing"):
        Plan.load(tmp_path / "none.json")


def test_rows_of_replicas_and_groups(small):
    assert small.samples(0, 0, 0) == range(4)
    assert small.samples(1, 0, 1) == range(2)
    assert small.samples(1, 0, 2) == range(2, 4)
    with pytest.raises(ConfigError, match="stage 0 is on the ranks"):
        small.samples(0, 0, 2)
    step = (Action("step"),)
    groups = Plan(
        placement="chain", num_stages=2, num_micro_batches=2, num_groups=2, batch_size=16,
        spans=((0, 1), (1, 2)), devices=((0, 2), (1, 3, 4, 5)), order=(step,) * 6,
    )  # fmt: skip
    # Group 0 has rows 0 to 7: micro-batch 1 is 4 to 7, which ranks 1 and 3 share.
    assert groups.samples(0, 1, 0) == range(4, 8)
    assert groups.samples(1, 1, 3) == range(6, 8)
    assert groups.samples(0, 0, 2) == range(8, 12)
    assert groups.samples(1, 1, 5) == range(14, 16)
    rows = [row for rank in (1, 3, 4, 5) for m in (0, 1) for row in groups.samples(1, m, rank)]
    assert sorted(rows) == list(range(16))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch_size": 5}, "expected batch_size 5 to be divisible"),
        (
            {"devices": ((0,),)},
            "a span, ranks and a backbone for each virtual stage, got 2, 1 and 2",
        ),
        ({"devices": ((0,), (1, 7))}, "a list for each rank that holds a stage, got 3"),
    ],
)
def test_contradictions_are_refused(small, change, text):
    with pytest.raises(ConfigError, match=text):
        replace(small, **change)
