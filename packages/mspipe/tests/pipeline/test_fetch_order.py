"""A fetch counts no write as stored that its GPU stream has not waited for."""

import threading
import time
from contextlib import nullcontext

import torch

from mspipe.pipeline.gpu_streams import GpuStreams
from mspipe.pipeline.stages import Stages

HELD = 3
"""The iteration whose write ends while the fetch of the next one waits."""


class Streams(GpuStreams):
    """Marks are numbers of stored iterations.

    A fetch after `HELD` that waits for the mark `HELD` waits until one more iteration is stored.
    """

    def __init__(self, stages):
        super().__init__(torch.device("cpu"))
        self.stages, self.awaited, self.waits = stages, 0, threading.Event()
        self.index = 0

    def on(self, way):
        return nullcontext()

    def mark(self):
        return self.stages.num_committed + 1

    def after(self, mark, *tensors):
        if tensors or mark is None:
            return
        self.awaited = mark
        if mark == HELD and self.index > HELD:  # the write of HELD waits for this
            self.waits.set()
            deadline = time.monotonic() + 60
            while self.stages.num_committed <= mark:
                assert time.monotonic() < deadline
                time.sleep(1e-4)


class Noted(Stages):
    """Notes what each fetch counted as stored, and what it had waited for."""

    noted = None

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.streams = Streams(self)
        self.found = []
        type(self).noted = self.found, self.streams

    def fetch_memory(self, work):
        self.streams.index = work.index
        super().fetch_memory(work)
        self.found.append((work.num_committed, self.streams.awaited))

    def write(self, work, rows):
        if work.index == HELD:
            assert self.streams.waits.wait(60)  # for the next iteration's fetch, which misses it
        super().write(work, rows)


def test_what_ends_during_the_wait_is_not_counted(toy):
    events = toy.stream()
    pipe = toy.pipeline(events, mode="forward", stages=Noted)
    toy.train(pipe, events, epochs=1)
    found, streams = Noted.noted
    assert len(found) == 12
    assert streams.waits.is_set()
    assert all(counted <= awaited for counted, awaited in found), found
