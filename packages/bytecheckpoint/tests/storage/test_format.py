"""A reader written from docs/format.md alone, without this package's code."""

import json
from math import prod

import msgspec
import numpy as np
import pytest
import torch
import xxhash

import bytecheckpoint as bcp


def read_checkpoint(folder):
    """All tensors by name, as NumPy arrays, and the tree of other values; checks every hash."""
    content = (folder / "manifest.json").read_bytes()
    body, _, seal = content.rpartition(b'\n,"xxh3_128":"')
    assert seal == xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'
    manifest = json.loads(content)
    assert (manifest["format"], manifest["version"]) == ("bytecheckpoint", 1)
    data = folder / manifest["data"]

    def small(record):
        found = (data / record["name"]).read_bytes()
        assert len(found) == record["num_bytes"]
        assert xxhash.xxh3_128_hexdigest(found) == record["xxh3_128"]
        return found

    index = msgspec.msgpack.decode(small(manifest["index"]))
    files = []
    for record, (name, num_bytes, hashed) in zip(manifest["files"], index["files"], strict=True):
        found = (data / name).read_bytes()
        assert (record["name"], record["num_bytes"]) == (name, num_bytes) == (name, len(found))
        assert xxhash.xxh3_128_hexdigest(found[hashed:]) == record["xxh3_128"]
        blocks = range(0, hashed, 262144)
        table = [xxhash.xxh3_64_intdigest(found[b : min(b + 262144, hashed)]) for b in blocks]
        assert np.frombuffer(found[hashed:], "<u8").tolist() == table
        files.append(found)

    arrays = {}
    for name, dtype, shape in zip(index["names"], index["dtypes"], index["shapes"], strict=True):
        arrays[name] = np.zeros(shape, {"bfloat16": "<u2"}.get(dtype, dtype))
    tensor, file = (np.frombuffer(index[key], "<i4") for key in ("tensor", "file"))
    start = np.frombuffer(index["start"], "<i8")
    boxes = (np.frombuffer(index[key], "<i8") for key in ("offsets", "sizes"))
    offsets, sizes = (box.reshape(len(tensor), index["ndim"]).tolist() for box in boxes)
    for row, at in enumerate(tensor):
        array = arrays[index["names"][at]]
        box = [slice(o, o + s) for o, s in zip(offsets[row], sizes[row], strict=True)][: array.ndim]
        count = prod(sizes[row])
        values = np.frombuffer(files[file[row]], array.dtype, count, int(start[row]))
        array[tuple(box)] = values.reshape(sizes[row][: array.ndim])
    arrays |= {name: arrays[target] for name, target in index["aliases"].items()}
    return arrays, json.loads(small(manifest["extra"]))["tree"]


@pytest.fixture
def state():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.Linear(700, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "half": torch.randn(5, 6).bfloat16(),
        "tied": model[0].weight,
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "extra": {"step": 3, "pair": (1, b"ab"), "far": float("inf"), 5: "five"},
    }


def test_a_reader_made_from_the_document_reads_everything(tmp_path, state):
    bcp.save(tmp_path / "one", state)
    arrays, tree = read_checkpoint(tmp_path / "one")
    expected = {f"model.{name}": value for name, value in state["model"].state_dict().items()}
    expected |= {key: state[key] for key in ("tied", "scalar", "empty")}
    expected["half"] = state["half"].view(torch.uint16)
    for name, parameter in state["model"].named_parameters():
        for key, value in state["optimizer"].state[parameter].items():
            expected[f"optimizer.state.model.{name}.{key}"] = value
    assert set(arrays) == set(expected)
    for name, array in arrays.items():
        value = expected[name].detach().numpy()
        assert array.tobytes() == value.tobytes(), name
        assert array.shape == value.shape
    assert tree["extra"] == {
        "$dict": [
            ["step", 3],
            ["pair", {"$tuple": [1, {"$bytes": "YWI="}]}],
            ["far", {"$float": "inf"}],
            [5, "five"],
        ]
    }
    assert tree["scalar"] == {"$tensor": "scalar"}
    assert set(tree["optimizer"]["$optimizer"]) == {"groups", "values"}


def test_safetensors_opens_the_data_files(tmp_path, state):
    safe_open = pytest.importorskip("safetensors").safe_open
    bcp.save(tmp_path / "one", state)
    (file,) = tmp_path.glob("one/data-*/rank-00000.safetensors")
    with safe_open(file, "pt") as shard:
        assert torch.equal(shard.get_tensor("half@0,0"), state["half"])
        assert shard.get_tensor("scalar@") == 7
