"""Files of torch.save: read by ranges, written in pieces, and the archives they are."""

import io
import random
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bytecheckpoint as bcp
from bytecheckpoint.formats.archive import Archive
from bytecheckpoint.formats.registry import FORMATS, Format, find_file_format
from bytecheckpoint.formats.torch import read_index
from bytecheckpoint.formats.zip_layout import LIMIT
from bytecheckpoint.storage import open_storage
from bytecheckpoint.tools.convert import convert
from bytecheckpoint.tools.writers.archive import ArchiveWriter
from shared.errors import ConfigError, DataError


def read(path):
    """Tensors by name and the tree, of a file."""
    storage = open_storage(str(path.parent))
    index, tree = read_index(storage, path.name)
    tensors = {}
    for name in [*index.names, *index.aliases]:
        at = index.position[name]
        row, end = int(index.rows[at]), int(index.rows[at + 1])
        dtype = getattr(torch, index.dtypes[at])
        if row == end:
            tensors[name] = torch.empty(index.shapes[at], dtype=dtype)
            continue
        buffer = bytearray(int(index.num_bytes[row]))
        storage.read_into(index.files[0].name, int(index.start[row]), memoryview(buffer))
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        tensors[name] = flat.view(dtype).reshape(index.shapes[at])
    return index, tensors, tree


def state():
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(30, 4, generator=draw)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "half": weight[:3].to(torch.bfloat16),
            "wide": torch.arange(4).to(torch.uint32),
            "none": torch.empty(0, 2),
            "one": torch.tensor(2.5),
            "parameter": torch.nn.Parameter(torch.ones(3)),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}, 5: {"lr": 0.1}}},
        "step": 12,
        "pair": (1, [2.5, None, b"\0"]),
    }


def test_reads_tensors_ties_and_values(tmp_path):
    torch.save(state(), tmp_path / "state.pt")
    index, tensors, tree = read(tmp_path / "state.pt")
    assert index.aliases == {"model.tied": "model.weight"}
    for name, tensor in state()["model"].items():
        assert torch.equal(tensors[f"model.{name}"], tensor), name
        assert tensors[f"model.{name}"].dtype == tensor.dtype
    assert tensors["optimizer.state.0.step"] == 3
    assert tree["step"] == 12
    assert tree["pair"] == {"$tuple": [1, [2.5, None, {"$bytes": "AA=="}]]}


def assert_equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_what_is_written(tmp_path, mmap):
    values = {**state(), "losses": [1.5, float("-inf")]}
    del values["model"]["parameter"]
    bcp.save(tmp_path / "native", values)
    told = []
    convert(tmp_path / "native", tmp_path / "state.pt", "torch", progress=told.append)
    found = torch.load(tmp_path / "state.pt", weights_only=True, mmap=mmap)
    assert_equal(found, values)
    assert found["model"]["tied"].data_ptr() == found["model"]["weight"].data_ptr()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found["model"].values())
    assert sum(told) == 30 * 4 * 4 + 3 * 4 * 2 + 16 + 4 + 4
    with zipfile.ZipFile(tmp_path / "state.pt") as file:
        assert file.testzip() is None


