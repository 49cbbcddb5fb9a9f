"""Recipes: what comes with the package is valid, and mistakes are told by name."""

import json
import re

import pytest

from hybridflow.cli import main
from hybridflow.tasks.tokenizers import ByteTokenizer
from hybridflow.training.config import built_in, read_recipe
from shared.errors import ConfigError, DataError


@pytest.mark.parametrize("name", sorted(built_in()))
def test_built_in_recipes_are_valid(name):
    assert read_recipe(name).algorithm in name or name in ("reinforce-sort", "safe-sort")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stepz": "1"}, "stepz: there is no such key; did you mean 'steps'"),
        ({"optimizer.lrr": "1"}, "optimizer.lrr: there is no such key; did you mean 'lr'"),
        ({"algorithm": "gprp"}, "did you mean 'grpo'"),
        ({"steps": "many"}, "steps: expected int, got 'many'"),
        ({"steps": "true"}, "steps: expected int, got True"),
        ({"optimizer": "3"}, "optimizer: expected keys and values, got 3"),
        ({"num_samples": "1"}, "num_samples: grpo compares the responses"),
        ({"batch_size": "9"}, "expected a multiple of num_samples"),
        ({"placement.engine": "threads"}, "placement.engine: expected one of inline, local, ray"),
        ({"steps": "0"}, "steps: expected 1 or more"),
        ({"cache_bytes": "-1"}, "cache_bytes: expected 0 or more, got -1"),
        ({"algorithm.x": "1"}, "algorithm.x: algorithm is 'grpo', which has no keys in it"),
        ({"placement.pools": "{a: 1"}, "placement.pools: expected YAML"),
        (
            {"algorithm": "remax", "num_samples": "1", "beta": "0.1"},
            "beta: remax has no KL penalty",
        ),
        ({"cost": "a.py:b"}, "cost: grpo has none, only safe-rlhf has"),
        (
            {"per_token": "true", "reward": "a.py:b"},
            "own reward, which can reward tokens, got reward ",
        ),
        ({"per_token": "true", "task": "a.jsonl"}, "reward tokens, got prompts of 'a.jsonl'"),
        ({"max_prompt_tokens": "5"}, "max_prompt_tokens: it limits prompts of a file"),
        ({"column": "question"}, "column: it names prompts of a file, and digit-sort:2 is a task"),
    ],
)
def test_mistakes_are_told(changes, told):
    with pytest.raises(ConfigError, match=told.replace("(", r"\(")):
        read_recipe("grpo-sort", changes)


