"""torch.distributed.checkpoint saves to our format and loads from it, with its own planners."""

import errno
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint import DCPReader, DCPWriter
from bytecheckpoint.saving import file_stream
from bytecheckpoint.saving.writer import hash_blocks
from bytecheckpoint.storage import open_storage
from bytecheckpoint.storage.files import commit
from bytecheckpoint.storage.files.data_file import size_file
from bytecheckpoint.storage.files.index import BLOCK_BYTES
from bytecheckpoint.storage.local import LocalSink
from bytecheckpoint.tools.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def state():
    draw = torch.Generator().manual_seed(4)
    return {
        "model": {
            "matrix": torch.randn(70, 50, generator=draw),
            "strided": torch.randn(6, 9, generator=draw).t(),
            "half": torch.randn(17, generator=draw).to(torch.bfloat16),
            "eight": torch.randn(9, generator=draw).to(torch.float8_e4m3fnuz),
            "one": torch.tensor(2.0, dtype=torch.float64),
            "none": torch.empty(0, 3),
            "flags": torch.tensor([True, False, True]),
        },
        "mixed": [torch.ones(2), 4],
        "step": 9,
        "pair": (1, "x"),
        "settings": {"lr": 0.5, "names": ["a"], "raw": b"\0"},
    }


def emptied(value):
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [emptied(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def assert_equal(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found.double(), expected.double())
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def test_saves_and_loads_what_it_saved(tmp_path):
    path = tmp_path / "step"
    dcp.save(state(), storage_writer=DCPWriter(path))
    loaded = emptied(state())
    dcp.load(loaded, storage_reader=DCPReader(path))
    assert_equal(loaded, state())
    assert list(verify(str(path), deep=True)) == []
    with bcp.open(path) as found:
        assert found.kind == "native"
        assert torch.equal(found["model.matrix"][3:5], state()["model"]["matrix"][3:5])
        assert found.extra["pair"] == (1, "x")


def test_what_dcp_saved_our_own_loader_loads(tmp_path):
    dcp.save(state(), storage_writer=DCPWriter(tmp_path / "step"))
    loaded = {key: value for key, value in emptied(state()).items() if key in ("model", "mixed")}
    bcp.load(tmp_path / "step", loaded, strict=False)
    assert_equal(loaded["model"], state()["model"])


def test_an_asynchronous_save_has_the_values_of_its_call(tmp_path):
    mine = state()
    future = dcp.async_save(mine, storage_writer=DCPWriter(tmp_path / "step"))
    mine["model"]["matrix"].zero_()
    future.result()
    loaded = emptied(state())
    dcp.load(loaded, storage_reader=DCPReader(tmp_path / "step"))
    assert_equal(loaded, state())


def test_the_path_may_come_from_the_call(tmp_path):
    values = {"w": torch.ones(3)}
    dcp.save(values, storage_writer=DCPWriter("unused"), checkpoint_id=tmp_path / "step")
    loaded = {"w": torch.zeros(3)}
    dcp.load(loaded, storage_reader=DCPReader("unused"), checkpoint_id=tmp_path / "step")
    assert torch.equal(loaded["w"], torch.ones(3))


def rows():
    return torch.arange(7 * 6.0).view(7, 6)


def save_sharded(path, how):
    mesh = init_device_mesh("cpu", (2,))
    values = {
        "rows": distribute_tensor(rows(), mesh, [Shard(0)]),
        "columns": distribute_tensor(rows().to(torch.bfloat16), mesh, [Shard(1)]),
        "copies": distribute_tensor(rows(), mesh, [Replicate()]),
        "plain": [rows() + at for at in range(4)],
        "step": 3,
    }
    if how == "sync":
        dcp.save(values, storage_writer=DCPWriter(path))
    else:
        dcp.async_save(values, storage_writer=DCPWriter(path)).result()


def load_resharded(path):
    mesh = init_device_mesh("cpu", (2,))
    half = torch.bfloat16
    loaded = {
        "rows": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(1)]),
        "columns": distribute_tensor(torch.zeros(7, 6, dtype=half), mesh, [Shard(0)]),
        "copies": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(0)]),
        "plain": [torch.zeros(7, 6) for _ in range(4)],
        "step": 0,
    }
    dcp.load(loaded, storage_reader=DCPReader(path))
    for name in ("rows", "columns", "copies"):
        assert torch.equal(loaded[name].full_tensor(), rows().to(loaded[name].dtype)), name
    assert all(torch.equal(loaded["plain"][at], rows() + at) for at in range(4))
    return loaded["step"]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_ranks_save_together_and_any_number_loads(pool, tmp_path, how):
    path = str(tmp_path / "step")
    pool.run(save_sharded, path, how)
    assert pool.run(load_resharded, path).results == [3, 3]
    loaded = {"rows": torch.zeros(7, 6), "plain": [torch.zeros(7, 6)] * 4, "step": 0}
    dcp.load(loaded, storage_reader=DCPReader(path))
    assert torch.equal(loaded["rows"], rows())
    with bcp.open(path) as found:
        assert found.world_size == 2
        assert [file.name for file in found.index.files] == [
            "rank-00000.safetensors",
            "rank-00001.safetensors",
        ]
        # Once each: 3 matrices of 42 elements in float32, one in bfloat16, and 4 plain ones.
        assert found.index.total_bytes == 42 * (4 + 2 + 4 + 4 * 4)


