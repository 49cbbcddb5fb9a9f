import pytest

from hybridflow.cli import main
from shared.claims import faults, read_demo


def test_demo_makes_claims_the_tour_accepts(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    demo = read_demo(tmp_path)
    assert demo.package == "hybridflow"
    assert faults(demo) == []
    assert capsys.readouterr().out.count("\n") == len(demo.claims)


def test_sum_prints_the_sum(capsys):
    assert main(["sum", "--start", "2", "--stop", "5"]) == 0
    assert capsys.readouterr().out == "9\n"


def test_bad_range_fails_with_status_1(capsys):
    assert main(["sum", "--start", "5", "--stop", "2"]) == 1
    assert "range 0: expected" in capsys.readouterr().err


def test_unknown_flag_is_a_usage_error():
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--fast"])
    assert caught.value.code == 2
