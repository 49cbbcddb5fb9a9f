"""Train a small Llama on replicas, one of which may be lost at any moment.

meshyard-swift run -n 2 --spares 1 train_replicas.py [TEXT_FILE]

In another terminal: meshyard-swift inject kill 1
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import swift

STEPS, LENGTH = 60, 64

run = swift.join()
path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(torch.__file__)
text = torch.tensor(list(path.read_bytes()), dtype=torch.long)
samples = list(text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH))

torch.manual_seed(0)
shape = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = AutoModelForCausalLM.from_config(
    LlamaConfig(vocab_size=256, attention_dropout=0.1, **shape)
)
optimizer = swift.undoable(torch.optim.AdamW(model.parameters(), lr=1e-3))
dp = swift.DataParallel(model, optimizer, run, clip_norm=1.0)
data = swift.StepData(samples, global_batch=8, seed=0)


def step(i: int) -> None:
    """One step: a pure function of its number and the rank."""
    ids = data[i]
    loss = dp(input_ids=ids, labels=ids).loss
    dp.backward(loss)
    if run.rank == 0 and i % 20 == 0:
        print(f"step {i}: loss {loss.item():.3f}", flush=True)


run.loop(step, dp, until=STEPS)
if run.rank == 0:
    print(run.report())
