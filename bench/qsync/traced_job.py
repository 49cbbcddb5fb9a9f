"""A small DDP job whose cause of delay is planted, and which every rank traces."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from qsync.diagnosis.traces.recording import record_steps
from shared.comms import Group, barrier

WIDTH, CLASSES = 512, 10


@dataclass(frozen=True, kw_only=True)
class PlantedDelay:
    """What makes a rank late, and how the job sends gradients.

    Attributes:
        rank: the rank that is late.
        gelu_repeats: how often this rank computes each GELU.
        loader_s: seconds that this rank's loader sleeps for each batch.
        rows: rows of a batch.
        num_layers: hidden layers of 1 MB of weights.
        bucket_mb: DDP's buckets; its default if None: 25 MiB, the first one 1 MiB.
        has_bf16_gradients: whether gradients travel in bf16.
        accumulation: batches whose gradients are added up before they are all-reduced.
    """

    rank: int = 1
    gelu_repeats: int = 1
    loader_s: float = 0.0
    rows: int = 256
    num_layers: int = 6
    bucket_mb: float | None = 2
    has_bf16_gradients: bool = False
    accumulation: int = 1


class _Batches(Dataset):
    def __init__(self, rows, loader_s):
        random = torch.Generator().manual_seed(0)
        self.loader_s = loader_s
        self.inputs = torch.randn(rows, WIDTH, generator=random)
        self.labels = torch.randint(CLASSES, (rows,), generator=random)

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        time.sleep(self.loader_s)
        return self.inputs, self.labels


class _Gelu(nn.Module):
    def __init__(self, repeats):
        super().__init__()
        self.repeats = repeats

    def forward(self, x):
        y = x
        for _ in range(self.repeats):
            y = nn.functional.gelu(x)
        return y


def _build(delay, rank):
    torch.manual_seed(0)
    repeats = delay.gelu_repeats if rank == delay.rank else 1
    layers = []
    for _ in range(delay.num_layers):
        layers += [nn.Linear(WIDTH, WIDTH), _Gelu(repeats)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class Trained(NamedTuple):
    """What a rank's training took and did.

    Attributes:
        step_s: seconds of a step, divided by its batches.
        learned: by how much the loss fell.
        sent_bytes: of each bucket of the last step, divided by its batches.
    """

    step_s: float
    learned: float
    sent_bytes: tuple[float, ...]


def send_in_bf16(state, bucket):
    """All-reduces a bucket in bf16: gloo refuses torch's own hook for it."""
    low = bucket.buffer().to(torch.bfloat16).div_(torch.distributed.get_world_size())
    future = torch.distributed.all_reduce(low, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def train(delay, num_steps, trace=None):
    """Trains, and writes a trace if a folder is given."""
    torch.set_num_threads(1)
    group = Group.world()
    model = DistributedDataParallel(_build(delay, group.rank), bucket_cap_mb=delay.bucket_mb)
    hook = send_in_bf16 if delay.has_bf16_gradients else allreduce_hook
    sent_bytes = []

    def send(state, bucket):
        sent_bytes.append(
            bucket.buffer().nbytes / (1 + delay.has_bf16_gradients) / delay.accumulation
        )
        return hook(state, bucket)

    model.register_comm_hook(None, send)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    loader_s = delay.loader_s if group.rank == delay.rank else 0.0
    batches = iter(DataLoader(_Batches(delay.rows, loader_s), batch_size=None))
    losses, ends_s = [], []

    def run_batch():
        inputs, labels = next(batches)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        losses.append(loss.detach())

    def run_step():
        sent_bytes.clear()
        optimizer.zero_grad(set_to_none=True)
        with model.no_sync():
            for _ in range(delay.accumulation - 1):
                run_batch()
        run_batch()
        optimizer.step()
        ends_s.append(time.perf_counter())

    for _ in range(2):
        run_step()
    barrier(group)
    if trace is not None:
        record_steps(run_step, Path(trace) / f"rank{group.rank}.json.gz", num_steps=num_steps)
    else:
        for _ in range(num_steps + 1):
            run_step()
        num_steps += 1
    step_s = (ends_s[-1] - ends_s[-num_steps]) / (num_steps - 1) / delay.accumulation
    return Trained(step_s, float(losses[0] - losses[-1]), tuple(sent_bytes))