def test_one_process_saves_and_ranks_load(pool, tmp_path):
    values = {
        "rows": rows(),
        "columns": rows().to(torch.bfloat16),
        "copies": rows(),
        "plain": [rows() + at for at in range(4)],
        "step": 5,
    }
    dcp.save(values, storage_writer=DCPWriter(str(tmp_path / "step")))
    assert pool.run(load_resharded, str(tmp_path / "step")).results == [5, 5]


def test_object_stores_take_and_give_the_same():
    path = "memory://dcp-storage/step"
    # A writer may be sent to the process that saves.
    dcp.save(state(), storage_writer=pickle.loads(pickle.dumps(DCPWriter(path))))
    loaded = emptied(state())
    dcp.load(loaded, storage_reader=DCPReader(path))
    assert_equal(loaded, state())


class Broken(DefaultSavePlanner):
    """Fails on one rank when data are asked for."""

    def resolve_data(self, write_item):
        if not dist.is_initialized() or dist.get_rank() == 1:
            raise OSError("no such luck")
        return super().resolve_data(write_item)


def save_broken(path):
    try:
        values = {"a": torch.ones(100), "b": torch.ones(100)}
        writer = DCPWriter(path, overwrite=True)
        dcp.save(values, storage_writer=writer, planner=Broken())
    except CheckpointException as error:
        return str(error)
    return ""


def test_nothing_is_committed_when_a_rank_fails(pool, tmp_path):
    path = str(tmp_path / "step")
    pool.run(save_sharded, path, "sync")
    for message in pool.run(save_broken, path).results:
        assert "no such luck" in message
        assert "RANK 1" in message
    assert pool.run(load_resharded, path).results == [3, 3]
    # The rank that failed removed all, but for what the other may have written later.
    assert len(commit.find_garbage(open_storage(str(tmp_path)), "step")) <= 1


def test_a_full_disk_leaves_nothing_and_says_so(tmp_path, monkeypatch):
    def refuse(sink, offset, data):
        raise OSError(errno.ENOSPC, "No space left on device", "rank-00000.safetensors")

    monkeypatch.setattr(LocalSink, "write_at", refuse)
    with pytest.raises(CheckpointException, match=r"No space left.*rank-00000"):
        dcp.save(state(), storage_writer=DCPWriter(tmp_path / "step"))
    assert not list(tmp_path.glob("step/*"))


