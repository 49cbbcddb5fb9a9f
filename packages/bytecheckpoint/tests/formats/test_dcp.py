"""Folders of torch's DCP are read in place, and written so that torch loads them."""

import collections
import enum
import logging
import os
import pickle
import random
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardMetadata, init_from_local_shards
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.formats import pickles
from bytecheckpoint.formats.dcp import read_index
from bytecheckpoint.formats.tree import encode
from bytecheckpoint.storage import open_storage
from bytecheckpoint.tools.convert import convert
from bytecheckpoint.tools.writers.dcp import write_dcp
from shared.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def plain_tensors():
    draw = torch.Generator().manual_seed(1)
    return {
        "matrix": torch.randn(300, 40, generator=draw),
        "half": torch.randn(17, generator=draw).to(torch.bfloat16),
        "step": torch.tensor(7.0),
        "none": torch.empty(0, 3),
        "wide": torch.arange(5).to(torch.uint16),
        "eight": torch.randn(9, generator=draw).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "weight": torch.nn.Parameter(torch.randn(4, 4, generator=draw)),
        "complex": torch.randn(3, dtype=torch.complex64, generator=draw),
    }


def same_bits(a, b):
    a, b = a.detach().contiguous(), b.detach().contiguous()
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder that torch wrote on one process."""
    folder = tmp_path_factory.mktemp("dcp") / "torch"
    others = {"epoch": 3, "names": ["a", "b"], "pair": (1, "x"), "raw": b"\0\1", "lr": 0.1}
    mixed = [5, torch.ones(2)]
    dcp.save({"model": plain_tensors(), "other": others, "mixed": mixed}, checkpoint_id=folder)
    return folder


def test_reads_every_type_bit_by_bit(saved):
    with bcp.open(saved) as found:
        for name, tensor in plain_tensors().items():
            assert same_bits(found.read(f"model.{name}"), tensor), name
        assert torch.equal(found.read("mixed.1"), torch.ones(2))
        extra = found.extra
    other = {"epoch": 3, "names": ["a", "b"], "pair": (1, "x"), "raw": b"\0\1", "lr": 0.1}
    assert extra["other"] == other
    assert extra["mixed"][0] == 5
    assert extra["mixed"][1].name == "mixed.1"


def test_a_slice_reads_a_slice(saved):
    with bcp.open(saved) as found:
        rows = found["model.matrix"][100:104]
        assert found.source.num_bytes_read == 4 * 40 * 4
    assert torch.equal(rows, plain_tensors()["matrix"][100:104])


def save_sharded(folder):
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    rows = torch.arange(5 * 6.0).view(5, 6)
    cut = ShardMetadata([0, 3 * rank], [4, 3], f"rank:{rank}/cpu")
    piece = torch.arange(24.0).view(4, 6)[:, 3 * rank : 3 * rank + 3].contiguous()
    state = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(rows.to(torch.bfloat16), mesh, [Shard(1)]),
        "tiny": distribute_tensor(torch.ones(1), mesh, [Shard(0)]),
        "copies": distribute_tensor(rows, mesh, [Replicate()]),
        "sharded": init_from_local_shards([LocalShard(piece, cut)], 4, 6),
        "plain": rows.clone(),
        "step": 4,
    }
    dcp.save(state, checkpoint_id=folder)


def test_reads_what_ranks_wrote(pool, tmp_path):
    pool.run(save_sharded, str(tmp_path / "dcp"))
    rows = torch.arange(30.0).view(5, 6)
    with bcp.open(tmp_path / "dcp") as found:
        assert len(found.index.files) == 2
        for name in ("rows", "copies", "plain"):
            assert torch.equal(found.read(name), rows), name
        assert torch.equal(found.read("columns"), rows.to(torch.bfloat16))
        assert torch.equal(found.read("sharded"), torch.arange(24.0).view(4, 6))
        assert torch.equal(found["rows"][2:4, 1:5], rows[2:4, 1:5])
        assert torch.equal(found.read("tiny"), torch.ones(1))
        assert found.extra["step"] == 4


def save_unmerged(folder):
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(35.0).view(5, 7)
    state = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(rows.to(torch.bfloat16), mesh, [Shard(1)]),
    }
    writer = dcp.HuggingFaceStorageWriter(path=folder, save_distributed=True)
    dcp.save(state, storage_writer=writer)


def test_reads_safetensors_that_ranks_left_unmerged(pool, tmp_path):
    pool.run(save_unmerged, str(tmp_path / "parts"))
    rows = torch.arange(35.0).view(5, 7)
    with bcp.open(tmp_path / "parts") as found:
        assert len(found.index.files) == 2
        assert torch.equal(found.read("rows"), rows)
        assert torch.equal(found["columns"][1:4, 2:6], rows.to(torch.bfloat16)[1:4, 2:6])


def zeros_like_saved():
    tensors = {name: torch.zeros_like(tensor) for name, tensor in plain_tensors().items()}
    others = {"epoch": 0, "names": [], "pair": (), "raw": b"", "lr": 0.0}
    return {"model": tensors, "other": others, "mixed": [0, torch.zeros(2)]}


@pytest.mark.parametrize("max_chunk_bytes", [1000, 1 << 26])
def test_torch_loads_what_is_written(saved, tmp_path, max_chunk_bytes):
    told = []
    with bcp.open(saved) as source:
        write_dcp(source, tmp_path / "dcp", max_chunk_bytes=max_chunk_bytes, progress=told.append)
        assert sum(told) == source.index.total_bytes
        tree = source.source.extra["tree"]
    state = zeros_like_saved()
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    for name, tensor in plain_tensors().items():
        assert same_bits(state["model"][name], tensor), name
    assert torch.equal(state["mixed"][1], torch.ones(2))
    assert state["other"]["pair"] == (1, "x")
    with bcp.open(tmp_path / "dcp") as again:
        assert again.source.extra["tree"] == tree
        chunks = again.index.num_bytes
        assert chunks.max() <= max_chunk_bytes
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert found["other"]["names"] == ["a", "b"]
    assert same_bits(found["model"]["half"], plain_tensors()["half"])


def load_sharded(folder):
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(30.0).view(5, 6)
    layouts = {"rows": Shard(1), "columns": Shard(0), "copies": Shard(0), "plain": Shard(1)}
    state = {
        name: distribute_tensor(
            torch.zeros(5, 6, dtype=torch.bfloat16 if name == "columns" else None), mesh, [layout]
        )
        for name, layout in layouts.items()
    }
    dcp.load(state, checkpoint_id=folder)
    for name, value in state.items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), rows.to(value.dtype)), name
    return state["rows"].to_local().shape[1]


def test_two_ranks_load_what_is_written_into_other_layouts(pool, tmp_path):
    pool.run(save_sharded, str(tmp_path / "dcp"))
    convert(tmp_path / "dcp", tmp_path / "again", "dcp")
    assert pool.run(load_sharded, str(tmp_path / "again")).results == [3, 3]


def trained(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(2):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_a_native_training_state_becomes_one_of_torch(tmp_path):
    model, optimizer = trained(0)
    state = {"model": model, "optimizer": optimizer, "step": 12, "losses": [1.5, float("inf")]}
    bcp.save(tmp_path / "native", state)
    convert(tmp_path / "native", tmp_path / "dcp", "dcp")
    other, other_optimizer = trained(1)
    values = get_optimizer_state_dict(other, other_optimizer)
    loaded = {"model": get_model_state_dict(other), "optimizer": values, "step": 0, "losses": []}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    set_optimizer_state_dict(other, other_optimizer, loaded["optimizer"])
    assert loaded["step"] == 12
    assert loaded["losses"] == [1.5, float("inf")]
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, other_optimizer.state[theirs][key]), key


def test_tied_tensors_are_written_once_and_found_again(tmp_path):
    shared = torch.randn(1000)
    bcp.save(tmp_path / "native", {"model": {"in": shared, "out": shared}})
    convert(tmp_path / "native", tmp_path / "dcp", "dcp")
    assert (tmp_path / "dcp" / "__0_0.distcp").stat().st_size < 6000
    state = {"model": {"in": torch.zeros(1000), "out": torch.zeros(1000)}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(state["model"]["in"], shared)
    assert torch.equal(state["model"]["out"], shared)
    with bcp.open(tmp_path / "dcp") as found:
        assert found.index.aliases == {"model.out": "model.in"}


def test_nothing_appears_where_something_is_or_after_a_failure(saved, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="exists"):
        convert(saved, tmp_path / "full", "dcp")

    def fail(num_bytes):
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        convert(saved, tmp_path / "dcp", "dcp", progress=fail)
    assert os.listdir(tmp_path) == ["full"]


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_refused(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "hacked")))
    with pytest.raises(DataError, match=r"\.metadata.*names (posix|nt)\.mkdir"):
        bcp.open(tmp_path / "dcp")
    assert not (tmp_path / "hacked").exists()


def test_code_in_a_value_is_refused_and_the_rest_read(tmp_path, caplog):
    state = {"w": torch.ones(2), "bad": Malicious(tmp_path / "hacked"), "step": 2}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    with caplog.at_level(logging.WARNING), bcp.open(tmp_path / "dcp") as found:
        assert found.extra.keys() == {"w", "step"}
    assert "'bad' was refused" in caplog.text
    assert "mkdir" in caplog.text
    assert not (tmp_path / "hacked").exists()
    read_index(open_storage(str(tmp_path)), "dcp", trust_pickle=True)
    assert (tmp_path / "hacked").exists()


def with_metadata(folder, change):
    """Rewrites a folder's metadata."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def set_all(**values):
    def change(metadata):
        for info in metadata.storage_data.values():
            for key, value in values.items():
                setattr(info, key, value)

    return change


def forget_a_chunk(metadata):
    metadata.storage_data = {
        item: info for item, info in metadata.storage_data.items() if item.fqn != "model.matrix"
    }


def shrink(metadata):
    metadata.state_dict_metadata["model.matrix"].size = torch.Size([299, 40])


def reshape(metadata):
    found = metadata.state_dict_metadata["model.matrix"]
    found.size = found.chunks[0].sizes = torch.Size([40, 300])


def no_chunks(metadata):
    metadata.state_dict_metadata["model.matrix"].chunks = []


def no_metadata(metadata):
    metadata.state_dict_metadata = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_all(relative_path="../../etc/passwd"), "leads out of the folder"),
        (set_all(relative_path="/etc/passwd"), "leads out of the folder"),
        (set_all(relative_path="gone.distcp"), "gone.distcp: expected a file, found none"),
        (set_all(transform_descriptors=["zstd"]), "through extensions"),
        (set_all(length=2**40), "expected at least"),
        (set_all(offset=-5), "are no sizes"),
        (forget_a_chunk, "expected a place of 'model.matrix'"),
        (shrink, "leaves the tensor's shape"),
        (reshape, "belongs to another save"),
        (no_chunks, "hold 0 elements of the 12000"),
        (no_metadata, "expected the metadata of DCP"),
    ],
)
def test_metadata_that_misleads_is_refused(saved, tmp_path, change, message):
    folder = shutil.copytree(saved, tmp_path / "dcp")
    with_metadata(folder, change)
    with pytest.raises(DataError, match=message):
        bcp.open(folder)


