"""Rows served over TCP beside raw sockets that answer the same request, and that only move as many bytes.

A batch of WIKI reads some 1,100 rows of 1,280 bytes. Two raw servers gather the asked rows out of a table of
the same size, numpy's `take` or torch's `index_select` into one buffer, and send that; the faster one counts.
A third sends one buffer that stays in the processor's cache, whatever was asked: the most that a socket
moves. Each server is a process of its own; the ways alternate within a run.
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

RAW = """
import socket, sys
import numpy as np
import torch
torch.set_num_threads(1)
how, num_asked, num_rows, words = sys.argv[1], *map(int, sys.argv[2:])
table = np.empty((num_rows, words), np.float32)
table[:] = np.arange(num_rows, dtype=np.float32)[:, None]
ids, rows = np.empty(num_asked, np.int64), np.empty((num_asked, words), np.float32)
gather = {
    "take": lambda: np.take(table, ids, 0, out=rows, mode="clip"),
    "index_select": lambda t=torch.from_numpy(table), i=torch.from_numpy(ids), r=torch.from_numpy(rows):
        torch.index_select(t, 0, i, out=r),
    "nothing": lambda: None,
}[how]
listener = socket.create_server(("127.0.0.1", 0))
print(f"tcp://127.0.0.1:{listener.getsockname()[1]}", flush=True)
sock, _ = listener.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while sock.recv_into(ids.view(np.uint8), 0, socket.MSG_WAITALL):
    gather()
    sock.sendall(rows)
"""

GATHERING = ("take", "index_select")
PEERS = [
    {
        "peer": "raw TCP with numpy's take",
        "setting": "into one buffer, mode='clip', sendall; table in huge pages where the kernel gives them",
        "why": "bounds are not checked twice, nothing is allocated, and no protocol is read",
    },
    {
        "peer": "raw TCP with torch's index_select",
        "setting": "out= one buffer, one thread, sendall; the same kind of table",
        "why": "as with take; the sender and the receiver have a core each",
    },
    {
        "peer": "raw TCP that gathers nothing",
        "setting": "one buffer that stays in the cache, whatever was asked",
        "why": "a bound: what a socket moves when no row is looked for",
    },
]


class Raw:
    """A client that knows how many bytes come."""

    def __init__(self, address):
        host, port = address.removeprefix("tcp://").split(":")
        self.sock = socket.create_connection((host, int(port)))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, ids):
        self.sock.sendall(ids.numpy())
        rows = torch.empty(ASKED, WORDS)  # the caller's own, as ours gives them
        left = rows.numpy().data.cast("B")
        while left:
            left = left[self.sock.recv_into(left, flags=socket.MSG_WAITALL) :]
        return rows


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
    ours = RemoteRows(serve(OURS), NUM_ROWS, torch.zeros(WORDS))
    marks = torch.arange(float(NUM_ROWS))
    for ids in torch.arange(NUM_ROWS).split(1 << 16):
        ours.write(ids, marks[ids, None].expand(-1, WORDS))
    raw = {how: Raw(serve(RAW, how, ASKED, NUM_ROWS, WORDS)) for how in (*GATHERING, "nothing")}
    readers = {"ours": ours, **raw}
    found = {name: [] for name in readers}
    wrong = set()

    def alternate():
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
                if name != "nothing" and not torch.equal(rows, marks[ids, None].expand(-1, WORDS)):
                    wrong.add(name)

    benchmark.pedantic(alternate, rounds=1)
    ours.close()
    benchmark.extra_info.update(
        {
            name: f"{median(rates):.3f} M/s, quartiles {low:.3f}-{high:.3f}"
            for name, rates in found.items()
            for low, _, high in [quantiles(rates, n=4)]
        }
    )
    best = max(GATHERING, key=lambda how: median(found[how]))
    cores = len(os.sched_getaffinity(0))
    about = (
        f"{ASKED:,} random rows out of {NUM_ROWS:,}, median of {ROUNDS}; rows of ours, take and index_select "
        f"are those asked for; cores for both ends: {cores}"
    )
    for name, told, aim in (
        (best, "a raw socket that gathers the same rows", 0.9),
        ("nothing", "a raw socket that moves as many bytes and gathers nothing, a bound", None),
    ):
        ratios = [one / other for one, other in zip(found["ours"], found[name], strict=True)]
        low, _, high = quantiles(ratios, n=4)
        record_claim(
            Claim(
                name=f"rows of {4 * WORDS:,} bytes served over loopback",
                unit="M/s",
                ours=median(found["ours"]),
                baseline=median(found[name]),
                baseline_name=told,
                higher_is_better=True,
                correct=not wrong,
                detail=f"wrong rows: {sorted(wrong)}"
                if wrong
                else f"{about}; the baseline is {name}",
                source="hatch run bench mspipe/server",
            ),
            aim=aim,
            spread=(low, high),
        )
