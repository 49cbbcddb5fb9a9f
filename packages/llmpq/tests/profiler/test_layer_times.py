"""Measured profiles of a tiny model: that all is there, whatever the seconds are."""

import pytest
import torch

from llmpq.config import ModelSpec
from llmpq.profiler import layer_times
from llmpq.profiler.layer_times import choose_forms, measure_device, read_processor
from shared.errors import ConfigError

from ..runtime.tiny_models import make


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: make(family, folder / family) for family in ("llama", "opt", "bloom")}


@pytest.mark.parametrize("family", ["llama", "opt", "bloom"])
def test_a_tiny_model_is_measured(folders, family):
    said = []
    found = measure_device(
        folders[family], kind="here", bits=(4, 16), group_size=16, batches=(1, 2, 4),
        prompt_tokens=8, new_tokens=4, limit_s=1.0, on_progress=said.append,
    )  # fmt: skip
    assert said == ["4 bits", "16 bits", "embedding and head"]
    assert (found.kind, found.processor) == ("here", read_processor(torch.device("cpu")))
    assert found.model == ModelSpec.from_hf(folders[family]).fingerprint
    assert sorted(found.prefill) == sorted(found.decode) == [4, 16]
    for latency in (*found.prefill.values(), *found.decode.values(), found.head):
        assert len(latency.points) >= 3
    for batch, length in [(1, 1), (3, 8), (100, 1000)]:
        assert found.prefill[4].prefill_s(batch, length) > 0
        assert found.decode[16].decode_s(batch, length) > 0
    assert found.embed[0] >= 0
    assert found.embed[1] >= 0
    assert list(found.forms) == ["4"]
    assert found.forms["4"][0][0] == 1


@pytest.mark.parametrize(
    ("bits", "dtype", "may_round"),
    [(3, "float32", True), (4, "float32", True), (8, "float32", False), (8, "bfloat16", True)],
)
def test_8_bits_are_not_rounded_to_bfloat16_where_float32_was_chosen(
    bits, dtype, may_round, folders, monkeypatch
):
    def bfloat16_is_fastest(*, tokens, forms, **settings):
        return {count: {form: 1.0 - (form == "dense16") for form in forms} for count in tokens}

    monkeypatch.setattr(layer_times, "measure_forms", bfloat16_is_fastest)
    spec = ModelSpec.from_hf(folders["llama"])
    table = choose_forms(spec, bits, group_size=16, dtype=dtype)
    assert table == [[1, "dense16" if may_round else "packed"]]


def test_int8_is_chosen_where_it_is_fastest_and_allowed_and_never_otherwise(folders, monkeypatch):
    asked = []

    def int8_is_fastest_for_many(*, tokens, forms, **settings):
        asked.extend(forms)
        (count,) = tokens
        speed = {"packed": 1.0, "dense16": 2.0, "dense32": 2.0, "int8": 0.5 if count >= 64 else 3.0}
        return {count: {form: speed[form] for form in forms}}

    monkeypatch.setattr(layer_times, "measure_forms", int8_is_fastest_for_many)
    settings = {"group_size": 16, "dtype": "float32"}
    spec = ModelSpec.from_hf(folders["llama"])
    assert choose_forms(spec, 4, **settings) == [[1, "packed"]]
    assert "int8" not in asked
    for bits in (3, 4, 8):
        table = choose_forms(spec, bits, activations="int8", **settings)
        assert table == [[1, "packed"], [64, "int8"]]
    with pytest.raises(ConfigError, match="activations: expected one of float, int8, got 'fp8'"):
        choose_forms(spec, 4, activations="fp8", **settings)


@pytest.mark.slow
def test_forms_are_listed_by_growing_numbers_of_tokens(folders):
    table = choose_forms(ModelSpec.from_hf(folders["llama"]), 4, group_size=16, dtype="float32")
    assert [first for first, _ in table] == sorted({first for first, _ in table})


def test_an_unknown_width_is_refused(folders):
    with pytest.raises(ConfigError, match="got 5"):
        measure_device(folders["llama"], kind="here", bits=(5,))