@pytest.mark.parametrize("keep", [0, 100, 5000, -1, -600])
def test_a_file_that_was_cut_is_refused(saved, tmp_path, keep):
    folder = shutil.copytree(saved, tmp_path / "dcp")
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:keep])
    with pytest.raises(DataError, match=r"__0_0\.distcp"):
        bcp.open(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damage_anywhere_is_a_data_error_or_harmless(saved, tmp_path, name, caplog):
    """No flipped byte leads to another exception, or to reads outside the tensors' own bytes."""
    caplog.set_level(logging.CRITICAL)
    folder = shutil.copytree(saved, tmp_path / "dcp")
    data = (folder / name).read_bytes()
    draw = random.Random(3)
    refused = 0
    for _ in range(80):
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 3])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        (folder / name).write_bytes(damaged)
        try:
            bcp.open(folder).close()
        except DataError:
            refused += 1
    assert refused > 5


def test_strided_and_conjugate_chunks_are_refused_by_name(tmp_path):
    dcp.save({"w": torch.randn(3, 4).t()}, checkpoint_id=tmp_path / "strided")
    with pytest.raises(DataError, match=r"tensor 'w': .*strides \[1, 4\] for shape \[4, 3\]"):
        bcp.open(tmp_path / "strided")
    dcp.save({"w": torch.ones(1, dtype=torch.complex64).conj()}, checkpoint_id=tmp_path / "conj")
    with pytest.raises(DataError, match="lazy conjugate"):
        bcp.open(tmp_path / "conj")


