"""Trains a causal LM on a text file within a limit of memory.

    python train_under_a_limit.py text.txt --limit 4GiB
    python train_under_a_limit.py text.txt --limit 4GiB --model ./my-model --tokens 4096

MODEL is a folder of a Hugging Face causal LM; without it, a small one whose tokens are bytes.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import memo

SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=6,
    num_attention_heads=4,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", nargs="?", type=Path, default=Path(__file__))
    parser.add_argument("--limit", default="4GiB", help="of the process's memory")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--tokens", type=int, default=512, help="of a batch")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()

    torch.manual_seed(0)
    if given.model is None:
        model = AutoModelForCausalLM.from_config(SMALL)
        ids = list(given.text.read_bytes())
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model)
        ids = AutoTokenizer.from_pretrained(given.model)(given.text.read_text())["input_ids"]
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    count = given.tokens * given.steps
    text = torch.tensor(ids).repeat(-(-count // len(ids)))[:count].view(given.steps, 1, -1)

    budget = memo.Budget(device=given.limit, store="1GiB", store_at=f"file:{tempfile.gettempdir()}")
    batch = {"input_ids": text[0], "labels": text[0], "use_cache": False}
    plan = memo.autotune(model, batch, budget)
    print(plan.explain())
    with memo.apply(model, plan) as run:
        for row in text:
            loss = model(input_ids=row, labels=row, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {loss.item():.3f}")
    print(run.report())


if __name__ == "__main__":
    main()
