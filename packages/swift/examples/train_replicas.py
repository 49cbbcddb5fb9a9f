"""Train a small Llama on replicas, of which any rank may be lost at any moment.

meshyard-swift run -n 2 --spares 1 train_replicas.py [TEXT_FILE]
meshyard-swift run -n 4 --spares 1 train_replicas.py [TEXT_FILE] --shards 2

With --shards each replica is sharded over so many ranks by FSDP2.
In another terminal: meshyard-swift inject kill 1
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import swift

STEPS, LENGTH = 60, 64

parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path, nargs="?", default=Path(torch.__file__))
parser.add_argument("--shards", type=int, default=1, help="ranks of a replica")
arguments = parser.parse_args()

run = swift.join()
text = torch.tensor(list(arguments.text.read_bytes()), dtype=torch.long)
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


def build(mesh: Any = None) -> tuple[torch.nn.Module, Any]:
    """The model, over a mesh the ranks of one replica; called again after each failure then."""
    model = AutoModelForCausalLM.from_config(config)
    if mesh is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, swift.undoable(torch.optim.AdamW(model.parameters(), lr=1e-3))


if arguments.shards == 1:
    torch.manual_seed(0)
    trained = swift.DataParallel(*build(), run, clip_norm=1.0)
else:
    trained = swift.Sharded(build, run, shards=arguments.shards, clip_norm=1.0)
data = swift.StepData(samples, global_batch=8, seed=0)


def step(i: int) -> None:
    """One step: a pure function of its number and the rank."""
    ids = data[i]
    loss = trained(input_ids=ids, labels=ids).loss
    trained.backward(loss)
    if run.rank == 0 and i % 20 == 0:
        print(f"step {i}: loss {loss.item():.3f}", flush=True)


run.loop(step, trained, until=STEPS)
if run.rank == 0:
    print(run.report())
