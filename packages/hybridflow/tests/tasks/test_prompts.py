"""Prompts: what is read, in which order, and that a step's batch depends on nothing else."""

import itertools
import json
import logging
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.tasks.prompts import Prompts, prompt_batch
from hybridflow.tasks.tokenizers import ByteTokenizer, CharTokenizer
from shared.errors import ConfigError, DataError

BYTES = ByteTokenizer()
OPTIONS = {"batch_size": 2, "seed": 0, "max_prompt_tokens": 100}


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def texts(batch):
    pairs = zip(batch["prompts"], batch["prompt_lengths"].tolist(), strict=True)
    return [BYTES.decode(row[:length].tolist()) for row, length in pairs]


def test_a_batch_is_as_the_contract_says():
    batch = prompt_batch([[5, 6], [7], [8, 9, 10]], [4, 5, 6], name=["a", "b", "c"])
    assert batch["prompts"].tolist() == [[5, 6, 0], [7, 0, 0], [8, 9, 10]]
    assert batch["prompt_lengths"].tolist() == [2, 1, 3]
    assert batch["sample_ids"].tolist() == [4, 5, 6]
    assert batch["name"] == ["a", "b", "c"]
    columns = ("prompts", "prompt_lengths", "sample_ids")
    assert {batch[name].dtype for name in columns} == {torch.int64}


@given(num=st.integers(1, 9), size=st.integers(1, 12), seed=st.integers(-5, 2**70))
def test_every_prompt_comes_once_an_epoch(num, size, seed):
    prompts = Prompts(
        [f"p{k}" for k in range(num)], BYTES, **{**OPTIONS, "batch_size": size, "seed": seed}
    )
    steps = -(-3 * num // size)
    batches = list(prompts.batches(steps))
    stream = [text for batch in batches for text in texts(batch)]
    for epoch in range(3):
        assert sorted(stream[epoch * num : (epoch + 1) * num]) == [f"p{k}" for k in range(num)]
    ids = [number for batch in batches for number in batch["sample_ids"].tolist()]
    assert ids == list(range(steps * size))


def test_orders_differ_between_epochs_and_seeds():
    rows = [f"p{k}" for k in range(50)]
    one, other = (Prompts(rows, BYTES, **{**OPTIONS, "batch_size": 50, "seed": k}) for k in (1, 2))
    orders = [tuple(texts(source.batch(step))) for source in (one, other) for step in range(3)]
    assert len({*orders, tuple(rows)}) == 7
    plain = Prompts(rows, BYTES, **{**OPTIONS, "batch_size": 50}, shuffle=False)
    assert texts(plain.batch(0)) == texts(plain.batch(5)) == rows


def test_places_in_an_order_are_even():
    """Over many epochs each of three prompts comes first in a third: 4 standard deviations."""
    prompts = Prompts(["a", "b", "c"], BYTES, **{**OPTIONS, "batch_size": 3})
    firsts = [texts(batch)[0] for batch in prompts.batches(900)]
    for text in "abc":
        assert abs(firsts.count(text) - 300) < 4 * (900 * 2 / 9) ** 0.5


def test_a_run_resumes_by_its_step_alone():
    rows = [{"prompt": f"p{k}", "answer": k} for k in range(7)]
    whole = list(Prompts(rows, BYTES, **{**OPTIONS, "batch_size": 3}).batches(9))
    resumed = Prompts(rows, BYTES, **{**OPTIONS, "batch_size": 3})
    for step, batch in zip(range(5, 9), resumed.batches(4, start=5), strict=True):
        assert torch.equal(batch["prompts"], whole[step]["prompts"])
        assert torch.equal(batch["sample_ids"], whole[step]["sample_ids"])
        assert batch["answer"] == whole[step]["answer"] == [int(t[1:]) for t in texts(batch)]
    endless = list(itertools.islice(resumed, 9))
    assert [batch["answer"] for batch in endless] == [batch["answer"] for batch in whole]
    with pytest.raises(ConfigError, match="step"):
        resumed.batch(-1)


def test_json_lines_keep_their_other_columns(tmp_path):
    rows = [{"prompt": "a\u00e4", "answer": 1}, {"prompt": "b", "level": [1, 2]}]
    lines = [json.dumps(rows[0], ensure_ascii=False), "", json.dumps(rows[1])]
    prompts = Prompts(write(tmp_path / "x.jsonl", *lines), BYTES, **OPTIONS, shuffle=False)
    batch = prompts.batch(0)
    assert texts(batch) == batch["prompt"] == ["a\u00e4", "b"]
    assert batch["answer"] == [1, None]
    assert batch["level"] == [None, [1, 2]]
    assert len(prompts) == 2


def test_parquet_reads_as_json_lines_do(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"q": ["a", "b"], "n": [1, 2]}), tmp_path / "x.parquet")
    write(tmp_path / "x.jsonl", '{"q": "a", "n": 1}', '{"q": "b", "n": 2}')
    one, other = (
        Prompts(str(tmp_path / f"x.{kind}"), BYTES, column="q", **OPTIONS).batch(3)
        for kind in ("parquet", "jsonl")
    )
    assert texts(one) == texts(other)
    assert one["n"] == other["n"]
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    with pytest.raises(DataError, match=r"bad\.parquet: expected a Parquet file"):
        Prompts(tmp_path / "bad.parquet", BYTES, **OPTIONS)


