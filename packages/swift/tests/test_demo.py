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


def test_ranks_that_tell_no_state_are_not_equal():
    silent = DemoTraining({}, STEPS, (FAILURE,), 6.0)
    claims = judge("replicas", DemoTraining({}, STEPS, (), 6.0), silent, start_s=4.0)
    assert not any(claim.correct for claim in claims)


class Launched:
    """Trainings of a process that have ended as they begin; the first one imports modules for 100 s."""

    begun: list[list[list[str]]]
    digest_of_killed: str

    def __init__(self, command, **_):
        runs = json.loads(command[-1]) if "-c" in command else [command]
        first_s = time.monotonic() + (7.0 if self.begun else 100.0)
        told = []
        for words in runs:
            at = next(at for at, word in enumerate(words) if word.endswith("verses.py"))
            kind, folder, text, *options = words[at + 1 :]
            assert len(Path(text).read_bytes()) == 256 * 64, "whole samples"
            spares = [words[at + 1] for at, word in enumerate(words) if word == "--spares"]
            told.append([kind, *options, *spares])
            is_killed = "--kill" in options
            for rank, number in enumerate((11, 12)):
                steps = [
                    {"rank": rank, "step": step, "at_s": first_s + step + 30 * rank}
                    for step in (0, 1, 2, 50, 51)
                ]
                digest = self.digest_of_killed if is_killed else "a"
                lines = [*steps, {"rank": rank, "digest": digest}]
                (Path(folder) / f"{number}.jsonl").write_text("\n".join(map(json.dumps, lines)))
            report = {"failures": [FAILURE] if is_killed else []}
            (Path(folder) / "report.json").write_text(json.dumps(report))
        self.begun.append(told)

    def wait(self, *_):
        return 0

    def kill(self):
        """It has ended."""


@pytest.fixture
def launched(monkeypatch):
    """Processes that the demo begins."""
    Launched.begun, Launched.digest_of_killed = [], "a"
    launcher = SimpleNamespace(Popen=Launched, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("swift.demo.subprocess", launcher)
    return Launched


def test_a_start_anew_is_that_of_a_process_of_its_own_behind_the_trainings(tmp_path, launched):
    assert run(tmp_path, is_full=False)
    trainings, anew = launched.begun
    assert trainings == [
        ["replicas", "--steps", "20", "0"],
        ["replicas", "--steps", "20", "--kill", "11", "1"],
        ["pipeline", "--steps", "20", "0"],
        ["pipeline", "--steps", "20", "--kill", "14", "1"],
    ]
    assert anew == [["replicas", "--steps", "1", "0"]]
    starts = {claim.baseline for claim in read_demo(tmp_path).claims if claim.unit == "s"}
    assert len(starts) == 1
    assert 7.0 <= starts.pop() < 30.0, "the first rank's first step"


def test_another_state_than_that_of_the_run_undisturbed_fails(tmp_path, launched):
    launched.digest_of_killed = "b"
    assert not run(tmp_path, is_full=False)
    assert not any(claim.correct for claim in read_demo(tmp_path).claims)


def test_the_long_form_kills_one_rank_under_torchrun(tmp_path, launched):
    assert run(tmp_path, is_full=True)
    *_, [restarted] = launched.begun
    assert restarted == ["torchrun", "--steps", "200", "--kill", "50"]
    assert len(read_demo(tmp_path).claims) == 5


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
