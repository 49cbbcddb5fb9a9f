"""Trains a causal LM on a text file within a limit of memory: python train_under_a_limit.py text.txt 4GiB"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import memo

path = Path(sys.argv[1] if len(sys.argv) > 1 else __file__)
limit = sys.argv[2] if len(sys.argv) > 2 else "4GiB"
tokens, steps = 512, 3

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=6,
    num_attention_heads=4,
)
model = AutoModelForCausalLM.from_config(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.tensor(list(path.read_bytes())).repeat(tokens)[: tokens * steps].view(steps, 1, -1)

budget = memo.Budget(device=limit, store="1GiB", store_at=f"file:{tempfile.gettempdir()}")
batch = {"input_ids": text[0], "labels": text[0], "use_cache": False}
plan = memo.autotune(model, batch, budget)
print(plan.explain())
with memo.apply(model, plan) as run:
    for ids in text:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.3f}")
print(run.report())
