import json

import pytest

from heta.config import TrainConfig, read_recipe
from shared.errors import ConfigError, DataError


def test_settings_come_back_from_json():
    config = TrainConfig(epochs=3, fanouts=(4, -1), cache="2MB", batch_size=9)
    assert TrainConfig.from_mapping(json.loads(config.to_json()), "run.json") == config


def test_a_recipe_stands_below_what_is_given_beside_it(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("epochs: 3\nlr: 1e-3\nfanouts: [5, 5]\nbatch_size: null\n")
    config = read_recipe(path, {"epochs": 4})
    assert config == TrainConfig(epochs=4, lr=1e-3, fanouts=(5, 5))
    assert read_recipe(None, {}) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("epochz: 3", "got 'epochz'; did you mean 'epochs'?"),
        ("epochs: 2.5", "epochs: expected a whole number, got 2.5"),
        ("epochs: true", "epochs: expected a whole number, got True"),
        ("epochs: 0", "epochs: expected 1 or more, got 0"),
        ("lr: fast", "lr: expected a number, got 'fast'"),
        ("lr: true", "lr: expected a number, got True"),
        ("lr: -1", "lr: expected a number above 0, got -1.0"),
        ("row_lr: .inf", "row_lr: expected a number above 0, got inf"),
        ("fanouts: 3", "fanouts: expected a list of whole numbers, got 3"),
        ("fanouts: [1, 2.5]", "fanouts: expected a list of whole numbers"),
        ("model: 3", "model: expected a text, got 3"),
        ("model: rgnc", "did you mean 'rgcn'?"),
        pytest.param(
            "wire: int4",
            "wire: expected one of float32, bfloat16, int8, got 'int4'",
            marks=pytest.mark.unchecked,
        ),
        pytest.param(
            "row_rule: sgd",
            "row_rule: expected one of adam, adagrad, got 'sgd'",
            marks=pytest.mark.unchecked,
        ),
        ("cache: much", "expected a size"),
        ("- 3", "expected settings by name"),
        ("a: [", "expected a recipe as YAML"),
    ],
)
def test_wrong_settings_are_refused(text, sentence, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(path, {})
    assert sentence in str(caught.value)


def test_an_empty_recipe_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("")
    with pytest.raises(DataError, match="the file is empty"):
        read_recipe(path, {})
