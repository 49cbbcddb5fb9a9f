"""Train a small Llama in two replicas, each sharded over two ranks by FSDP2; any rank may be lost.

meshyard-swift run -n 4 --spares 1 train_sharded.py [TEXT_FILE]

In another terminal: meshyard-swift inject kill 1
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import swift

STEPS, LENGTH = 30, 64

run = swift.join()
path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(torch.__file__)
text = torch.tensor(list(path.read_bytes()), dtype=torch.long)
samples = list(text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH))
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=True,
    attention_dropout=0.1,
)


def build(mesh: Any) -> tuple[torch.nn.Module, Any]:
    """The model over the ranks of one replica; called again after each failure."""
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, swift.undoable(torch.optim.AdamW(model.parameters(), lr=1e-3))


sharded = swift.Sharded(build, run, shards=2, clip_norm=1.0)
data = swift.StepData(samples, global_batch=8, seed=0)


def step(i: int) -> None:
    """One step: a pure function of its number and the rank."""
    ids = data[i]
    loss = sharded(input_ids=ids, labels=ids).loss
    sharded.backward(loss)
    if run.rank == 0 and i % 10 == 0:
        print(f"step {i}: loss {loss.item():.3f}", flush=True)


run.loop(step, sharded, until=STEPS)
if run.rank == 0:
    print(run.report())