@pytest.mark.parametrize(("error", "num_left"), [(FileExistsError, 0), (OSError, 1)])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_commit_that_fails_leaves_only_what_may_still_appear(
    tmp_path, monkeypatch, kind, error, num_left
):
    path = str(tmp_path / "step") if kind == "local" else f"memory://{tmp_path.name}-{num_left}"
    storage = open_storage(path)

    def fail(*args, overwrite):
        raise error(5, "no such luck", "manifest.json")

    monkeypatch.setattr(type(storage), "publish", fail)
    with pytest.raises(CheckpointException, match="no such luck"):
        dcp.save(state(), storage_writer=DCPWriter(path))
    assert len(storage.list("")) == (num_left if kind == "memory" else 0)


def test_a_checkpoint_is_replaced_only_when_asked(tmp_path):
    path = tmp_path / "step"
    dcp.save({"w": torch.ones(2)}, storage_writer=DCPWriter(path))
    with pytest.raises(CheckpointException, match="holds a checkpoint"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=DCPWriter(path))
    assert len(os.listdir(path)) == 2
    with pytest.raises(CheckpointException, match="no such luck"):
        dcp.save(
            {"w": torch.zeros(2)},
            storage_writer=DCPWriter(path, overwrite=True),
            planner=Broken(),
        )
    loaded = {"w": torch.zeros(2)}
    dcp.load(loaded, storage_reader=DCPReader(path))
    assert torch.equal(loaded["w"], torch.ones(2))
    dcp.save({"w": torch.full((2,), 5.0)}, storage_writer=DCPWriter(path, overwrite=True))
    dcp.load(loaded, storage_reader=DCPReader(path))
    assert torch.equal(loaded["w"], torch.full((2,), 5.0))


