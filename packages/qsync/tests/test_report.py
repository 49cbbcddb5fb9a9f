from pathlib import Path

import pytest

from qsync import diagnose
from qsync.diagnosis.advise import advise
from qsync.report import describe_advice, draw_waits
from shared.errors import ConfigError

ASSETS = Path(__file__).parent / "diagnosis/assets"


@pytest.fixture(scope="module")
def diagnosis():
    return diagnose([ASSETS / "rank0.json.gz", ASSETS / "rank1.json.gz"])


def test_picture_names_ranks_and_jobs(diagnosis, tmp_path):
    path = tmp_path / "new" / "waits.svg"
    draw_waits({"before": diagnosis, "after": diagnosis}, path)
    text = path.read_text()
    assert "<title>Who waits in a training step, by rank</title>" in text
    for words in ("before", "after", "rank 0", "rank 1", "waits", "transfers", "computes"):
        assert f"<!-- {words} -->" in text
    # Both ranks transfer, and only rank 0 waits for the slow one.
    assert text.count("fill: #868e96") == 2 * 2 + 1
    assert text.count("fill: #ffd8a8") == 2 * 1 + 1
    with pytest.raises(ConfigError, match="got none"):
        draw_waits({}, path)


def test_advice_is_listed_with_its_gain(diagnosis):
    advices = advise(diagnosis)
    lines = describe_advice(advices).splitlines()
    assert len(lines) == 1 + len(advices) > 1
    assert lines[1].startswith("  1. run ")
    assert f"{advices[0].gain:.2f} times as fast" in lines[1]
    assert describe_advice([]) == "Advice: no change gains 1 % of a step."
