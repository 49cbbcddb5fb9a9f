import json
import math

import pytest

from shared.claims import Claim, faults, finish, pair_turns, read_demo, write_demo
from shared.errors import ConfigError, DataError

PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><title>One</title></svg>'


def claim(**changes):
    fields = {
        "name": "epoch time",
        "unit": "s",
        "ours": 2.0,
        "baseline": 9.0,
        "baseline_name": "exact",
        "higher_is_better": False,
        "correct": True,
        "detail": "same losses",
        "source": "adaqp demo",
    }
    return Claim(**(fields | changes))


def test_ratio_above_one_means_ours_is_better():
    assert claim().ratio == 4.5
    assert claim(ours=9.0, baseline=3.0, higher_is_better=True).ratio == 3.0
    assert claim(ours=0.0, baseline=0.0).ratio == 1.0
    assert claim(ours=0.0, baseline=1.0).ratio == math.inf
    assert claim(ratio=1.25).ratio == 1.25


@pytest.mark.parametrize("change", [{"name": " "}, {"baseline_name": ""}, {"kind": "guessed"}])
def test_a_claim_that_says_nothing_is_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        claim(**change)


def test_claims_survive_the_file(tmp_path):
    claims = [claim(), claim(name="rate", kind="simulated", ours=1.5)]
    path = write_demo(tmp_path / "new", "adaqp", claims, {"bits": {"layer0": [2, 4, 8]}})
    demo = read_demo(path)
    assert demo == read_demo(path.parent)
    assert demo.package == "adaqp"
    assert list(demo.claims) == claims
    assert demo.figures == {"bits": {"layer0": [2, 4, 8]}}
    assert [entry.name for entry in path.parent.iterdir()] == ["demo.json"]


def test_file_has_the_documented_shape(tmp_path):
    record = json.loads(write_demo(tmp_path, "adaqp", [claim()], {}).read_text())
    assert set(record) == {"package", "format", "claims", "figures"}
    assert record["format"] == 1
    assert record["claims"][0]["ratio"] == 4.5


def test_not_finite_ratio_survives_as_nan(tmp_path):
    read = read_demo(write_demo(tmp_path, "adaqp", [claim(ours=0.0)], {})).claims[0]
    assert math.isnan(read.ratio)
    assert read.ours == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ours": "2"}, "ours must be a number"),
        ({"baseline": True}, "baseline must be a number"),
        ({"correct": 1}, "correct must be true or false"),
        ({"unit": None}, "unit must be a text"),
        ({"extra": 1}, "unknown fields"),
    ],
)
def test_damaged_claim_is_refused(change, message):
    with pytest.raises(DataError, match=message):
        Claim.from_json(claim().to_json() | change)


def test_missing_field_is_named():
    record = claim().to_json()
    del record["correct"]
    with pytest.raises(DataError, match=r"missing \['correct'\]"):
        Claim.from_json(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "expected JSON"),
        ("[]", "expected format 1, got 'list'"),
        ('{"format": 2}', "expected format 1, got 2"),
        ('{"format": 1}', "expected package"),
    ],
)
def test_damaged_file_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "demo.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_demo(tmp_path)


@pytest.mark.parametrize("figure", [math.nan, object(), {1, 2}])
def test_figures_json_cannot_hold_are_refused(tmp_path, figure):
    with pytest.raises(DataError, match="tolist"):
        write_demo(tmp_path, "adaqp", [claim()], {"bad": figure})
    assert not (tmp_path / "demo.json").exists()


def found(tmp_path, claims, picture=PICTURE):
    if picture is not None:
        (tmp_path / "epoch.svg").write_text(picture)
    return faults(read_demo(write_demo(tmp_path, "adaqp", claims, {})))


def test_a_sound_demo_has_no_faults(tmp_path):
    assert found(tmp_path, [claim()] * 3) == []


def test_each_fault_is_named(tmp_path):
    assert "2 claims, expected at least 3" in found(tmp_path, [claim()] * 2)
    assert "claim 'x' is not correct: off" in found(
        tmp_path, [claim(), claim(), claim(name="x", correct=False, detail="off")]
    )
    assert "claim 'x': ratio is not a finite number" in found(
        tmp_path, [claim(), claim(), claim(name="x", ours=0.0)]
    )
    assert "picture epoch.svg is empty or no SVG" in found(tmp_path, [claim()] * 3, picture="")


def test_picture_without_words_is_a_fault(tmp_path):
    (fault,) = found(tmp_path, [claim()] * 3, picture=PICTURE.replace("title", "desc"))
    assert fault.startswith("picture epoch.svg has no <title>")


def test_missing_picture_is_a_fault(tmp_path):
    assert found(tmp_path, [claim()] * 3, picture=None) == [
        "no picture: expected at least one *.svg beside demo.json"
    ]


def test_finish_writes_prints_and_says_whether_all_was_correct(tmp_path, capsys):
    good, bad = claim(), claim(name="bytes", correct=False)
    assert finish(tmp_path, "adaqp", [good], {"curve": [1]})
    assert read_demo(tmp_path).claims == (good,)
    assert not finish(tmp_path, "adaqp", iter([good, bad]), {})
    assert read_demo(tmp_path).claims == (good, bad)
    told = capsys.readouterr()
    assert told.out == ""
    lines = told.err.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"adaqp: {good.name}: {good.ours:.4g} {good.unit} against")
    assert lines[1].endswith(f"{good.ratio:.2f}x")
    assert lines[2].endswith("NOT CORRECT")


def test_turns_are_compared_pair_by_pair():
    # Other programs make both ways five times slower in the second half.
    ours, baseline = [1.0, 1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 10.0, 11.0, 10.0]
    figures = pair_turns(ours, baseline)
    assert figures["ratio"] == 2.0
    assert figures["ratio_range"] == (2.0, 2.2)
    assert (figures["ours"], figures["baseline"]) == (5.0, 10.0)
    made = Claim(name="n", unit="s", baseline_name="b", correct=True, **figures)
    assert made.disputed_range is None
    assert Claim.from_json(made.to_json()) == made
    rates = pair_turns([4.0, 2.0], [2.0, 1.0], higher_is_better=True)
    assert (rates["ratio"], rates["ratio_range"]) == (2.0, (2.0, 2.0))
    assert rates["higher_is_better"]
    # The ratio of medians, 1.0, is no turn's: one way was slow in one turn, the other in another.
    assert pair_turns([1.0, 9.0, 1.0], [3.0, 27.0, 1.0])["ratio"] == 3.0


@pytest.mark.parametrize(("ours", "baseline"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [])])
def test_turns_without_a_partner_are_refused(ours, baseline):
    with pytest.raises(ConfigError, match="one figure of each way for every turn"):
        pair_turns(ours, baseline)


@pytest.mark.parametrize(
    ("turns", "is_shown"), [((1.0, 2.0), False), ((1.0, 2.1), True), ((0.0, 0.1), True)]
)
def test_a_ratio_whose_turns_disagree_is_shown_with_its_range(tmp_path, capsys, turns, is_shown):
    made = claim(ratio_range=turns)
    finish(tmp_path, "p", [made], {})
    assert (f"(turns {turns[0]:.2f} to {turns[1]:.2f})" in capsys.readouterr().err) == is_shown
    assert (made.disputed_range is not None) == is_shown
    (read,) = read_demo(tmp_path).claims
    assert read == made


def test_a_turn_of_no_time_has_an_endless_ratio(tmp_path):
    made = claim(**pair_turns([0.0, 1.0], [1.0, 1.0]) | {"ratio": 1.0})
    assert made.ratio_range == (1.0, math.inf)
    assert json.loads(json.dumps(made.to_json(), allow_nan=False))["ratio_range"] == [1.0, None]
    assert Claim.from_json(made.to_json()) == made


@pytest.mark.parametrize("turns", [[1.0], "ab", [1.0, "2"], [True, 2.0], {"low": 1}])
def test_a_damaged_range_is_refused(turns):
    with pytest.raises(DataError, match="ratio_range must be two numbers"):
        Claim.from_json(claim().to_json() | {"ratio_range": turns})
