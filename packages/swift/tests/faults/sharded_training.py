"""The training of the tests of sharded replicas: tells the digest of its state at the beginning of each step.

Arguments: the folder for what it tells; JSON with steps, faults, optimizer, mode, dropout, ...
"""

import json
import sys
import threading
import time
import types
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn import functional

import swift
from shared.kernels.digest import digest
from swift.injection import Fault, arm
from swift.membership.member import StuckWatch

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 1e-2),
}
WORDS, WIDTH, LENGTH, BATCH = 17, 24, 6, 16


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH + 1)  # its second shard is smaller
        self.second = nn.Linear(2 * WIDTH + 1, WIDTH)
        self.gate = nn.Parameter(torch.ones(1))  # its second shard is empty
        self.unused = nn.Parameter(torch.randn(4, 3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        hidden = self.second(self.dropout(torch.tanh(self.first(x))))
        return x + self.gate * hidden


class Model(nn.Module):
    """A few words in, the next ones out, by one table for both; a frozen layer, and two buffers."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("places", torch.randn(LENGTH, WIDTH), persistent=False)

    def forward(self, ids):
        x = self.table(ids) + self.places
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return self.head(self.frozen(x) + self.mean)


def make_data():
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (200, LENGTH), generator=draw)
    return torch.utils.data.TensorDataset(ids, ids.roll(1, 1))


def loss_of(model, ids, targets):
    return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


SPLIT = {"first.weight": 0, "first.bias": 0, "second.weight": 1}
"""Tensor parallelism: the dimension in which a parameter of a block is split; the others are whole."""


def split(model, mesh):
    """Splits the blocks' layers over the mesh, as tensor parallelism does."""

    def place(path, module, mesh):
        for name, one in list(module.named_parameters(recurse=False)):
            dim = SPLIT.get(f"{path.rpartition('.')[2]}.{name}")
            if dim is not None:
                parts = distribute_tensor(one, mesh, [Shard(dim)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(parts))

    def replicate(module, inputs, mesh):
        return tuple(
            DTensor.from_local(one, mesh, [Replicate()], run_check=False) for one in inputs
        )

    def gather(module, out, mesh):
        return out.full_tensor()

    distribute_module(model, mesh, place, replicate, gather)
    model.head.weight = model.table.weight  # it makes two of them


def join_parts(name, parts, whole):
    """A parameter from what the ranks of a replica hold of it."""
    if parts[0].shape == whole.shape:
        return parts[0]
    (dim,) = {at for one in parts for at in range(whole.dim()) if one.shape[at] != whole.shape[at]}
    joined = torch.cat(parts, dim)
    assert joined.shape == whole.shape, name
    return joined


def hang(marker):
    """Once: a message from which nothing frees this process, as a fault in gloo would leave one."""
    if not marker.exists():
        marker.touch()
        StuckWatch.limit_s = 0.5
        wait = (lambda: threading.Event().wait()).__code__
        there = {"threading": threading, "__name__": "shared.comms.collectives"}
        types.FunctionType(wait, there)()


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    arm(Fault(**fault) for fault in given.get("faults", ()))
    kind = given.get("kind", "shards")
    run = swift.join()

    def build(mesh):
        model = Model(given.get("dropout", 0.2))
        {"shards": shard, "tensor": split}[kind](model, mesh)
        make = OPTIMIZERS[given.get("optimizer", "adamw")]
        trained = [one for one in model.parameters() if one.requires_grad]
        return model, swift.undoable(make(trained), mode=given.get("mode", "exact"))

    sharded = swift.Sharded(
        build,
        run,
        shards=given.get("shards", 2),
        bucket_mb=2e-3,
        clip_norm=given.get("clip_norm"),
        stateful=lambda opt: [torch.optim.lr_scheduler.StepLR(opt.optimizer, 3, 0.9)],
    )
    data = swift.StepData(make_data(), BATCH, seed=3, shared_by=2 if kind == "tensor" else 1)

    def tell(step: int) -> None:
        entries = range(len(sharded.versions()))
        found = digest([one for entry in entries for one in sharded.state_of(entry).values()])
        with open(folder / "states", "a") as file:
            file.write(f"{step} {found:016x} {run.rank}\n")

    def step(i: int) -> None:
        tell(i)
        if [run.rank, i] == given.get("hangs"):
            hang(folder / "hung")
        ids, targets = data[i]
        for half in (slice(0, None, 2), slice(1, None, 2)):
            loss = loss_of(sharded, ids[half], targets[half]) / 2
            sharded.backward(loss, update=half.start == 1)
        sharded.stateful[0].step()
        time.sleep(given.get("step_s", 0.0))

    every = given.get("checkpoint")
    checkpoint = swift.Every(every, folder / "checkpoints") if every else None
    run.loop(step, sharded, until=given["steps"], checkpoint=checkpoint)
    tell(given["steps"])
    state = {
        name: one
        for entry in range(len(sharded.versions()) - 1)
        for name, one in sharded.state_of(entry).items()
    }
    torch.save(state, folder / f"state-{run.rank}")


if __name__ == "__main__":
    main()
