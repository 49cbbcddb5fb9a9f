"""Files of answers: in waves, sampled alike under every plan, and continued after an interruption."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch

from llmpq.planner.plan import Plan, Stage
from llmpq.runtime.answers import Request, answer, find_unanswered
from llmpq.runtime.pipeline import Pipeline
from shared.comms import Group, RankPool
from shared.errors import CommError, DataError, RankFailure

from .tiny_models import make


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("answers") / "llama")


@pytest.fixture(scope="module")
def three():
    with RankPool(3) as pool:
        yield pool


def requests(num=11):
    torch.manual_seed(3)
    return [
        Request(f"q{k}", k, tuple(torch.randint(3, 131, (2 + k * 5 % 9,)).tolist()))
        for k in range(num)
    ]


def plan_of(cuts, ranks, prefill_size, decode_size):
    bounds = [0, *cuts, 5]
    stages = tuple(
        Stage(rank=rank, layers=(bounds[k], bounds[k + 1])) for k, rank in enumerate(ranks)
    )
    return Plan(
        stages=stages, bits=(4, 16, 8, 3, 4), group_size=16,
        prefill_size=prefill_size, decode_size=decode_size,
    )  # fmt: skip


def answers_of(plan, model, out, asked, wave_size, settings, dying_wave=None):
    with Pipeline(plan, model) as pipe:
        seen = []

        def on_answered(count):
            seen.append(count)

        if dying_wave is not None and Group.world().rank == 1:
            generate, calls = pipe.generate, []

            def breaking(*args, **options):
                calls.append(1)
                if len(calls) == dying_wave:
                    os.kill(os.getpid(), signal.SIGKILL)
                return generate(*args, **options)

            pipe.generate = breaking
        count = answer(
            pipe, asked, out, wave_size=wave_size, max_new_tokens=6, on_answered=on_answered,
            **settings,
        )  # fmt: skip
        return count, seen


def refused(*arguments):
    with pytest.raises((DataError, CommError)) as told:
        answers_of(*arguments)
    return str(told.value)


def read(path):
    return {r["id"]: r["token_ids"] for r in map(json.loads, path.read_text().splitlines())}


SETTINGS = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "eos_token_id": 2}


def test_draws_are_the_same_under_any_plan(model, three, tmp_path):
    found = []
    for number, (plan, wave) in enumerate(
        [
            (plan_of([], [0], 1, 1), 1),
            (plan_of([2], [0, 1], 2, 4), 11),
            (plan_of([1, 3], [2, 0, 1], 1, 2), 5),
        ]
    ):
        out = tmp_path / f"{number}.jsonl"
        results = three.run(answers_of, plan, model, out, requests(), wave, SETTINGS).results
        assert results[0][0] == 11
        assert sum(results[0][1]) == 11
        assert results[1][1] == []
        found.append(read(out))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 11
    assert len({tuple(ids) for ids in found[0].values()}) > 5


def test_a_run_goes_on_with_what_is_not_answered(model, three, tmp_path):
    plan, out = plan_of([2], [0, 1], 2, 2), tmp_path / "answers.jsonl"
    three.run(answers_of, plan, model, tmp_path / "whole.jsonl", requests(), 4, SETTINGS)
    with RankPool(2) as pool, pytest.raises(RankFailure, match="rank 1"):
        pool.run(answers_of, plan, model, out, requests(), 4, SETTINGS, 2)
    assert len(read(out)) == 4
    with out.open("a") as file:
        file.write('{"id": "q9", "tok')  # killed in the midst of a line
    count, _ = three.run(answers_of, plan, model, out, requests(), 4, SETTINGS).results[0]
    assert count == 7
    assert read(out) == read(tmp_path / "whole.jsonl")
    assert three.run(answers_of, plan, model, out, requests(), 4, SETTINGS).results[0][0] == 0
    for other, changed in (
        (plan, {**SETTINGS, "seed": 6}), (replace(plan, bits=(4,) * 5), SETTINGS),
    ):  # fmt: skip
        told = three.run(refused, other, model, out, requests(), 4, changed).results
        assert all("made under others" in text for text in told)


def test_another_file_is_refused(tmp_path):
    asked = [Request("a", 0, (3, 4)), Request("b", 1, (5,))]
    assert find_unanswered(asked, tmp_path / "none") == asked
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n')
    with pytest.raises(DataError, match=r"prompts.jsonl:1: expected an answer"):
        find_unanswered(asked, path)


@pytest.mark.parametrize(
    "text",
    [b"my notes, without an end of line", b'"a prompt"\n"another one"', b"\xff\xfe\n", b"{}"],
)
def test_a_file_that_holds_something_else_is_left_as_it_is(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    with pytest.raises(DataError, match=r"notes.txt.*give another --out"):
        find_unanswered([Request("a", 0, (3, 4))], path)
    assert path.read_bytes() == text


def test_answers_to_other_prompts_are_not_taken_for_these(tmp_path):
    asked = [Request("a", 0, (3, 4)), Request("b", 1, (5,))]
    path = tmp_path / "answers.jsonl"
    record = {
        "id": "a", "prompt_hash": asked[0].prompt_hash, "settings": "x", "token_ids": [1],
        "answer": "\u2028",
    }  # fmt: skip
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n")
    assert find_unanswered(asked, path) == asked[1:]
    assert find_unanswered(asked, path, "x") == asked[1:]
    with pytest.raises(
        DataError, match=r"answers.jsonl:1: .*made under others; give another --out"
    ):
        find_unanswered(asked, path, "y")
    with pytest.raises(DataError, match="another prompt of id 'a'; give another --out"):
        find_unanswered([Request("a", 0, (3, 5))], path)