def test_views_of_larger_storages_are_read(tmp_path):
    base = torch.arange(100.0).view(10, 10)
    state = {"rows": base[3:5], "column": base[:, 2], "one": base[4, 4]}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    with bcp.open(tmp_path / "dcp") as found:
        for name, value in state.items():
            assert torch.equal(found.read(name), value), name


class Unknown:
    pass


class _AttributePickler(pickle.Pickler):
    """Pickles enums' members as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value):
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_members_of_enums_may_be_pickled_as_attributes(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "dcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    with open(folder / ".metadata", "wb") as file:
        _AttributePickler(file, 4).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    with bcp.open(saved) as one, bcp.open(folder) as other:
        assert one.index.names == other.index.names


@pytest.mark.parametrize("kind", [dcp.metadata.Metadata, torch.Size, collections.OrderedDict])
def test_other_attributes_are_refused(kind):
    class Hostile:
        def __reduce__(self):
            return getattr, (kind, "__init__")

    with pytest.raises(DataError, match="attribute of something that is no enum"):
        pickles.load_metadata(pickle.dumps(Hostile()), "here")


def test_unknown_classes_are_named():
    with pytest.raises(DataError, match=r"names .*test_dcp\.Unknown"):
        pickles.load_metadata(pickle.dumps(Unknown()), "here")


@pytest.mark.parametrize(
    "hostile",
    [b"Nr\xff\xff\xff\x00.", b"Np16777215\n.", b"\x80\x04Nr\xff\xff\xff\x00."],
    ids=["four bytes", "decimal", "protocol 4"],
)
def test_a_few_bytes_cannot_ask_for_a_table_of_gigabytes(hostile):
    # 2 ** 24 entries take 256 MiB; the index of four bytes that is used in earnest takes 64 GiB.
    for read in (pickles.load_metadata, pickles.load_tree):
        with pytest.raises(DataError, match=r"entry 16777215 .* of \d+ bytes"):
            read(hostile, "here")


def test_pickles_of_every_protocol_are_read():
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        tree = {"r\xff\xff\xff\xff": [(at, f"p{at}\n") for at in range(300)]}
        assert pickles.load_tree(pickle.dumps(tree, protocol), "here") == tree


def test_a_pickle_cannot_change_classes_for_later_ones():
    # The class itself, and BUILD with attributes to set on it.
    hostile = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\0\0\0aK\x01s\x86b."
    )
    with pytest.raises(DataError, match="expected a pickle of Metadata"):
        pickles.load_metadata(hostile, "here")
    found = pickles.load_metadata(pickle.dumps(dcp.metadata.Metadata({})), "here")
    assert found.state_dict_metadata == {}
    assert not hasattr(found, "a")


def test_values_that_lie_too_deep_or_in_themselves_are_refused():
    endless, deep = [1], [1]
    endless.append(endless)
    for _ in range(5000):
        deep = [deep]
    for value in (endless, deep):
        with pytest.raises(DataError, match="too deep or in itself"):
            encode({"a": value}, "")


def test_names_in_the_place_of_others_are_refused(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "dcp")

    def change(metadata):
        metadata.planner_data["model.matrix"] = ("other", "epoch", "more")

    with_metadata(folder, change)
    with pytest.raises(DataError, match=r"expected one value at 'other\.epoch"):
        bcp.open(folder)


def test_paths_without_end_are_ignored(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "dcp")

    def change(metadata):
        metadata.planner_data["model.matrix"] = ("a",) * 100_000

    with_metadata(folder, change)
    with bcp.open(folder) as found:
        assert found.extra["model.matrix"].shape == (300, 40)


def test_equal_checkpoints_give_equal_files(saved, tmp_path):
    for name in ("a", "b"):
        convert(saved, tmp_path / name, "dcp")
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b")
    first, second = ((tmp_path / name / "__0_0.distcp").read_bytes() for name in ("a", "b"))
    assert first == second
