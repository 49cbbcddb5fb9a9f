"""Rules of generation configs, beside transformers' own `generate` of each prompt alone."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmpq.planner.plan import Plan, Stage
from llmpq.runtime.answers import digest, pad_left
from llmpq.runtime.generation import read_rules
from llmpq.runtime.pipeline import Pipeline
from shared.comms import RankPool
from shared.errors import ConfigError

from .tiny_models import make

TEXTS = [[5, 9, 33, 7], [8, 100], [3] * 9]
RULES = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 1},
    {"suppress_tokens": list(range(3, 70))},
    {"begin_suppress_tokens": list(range(3, 70))},
    {"bad_words_ids": [[token] for token in range(3, 70)]},
    {"forced_eos_token_id": 2},
    {"min_new_tokens": 5, "sequence_bias": [[[2], 9.0]]},
    {"exponential_decay_length_penalty": [2, 3.0]},
    {"encoder_repetition_penalty": 3.0},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [9]},
]
PLAN = Plan(stages=(Stage(rank=0, layers=(0, 5)),), bits=(16,) * 5, prefill_size=2, decode_size=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("generation") / "llama")


def set_fields(model, **fields):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **fields}))


def answers_of(model, rules):
    """Answers of one pipeline after another, a set of rules each."""
    found = []
    for fields in rules:
        set_fields(model, **fields)
        with Pipeline(PLAN, model) as pipe:
            ids, mask = pad_left(TEXTS)
            found.append(pipe.generate(ids, mask, max_new_tokens=6, eos_token_id=2).tolist())
    return found


def test_against_transformers_generate(model):
    with RankPool(1) as pool:
        plain, *found = pool.run(answers_of, model, [{}, *RULES]).results[0]
    num_changed = 0
    for fields, answers in zip(RULES, found, strict=True):
        set_fields(model, **fields)
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for text, answer in zip(TEXTS, answers, strict=True):
            told = whole.generate(
                torch.tensor([text]), max_new_tokens=6, do_sample=False, pad_token_id=0
            )[0, len(text) :].tolist()
            assert (answer + [0] * 6)[:6] == (told + [0] * 6)[:6], fields
        num_changed += answers != plain
    assert num_changed >= len(RULES) - 1


def test_what_is_not_taken_is_named_once(model, caplog):
    set_fields(model, do_sample=True, temperature=0.6, top_k=50, num_beams=4, stop_strings=["x"])
    assert not read_rules(model)
    read_rules(model)
    (record,) = caplog.records
    told = record.getMessage()
    assert "do_sample=True, temperature=0.6, num_beams=4, stop_strings=['x'], which is not" in told
    caplog.clear()
    set_fields(model, max_length=20, temperature=1.0, do_sample=False, repetition_penalty=1.0)
    assert not read_rules(model)
    assert not caplog.records


def processors(model, prompt, ends, **fields):
    set_fields(model, **fields)
    (found,) = read_rules(model).start([torch.tensor(prompt)], 4, ends)
    return found


def test_rules_apply_in_the_order_of_transformers(model):
    rules = {"repetition_penalty": 2.0, "sequence_bias": [[[3], 2.0]]}
    logits = torch.ones(1, 8)
    changed = processors(model, [3], [2], **rules)(torch.tensor([[3]]), logits)
    assert changed[0, 3] == (1 + 2) / 2, "the bias comes before the penalty"


def test_rules_on_the_end_need_one(model):
    rules = {"min_new_tokens": 3, "min_length": 9, "exponential_decay_length_penalty": [2, 3.0]}
    assert len(processors(model, [3, 4], [2], **rules)) == 3
    assert not processors(model, [3, 4], [], **rules)


@pytest.mark.parametrize(("prompt", "first"), [([3], 2), ([3, 4], 2), ([3, 4, 5], 3)])
def test_a_forced_first_token_is_not_suppressed(model, prompt, first):
    rules = {"begin_suppress_tokens": [5], "forced_bos_token_id": 5}
    found = processors(model, prompt, [2], **rules)
    suppressed = [processor.begin_index for processor in found if hasattr(processor, "begin_index")]
    assert suppressed == [first]


def test_a_wrong_value_is_told_before_anything_is_loaded(model):
    set_fields(model, repetition_penalty=-1.0)
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: .*'repetition_penalty': -1\.0"
    ):
        read_rules(model)
    (model / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json: expected a generation config"):
        read_rules(model)


def test_answers_under_other_rules_have_another_digest(model):
    digests = set()
    for fields in ({}, {"repetition_penalty": 1.2}, {"repetition_penalty": 1.3}):
        set_fields(model, **fields)
        digests.add(digest(PLAN, model, max_new_tokens=4, seed=0))
    assert len(digests) == 3
