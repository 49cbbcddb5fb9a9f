"""Small streams and pipelines for the tests."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mspipe import models
from mspipe.data.batching import batches
from mspipe.data.events import Events
from mspipe.data.sampler import Sampler
from mspipe.memory.node_memory import NodeMemory
from mspipe.pipeline.pipeline import Pipeline

EDGE_DIM = 3
MODELS = {
    "tgn": lambda: models.TGN(8, EDGE_DIM, time_dim=4, fanout=4),
    "jodie": lambda: models.JODIE(8, EDGE_DIM, time_dim=4),
    "apan": lambda: models.APAN(8, EDGE_DIM, time_dim=4, slots=3, fanout=4),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unchecked():
    """What users run: no types are checked at calls, so that the errors are the package's own."""
    jaxtyping = pytest.importorskip("jaxtyping")
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def synced(monkeypatch):
    """Which files were renamed, and whether what they hold had been synced to the disk by then."""
    fsync, replace = os.fsync, os.replace
    done, replaced = set(), []

    def noted_fsync(descriptor):
        fsync(descriptor)
        done.add(_version_of(os.fstat(descriptor)))

    def noted_replace(source, target):
        replaced.append((Path(target), _version_of(os.stat(source)) in done))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return SimpleNamespace(replaced=replaced)


def _version_of(status):
    return status.st_ino, status.st_size, status.st_mtime_ns


def stream(count=600, num_src=20, num_dst=8, seed=0, *, loops=False):
    """Sources that meet destinations of their own kind; several events a moment."""
    draw = np.random.default_rng(seed)
    src = draw.integers(0, num_src, count)
    dst = num_src + (src + 4 * draw.integers(0, num_dst // 4, count)) % num_dst
    if loops:
        dst = np.where(draw.random(count) < 0.2, src, dst)
    t = np.sort(draw.integers(0, 3 * count, count))
    return Events(src, dst, t, draw.standard_normal((count, EDGE_DIM)).astype(np.float32))


def pipeline(events, name="tgn", *, place="cpu", memory=None, sampler=None, seed=0, **settings):
    torch.manual_seed(seed)
    model = MODELS[name]()
    if memory is None:
        memory = NodeMemory(events.num_nodes, model.dim, model.mail_dim, model.slots, place)
    sampler = sampler or Sampler(events, [model.fanout])
    return Pipeline(model, memory, sampler, events.features, **settings)


def train(pipe, events, *, size=50, epochs=2, rate=1e-2, step=lambda: None):
    """Losses, and everything that was learnt, of passes that begin with an empty memory."""
    optimizer = torch.optim.Adam(pipe.model.parameters(), rate)
    losses = []
    for epoch in range(epochs):
        pipe.memory.reset()
        for out in pipe.train(batches(events, size, seed=epoch)):
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
            step()
            losses.append(out.loss.item())
    return losses


@pytest.fixture(scope="session")
def toy():
    return SimpleNamespace(
        edge_dim=EDGE_DIM, models=MODELS, stream=stream, pipeline=pipeline, train=train
    )