def test_a_flipped_bit_is_found_by_name(tmp_path):
    dcp.save(state(), storage_writer=DCPWriter(tmp_path / "step"))
    (file,) = tmp_path.glob("step/*/rank-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointException, match=r"block 0 .* does not have its checksum"):
        dcp.load(emptied(state()), storage_reader=DCPReader(tmp_path / "step"))
    dcp.load(emptied(state()), storage_reader=DCPReader(tmp_path / "step", verify=False))


def test_planners_decide_what_is_loaded(tmp_path):
    dcp.save({"a": torch.ones(2), "step": 2}, storage_writer=DCPWriter(tmp_path / "step"))
    wanted = {"a": torch.zeros(2), "new": torch.full((1,), 7.0), "other": 1}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: new"):
        dcp.load(wanted, storage_reader=DCPReader(tmp_path / "step"))
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(wanted, storage_reader=DCPReader(tmp_path / "step"), planner=planner)
    assert torch.equal(wanted["a"], torch.ones(2))
    assert wanted["new"] == 7
    assert wanted["other"] == 1


def test_planners_that_do_not_flatten(tmp_path):
    values = {"w": torch.ones(2), "settings": {"lr": 0.5, "steps": [1, {"a": 2}]}, "t": (1, 2)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(values, storage_writer=DCPWriter(tmp_path / "step"), planner=planner)
    loaded = {"w": torch.zeros(2), "settings": {}, "t": None}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(loaded, storage_reader=DCPReader(tmp_path / "step"), planner=planner)
    assert_equal(loaded, values)


def test_the_whole_state_is_rebuilt_without_one(tmp_path):
    dcp.save(state(), storage_writer=DCPWriter(tmp_path / "step"))
    found = _load_state_dict_from_keys(storage_reader=DCPReader(tmp_path / "step"))
    assert_equal(found, state())


def test_torch_loads_training_states_that_we_saved(tmp_path):
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    bcp.save(tmp_path / "step", {"model": model, "optimizer": optimizer, "step": 4})
    expected = {
        "model": {name: value.clone() for name, value in get_model_state_dict(model).items()},
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 4,
    }
    loaded = emptied({key: value for key, value in expected.items() if key != "optimizer"})
    other = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    loaded["optimizer"] = get_optimizer_state_dict(other, torch.optim.AdamW(other.parameters()))
    dcp.load(loaded, storage_reader=DCPReader(tmp_path / "step"))
    assert_equal(loaded, expected)


def test_reads_other_formats_by_ranges(tmp_path):
    matrix = torch.randn(1000, 100)
    dcp.save({"matrix": matrix, "step": 3}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "hf").mkdir()
    save_file({"matrix": matrix}, tmp_path / "hf" / "model.safetensors")
    for name in ("dcp", "hf"):
        reader = DCPReader(tmp_path / name)
        loaded = {"matrix": torch.zeros(1000, 100)}
        dcp.load(loaded, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
        assert torch.equal(loaded["matrix"], matrix)
        assert reader.num_bytes_read == matrix.nbytes
    loaded = {"matrix": torch.zeros(1000, 100), "step": 0}
    dcp.load(loaded, storage_reader=DCPReader(tmp_path / "dcp"))
    assert loaded["step"] == 3


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_of_other_formats_run_only_when_trusted(tmp_path):
    hacked = tmp_path / "hacked"
    dcp.save({"w": torch.ones(2), "bad": Runs(str(hacked))}, checkpoint_id=tmp_path / "dcp")
    loaded = {"w": torch.zeros(2)}
    dcp.load(loaded, storage_reader=DCPReader(tmp_path / "dcp"))
    assert torch.equal(loaded["w"], torch.ones(2))
    loaded |= {"bad": 0}
    with pytest.raises(CheckpointException, match=r"the value 'bad' was refused.*mkdir"):
        dcp.load(loaded, storage_reader=DCPReader(tmp_path / "dcp"))
    assert not hacked.exists()
    dcp.load(loaded, storage_reader=DCPReader(tmp_path / "dcp", trust_pickle=True))
    assert hacked.exists()


class Unsayable:
    pass


def test_what_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(
        CheckpointException, match=r"a\.b: expected tensors, numbers.*got a .*Unsayable"
    ):
        dcp.save({"a": {"b": Unsayable()}}, storage_writer=DCPWriter(tmp_path / "step"))


def test_kept_plans_are_refused(tmp_path):
    def save(name):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        writer = DCPWriter(tmp_path / name)
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, planner=planner)

    save("first")
    with pytest.raises(CheckpointException, match="without enable_plan_caching"):
        save("second")


def save_alone(path):
    try:
        dcp.save({"w": torch.ones(1)}, storage_writer=DCPWriter(path), use_collectives=False)
    except Exception as error:  # noqa: BLE001 - its text is looked at
        return str(error)
    return ""


def test_ranks_that_do_not_coordinate_are_refused(tmp_path):
    assert "expected use_collectives=True" in save_alone(tmp_path / "step")
    dcp.save({"w": torch.ones(1)}, storage_writer=DCPWriter(tmp_path / "step"), no_dist=True)
    shutil.rmtree(tmp_path / "step")
    with pytest.raises(CheckpointException, match="expected a checkpoint"):
        dcp.load({"w": torch.ones(1)}, storage_reader=DCPReader(tmp_path / "step"))


@pytest.mark.parametrize(
    "num_bytes",
    [
        1,
        BLOCK_BYTES - 1,
        BLOCK_BYTES,
        2 * BLOCK_BYTES - 16,  # the table crosses the end of a write
        2 * BLOCK_BYTES - 8,
        2 * BLOCK_BYTES,
        5 * BLOCK_BYTES + 3,
        6 * BLOCK_BYTES,
    ],
)
def test_files_are_streamed_in_blocks(tmp_path, monkeypatch, num_bytes):
    """A write is of two blocks here, so that files have several."""
    monkeypatch.setattr(file_stream, "WRITE_BYTES", 2 * BLOCK_BYTES)
    storage = open_storage(str(tmp_path))
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy().tobytes()
    file = size_file("rank-00000.safetensors", num_bytes)
    with file_stream.FileStream(storage, "data", file) as out:
        for start in range(0, num_bytes, 100_001):
            out.write(data[start : start + 100_001])
        record = out.finish()
    content = (tmp_path / "data" / file.name).read_bytes()
    assert len(content) == file.num_bytes == record.num_bytes
    assert content[:num_bytes] == data
    table = memoryview(bytearray(file.num_bytes - num_bytes))
    hash_blocks(memoryview(data), table, 0, num_bytes)
    assert content[num_bytes:] == table
