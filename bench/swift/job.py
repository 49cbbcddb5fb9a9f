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
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "KINDS",
    "NUM_SHARDS",
    "Progress",
    "digest",
    "inputs",
    "local",
    "loss_of",
    "make_model",
    "shard",
]

KINDS = ("linear", "minilm", "llama")
"""25 MB of parameters and AdamW's states; a MiniLM of 22 million parameters, 270 MB; a Llama of 14 million,
166 MB, which is sharded."""
NUM_SHARDS = 2
"""Of the Llama, in two replicas."""
WIDTH, DEPTH = 512, 8
BATCH = {"linear": 16, "minilm": 4, "llama": 2}
TOKENS = 32


def make_model(kind: str) -> nn.Module:
    """The model, the same in every process."""
    torch.manual_seed(0)
    if kind == "linear":
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(DEPTH)
        ]
        return nn.Sequential(*blocks)
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForCausalLM,
    )

    if kind == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
                num_attention_heads=6, num_key_value_heads=6, tie_word_embeddings=True,
                attention_dropout=0.1,
            )
        ).train()  # fmt: skip
    config = BertConfig(
        vocab_size=30_522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=1536,
    )  # fmt: skip
    return BertForSequenceClassification(config).train()


def shard(model: Any, mesh: Any) -> None:
    """Shards a Llama layer by layer with FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def inputs(kind: str, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's inputs and targets of one step."""
    drawn = torch.Generator().manual_seed(1_000_003 * step + rank)
    if kind == "linear":
        x = torch.randn(BATCH[kind], WIDTH, generator=drawn)
        return x, x.roll(1, dims=1).tanh()
    if kind == "llama":
        ids = torch.randint(8192, (BATCH[kind], TOKENS), generator=drawn)
        return ids, ids
    ids = torch.randint(1000, 30_000, (BATCH[kind], TOKENS), generator=drawn)
    return ids, ids[:, 0] % 2


def loss_of(kind: str, model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    """The mean loss of a rank's samples."""
    x, y = given
    if kind == "linear":
        return nn.functional.mse_loss(model(x), y)
    return model(input_ids=x, labels=y).loss


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of this rank's parts of all parameters, and of what AdamW keeps of each."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state: Mapping[str, Tensor] = optimizer.state.get(parameter, {})
        for value in (parameter.data, state.get("exp_avg"), state.get("exp_avg_sq")):
            if value is not None:
                found.update(local(value).contiguous().numpy().tobytes())
    return found.hexdigest()


def local(tensor: Any) -> Tensor:
    """The memory of a tensor, of a DTensor this rank's part."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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
