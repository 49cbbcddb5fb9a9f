"""The training that every contender runs, and the lines that its ranks leave for the one who measures.

A rank appends a JSON line to a file of its own after each finished step: its rank, process, step and the
seconds of the machine's monotonic clock, which all processes share.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ["KINDS", "Progress", "digest", "inputs", "loss_of", "make_model"]

KINDS = ("linear", "minilm")
"""25 MB of parameters and AdamW's states; a MiniLM of 22 million parameters, 270 MB."""
WIDTH, DEPTH = 512, 8
BATCH = {"linear": 16, "minilm": 4}
TOKENS = 32


def make_model(kind: str) -> nn.Module:
    """The model, the same in every process."""
    torch.manual_seed(0)
    if kind == "linear":
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(DEPTH)
        ]
        return nn.Sequential(*blocks)
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30_522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=1536,
    )  # fmt: skip
    return BertForSequenceClassification(config).train()


def inputs(kind: str, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's inputs and targets of one step."""
    drawn = torch.Generator().manual_seed(1_000_003 * step + rank)
    if kind == "linear":
        x = torch.randn(BATCH[kind], WIDTH, generator=drawn)
        return x, x.roll(1, dims=1).tanh()
    ids = torch.randint(1000, 30_000, (BATCH[kind], TOKENS), generator=drawn)
    return ids, ids[:, 0] % 2


def loss_of(kind: str, model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    """The mean loss of a rank's samples."""
    x, y = given
    if kind == "linear":
        return nn.functional.mse_loss(model(x), y)
    return model(input_ids=x, labels=y).loss


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of all parameters and of what AdamW keeps of each."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state: Mapping[str, Tensor] = optimizer.state.get(parameter, {})
        for value in (parameter.data, state.get("exp_avg"), state.get("exp_avg_sq")):
            if value is not None:
                found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class Progress:
    """Lines that a rank leaves in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Opens this process's file."""
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._file = os.open(folder / f"{os.getpid()}.jsonl", flags)

    def note(self, rank: int, step: int, **more: object) -> None:
        """Notes that a step is finished, in one write."""
        line = {"rank": rank, "pid": os.getpid(), "step": step, "at_s": time.monotonic(), **more}
        os.write(self._file, json.dumps(line).encode() + b"\n")
