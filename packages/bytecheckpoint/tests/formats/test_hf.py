"""Folders of safetensors files are read in place, and written as transformers reads them."""

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model

import bytecheckpoint as bcp
from bytecheckpoint.formats.hf import INDEX_NAME
from bytecheckpoint.tools.convert import convert
from bytecheckpoint.tools.writers.hf import write_hf
from bytecheckpoint.tools.writers.slabs import cut_slabs
from shared.errors import DataError
from shared.topology.boxes import Box


def weights():
    draw = torch.Generator().manual_seed(2)
    return {
        "model.embed.weight": torch.randn(50, 8, generator=draw).to(torch.bfloat16),
        "model.layers.0.weight": torch.randn(8, 8, generator=draw),
        "model.layers.1.weight": torch.randn(8, 8, generator=draw),
        "model.scale": torch.tensor(0.5),
        "model.none": torch.empty(0, 4),
        "lm_head.weight": torch.randn(50, 8, generator=draw).to(torch.float8_e5m2),
    }


@pytest.fixture
def repository(tmp_path):
    """A folder in the layout of save_pretrained, in two files."""
    folder = tmp_path / "repository"
    folder.mkdir()
    names = list(weights())
    weight_map = {}
    for at, part in enumerate((names[:3], names[3:]), 1):
        file = f"model-{at:05d}-of-00002.safetensors"
        save_file({name: weights()[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return folder


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8).tolist()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def test_reads_a_repository_bit_by_bit(repository):
    with bcp.open(repository) as found:
        assert_same({name: found.read(name) for name in found.names}, weights())
        assert torch.equal(found["model.embed.weight"][3:5], weights()["model.embed.weight"][3:5])


def test_loads_straight_into_a_model(tmp_path):
    source = torch.nn.Linear(4, 3)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    model = torch.nn.Linear(4, 3)
    bcp.load(tmp_path, {"model": model})
    assert torch.equal(model.weight, source.weight)


def test_other_layouts_beside_the_weights_are_left_alone(repository, tmp_path):
    save_file({"tok": torch.ones(2)}, repository / "consolidated.safetensors")
    with bcp.open(repository) as found:
        assert "tok" not in found
    folder = tmp_path / "lone"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    save_file({"tok": torch.ones(2)}, folder / "consolidated.safetensors")
    with bcp.open(folder) as found:
        assert found.names == ["w"]


def test_names_of_files_with_spaces(tmp_path):
    save_file({"w": torch.arange(3)}, tmp_path / "my model v2.safetensors")
    with bcp.open(tmp_path) as found:
        assert found.read("w").tolist() == [0, 1, 2]
    (tmp_path / "my model v2.safetensors").rename(tmp_path / "my model (2).safetensors")
    with pytest.raises(DataError, match=r"my model \(2\)\.safetensors' is no plain name.*rename"):
        bcp.open(tmp_path)


def test_tied_names_in_the_header_are_names(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    save_model(model, tmp_path / "model.safetensors")
    with bcp.open(tmp_path) as found:
        assert set(found.names) == set(model.state_dict())
        assert torch.equal(found.read("a.weight"), found.read("b.weight"))


@pytest.mark.parametrize("max_shard_bytes", [10**9, 700])
def test_writes_what_safetensors_reads(repository, tmp_path, max_shard_bytes):
    told = []
    with bcp.open(repository) as source:
        write_hf(
            source,
            tmp_path / "out",
            max_shard_bytes=max_shard_bytes,
            prefix="",
            progress=told.append,
        )
        assert sum(told) == source.index.total_bytes
    found = {}
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    for file in files:
        found |= load_file(file)
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert_same(found, weights())
    if len(files) == 1:
        names = sorted(file.name for file in (tmp_path / "out").iterdir())
        assert names == ["config.json", "model.safetensors"]
    else:
        index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
        assert index["weight_map"].keys() == found.keys()
        assert set(index["weight_map"].values()) == {file.name for file in files}


def test_a_training_state_becomes_a_model(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    bcp.save(tmp_path / "native", {"model": model, "other": torch.ones(3)})
    convert(tmp_path / "native", tmp_path / "out", "safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.state_dict().keys() - {"b.weight"}
    assert torch.equal(found["a.weight"], model["a"].weight)
    with bcp.open(tmp_path / "out") as again:
        assert torch.equal(again.read("b.weight"), model["a"].weight)


def test_a_repository_keeps_its_names(repository, tmp_path):
    convert(repository, tmp_path / "out", "safetensors")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), weights())


def test_what_safetensors_cannot_say_is_refused(tmp_path):
    bcp.save(tmp_path / "native", {"model": {"w": torch.ones(2, dtype=torch.complex128)}})
    with pytest.raises(DataError, match=r"model\.w: safetensors has no name for complex128"):
        convert(tmp_path / "native", tmp_path / "out", "safetensors")
    with pytest.raises(DataError, match=r"begin with 'net\.', got model\.w"):
        convert(tmp_path / "native", tmp_path / "out", "safetensors", prefix="net.")
    assert not (tmp_path / "out").exists()


def rewrite(folder, change):
    """Changes the JSON header of the first file, whose data stay."""
    file = folder / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    change(entries)
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def in_entry(**values):
    return lambda folder: rewrite(folder, lambda e: e["model.layers.0.weight"].update(values))


def in_index(change):
    def apply(folder):
        content = json.loads((folder / INDEX_NAME).read_text())
        change(content)
        (folder / INDEX_NAME).write_text(json.dumps(content))

    return apply


def cut(folder):
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def long_header(folder):
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (in_entry(dtype="F4"), "type 'F4' are not known"),
        (in_entry(shape=[8, 9]), "does not fit 256 bytes"),
        (in_entry(shape=[-8, -8]), "no whole numbers"),
        (in_entry(shape="88"), "no whole numbers"),
        (in_entry(data_offsets=[-256, 0]), "no whole numbers"),
        (in_entry(data_offsets=[10**9, 10**9 + 256]), "ends after the data"),
        (in_entry(data_offsets=[4, 260]), "share bytes"),
        (lambda folder: rewrite(folder, lambda e: e.pop("model.embed.weight")), "does not hold it"),
        (cut, "ends after the data"),
        (long_header, "expected a safetensors header"),
        (in_index(lambda c: c["weight_map"].update(w="../secret")), "leads out"),
        (in_index(lambda c: c["weight_map"].update(w=3)), "leads out"),
        (
            in_index(lambda c: c["weight_map"].update(w="gone.safetensors")),
            "expected a file, found none",
        ),
        (in_index(lambda c: c.pop("weight_map")), "expected JSON with a weight_map"),
    ],
)
def test_headers_that_mislead_are_refused(repository, change, message):
    change(repository)
    with pytest.raises(DataError, match=message):
        bcp.open(repository)


def test_a_name_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(DataError, match=r"b\.safetensors: expected 'w' in one file"):
        bcp.open(tmp_path)


def test_damaged_headers_are_data_errors_or_harmless(repository):
    file = repository / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    draw = random.Random(4)
    refused = 0
    for _ in range(100):
        damaged = bytearray(data)
        damaged[draw.randrange(length)] = draw.randrange(256)
        file.write_bytes(damaged)
        try:
            bcp.open(repository).close()
        except DataError:
            refused += 1
    assert refused > 25


@given(
    offsets=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    sizes=st.lists(st.integers(0, 6), max_size=4),
    limit=st.integers(1, 200),
    itemsize=st.sampled_from([1, 2, 8]),
)
def test_slabs_are_the_elements_in_order_and_none_too_large(offsets, sizes, limit, itemsize):
    box = Box(tuple(offsets[: len(sizes)]), tuple(sizes))
    grid = torch.arange(box.numel).view(sizes)
    parts = list(cut_slabs(box, itemsize, limit))
    assert all(part.numel * itemsize <= max(limit, itemsize) for part in parts)
    seen = [grid[part.within(box)].reshape(-1) for part in parts]
    assert torch.equal(torch.cat(seen) if seen else grid.reshape(-1), torch.arange(box.numel))
