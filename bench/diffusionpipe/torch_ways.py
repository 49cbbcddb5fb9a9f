"""What torch offers for the same job: DDP, FSDP2 and its pipelines, each as a way that steps in turns.

All of them run the same layers, frozen parts and draws as the engine, on the same batches.
"""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from small_sd import SEED, copy_job, iterate, make_optimizer
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

import diffusionpipe as dp
from shared.comms import Group

__all__ = ["SCHEDULES", "DataParallel", "Pipeline", "shard", "wrap_ddp"]

SCHEDULES: dict[str, Any] = {
    "Schedule1F1B": lambda stage, *own, **named: Schedule1F1B(stage, *own, **named),
    "ScheduleInterleavedZeroBubble": lambda stage, *own, **named: ScheduleInterleavedZeroBubble(
        [stage], *own, **named
    ),
}


class Shares:
    """This rank's even share of each batch and its frozen outputs, encoded first or a step ahead.

    Args:
        job: whose frozen parts run.
        batch_size: rows of all ranks.
        is_prefetched: encode the next batch's share in a thread while this one is trained on.
    """

    def __init__(self, job: dp.Job, batch_size: int, *, is_prefetched: bool) -> None:
        world = Group.world()
        own = batch_size // world.world_size
        self.rows = range(own * world.rank, own * (world.rank + 1))
        self.job, self.step = job, -1
        self._is_prefetched = is_prefetched
        self._batches = iterate(batch_size)
        self._thread: threading.Thread | None = None
        self._ahead: Any = None

    def begin(self) -> tuple[dict[str, Any], dict[str, Tensor], dp.Draw]:
        """Begins a step: the whole batch, frozen outputs of this rank's rows, and their draw."""
        if self._thread is None:
            self._encode(self.step + 1)
        else:
            self._thread.join()
        batch, values = self._ahead
        self.step += 1
        self._thread = None
        if self._is_prefetched:
            self._thread = threading.Thread(target=self._encode, args=(self.step + 1,))
        return batch, values, dp.Draw(SEED, self.step, self.rows)

    def prefetch(self) -> None:
        """Lets the thread begin with the next batch."""
        if self._thread is not None:
            self._thread.start()

    def finish(self) -> None:
        """Waits for the thread, so that the next way has the core for itself."""
        if self._thread is not None:
            self._thread.join()

    def _encode(self, step: int) -> None:
        torch.set_num_threads(1)
        batch = next(self._batches)
        rows = self.job.take(batch, self.rows)
        draw, values = dp.Draw(SEED, step, self.rows), {}
        for component in self.job.components:
            values |= self.job.encode(component, rows, draw)
        self._ahead = batch, values


