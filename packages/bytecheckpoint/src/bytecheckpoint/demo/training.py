"""The demo's training: a small Transformer on text, the same run on any number of ranks.

A step averages over the next samples of the whole run, whichever ranks compute them, so its loss is
the same on one rank, two or four, except for the order in which floats are added.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from shared.comms import Group, all_reduce, barrier
from shared.data.texts.bible import read_bible
from shared.topology import Mesh

__all__ = ["Run", "measure_blocking", "measure_read_bytes", "train", "train_until_killed"]

_CONTEXT = 64
_BATCH = 8
_WIDTH = 192


class Model(nn.Module):
    """A causal Transformer over bytes."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, _WIDTH)
        self.place = nn.Embedding(_CONTEXT, _WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                _WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, time, 256] of tokens [batch, time]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token(tokens) + self.place(places)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


class Run:
    """One training run on the ranks there are; sharded by FSDP2 where there are several."""

    def __init__(self, num_layers: int) -> None:
        torch.manual_seed(0)
        self.world_size = Group.world().world_size if Group.exists() else 1
        self.model = Model(num_layers)
        if self.world_size > 1:
            mesh = Mesh(axes={"shard": self.world_size}).to_device_mesh("cpu")
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.text = torch.frombuffer(bytearray(read_bible(), "utf-8"), dtype=torch.uint8)
        self.order = bcp.LoaderState(len(self.text) // (_CONTEXT + 1), dataset="bible")
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "data": self.order,
            "extra": {"step": 0, "rng": bcp.rng_state()},
        }
        self._samples = iter(self.order)

    def step(self) -> float:
        """Trains one step; the loss over the whole batch, in nats a byte."""
        chosen = [next(self._samples) for _ in range(_BATCH // self.world_size)]
        starts = torch.tensor(chosen) * (_CONTEXT + 1)
        windows = self.text[starts[:, None] + torch.arange(_CONTEXT + 1)].long()
        logits = self.model(windows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.state["extra"]["step"] += 1
        mean = loss.detach().clone()
        if self.world_size > 1:
            all_reduce(Group.world(), mean)
        return mean.item() / self.world_size

    def resume(self, checkpointer: bcp.Checkpointer) -> int:
        """Resumes from the newest checkpoint; returns its step."""
        checkpointer.load_latest(self.state)
        self._samples = iter(self.order)
        return self.state["extra"]["step"]


def train(num_layers: int, num_steps: int, folder: Path | None = None) -> tuple[int, list[float]]:
    """Trains to a step, from a folder's newest checkpoint where one is given.

    Returns:
        The step it began at, and the loss of each step from there.
    """
    run = Run(num_layers)
    first = 0 if folder is None else run.resume(bcp.Checkpointer(folder))
    return first, [run.step() for _ in range(first, num_steps)]


def train_until_killed(num_layers: int, folder: Path, every_n: int, kill_at: int) -> None:
    """Trains and saves in the background, until every rank is killed without warning."""
    run = Run(num_layers)
    checkpointer = bcp.Checkpointer(folder, every_n=every_n, keep=2)
    while True:
        run.step()
        step = run.state["extra"]["step"]
        handle = checkpointer.save(step, run.state)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step + every_n > kill_at and step % every_n == 0:
            # The last save before the kill is on disk; the next one is killed half written.
            handle.committed.result()


def measure_blocking(num_layers: int, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Measures how long a save blocks training, ours and DCP's in turn.

    Returns:
        Seconds of the slowest rank by round: "ours", "ours total", "dcp", "dcp total"; and under
        "correct" whether what was saved equals the state, once a round.
    """
    run = Run(num_layers)
    run.step()
    state = {"model": run.model.state_dict(), "optimizer": _list_tensors(run.optimizer)}
    found: dict[str, list[float]] = {
        key: [] for key in ("ours", "ours total", "dcp", "dcp total", "correct")
    }
    checkpointer = bcp.Checkpointer(folder / "ours", keep=1)
    for number in range(rounds + 1):
        begin = _start_together()
        handle = checkpointer.save(number, state)
        ours = time.perf_counter() - begin
        handle.committed.result(timeout=timedelta(minutes=5).total_seconds())
        ours_total = time.perf_counter() - begin
        writer = dcp.FileSystemWriter(folder / "dcp")
        begin = _start_together()
        future = dcp.async_save(state, storage_writer=writer)
        theirs = time.perf_counter() - begin
        assert isinstance(future, Future)
        future.result()
        theirs_total = time.perf_counter() - begin
        seconds = torch.tensor([ours, ours_total, theirs, theirs_total])
        all_reduce(Group.world(), seconds, "max")
        if number:  # the first round warms up
            for key, value in zip(found, seconds.tolist(), strict=False):
                found[key].append(value)
    with bcp.open(folder / "ours" / f"step_{rounds:08d}") as checkpoint:
        weight = run.model.state_dict()["head.weight"].full_tensor()
        found["correct"].append(float(torch.equal(checkpoint.read("model.head.weight"), weight)))
    return found


def measure_read_bytes(num_layers: int, folder: Path) -> dict[str, int]:
    """Bytes that all ranks read from storage when each wants the whole model."""
    found = {}
    for dedupe in ("never", "always"):
        torch.manual_seed(1)
        state = {"model": Model(num_layers)}
        step = max(bcp.Checkpointer(folder).steps())
        report = bcp.load(folder / f"step_{step:08d}", state, dedupe=dedupe)
        total = torch.tensor(report.num_bytes_read)
        all_reduce(Group.world(), total)
        found[dedupe] = int(total)
    found["model"] = sum(t.numel() * t.itemsize for t in Model(num_layers).state_dict().values())
    return found


def _start_together() -> float:
    barrier(Group.world())
    return time.perf_counter()


def _list_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as a dictionary of tensors, which both ways can save."""
    return {
        f"{at}.{key}": value
        for at, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }
