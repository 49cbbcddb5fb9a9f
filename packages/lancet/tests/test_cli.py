"""Commands that read a plan's file, and what they say of wrong ones."""

import json
import re

import pytest

from lancet.cli import main
from lancet.graph.operations import Op
from lancet.planner.plan import make_plan, save_plans

OPS = [
    Op("experts", "compute", 1.0),
    Op("rows", "all_to_all", 4.0, after=("experts",)),
    Op("attention", "compute", 2.0, after=("rows",)),
    Op("weights", "compute", 3.0, after=("experts",)),
]


@pytest.fixture
def plan_file(tmp_path):
    plan = make_plan("backward 1", "digest", "2.13", OPS, [], None)
    save_plans(tmp_path / "plan.json", [plan])
    return str(tmp_path / "plan.json")


def test_explain_says_what_covers_an_exchange_and_why_some_is_left(plan_file, capsys):
    assert main(["explain", plan_file]) == 0
    printed = capsys.readouterr().out
    assert "rows: 4.00 s, 1 operations run beside it, 1.00 s exposed: 3.00 s of" in printed
    assert main(["explain", plan_file, "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert (plan["before_s"], plan["makespan_s"], plan["exposed_s"]) == (10.0, 7.0, 1.0)


def test_simulate_replays_other_networks(plan_file, capsys):
    argv = ["simulate", plan_file, "--communication", "0.5", "1", "--json"]
    assert main(argv) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    # Computing takes 6 s, of which the 3 s of weights can run beside the exchange.
    assert [(p["communication"], p["exposed_s"]) for p in points] == [(0.5, 0.0), (1.0, 3.0)]
    assert main(argv[:-1]) == 0
    assert "backward 1" in capsys.readouterr().out


def test_plan_plans_for_a_faster_network_and_writes_what_explain_reads(plan_file, tmp_path, capsys):
    out = str(tmp_path / "new" / "plan.json")
    assert main(["plan", plan_file, "--network", "4", "--out", out]) == 0
    assert "written to" in capsys.readouterr().out
    assert main(["explain", out, "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    # The exchange takes 1 s, the weights' 3 s hide it.
    assert (plan["before_s"], plan["makespan_s"]) == (7.0, 6.0)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["explain", "nowhere.json"], "nowhere.json: expected a plan, there is nothing"),
        (["plan", "FILE", "--network", "0"], "network: expected more than 0, got 0"),
        (["simulate", "FILE", "--communication", "-1"], "expected a factor of 0 or more"),
        (["explain", "OTHER"], "expected a plan of format 3"),
    ],
)
def test_mistakes_are_said_in_a_sentence(argv, sentence, plan_file, tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"layers": 2}')
    named = {"FILE": plan_file, "OTHER": str(tmp_path / "other.json")}
    assert main([named.get(word, word) for word in argv]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": 0}, "expected a plan of format 3, got format 0; plan again with this version"),
        ({"parts": 2}, "expected a plan with before_s, cut, digest, .*, got .*parts"),
        ({"order": ["experts", "rows"]}, "an order of the plan's 4 operations, got 2 names"),
        ({"order": ["attention", "experts", "rows", "weights"]}, "'attention' follows 'rows'"),
        ({"ops": [{"name": "experts"}]}, "got values of other names or types.*'kind'"),
        ({"ops": 7}, "got values of other names or types"),
        ({"makespan_s": "long"}, "got values of other names or types"),
        ({"exposed_s": -1.0}, "expected finite seconds of 0 or more"),
    ],
)
def test_a_plan_that_is_another_versions_or_was_changed_is_refused(
    plan_file, tmp_path, capsys, changes, sentence
):
    (plan,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    (tmp_path / "plan.json").write_text(json.dumps({"plans": [plan | changes]}))
    assert main(["explain", plan_file]) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert re.search(rf"plan\.json: .*{sentence}", printed)
    assert "Traceback" not in printed


@pytest.mark.parametrize("argv", [["demo", "--fast"], ["simulate", "--communication", "fast"]])
def test_wrong_usage_is_status_2(argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