def send_in_bf16(state, bucket):
    """All-reduces a bucket in bf16: gloo refuses torch's own hook for it."""
    low = bucket.buffer().to(torch.bfloat16).div_(distributed.get_world_size())
    future = distributed.all_reduce(low, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


class DataParallel:
    """Every rank trains the whole U-Net on its share of each batch.

    Args:
        job: a copy of it is trained.
        batch_size: rows of all ranks.
        wrap: makes what is called in the U-Net's place.
        is_prefetched: as of `Shares`.
        is_alone: send no gradients. Ranks then learn from their own rows only.
    """

    def __init__(
        self,
        job: dp.Job,
        batch_size: int,
        wrap: Any,
        *,
        is_prefetched: bool = False,
        is_alone: bool = False,
    ) -> None:
        self.job = copy_job(job)
        self.model = wrap(self.job.chains[0].model)
        self.optimizer = make_optimizer(list(self.model.parameters()))
        self._shares = Shares(self.job, batch_size, is_prefetched=is_prefetched)
        self._is_alone = is_alone

    def __call__(self) -> float:
        """Trains a step and returns the mean loss of this rank's rows."""
        batch, values, draw = self._shares.begin()
        prepared = self.job.prepare(self.job.take(batch, draw.samples), values, draw)[0]
        with self.model.no_sync() if self._is_alone else nullcontext():
            output = self.model(**prepared.state, return_dict=False)[0]
            loss = self.job.compute_losses(output, prepared.target, len(draw.samples)).mean()
            self._shares.prefetch()
            loss.backward()
        self._shares.finish()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def wrap_ddp(bucket_mb: float, *, is_bf16: bool = False) -> Any:
    """Makes DDP of a model, with buckets of a size."""

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        if is_bf16:
            wrapped.register_comm_hook(None, send_in_bf16)
        return wrapped

    return wrap


def shard(model: nn.Module) -> Any:
    """Makes FSDP2 of a U-Net; weights stay whole until the backward pass, which sends least."""
    mesh = Group.world().device_mesh()
    unet: Any = model
    for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


class _Dense(torch.autograd.Function):
    """Hands values on; makes their gradients contiguous, which torch's pipelines want."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.contiguous()


class _StageModule(nn.Module):
    """Layers of a chain as torch's pipelines take them: values of other stages in order, inputs by name."""

    def __init__(self, chain: dp.Chain, first: int, stop: int) -> None:
        super().__init__()
        self._run = lambda state: chain.run(state, first, stop)
        self.own = nn.ModuleList(m for layer in chain.layers[first:stop] for m in layer.modules)
        self.received = [key for key in chain.list_reads(first, stop) if key not in chain.inputs]
        self.inputs = [key for key in chain.list_reads(first, stop) if key in chain.inputs]
        rest = chain.list_reads(stop, len(chain)) if stop < len(chain) else ("output",)
        # Values of earlier stages that later ones read go through this one.
        self.sent = [key for key in rest if key not in chain.inputs]

    def forward(self, *received: Tensor, **inputs: Tensor) -> Any:
        dense = [_Dense.apply(value) for value in received]
        state = dict(zip(self.received, dense, strict=True)) | inputs
        written = state | self._run(state)
        sent = tuple(written[key].contiguous() for key in self.sent)
        return sent if len(sent) > 1 else sent[0]


class Pipeline:
    """One of torch's schedules over two stages, the frozen part split evenly and first.

    Args:
        job: a copy of it is trained.
        spans: layers of both stages.
        batch_size: rows of a batch.
        num_micro_batches: of a step.
        schedule: a name of `SCHEDULES`.
    """

    def __init__(
        self,
        job: dp.Job,
        spans: Any,
        batch_size: int,
        num_micro_batches: int,
        schedule: str = "Schedule1F1B",
    ) -> None:
        self.job, rank = copy_job(job), Group.world().rank
        self._stage = _StageModule(self.job.chains[0], *spans[rank])
        self.optimizer = make_optimizer(list(self._stage.parameters()))
        stage = PipelineStage(self._stage, rank, len(spans), torch.device("cpu"))
        self._schedule = SCHEDULES[schedule](stage, num_micro_batches, loss_fn=self._compute_loss)
        self._shares = Shares(self.job, batch_size, is_prefetched=False)
        self._batch_size, self._is_last = batch_size, rank == len(spans) - 1

    def __call__(self) -> float | None:
        """Trains a step; the last rank returns the mean loss of the batch."""
        batch, values, draw = self._shares.begin()
        whole = dict(self._exchange(values))
        draw = dp.Draw(SEED, draw.step, range(self._batch_size))
        prepared = self.job.prepare(batch, whole, draw)[0]
        inputs = {key: prepared.state[key] for key in self._stage.inputs}
        losses: list[Tensor] = []
        options = {"target": prepared.target, "losses": losses} if self._is_last else {}
        self._schedule.step(**inputs, **options, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).detach().mean()) if self._is_last else None

    def _exchange(self, values: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Gives both ranks all rows' frozen outputs."""
        for name, value in values.items():
            parts = [torch.empty_like(value) for _ in range(Group.world().world_size)]
            distributed.all_gather(parts, value.contiguous())
            yield name, torch.cat(parts)

    def _compute_loss(self, output: Tensor, target: Any) -> Tensor:
        return self.job.compute_losses(output, target, len(output)).mean()