def test_a_training_state_becomes_the_state_dictionaries_of_torch(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    bcp.save(tmp_path / "native", {"optimizer": optimizer, "model": model})
    convert(tmp_path / "native", tmp_path / "state.pt", "torch")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    model.load_state_dict(found["model"])
    assert_equal(dict(sorted(found["model"].items())), dict(sorted(model.state_dict().items())))
    moments = found["optimizer"]["state"]["0.weight"]["momentum_buffer"]
    assert torch.equal(moments, optimizer.state[model[0].weight]["momentum_buffer"])
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.5
    assert found["optimizer"]["param_groups"][0]["params"][0] == "0.weight"


class Loader:
    """Differs by rank."""

    per_rank = True

    def state_dict(self):
        return {"position": 7}

    def load_rank_states(self, states, rank, world_size):
        raise AssertionError


def test_values_of_every_kind_become_python_values(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Rprop(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    values = {
        "nets": [model, torch.nn.Linear(1, 1)],
        "optimizer": optimizer,
        "loader": Loader(),
        "keys": {1: "one", None: 2},
        "empty": [{}, [], ()],
    }
    bcp.save(tmp_path / "native", values)
    convert(tmp_path / "native", tmp_path / "state.pt", "torch")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(found["nets"][0]["weight"], model.weight)
    assert found["loader"] == [{"position": 7}]
    assert found["keys"] == values["keys"]
    assert found["empty"] == values["empty"]
    # Parameters of one of two modules are named from that module on.
    assert found["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert found["optimizer"]["state"].keys() == {"weight", "bias"}


def test_values_that_json_cannot_say_are_read_as_none(tmp_path, caplog):
    torch.save({"w": torch.ones(2), "dtype": torch.float16}, tmp_path / "state.pt")
    _, _, tree = read(tmp_path / "state.pt")
    assert tree == {"w": {"$tensor": "w"}, "dtype": None}
    assert "read as None: dtype: expected" in caplog.text


class Runs:
    def __reduce__(self):
        return eval, ("print('hacked')",)


def test_code_is_refused(tmp_path, capsys):
    torch.save({"w": torch.ones(2), "bad": Runs()}, tmp_path / "state.pt")
    with pytest.raises(DataError, match=r"state\.pt.*names __builtin__\.eval"):
        read(tmp_path / "state.pt")
    assert "hacked" not in capsys.readouterr().out


def test_files_that_cannot_be_read_by_ranges_are_refused(tmp_path):
    base = torch.randn(4, 4)
    torch.save({"w": base.t()}, tmp_path / "strided.pt")
    with pytest.raises(DataError, match=r"tensor 'w': .*strides \[1, 4\]"):
        read(tmp_path / "strided.pt")
    torch.save({"a": base[:3], "b": base[1:]}, tmp_path / "overlap.pt")
    with pytest.raises(DataError, match="share bytes"):
        read(tmp_path / "overlap.pt")
    torch.save({"a": base}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DataError, match=r"old\.pt: expected an archive of torch\.save"):
        read(tmp_path / "old.pt")
    torch.save([base], tmp_path / "list.pt")
    with pytest.raises(DataError, match="expected a dictionary, got a list"):
        read(tmp_path / "list.pt")
    torch.save({"a": {"b": base}, "a.b": base + 1}, tmp_path / "names.pt")
    with pytest.raises(DataError, match="got two tensors of one name"):
        read(tmp_path / "names.pt")


def test_destinations_that_cannot_be_are_refused(tmp_path):
    bcp.save(tmp_path / "native", {"w": torch.ones(2)})
    (tmp_path / "there.pt").touch()
    with pytest.raises(ConfigError, match="exists"):
        convert(tmp_path / "native", tmp_path / "there.pt", "torch")
    with pytest.raises(ConfigError, match="local path"):
        convert(tmp_path / "native", "s3://bucket/state.pt", "torch")
    with pytest.raises(
        ConfigError, match=r"format: expected one of dcp, safetensors, torch, got .onnx"
    ):
        convert(tmp_path / "native", tmp_path / "out", "onnx")


def test_what_another_makes_meanwhile_stays_and_nothing_else_is_left(tmp_path):
    bcp.save(tmp_path / "native", {"w": torch.ones(2)})
    target = tmp_path / "out" / "state.pt"
    with pytest.raises(ConfigError, match="exists"):
        convert(
            tmp_path / "native", target, "torch", progress=lambda _: target.write_text("theirs")
        )
    assert target.read_text() == "theirs"
    assert list(target.parent.iterdir()) == [target]


def test_a_prefix_that_a_format_has_no_use_for_is_warned_of(tmp_path, caplog):
    bcp.save(tmp_path / "native", {"w": torch.ones(2)})
    convert(tmp_path / "native", tmp_path / "state.pt", "torch", prefix="model.")
    assert "the prefix 'model.' is ignored: a checkpoint in torch has none" in caplog.text


def test_a_file_is_of_the_format_registered_last_that_its_name_fits():
    def read_lines(storage, path):
        raise NotImplementedError

    FORMATS.add("lines", Format("lines", "*.lines", read_lines, is_file=True), "of a test")
    try:
        assert find_file_format("state.lines").kind == "lines"
        assert find_file_format("state.pt").kind == "torch"
    finally:
        FORMATS.remove("lines")
    assert find_file_format("state.lines").kind == "torch"


def test_any_format_becomes_any_other(tmp_path):
    values = {"w": torch.randn(5, 5), "n": torch.arange(3)}
    bcp.save(tmp_path / "native", values)
    convert(tmp_path / "native", tmp_path / "a", "dcp")
    convert(tmp_path / "a", tmp_path / "b", "safetensors")
    convert(tmp_path / "b", tmp_path / "c.pt", "torch")
    convert(tmp_path / "c.pt", tmp_path / "d.pt", "torch")
    for name in ("c.pt", "d.pt"):
        found = torch.load(tmp_path / name, weights_only=True)
        assert_equal(dict(sorted(found.items())), dict(sorted(values.items())))


def test_damage_anywhere_is_a_data_error_or_harmless(tmp_path, caplog):
    caplog.set_level("CRITICAL")
    torch.save(state(), tmp_path / "state.pt")
    data = (tmp_path / "state.pt").read_bytes()
    draw = random.Random(6)
    refused = 0
    for _ in range(80):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] = draw.randrange(256)
        (tmp_path / "state.pt").write_bytes(damaged)
        try:
            read_index(open_storage(str(tmp_path)), "state.pt")
        except DataError:
            refused += 1
    assert refused > 5
    for keep in (0, 10, 500, len(data) - 1):
        (tmp_path / "state.pt").write_bytes(data[:keep])
        with pytest.raises(DataError):
            read_index(open_storage(str(tmp_path)), "state.pt")


@pytest.mark.parametrize("limit", [LIMIT, 100])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    records=st.dictionaries(st.text("abc/", min_size=1, max_size=9), st.binary(max_size=300)),
    before=st.integers(0, 70),
    is_streamed=st.booleans(),
)
def test_archives_are_read_by_us_and_by_zipfile(limit, records, before, is_streamed):
    """With a low limit the fields of files beyond 4 GiB are used, which are then the only ones."""
    file = io.BytesIO(bytes(before))
    file.seek(before)
    writer = ArchiveWriter(file, limit=limit)
    for name, data in records.items():
        if is_streamed:
            writer.stream(name, len(data), [data[:7], data[7:]])
        else:
            writer.write(name, data)
    length = writer.finish()
    assert before + length == len(file.getvalue())
    content = file.getvalue()
    found = Archive(lambda at, size: content[at : at + size], before, length, "here", limit=limit)
    assert found.names == list(records)
    for name, data in records.items():
        record = found.locate(name)
        assert content[record.start : record.start + record.num_bytes] == data
        assert record.start % 64 == 0
    if limit == LIMIT:
        with zipfile.ZipFile(io.BytesIO(content[before:])) as other:
            assert other.testzip() is None
            assert {one.filename: other.read(one) for one in other.infolist()} == {
                f"archive/{name}": data for name, data in records.items()
            }


def test_a_record_of_another_length_is_refused():
    with pytest.raises(DataError, match=r"expected 5 bytes, got 3"):
        ArchiveWriter(io.BytesIO()).stream("data/0", 5, [b"abc"])


class Sparse(io.FileIO):
    """A file in which large writes are holes."""

    def write(self, data):
        if len(data) < 1 << 26:
            return super().write(data)
        self.seek(len(data), io.SEEK_CUR)
        return len(data)


@pytest.mark.slow
def test_files_beyond_4_gib_are_those_of_any_zip_tool(tmp_path):
    path = tmp_path / "large.zip"
    zeros = memoryview(bytes(1 << 26))
    with io.BufferedWriter(Sparse(path, "w")) as file:
        writer = ArchiveWriter(file)
        writer.stream("data/0", 65 << 26, (zeros for _ in range(65)))
        writer.write("after", b"behind 4 GiB")
        writer.finish()
    with zipfile.ZipFile(path) as found:
        assert found.getinfo("archive/data/0").file_size == 65 << 26
        assert found.read("archive/after") == b"behind 4 GiB"
    with path.open("rb") as file:

        def read_at(offset, num_bytes):
            file.seek(offset)
            return file.read(num_bytes)

        found = Archive(read_at, 0, path.stat().st_size, "here")
        assert found.locate("data/0").num_bytes == 65 << 26
        assert found.read("after") == b"behind 4 GiB"
