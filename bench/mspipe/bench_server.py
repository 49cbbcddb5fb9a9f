"""Rows served over TCP beside what a raw socket moves of the same bytes.

A batch of WIKI reads some 1,100 rows of 1,280 bytes. The raw servers answer a request of the same length
with the same number of bytes, one from a single buffer, which stays in the processor's cache, and one
from places all over a table of the same size, which no server of rows can avoid to fetch from memory.
Each server is a process of its own; the ways alternate within a run.
"""

import os
import socket
import subprocess
import sys
import time
from statistics import median, quantiles

import pytest
import torch

from mspipe.memory.remote_rows import RemoteRows
from shared.claims import Claim

ROUNDS = 400
NUM_ROWS, WORDS, ASKED = 500_000, 320, 1_100

OURS = """
from mspipe.memory.server import MemoryServer
server = MemoryServer()
print(server.address, flush=True)
server.serve_forever()
"""

# Places are whole answers, so that the raw server sends each with one call.
RAW = """
import random, socket, sys
import numpy as np
request, answer, num_places = map(int, sys.argv[1:])
listener = socket.create_server(("127.0.0.1", 0))
print(f"tcp://127.0.0.1:{listener.getsockname()[1]}", flush=True)
sock, _ = listener.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
asked, places = bytearray(request), np.ones((num_places, answer), np.uint8)
while sock.recv_into(asked, request, socket.MSG_WAITALL):
    sock.sendall(places[random.randrange(num_places)])
"""


class Raw:
    """A client that knows how many bytes come."""

    def __init__(self, address):
        host, port = address.removeprefix("tcp://").split(":")
        self.sock = socket.create_connection((host, int(port)))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = memoryview(bytearray(4 * WORDS * ASKED))

    def read(self, ids):
        self.sock.sendall(ids.numpy())
        left = self.buffer
        while left:
            left = left[self.sock.recv_into(left, flags=socket.MSG_WAITALL) :]
        return self.buffer


@pytest.fixture
def serve():
    started = []

    def start(script, *arguments):
        command = [sys.executable, "-c", script, *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None, "it is a pipe"
        return process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def bench_server(benchmark, record_claim, serve):
    answer = 4 * WORDS * ASKED
    num_places = 4 * WORDS * NUM_ROWS // answer
    ours = RemoteRows(serve(OURS), NUM_ROWS, torch.zeros(WORDS))
    marks = torch.arange(float(NUM_ROWS))
    for ids in torch.arange(NUM_ROWS).split(1 << 16):
        ours.write(ids, marks[ids, None].expand(-1, WORDS))
    readers = {
        "ours": ours,
        "raw": Raw(serve(RAW, 8 * ASKED, answer, 1)),
        "raw, from memory": Raw(serve(RAW, 8 * ASKED, answer, num_places)),
    }
    found = {name: [] for name in readers}
    correct = True

    def alternate():
        nonlocal correct
        random = torch.Generator().manual_seed(0)
        for number in range(ROUNDS + 20):
            ids = torch.randint(0, NUM_ROWS, (ASKED,), generator=random)
            # Each comes first as often, since one leaves its bytes in the cache for the next.
            turn = number % len(readers)
            for name in (*list(readers)[turn:], *list(readers)[:turn]):
                reader = readers[name]
                begin = time.perf_counter()
                rows = reader.read(ids)
                seconds = time.perf_counter() - begin
                if number >= 20:  # the first ones warm up
                    found[name].append(ASKED / seconds / 1e6)
                if isinstance(rows, torch.Tensor):
                    correct &= torch.equal(rows, marks[ids, None].expand(-1, WORDS))

    benchmark.pedantic(alternate, rounds=1)
    ours.close()
    benchmark.extra_info.update({name: median(rates) for name, rates in found.items()})
    cores = len(os.sched_getaffinity(0))
    for name, told, aim in (
        ("raw", "raw TCP, one buffer that stays in the cache", 0.8),
        ("raw, from memory", "raw TCP, places of a table of the same size", None),
    ):
        spread = "; ".join(
            f"{way} {low:.2f}-{high:.2f}"
            for way, (low, _, high) in ((way, quantiles(found[way], n=4)) for way in ("ours", name))
        )
        record_claim(
            Claim(
                name=f"rows of {4 * WORDS:,} bytes served over loopback, cores for both ends: {cores}",
                unit="M/s",
                ours=median(found["ours"]),
                baseline=median(found[name]),
                baseline_name=told,
                higher_is_better=True,
                correct=correct,
                detail=f"{ASKED:,} random rows out of {NUM_ROWS:,}, median of {ROUNDS}, quartiles {spread}",
                source="hatch run bench mspipe -k server",
            ),
            aim=aim,
        )
