"""Files of answers: in waves, sampled alike under every plan, and continued after an interruption."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmpq.planner.plan import Plan, Stage
from llmpq.runtime.answer_file import AnswerFile
from llmpq.runtime.answers import Request, answer, digest, find_unanswered
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
        (replace(plan, group_size=8), SETTINGS),
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


def test_answers_are_bound_to_what_they_depend_on(model, tmp_path):
    plan = plan_of([], [0], 1, 1)
    codes = []
    for number in range(2):
        codes.append(tmp_path / f"{number}.safetensors")
        save_file({"a.codes": torch.full((2,), number)}, codes[-1])
    tuned = shutil.copytree(model, tmp_path / "tuned")
    tensors = load_file(tuned / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    eager = shutil.copytree(model, tmp_path / "eager")
    config = json.loads((eager / "config.json").read_text())
    (eager / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    int8 = {"0": {"4": [[1, "int8"]]}}
    others = [
        (replace(plan, group_size=32), model), (replace(plan, group_size=-1), model),
        (replace(plan, dtype="bfloat16"), model), (replace(plan, forms=int8), model),
        *((replace(plan, method="gptq", codes=str(path)), model) for path in codes),
        (plan, tuned), (plan, eager),
    ]  # fmt: skip
    digests = [digest(one, folder, max_new_tokens=6) for one, folder in [(plan, model), *others]]
    digests.append(digest(plan, model, max_new_tokens=7))
    assert len(set(digests)) == len(digests) == 10
    split = replace(plan_of([2], [1, 0], 2, 4), forms={"0": {"4": [[1, "packed"]]}})
    copy = shutil.copytree(model, tmp_path / "copy")
    assert digest(split, copy, max_new_tokens=6) == digests[0], "stages and places do not count"


HOLD = """
import sys, time
from llmpq.runtime.answer_file import AnswerFile
with AnswerFile(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_one_run_writes_a_file_and_a_killed_one_blocks_nobody(tmp_path):
    path, asked = tmp_path / "answers.jsonl", Request("a", 0, (3, 4))
    other = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"locked\n"
    with pytest.raises(DataError, match="expected a file that no other run writes"):
        AnswerFile(path).__enter__()
    other.kill()
    other.wait()
    file = AnswerFile(path)
    with file, file:
        file.write([asked], [[5, 2]], "x", None)
    assert find_unanswered([asked], path, "x") == []
    with AnswerFile(tmp_path / "empty.jsonl"):
        pass
    assert not (tmp_path / "empty.jsonl").exists(), "what holds nothing is removed"
    with AnswerFile("/dev/null") as nowhere:
        nowhere.write([asked], [[5]], "x", None)


class Filling(io.FileIO):
    """A raw file that takes some bytes at a time, as a disk does that fills up."""

    def write(self, data):
        return super().write(bytes(data)[:7])


def test_what_a_filling_disk_takes_in_parts_is_written_whole(tmp_path, monkeypatch):
    path, asked = tmp_path / "answers.jsonl", Request("a", 0, (3, 4))
    monkeypatch.setattr(
        "llmpq.runtime.answer_file.open",
        lambda path, mode, buffering: Filling(path, mode),
        raising=False,
    )
    with AnswerFile(path) as file:
        file.write([asked], [[5, 2]], "x", None)
    assert find_unanswered([asked], path, "x") == []


@pytest.mark.slow
def test_a_long_prompt_pads_no_others_and_answers_stay(model, three, tmp_path):
    mixed = [*requests(8), Request("long", 8, tuple(range(3, 103)))]
    results = three.run(
        answers_of, plan_of([2], [0, 1], 2, 4), model, tmp_path / "a.jsonl", mixed, 9, SETTINGS
    ).results
    assert results[0] == (9, [1, 8])
    alone = three.run(
        answers_of, plan_of([2], [0, 1], 2, 4), model, tmp_path / "b.jsonl", mixed, 1, SETTINGS
    ).results
    assert alone[0][0] == 9
    assert read(tmp_path / "a.jsonl") == read(tmp_path / "b.jsonl")
