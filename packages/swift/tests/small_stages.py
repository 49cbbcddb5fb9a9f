"""A pipeline of small stages with dropout, run on the ranks of a pool."""

import torch
from torch import nn

from swift import undoable
from swift.pipeline.log import BoundaryLog
from swift.pipeline.stage import PipelineStage

DIM, CLASSES, BATCH, MICRO_BATCHES = 6, 4, 12, 6
RUN = "run-1"


def build(index, num_stages, extra=None):
    """A stage's module and optimizer, always with the same weights; extra="norm": with BatchNorm."""
    torch.manual_seed(31 + index)
    layers = [nn.Linear(DIM, DIM + index), nn.Tanh(), nn.Dropout(0.3), nn.Linear(DIM + index, DIM)]
    if extra == "norm":
        layers.insert(1, nn.BatchNorm1d(DIM + index))
    if index == num_stages - 1:
        layers.append(nn.Linear(DIM, CLASSES))
    module = nn.Sequential(*layers)
    if index % 2:
        return module, undoable(torch.optim.SGD(module.parameters(), 0.3, momentum=0.9))
    return module, undoable(torch.optim.AdamW(module.parameters(), 0.05))


def batch(iteration):
    draw = torch.Generator().manual_seed(1000 + iteration)
    inputs = torch.randn(BATCH, DIM, generator=draw)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=draw)


def loss_of(out, targets):
    return nn.functional.cross_entropy(out, targets)


def make_stage(
    folder, group, *, index=None, num_stages=None, chunk=None, log=True, extra=None, **settings
):
    """This rank's stage, or another one for a helper."""
    index = group.rank if index is None else index
    num_stages = num_stages or group.world_size
    module, opt = build(index, num_stages, extra)
    writer = BoundaryLog(folder).open(RUN, index) if log else None
    return PipelineStage(
        module, opt, index=index, num_stages=num_stages, group=group if num_stages > 1 else None,
        loss=loss_of, micro_batches=MICRO_BATCHES, chunk=chunk, log=writer, seed=5, **settings,
    )  # fmt: skip


def train(stage, stop):
    """Steps until `stop`; the losses."""
    losses = []
    while stage.iteration < stop:
        inputs, targets = batch(stage.iteration)
        # Only the ends read them.
        losses.append(
            stage.step(inputs if stage.index == 0 else None, targets if stage.is_last else None)
        )
        stage.opt.confirm()
    return losses


def state_of(stage):
    """Parameters and optimizer state, copied."""
    state = [p.detach().clone() for p in stage.opt.parameters]
    for parameter in stage.opt.parameters:
        held = stage.opt.optimizer.state[parameter]
        state += [held[key].clone() for key in sorted(held) if isinstance(held[key], torch.Tensor)]
    return state + [buffer.clone() for buffer in stage.module.buffers()]
