"""A fetch counts no write as stored that its GPU stream has not waited for."""

import time
from contextlib import nullcontext

import torch

from mspipe.pipeline.gpu_streams import GpuStreams
from mspipe.pipeline.stages import Stages


class Streams(GpuStreams):
    """Marks are numbers of stored iterations; a wait for one lasts until the next one is stored."""

    def __init__(self, stages):
        super().__init__(torch.device("cpu"))
        self.stages, self.awaited, self.num_late = stages, 0, 0

    def on(self, way):
        return nullcontext()

    def mark(self):
        return self.stages.num_committed + 1

    def after(self, mark, *tensors):
        if tensors or mark is None:
            return
        self.awaited, end = mark, time.monotonic() + 0.02
        while self.stages.num_committed <= mark and time.monotonic() < end:
            time.sleep(1e-4)
        self.num_late += self.stages.num_committed > mark


class Noted(Stages):
    """Notes what each fetch counted as stored, and what it had waited for."""

    noted = None

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.streams = Streams(self)
        self.found = []
        type(self).noted = self.found, self.streams

    def fetch_memory(self, work):
        super().fetch_memory(work)
        self.found.append((work.num_committed, self.streams.awaited))


def test_what_ends_during_the_wait_is_not_counted(toy):
    events = toy.stream()
    pipe = toy.pipeline(events, mode="forward", stages=Noted)
    toy.train(pipe, events, epochs=1)
    found, streams = Noted.noted
    assert len(found) == 12
    assert streams.num_late > 0, "no write ended while a fetch waited"
    assert all(counted <= awaited for counted, awaited in found), found