def test_a_missing_pyarrow_is_told_with_its_cure(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        Prompts(tmp_path / "x.parquet", BYTES, **OPTIONS)


def test_long_prompts_are_left_out_and_counted(caplog):
    with caplog.at_level(logging.WARNING):
        prompts = Prompts(
            ["a" * n for n in range(1, 8)], BYTES, **{**OPTIONS, "max_prompt_tokens": 4}
        )
    assert (len(prompts), prompts.num_too_long, len(caplog.records)) == (4, 3, 1)
    assert "3 of 7 prompts have more than 4 tokens" in caplog.text
    assert max(len(text) for batch in prompts.batches(4) for text in texts(batch)) == 4


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (['{"prompt": "a"}', "", "{bad"], r"x\.jsonl:3: expected a JSON object on one line"),
        (['{"prompt": "a"}', "[1]"], r"x\.jsonl:2: expected a JSON object, got list"),
        (['{"text": "a", "n": 1}'], r"x\.jsonl:1: no column 'prompt'; there are text, n"),
        (['{"prompt": 3}'], r"x\.jsonl:1: expected a string or a list of messages, got 3"),
        (['{"prompt": ""}'], r"x\.jsonl:1: expected a prompt of at least one token"),
        (['{"prompt": "a", "group": 1}'], "column 'group' has a name that batches use"),
        (['{"prompt": [{"role": "user"}]}'], "needs a tokenizer with a chat template"),
        ([], r"x\.jsonl: expected prompts, the file is empty; check what wrote it"),
        ([json.dumps({"prompt": "a" * 101})], "has 1 rows, 1 of them too long"),
    ],
)
def test_files_that_can_not_be_used(tmp_path, lines, told):
    with pytest.raises(DataError, match=told):
        Prompts(write(tmp_path / "x.jsonl", *lines), BYTES, **OPTIONS)


def test_other_faults_of_sources(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match=r"x\.jsonl:1"):
        Prompts(tmp_path / "x.jsonl", BYTES, **OPTIONS)
    with pytest.raises(
        DataError, match=r"y.jsonl: expected prompts, there is nothing; check the path"
    ):
        Prompts(tmp_path / "y.jsonl", BYTES, **OPTIONS)
    with pytest.raises(ConfigError, match=r"expected \.jsonl or \.parquet, got '\.csv'"):
        Prompts(tmp_path / "y.csv", BYTES, **OPTIONS)
    with pytest.raises(DataError, match="row 1: character 'x'"):
        Prompts(["1", "x"], CharTokenizer("1"), **OPTIONS)
    with pytest.raises(ConfigError, match="batch_size"):
        Prompts(["1"], BYTES, **{**OPTIONS, "batch_size": 0})


def test_conversations_go_through_the_chat_template():
    class Chat:
        vocab_size, pad_token, end_token = BYTES.vocab_size, 0, 1
        encode, decode = BYTES.encode, BYTES.decode

        def encode_chat(self, messages):
            return self.encode("".join(f"{m['role']}:{m['content']};" for m in messages) + "model:")

    talk = [{"role": "user", "content": "hi"}]
    batch = Prompts([{"prompt": talk, "n": 1}, "plain"], Chat(), **OPTIONS, shuffle=False).batch(0)
    assert texts(batch) == ["user:hi;model:", "plain"]
    assert batch["prompt"] == [talk, "plain"]
    assert texts(Prompts([{"prompt": talk}], Chat(), **OPTIONS).batch(0)) == ["user:hi;model:"] * 2
