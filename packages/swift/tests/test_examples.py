"""The scripts and blocks that users start from run as they are, ranks and spares included."""

import re
from pathlib import Path

import launching
import pytest

HOME = Path(__file__).parents[1]
EXAMPLES = HOME / "examples"
OPTIONS = ("-n", "2", "--spares", "1")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Does runs whose ranks find a large import made."""
    found = launching.Driver(
        tmp_path_factory.mktemp("driver"), "transformers.models.llama.modeling_llama"
    )
    yield found
    found.close()


def losses_of(printed):
    found = re.findall(r"^step (\d+): loss ([\d.]+)$", printed, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["whole", "sharded"])
def test_replicas_learn_a_text_of_ones_own(driver, tmp_path, number):
    text, example = tmp_path / "text.txt", EXAMPLES / "train_replicas.py"
    text.write_text("one two three four " * 200)
    said = re.findall(r"^meshyard-swift run (.*)", example.read_text(), re.MULTILINE)[number]
    words = said.replace("train_replicas.py", str(example)).replace("[TEXT_FILE]", str(text))
    losses = losses_of(driver.run(tmp_path, *words.split()))
    assert list(losses) == [0, 20, 40]
    assert losses[40] < losses[0] - 0.5


@pytest.mark.slow
def test_a_table_of_ones_own_is_learnt_and_resumed_to_the_same_losses(driver, tmp_path):
    rows = [f"{at % 7 / 7},{at % 5 / 5},{at % 7 / 7 - at % 5 / 5}" for at in range(60)]
    table = tmp_path / "rows.csv"
    table.write_text("\n".join(["a,b,target", *rows]) + "\n")

    def train(folder, *more):
        script = EXAMPLES / "train_on_your_table.py"
        return driver.run(tmp_path, *OPTIONS, script, table, "--folder", tmp_path / folder, *more)

    whole = losses_of(train("whole"))
    first, rest = train("parts", "--steps", "40"), train("parts")
    assert "starting after step 0\n" in first
    assert "starting after step 40\n" in rest
    assert losses_of(first) | losses_of(rest) == whole
    assert list(whole) == [20, 40, 60]
    assert whole[60] < 0.1, "a constant guess loses the targets' variance, about 0.16"


def test_every_example_is_tested():
    text = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if path.name not in text] == []


@pytest.mark.slow
def test_the_readmes_script_trains(driver, tmp_path):
    (block,) = re.findall(
        r"^```py\n(.*?)^```", (HOME / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    script = tmp_path / "train.py"
    assert block.count("until=100") == 1
    script.write_text(block.replace("until=100", "until=50"))
    driver.run(tmp_path, *OPTIONS, script)
    assert list((tmp_path / "checkpoints").iterdir())
