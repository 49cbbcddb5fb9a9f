"""The command line."""

import json

import pytest

import hydraulis as hy
from hydraulis.cli import main
from shared.claims import faults, read_demo


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, [30_000, *[500] * 40])) + "\n")
    return path


@pytest.mark.slow
def test_demo_makes_claims_the_tour_accepts(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    demo = read_demo(tmp_path)
    assert demo.package == "hydraulis"
    assert faults(demo) == []
    assert capsys.readouterr().err.count("hydraulis: ") == len(demo.claims)
    assert (tmp_path / "ranks.svg").read_text().count("<svg") == 1


def test_a_plan_names_groups_seconds_and_the_bound(lengths, capsys):
    given = ["plan", str(lengths), "--ranks", "8", "--cap", "9000"]
    assert main(given) == 0
    text = capsys.readouterr().out
    assert "longest" in text
    assert "no plan of this kind is faster" in text
    assert main([*given, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bound_s"] <= record["seconds"]
    assert record["groups"][0]["longest"] == 30_000
    assert sum(row["documents"] for row in record["groups"]) == 41


def test_a_plan_goes_by_a_measured_cost(lengths, tmp_path, capsys):
    path = tmp_path / "cost.json"
    given = ["plan", str(lengths), "--ranks", "8", "--cap", "9000", "--cost", str(path), "--json"]
    hy.Cost(a=1e-6, b=1e-3, c=0.5).save(path)
    assert main(given) == 0
    seconds = json.loads(capsys.readouterr().out)["seconds"]
    hy.Cost(a=2e-6, b=2e-3, c=1.0).save(path)
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(2 * seconds)
    path.write_text("{}")
    assert main(given) == 1
    assert "expected a cost of version 1, got None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "lengths.txt: expected lengths, a number on each line, the file is empty"),
        ("5\nx\n", "lengths.txt:2: expected a whole number of tokens above 0, got x"),
        ("5\n0\n", "lengths.txt:2: expected a whole number"),
        ("80000\n", "sequence 0: expected at most 72000 tokens, got 80000"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(text, told, tmp_path, capsys):
    (tmp_path / "lengths.txt").write_text(text)
    given = ["plan", str(tmp_path / "lengths.txt"), "--ranks", "8", "--cap", "9000"]
    assert main(given) == 1
    assert told in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "none"), "--ranks", "8", "--cap", "9"]) == 1
    assert (
        "none: expected lengths, a number on each line, there is nothing; check"
        in capsys.readouterr().err
    )


def test_strategies_are_compared_without_a_gpu(lengths, tmp_path, capsys):
    given = [
        "compare", "--lengths", str(lengths), "--gpus", "8", "--max-tokens", "9000",
        "--tokens-per-step", "50000", "--steps", "2", "--out", str(tmp_path / "compare"),
    ]  # fmt: skip
    assert main(given) == 0
    text = capsys.readouterr().out
    assert "simulated: 8 H100 at 50% of their peak, 9000 tokens each" in text
    assert "hydraulis" in text
    assert (tmp_path / "compare" / "strategies.svg").read_text().count("<svg") == 1
    assert main([*given, "--json"]) == 0
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    ours = next(one for one in outcomes if one["name"] == "hydraulis")
    assert all(min(one["step_s"]) >= min(ours["step_s"]) * 0.999 for one in outcomes)
    assert main([*given, "--max-tokens", "1000"]) == 1
    assert "expected at most 8000 tokens, got 30000" in capsys.readouterr().err
    assert main([*given, "--model", "nowhere"]) == 1
    assert (
        "nowhere: expected a model's folder with config.json, or one of llama-7b, there"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("plan x --ranks 8 --cap 0", "--cap: expected at least 1, got 0"),
        ("plan x --ranks 0 --cap 9", "--ranks: expected at least 1, got 0"),
        ("plan x --ranks 8 --cap 9 --message nan", "--message: expected at least 0, got nan"),
        ("plan x --ranks 8 --cap 9 --b inf", "--b: expected at least 0, got inf"),
        ("plan x --ranks 8 --cap 9 --a 1 --cost y", "--cost: expected a file alone, got --a too"),
        ("plan x --ranks 8 --cap 9 --a 0 --b 0", "expected one of them above 0"),
        ("compare --tokens-per-step 0", "--tokens-per-step: expected at least 1, got 0"),
        ("compare --steps 0", "--steps: expected at least 1, got 0"),
        ("compare --efficiency nan", "--efficiency: expected at least 0, got nan"),
        ("compare --efficiency 2", "--efficiency: expected a share of at most 1, got 2"),
        ("compare --network-gb-per-s 0", "--network-gb-per-s: expected more than 0, got 0"),
        ("compare --seed -1", "--seed: expected at least 0, got -1"),
    ],
)
def test_options_outside_their_range_are_wrong_usage(argv, told, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv.split())
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["demo", "--fast"], ["plan", "x", "--ranks", "eight"]])
def test_wrong_usage_is_status_2(argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
