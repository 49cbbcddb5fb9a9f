"""A plan's JSON: what is written is read again, and what was edited by hand is checked first."""

import json

import pytest

from llmpq import Plan, Stage
from shared.errors import ConfigError, DataError

PLAN = Plan(
    stages=(Stage(rank=1, layers=(0, 3)), Stage(rank=0, layers=(3, 4))),
    bits=(3, 4, 8, 16),
    group_size=64,
    prefill_size=2,
    decode_size=4,
    dtype="bfloat16",
    model="0123456789abcdef",
    folder="model",
    forms={"0": {"4": [[1, "packed"], [32, "dense32"]]}},
    predicted={"seconds": 1.5},
)


def test_a_plan_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PLAN.save("plan.json")
    assert Plan.load("plan.json") == PLAN


def test_the_models_folder_is_found_from_wherever_the_plan_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plans").mkdir()
    PLAN.save("plans/plan.json")
    assert json.loads((tmp_path / "plans/plan.json").read_text())["folder"] == "../model"
    monkeypatch.chdir("/")
    assert Plan.load(tmp_path / "plans/plan.json").folder == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stages", [{"rank": 0, "layers": [0, 3]}, {"rank": 1, "layers": [2, 4]}], "stages.1."),
        ("stages", [{"rank": 0, "layers": [0, 2]}, {"rank": 1, "layers": [3, 4]}], "stages.1."),
        (
            "stages",
            [{"rank": 0, "layers": [0, 2]}, {"rank": 0, "layers": [2, 4]}],
            "a rank of its own",
        ),
        ("stages", [{"rank": 0, "layers": [0, 0]}, {"rank": 1, "layers": [0, 4]}], "empty"),
        ("stages", [], "at least one stage"),
        ("stages", [{"layers": [0, 4]}], "malformed"),
        ("bits", [4, 4, 5, 4], r"bits\[2\]: expected one of"),
        ("bits", [4, 4, 4], "4 layers, got 3"),
        ("bits", [4, 4, 4, True], "malformed"),
        ("decode_size", 3, "multiple of prefill_size"),
        ("prefill_size", 0, "multiple of prefill_size"),
        ("group_size", 0, "group_size: expected at least 1"),
        ("group_size", 64.5, "group_size"),
        ("prefill_size", 2.0, "prefill_size"),
        ("forms", 5, "forms"),
        ("forms", {"0": 5}, r"forms\['0'\]: expected forms by width, got 5"),
        ("predicted", {"seconds": "soon"}, r"predicted\['seconds'\]: expected numbers, got 'soon'"),
        ("predicted", {"stage_decode_s": [1, None]}, r"predicted\['stage_decode_s'\]"),
        ("stages", [{"rank": 0, "layers": [0, 2, 4]}], "malformed"),
        ("predicted", None, "predicted"),
        ("dtype", "float64", "dtype: expected one of"),
        ("method", "guess", "method: expected one of"),
        ("version", 99, "version 1"),
        ("colour", "red", "expected the keys"),
    ],
)
def test_a_plan_edited_by_hand_is_refused_by_file_and_key(tmp_path, key, value, message):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=message) as found:
        Plan.load(path)
    assert str(path) in str(found.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json"])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises((ConfigError, DataError), match="expected a plan"):
        Plan.load(path)
