import json
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.claims import faults, read_demo
from swift.cli import main
from swift.demo import DemoTraining, judge, judge_restart, run
from swift.timeline import draw_failure, place_phases

STEPS = {11: [(0, 0, 10.0), (0, 1, 10.5)], 12: [(1, 0, 10.0), (1, 1, 10.5)]}
RANK = {"seconds": {"join": 0.1, "transfer": 0.1}, "received_bytes": 8, "undone": 1}
FAILURE = {"reason": "Undo.", "target": 0, "ranks": {"0": RANK, "1": RANK}}
QUIET = DemoTraining({0: "a", 1: "a"}, STEPS, (), 6.0)
GOOD = DemoTraining({0: "a", 1: "a"}, STEPS, (FAILURE,), 6.0)


@pytest.mark.parametrize(
    "outcome",
    [
        DemoTraining({}, {}, (), 6.0),
        DemoTraining({0: "a", 1: "a"}, STEPS, (), 6.0),
        DemoTraining({0: "a", 1: "b"}, STEPS, (FAILURE,), 6.0),
        DemoTraining({0: "a"}, STEPS, (FAILURE,), 6.0),
    ],
    ids=["nothing ran", "nobody was killed", "a bit differs", "a rank never ended"],
)
def test_a_run_that_does_nothing_or_something_else_is_not_correct(outcome):
    claims = judge("replicas", QUIET, GOOD, start_s=QUIET.start_s)
    assert all(claim.correct for claim in claims)
    assert claims[0].ours == pytest.approx(0.2)
    assert claims[0].baseline == pytest.approx(4.0)
    assert not any(claim.correct for claim in judge("replicas", QUIET, outcome, start_s=4.0))


def test_a_start_anew_is_that_of_a_process_of_its_own_behind_the_trainings(tmp_path, monkeypatch):
    begun = []

    class Launched:
        """Trainings that have ended as they begin; the first process's import modules for 100 s."""

        def __init__(self, command, **_):
            runs = json.loads(command[-1])
            first_s = time.monotonic() + (7.0 if begun else 100.0)
            begun.append([words[words.index("--report") + 3 :] for words in runs])
            for words in runs:
                report = Path(words[words.index("--report") + 1])
                for rank, number in enumerate((11, 12)):
                    steps = [{"rank": rank, "step": at, "at_s": first_s + at} for at in range(3)]
                    lines = [*steps, {"rank": rank, "digest": "a"}]
                    path = report.with_name(f"{number}.jsonl")
                    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
                report.write_text(json.dumps({"failures": [FAILURE] * words.count("--kill")}))

        def wait(self, *_):
            return 0

        def kill(self):
            """It has ended."""

    launcher = SimpleNamespace(Popen=Launched, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("swift.demo.subprocess", launcher)
    assert run(tmp_path, is_full=False)
    [trainings, anew] = begun
    assert [(words[1], words.count("--kill")) for words in trainings] == [
        ("replicas", 0), ("replicas", 1), ("pipeline", 0), ("pipeline", 1),
    ]  # fmt: skip
    assert [words[1] for words in anew] == ["replicas"]
    starts = {claim.baseline for claim in read_demo(tmp_path).claims if claim.unit == "s"}
    assert len(starts) == 1
    assert 7.0 <= starts.pop() < 100.0


def test_a_restart_counts_from_the_killed_step_to_all_ranks_in_the_next():
    steps = {
        1: [(0, 4, 1.0), (0, 5, 2.0)],
        2: [(1, 4, 1.0), (1, 5, 2.25)],
        3: [(0, 5, 7.0), (0, 6, 8.0)],
        4: [(1, 5, 7.0), (1, 6, 9.0)],
    }
    restarted = DemoTraining({0: "a", 1: "a"}, steps, (), 0.0)
    claim = judge_restart(GOOD, restarted, 5)
    assert (claim.ours, claim.baseline) == (pytest.approx(0.2), pytest.approx(7.0))
    assert claim.correct
    # Rank 0 had finished the step and saved it before it was ended.
    before = {**steps, 1: [*steps[1], (0, 6, 2.5)]}
    claim = judge_restart(GOOD, DemoTraining({0: "a", 1: "a"}, before, (), 0.0), 5)
    assert (claim.baseline, claim.correct) == (pytest.approx(7.0), True)
    assert not judge_restart(QUIET, restarted, 5).correct
    assert not judge_restart(GOOD, DemoTraining({}, {}, (), 0.0), 5).correct
    assert not judge_restart(GOOD, DemoTraining({0: "a"}, steps, (), 0.0), 5).correct


def test_phases_end_where_the_repeated_step_does():
    bars = place_phases({"join": 0.5, "repeat": 0.25}, 4.0)
    assert [(bar.what, bar.start_s, bar.end_s) for bar in bars] == [
        ("join", 3.25, 3.75),
        ("repeat", 3.75, 4.0),
    ]


def test_a_failure_is_drawn_with_its_ranks_and_phases(tmp_path):
    rows = {"rank 0": place_phases({"join": 0.5}, 4.0), "rank 1, killed": []}
    draw_failure(rows, tmp_path / "failure.svg", lost=("rank 1, killed", 3.5))
    picture = (tmp_path / "failure.svg").read_text()
    # Of a text drawn as curves a comment tells the words.
    texts = re.findall("<!-- (.*) -->", picture)
    assert [one for one in texts if one.startswith("rank")] == ["rank 0", "rank 1, killed"]
    assert texts[-1] == "join"  # the legend
    assert "seconds after the kill" in texts
    assert picture.count("fill: #fdae6b") == 2  # the bar, and in the legend


@pytest.mark.slow
def test_demo_makes_claims_the_tour_accepts(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    demo = read_demo(tmp_path)
    assert demo.package == "swift"
    assert faults(demo) == []
    said = capsys.readouterr().err
    assert all(f"swift: {one.name}: " in said for one in demo.claims)
    assert re.search(r"<!-- spare, now rank \d -->", (tmp_path / "failure.svg").read_text())