def test_values_are_read_as_yaml():
    recipe = read_recipe("grpo-sort", {"optimizer.lr": "1e-4", "beta": "0", "per_token": "true"})
    assert (recipe.optimizer.lr, recipe.beta, recipe.per_token) == (1e-4, 0.0, True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("steps: [", "expected YAML"),
        ("- a", "expected keys and values"),
        ("steps: 3", "algorithm: expected a value, got none"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, text, told):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_recipe(path)


def test_a_name_that_is_none_lists_those_that_are():
    told = "grpo-srt: expected a recipe as YAML, or one of .*, grpo-sort, .*, there is nothing"
    with pytest.raises(DataError, match=told):
        read_recipe("grpo-srt")


def test_train_writes_metrics_and_says_how_it_went(tmp_path, capsys):
    arguments = ["train", "grpo-sort", "--set", "steps=3", "batch_size=32"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "right answers" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(0 <= line["reward"] <= 1 and line["seconds"] > 0 for line in lines)


def test_a_recipe_bounds_the_memory_of_generation(caplog, tmp_path):
    """Waves say what they take, and their responses are those of one wave."""
    rewards = []
    for changes in ((), ("cache_bytes=60_000",)):
        with caplog.at_level("INFO", logger="hybridflow"):
            out = tmp_path / str(len(rewards))
            settings = ["--set", "steps=2", "batch_size=32", *changes, "--out", str(out)]
            assert main(["train", "grpo-sort", *settings]) == 0
        told = [r.getMessage() for r in caplog.records if "waves of up to" in r.getMessage()]
        assert bool(told) == bool(changes)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        rewards.append([json.loads(line)["reward"] for line in lines])
    assert rewards[0] == pytest.approx(rewards[1], abs=0.05)


def test_users_own_prompts_and_reward(tmp_path, capsys):
    rows = [{"prompt": f"say {k}", "answer": str(k)} for k in range(8)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    reward = tmp_path / "mine.py"
    reward.write_text(
        "from __future__ import annotations\nimport dataclasses\nimport hybridflow as hy\n\n\n"
        "@dataclasses.dataclass\nclass Kept:\n    x: int = 0\n\n\n"
        "def plain(sample, text):\n    return 0.0\n\n\n@hy.reward\ndef score(sample, text):\n"
        "    return float(sample['answer'] in text)\n"
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"algorithm: rloo\ntask: {prompts}\nreward: {reward}:score\nnum_samples: 2\n"
        "batch_size: 8\nmax_new_tokens: 5\nsteps: 2\n"
    )
    assert main(["train", str(recipe), "--out", str(tmp_path / "out")]) == 0
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    assert main(["train", str(recipe), "--set", f"reward={reward}:scor"]) == 1
    assert "marked with @hybridflow.reward, got none" in capsys.readouterr().err
    assert main(["train", str(recipe), "--set", f"reward={reward}:plain"]) == 1
    assert "marked with @hybridflow.reward, got a function" in capsys.readouterr().err
    assert main(["train", str(recipe), "--every", "0"]) == 1
    assert main(["train", str(recipe), "--set", "reward="]) == 1


def rewards_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    told = map(json.loads, lines)
    return {line["step"]: (line["reward"], line["loss"], line["grad_norm"]) for line in told}


def test_an_interrupted_run_goes_on_to_the_same_end(tmp_path, capsys):
    arguments = ["train", "ppo-sort", "--set", "steps=4", "batch_size=16"]
    kept = ["--checkpoint", str(tmp_path / "kept"), "--out", str(tmp_path / "parts")]
    constant = ["optimizer.schedule=constant"]
    whole = [*arguments, *constant, "--out", str(tmp_path / "constant")]
    assert main(whole) == 0
    short = [text.replace("steps=4", "steps=2") for text in arguments]
    assert main([*short, *constant, *kept]) == 0
    capsys.readouterr()
    assert main([*arguments, *constant, *kept]) == 0
    told = capsys.readouterr().err
    assert f"hybridflow: resumed from step 2 of {tmp_path}/kept\n" in told
    assert rewards_of(tmp_path / "parts") == rewards_of(tmp_path / "constant")
    assert main([*arguments, "optimizer.lr=1", *kept]) == 1
    out = ["--checkpoint", str(tmp_path / "kept"), "--out", str(tmp_path / "model")]
    changes = [*arguments[2:], *constant]
    assert main(["export", "ppo-sort", *changes, *out]) == 0
    assert (tmp_path / "model" / "config.json").is_file()
    # The folder is a model of the next run, of the same task.
    begun = [f"model={tmp_path}/model", "steps=1"]
    assert main(["train", "ppo-sort", "--set", "batch_size=16", *begun]) == 0
    # Without the tokenizer that was exported with it nobody knows what its tokens are.
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say 1"}\n')
    begun += [f"task={tmp_path}/prompts.jsonl", "max_new_tokens=2"]
    capsys.readouterr()
    assert main(["train", "grpo-sort", "--set", *begun]) == 1
    assert capsys.readouterr().err.strip() == (
        f"hybridflow: model: expected a tokenizer beside the weights in '{tmp_path}/model', got none "
        "of tokenizer_config.json, tokenizer.json, tokenizer.model; copy the tokenizer's files there, "
        "or train on a task"
    )


@pytest.mark.parametrize(
    "command", [["train"], ["bench"], ["export", "--checkpoint", "a", "--out", "b"]]
)
def test_a_model_that_is_not_there_is_one_sentence(command, tmp_path, capsys):
    model = ["--set", f"model={tmp_path}/nowhere"]
    assert main([command[0], "grpo-sort", *command[1:], *model]) == 1
    assert capsys.readouterr().err == (
        f"hybridflow: {tmp_path}/nowhere: expected a model's folder with config.json, or config:NAME "
        "for one of tiny-llama, small-llama, there is nothing; give a folder that save_pretrained or "
        "an export wrote, as nothing is downloaded\n"
    )


def test_a_full_disk_is_one_sentence(small_disk, capsys):
    folder = small_disk(65_536) / "run1"
    arguments = ["train", "grpo-sort", "--set", "steps=1", "batch_size=16"]
    assert main([*arguments, "--checkpoint", str(folder)]) == 1
    told = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("hybridflow: ")
    ]
    assert len(told) == 1
    assert re.fullmatch(
        rf"hybridflow: {folder}/step-000001: expected room on the disk for what is written there, got "
        r"[\d,]+ bytes free; free some, or write to another disk",
        told[0],
    )


@pytest.mark.parametrize("name", sorted(built_in()))
def test_a_recipe_that_is_shown_is_that_recipe(name, tmp_path, capsys):
    assert main(["recipe", "show", name, "--set", "optimizer.lr=2e-4"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(text)
    recipe = read_recipe(tmp_path / "mine.yaml")
    assert recipe == read_recipe(name, {"optimizer.lr": "2e-4"})
    assert "max_prompt_tokens: 1024" in text


def test_built_in_recipes_are_listed_with_what_they_are_for(capsys):
    assert main(["recipe", "list"]) == 0
    told = capsys.readouterr().out
    assert "grpo-sort: GRPO, eight responses a prompt, no critic." in told.splitlines()
    assert len(told.splitlines()) == len(built_in())
    assert main(["recipe", "show", "grpo-srt"]) == 1
    assert "or one of cispo-sort, dr-grpo-sort" in capsys.readouterr().err


def write_own_recipe(folder, **keys):
    """A recipe in a folder with prompts and a reward of its own."""
    folder.mkdir()
    rows = [{"question": f"say {k}", "answer": str(k)} for k in range(8)]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "judge.py").write_text(
        "import hybridflow as hy\n\n\n@hy.reward\ndef score(sample, text):\n"
        "    return float(sample['answer'] in text)\n"
    )
    tree = {
        "algorithm": "rloo",
        "task": "asked.jsonl",
        "column": "question",
        "steps": 2,
        "reward": "judge.py:score",
        "num_samples": 2,
        "batch_size": 8,
        "max_new_tokens": 5,
    } | keys
    (folder / "recipe.yaml").write_text("\n".join(f"{key}: {value}" for key, value in tree.items()))
    return str(folder / "recipe.yaml")


def test_files_are_looked_for_beside_the_recipe_first(tmp_path, monkeypatch):
    recipe = write_own_recipe(tmp_path / "mine")
    (tmp_path / "asked.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    found = read_recipe("mine/recipe.yaml")
    assert found.task == str(tmp_path / "mine" / "asked.jsonl")
    assert found.reward == f"{tmp_path}/mine/judge.py:score"
    assert found.model == "config:tiny-llama"
    assert read_recipe(recipe, {"task": "asked.jsonl"}).task == "asked.jsonl"
    (tmp_path / "mine" / "asked.jsonl").unlink()
    assert read_recipe(recipe).task == "asked.jsonl"
    module = write_own_recipe(tmp_path / "other", reward="hybridflow.tasks.costs:leading_nine")
    assert read_recipe(module).reward == "hybridflow.tasks.costs:leading_nine"


def test_what_is_exported_is_the_next_recipes_model(tmp_path):
    transformers = pytest.importorskip("transformers", reason="reads the exported tokenizer")
    recipe, kept = write_own_recipe(tmp_path / "first"), str(tmp_path / "kept")
    assert main(["train", recipe, "--checkpoint", kept]) == 0
    model = tmp_path / "next" / "model"
    second = write_own_recipe(tmp_path / "next", model="model")
    assert main(["export", recipe, "--checkpoint", kept, "--out", str(model)]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert tokenizer.encode("say 5") == ByteTokenizer().encode("say 5")
    assert read_recipe(second).model == str(model)
    assert main(["train", second, "--out", str(tmp_path / "out")]) == 0
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
