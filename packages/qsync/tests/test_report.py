from pathlib import Path

from qsync import diagnose
from qsync.diagnosis.advise import advise
from qsync.report import describe_advice, draw_waits

ASSETS = Path(__file__).parent / "diagnosis/assets"


def test_the_picture_has_a_bar_of_each_row(tmp_path):
    rows = {"rank 0, float32": (0.5, 0.3), "rank 0, planned": (0.5, 0.1)}
    draw_waits(rows, "A step of two ranks", tmp_path / "new" / "waits.svg")
    text = (tmp_path / "new" / "waits.svg").read_text()
    assert "<title>A step of two ranks</title>" in text
    for words in ("rank 0, float32", "rank 0, planned", "computes", "waits", "300", "100"):
        assert f"<!-- {words} -->" in text


def test_advice_is_listed_with_its_gain():
    advices = advise(diagnose([ASSETS / "rank0.json.gz", ASSETS / "rank1.json.gz"]))
    lines = describe_advice(advices).splitlines()
    assert len(lines) == 1 + len(advices) > 1
    assert lines[1].startswith("  1. run ")
    assert f"{advices[0].gain:.2f} times as fast" in lines[1]
    assert describe_advice([]) == "Advice: no change gains 1 % of a step."
