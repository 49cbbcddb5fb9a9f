"""Train a model of your own on text: experts with capacity, divided over the ranks.

torchrun --nproc-per-node 2 packages/lancet/examples/train_layers.py
"""

from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lancet
from lancet.data import load_text_batches
from shared.comms import init_from_env

OUT = Path("report/lancet/layers")
DIM = 64


class Block(nn.Module):
    """A convolution over earlier bytes, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Conv1d(DIM, DIM, kernel_size=4, padding=3)
        self.experts = lancet.moe.Layer(DIM, 2 * DIM, 8, gate="top_k", k=2, capacity_factor=1.25)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens after both, and the balance loss."""
        mixed = self.mix(hidden.transpose(1, 2))[..., : hidden.shape[1]]
        hidden = hidden + mixed.transpose(1, 2)
        added, balance = self.experts(self.norm(hidden))
        return hidden + added, balance  # a dropped token keeps what it was


class ByteModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, 256)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        hidden, balances = self.embedding(input_ids), []
        for block in self.blocks:
            hidden, balance = block(hidden)
            balances.append(balance)
        logits = self.head(hidden)[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        return loss + 0.01 * torch.stack(balances).mean()


def main() -> None:
    group = init_from_env()
    torch.manual_seed(0)
    model = lancet.parallelize(ByteModel(), group)
    backend = lancet.Backend(group)
    step = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for number, batch in enumerate(islice(load_text_batches(4, 64, seed=group.rank), 10)):
        loss = step(**batch)
        loss.backward()
        lancet.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if group.rank == 0:
            print(f"step {number}: loss {loss:.3f}")
    lancet.export(model, OUT)
    if group.rank == 0:
        print(backend.report())
        whole = ByteModel()
        whole.load_state_dict(load_file(OUT / "model.safetensors"))
        print(f"{sum(weight.numel() for weight in whole.parameters()):,} weights in {OUT}")


if __name__ == "__main__":
    main()
