"""The demo's training: a small Llama on verses, run as a script by `meshyard-swift run`.

`verses.py replicas FOLDER TEXT --steps 20 --kill 11` trains on replicas, `verses.py pipeline ...` on a stage
a rank. Each process leaves lines in the folder: the second at which it finished each step, and at the end the
digest of its state. Rank 1 kills itself in the middle of the steps named. Under `torchrun`, for comparison,
`verses.py torchrun ...` trains replicas by DDP from a checkpoint of every step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

import swift
from shared.comms.init import init_from_env, leave
from shared.kernels.digest import digest
from swift.injection import Fault, arm

__all__: list[str] = []

_LENGTH, _GLOBAL_BATCH = 64, 8
_CHECKPOINT_EVERY = 8


class _Half(nn.Module):
    """The first or the second half of a Llama's layers, with its embedding or head."""

    def __init__(self, model: Any, index: int) -> None:
        super().__init__()
        layers, middle = model.model.layers, len(model.model.layers) // 2
        self.embed = model.model.embed_tokens if index == 0 else None
        self.layers = layers[:middle] if index == 0 else layers[middle:]
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if index else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embed is None else self.embed(x)
        places = torch.arange(hidden.shape[1])[None]
        angles = self.rotary(hidden, places)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=angles, position_ids=places)
        return hidden if self.head is None or self.norm is None else self.head(self.norm(hidden))


def _make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, attention_dropout=0.1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def _make_undoable(module: nn.Module) -> Any:
    return swift.undoable(torch.optim.AdamW(module.parameters(), lr=1e-3))


def _read_verses(path: Path) -> list[Tensor]:
    """Samples of a text, a token a byte."""
    return list(torch.tensor(list(path.read_bytes())).view(-1, _LENGTH))


def _loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _replicas(run: Any, data: Any) -> tuple[Any, Callable[[int], Any]]:
    model = _make_model()
    parallel = swift.DataParallel(model, _make_undoable(model), run)

    def step(i: int) -> None:
        ids = data[i]
        parallel.backward(parallel(input_ids=ids, labels=ids).loss)

    return parallel, step


def _pipeline(run: Any, data: Any, folder: Path) -> tuple[Any, Callable[[int], Any]]:
    def build(index: int) -> tuple[nn.Module, Any]:
        module = _Half(_make_model(), index)
        return module, _make_undoable(module)

    log = swift.BoundaryLog(folder / "log")
    stage = swift.Stage(build, run, loss=_loss_of, micro_batches=4, chunk=2, log=log)
    return stage, lambda i: stage.step(data[i], data[i])


class _Lines:
    """What a process tells, a line each."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")

    def note(self, rank: int | None, **line: Any) -> None:
        self._file.write(json.dumps({"rank": rank, **line}) + "\n")
        self._file.flush()

    def note_state(self, rank: int | None, step: int, state: Sequence[Tensor]) -> None:
        self.note(rank, step=step, at_s=time.monotonic())
        self.note(rank, digest=f"{digest(state):016x}")


def _train_under_torchrun(
    folder: Path, verses: list[Tensor], steps: int, kills: Sequence[int], lines: _Lines
) -> None:
    group = init_from_env(backend="gloo")
    rank, world_size = group.rank, group.world_size
    place = SimpleNamespace(rank=rank, world_size=world_size, reads_whole_batches=False)
    data = swift.StepData(verses, global_batch=_GLOBAL_BATCH, seed=0, run=place)
    model = _make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    saved, at = folder / "checkpoint.pt", 0
    if saved.exists():
        held = torch.load(saved, weights_only=True)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        at = held["step"]
    replica = DistributedDataParallel(model)
    while at < steps:
        lines.note(rank, step=at, at_s=time.monotonic())
        torch.manual_seed(world_size * at + rank)
        optimizer.zero_grad()
        replica(input_ids=data[at], labels=data[at]).loss.backward()
        killed = folder / f"killed-{at}"
        if rank == 1 and at in kills and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        at += 1
        if rank == 0:
            held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": at}
            torch.save(held, saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
    lines.note_state(rank, steps, list(model.parameters()))
    leave()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("replicas", "pipeline", "torchrun"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill", type=int, action="append", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines, verses = _Lines(arguments.folder), _read_verses(arguments.text)
    if arguments.kind == "torchrun":
        _train_under_torchrun(arguments.folder, verses, arguments.steps, arguments.kill, lines)
        return
    run = swift.join()
    is_replicated = arguments.kind == "replicas"
    arm(
        Fault(rank=1, recovery=at, point="update" if is_replicated else "backward", step=step)
        for at, step in enumerate(arguments.kill)
    )
    data = swift.StepData(verses, global_batch=_GLOBAL_BATCH, seed=0)
    if is_replicated:
        trained, step = _replicas(run, data)
        checkpoint = None
    else:
        trained, step = _pipeline(run, data, arguments.folder)
        checkpoint = swift.Every(_CHECKPOINT_EVERY, arguments.folder / "checkpoints")

    def noted(i: int) -> None:
        lines.note(run.rank, step=i, at_s=time.monotonic())  # that many steps are finished
        step(i)

    run.loop(noted, trained, until=arguments.steps, checkpoint=checkpoint)
    entries = range(len(trained.versions()))
    state = [tensor for entry in entries for tensor in trained.state_of(entry).values()]
    lines.note_state(run.rank, arguments.steps, state)


if __name__ == "__main__":
    _main()
