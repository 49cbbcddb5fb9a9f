import json

import numpy as np
import pytest

from lancet import METHODS
from lancet.cli import main
from shared.claims import faults, read_demo


def test_demo_makes_claims_the_tour_accepts(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    demo = read_demo(tmp_path)
    assert demo.package == "lancet"
    assert faults(demo) == []
    assert capsys.readouterr().err.count("lancet: ") == len(demo.claims)


def test_sum_prints_the_sum(capsys):
    assert main(["sum", "--start", "2", "--stop", "5"]) == 0
    assert capsys.readouterr().out == "9\n"
    assert main(["sum", "--start", "2", "--stop", "5", "--method", "loop", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"sum": 9, "method": "loop"}


def test_a_method_from_outside_is_in_the_help_and_taken(capsys):
    METHODS.add("none", lambda values, starts, stops: np.zeros(len(starts), np.int64), "always 0")
    try:
        with pytest.raises(SystemExit):
            main(["sum", "--help"])
        assert "{prefix,loop,none}" in capsys.readouterr().out
        assert main(["sum", "--start", "2", "--stop", "5", "--method", "none"]) == 0
        assert capsys.readouterr().out == "0\n"
    finally:
        METHODS.remove("none")


def test_bad_range_fails_with_status_1(capsys):
    assert main(["sum", "--start", "5", "--stop", "2"]) == 1
    assert "lancet: range 0: expected" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["demo", "--fast"], ["sum", "--method", "fast"]])
def test_wrong_usage_is_status_2(argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
