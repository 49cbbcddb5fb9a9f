import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from qsync import Plan
from qsync.planner.plan import DeniedRaise, RankPlan
from shared.errors import ConfigError, DataError


def build(width=6):
    return nn.Sequential(
        nn.Embedding(10, 4), nn.Sequential(nn.Linear(4, width), nn.ReLU()), nn.Linear(width, 2)
    )


def measured_plan():
    return replace(
        Plan.uniform(build(), "fp32"),
        ranks=(
            RankPlan(lowered={}, noise=0.0, compute_s=0.5, float32_s=0.5, idle_s=0.25, num_casts=0),
            RankPlan(
                device="Emulated CPU",
                lowered={"1.0": "int8", "2": "bf16"},
                noise=0.0004,
                compute_s=0.75,
                float32_s=1.0,
                idle_s=0.0,
                num_casts=7,
                denied=(
                    DeniedRaise(name="1.0", precision="fp32", noise_removed=0.0003, added_s=0.1),
                ),
            ),
        ),
        step_s=0.75,
        float32_s=1.0,
        target_s=0.8,
        notes=("traced by modules",),
    )


def test_uniform_plan_lowers_all_but_the_overrides():
    plan = Plan.uniform(build(), "int8", overrides={"2": "fp32", "0": "bf16"})
    assert [plan.precision(name) for name in ("0", "1.0", "2")] == ["bf16", "int8", "fp32"]
    assert plan.precision("1.0", rank=3) == "int8"
    assert (plan.noise, plan.step_s, plan.is_target_met) == (None, None, True)


def test_uniform_plan_changes_no_weight():
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Plan.uniform(model, "int8")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_wrong_names_are_told_the_near_ones():
    with pytest.raises(ConfigError, match=r"got '1\.1'; did you mean '1\.0'"):
        Plan.uniform(build(), "int8", overrides={"1.1": "fp32"})
    with pytest.raises(ConfigError, match="expected one of the plan's 3, got 'head'"):
        Plan.uniform(build(), "int8").precision("head")
    with pytest.raises(ConfigError, match="got 'int4'"):
        Plan.uniform(build(), "int4")
    with pytest.raises(ConfigError, match="got 'int4'"):
        Plan.uniform(build(), "int8", overrides={"2": "int4"})
    with pytest.raises(ConfigError, match="got a ReLU without any"):
        Plan.uniform(nn.ReLU(), "int8")


def test_loaded_plan_equals_the_saved(tmp_path):
    plan = measured_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "edit",
    [
        lambda tree: tree["ranks"][1]["lowered"].update({"2": "int8"}),
        lambda tree: tree["ranks"][1]["lowered"].pop("2"),
        lambda tree: tree.update(step_s=0.5),
        lambda tree: tree["operators"].update({"2": "Linear 2x7"}),
        lambda tree: tree["ranks"].pop(),
        lambda tree: tree.update(notes=[]),
        lambda tree: tree.update(fingerprint="0" * 16),
    ],
)
def test_edited_plan_is_refused(tmp_path, edit):
    path = tmp_path / "plan.json"
    measured_plan().save(path)
    tree = json.loads(path.read_text())
    edit(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"plan.json: expected the fingerprint .* was edited"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tree: tree.update(format=2), "ValueError: format 2"),
        (lambda tree: tree.pop("operators"), "KeyError: 'operators'"),
        (lambda tree: tree.pop("fingerprint"), "KeyError: 'fingerprint'"),
        (lambda tree: tree.update(spare=1), r"unknown keys \['spare'\]"),
        (lambda tree: tree.update(ranks=[]), "expected one entry or more"),
        (lambda tree: tree["ranks"][1]["lowered"].update({"2": "int4"}), "got 'int4'"),
    ],
)
def test_malformed_plan_is_refused(tmp_path, edit, message):
    path = tmp_path / "plan.json"
    measured_plan().save(path)
    tree = json.loads(path.read_text())
    edit(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(DataError, match=message):
        Plan.load(path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "3"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"plan\.json: expected a plan"):
        Plan.load(path)


def test_other_model_is_refused():
    plan = Plan.uniform(build(), "int8")
    plan.check_model(build())
    with pytest.raises(ConfigError, match=r"'1\.0' as Linear 6x4, got Linear 5x4"):
        plan.check_model(build(5))
    with pytest.raises(ConfigError, match="'0' as Embedding 10x4, got Linear 1x1"):
        plan.check_model(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(ConfigError, match="'3' as none, got Linear 1x1"):
        plan.check_model(build().append(nn.Linear(1, 1)))


def test_ranks_have_their_own_precisions():
    plan = measured_plan()
    assert [plan.precision("2", rank) for rank in (0, 1)] == ["fp32", "bf16"]
    assert plan.noise == 0.0  # of rank 0, which a process without a group is
    with pytest.raises(ConfigError, match="rank: expected 0 to 1, got 2"):
        plan.precision("2", 2)


def test_target_is_met_up_to_its_end():
    assert replace(measured_plan(), target_s=0.75).is_target_met
    assert not replace(measured_plan(), target_s=0.7499).is_target_met


def test_explanation_has_every_figure():
    text = measured_plan().explain()
    for part in (
        "A step takes 750 ms (predicted), 0.75 of float32's 1.00 s; the target of 800 ms is met.",
        "rank 0: all 3 operators stay in float32; it computes for 500 ms and is idle for 250 ms.",
        "rank 1 (Emulated CPU): 2 of 3 operators are lowered: 1 in int8, 1 in bf16",
        "relative gradient error 2.00% (noise 0.0004); 7 casts a step",
        "with 100 ms more, 1.0 could return to fp32: error 1.00%",
        "Note: traced by modules.",
    ):
        assert part in text
    assert "is not met" in replace(measured_plan(), target_s=0.5).explain()
    assert "not measured" in Plan.uniform(build(), "int8").explain()
