"""A worker in which all goes wrong that can; apart, as ranks import the file that it is in."""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow import Batch, Worker, remote


class Frail(Worker):
    def __init__(self, fails=False):
        if fails:
            raise ValueError("no weights here")

    @remote("dp")
    def add(self, batch, number=0):
        return Batch(x=batch["x"] + number)

    @remote("dp")
    def grow(self, batch):
        return Batch(y=torch.ones(len(batch), 50_000))

    @remote("dp")
    def lose(self, batch):
        raise LookupError(f"rank {self.rank} lost its rows")

    @remote()
    def echo(self, value):
        return value

    @remote()
    def pid(self):
        return os.getpid()

    @remote()
    def hang_in_collective(self, told):
        self.subgroup("all")  # made while both are there
        if self.rank == 1:
            while not Path(told).exists():
                time.sleep(0.01)
            raise ArithmeticError("rank 1 gives up")
        Path(told).touch()
        dist.barrier()

    @remote()
    def sleep_for_ever(self):
        threading.Event().wait()

    @remote()
    def unpicklable(self):
        return threading.Lock()

    def not_remote(self):
        return None


def rows(count):
    return Batch(x=torch.arange(count))
