"""Any layout into any other, on real ranks: every element of model and optimizer bit by bit."""

from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bytecheckpoint as bcp
from shared.comms import RankPool

LAYOUTS = ["plain", "ddp", "fsdp2", "hsdp", "fsdp2 over tp", "fsdp1", "fsdp1 flat"]


def build(layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 6), nn.BatchNorm1d(6))
    size = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif layout == "fsdp2":
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    elif layout == "fsdp2 over tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    elif layout.startswith("fsdp1"):
        model = FullyShardedDataParallel(
            model, use_orig_params=layout == "fsdp1", device_id=torch.device("cpu")
        )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def fill(model, optimizer):
    """Values that differ everywhere, without training, which some layouts cannot do on gloo."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.125


def save_reference(path):
    model, optimizer = build("plain")
    fill(model, optimizer)
    torch.manual_seed(3)
    state = [optimizer.state[parameter] for parameter in model.parameters()]
    tensors = [*model.state_dict().values(), *(t for one in state for t in one.values())]
    for tensor in tensors:
        # A flat parameter of FSDP1 has one number of steps for all that it joins.
        if tensor.is_floating_point() and tensor.dim():
            tensor.data.normal_()
    bcp.save(path, {"model": model, "optimizer": optimizer})


def move(source, path, layout, dedupe):
    """Loads into a layout and saves from it."""
    model, optimizer = build(layout)
    state = {"model": model, "optimizer": optimizer}
    report = bcp.load(source, state, dedupe=dedupe)
    assert optimizer.param_groups[0]["lr"] == 0.125
    bcp.save(path, state)
    return report.num_bytes_read, report.is_shared


def contents(path):
    with bcp.open(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def assert_equal(path, expected):
    found = contents(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("layouts") / "reference"
    save_reference(path)
    return path


@pytest.fixture(scope="module")
def saved(reference, pool, tmp_path_factory):
    """A checkpoint from every layout on two ranks."""
    return save_all(pool, reference, tmp_path_factory.mktemp("saved"))


def save_all(pool, reference, folder):
    for at, layout in enumerate(LAYOUTS):
        dedupe = ("never", "always", "auto")[at % 3]
        done = pool.run(move, reference, folder / layout, layout, dedupe)
        if dedupe != "auto":
            assert {shared for _, shared in done.results} == {dedupe == "always"}
        assert_equal(folder / layout, contents(reference))
    return folder


def test_every_layout_saves_the_same_tensors(reference, saved):
    assert len(contents(reference)) == 4 * 2 + 3 + 8 * 3
    assert sorted(path.name for path in saved.iterdir()) == sorted(LAYOUTS)


@pytest.mark.parametrize("shift", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_layouts_load_one_another(reference, saved, pool, tmp_path, shift):
    """Each layout, as source and as target."""
    for at, source in enumerate(LAYOUTS):
        target = LAYOUTS[(at + shift) % len(LAYOUTS)]
        pool.run(move, saved / source, tmp_path / source, target, ("never", "always")[at % 2])
        assert_equal(tmp_path / source, contents(reference))


@pytest.mark.slow
def test_every_layout_loads_every_other_on_four_ranks(reference, tmp_path):
    with RankPool(4, timeout=timedelta(seconds=60)) as pool:
        saved = save_all(pool, reference, tmp_path / "saved")
        for at, (source, target) in enumerate(product(LAYOUTS, LAYOUTS)):
            path = tmp_path / f"{source} to {target}"
            pool.run(move, saved / source, path, target, ("never", "always")[at % 2])
            assert_equal(path, contents(reference))


@pytest.mark.slow
def test_four_ranks_load_what_two_saved_and_one_what_four(reference, saved, tmp_path):
    with RankPool(4, timeout=timedelta(seconds=60)) as pool:
        pool.run(move, saved / "fsdp1", tmp_path / "four", "hsdp", "always")
    move(tmp_path / "four", tmp_path / "one", "plain", "auto")
    assert_equal(tmp_path / "one", contents(reference))


def test_one_process_loads_what_two_ranks_saved(reference, saved, tmp_path):
    move(saved / "hsdp", tmp_path / "one", "plain", "auto")
    assert_equal(tmp_path / "one", contents(reference))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_other_numbers_of_ranks(reference, saved, tmp_path, num_ranks):
    with RankPool(num_ranks, timeout=timedelta(seconds=60)) as pool:
        pool.run(move, saved / "fsdp1", tmp_path / "other", "fsdp2", "always")
    assert_equal(tmp_path / "other", contents(reference))
