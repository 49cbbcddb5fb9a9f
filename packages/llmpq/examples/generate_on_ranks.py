"""Answers prompts by a plan, each rank holding its stage alone.

torchrun --nproc-per-node 2 generate_on_ranks.py MODEL --bits 8
torchrun --nproc-per-node 2 generate_on_ranks.py MODEL --plan plan.json --prompts prompts.txt
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import llmpq
from shared.comms import init_from_env

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a Hugging Face causal LM")
    parser.add_argument("--plan", type=Path, help="of `llmpq plan`; by default an even split")
    parser.add_argument("--bits", type=int, default=8, help="width of an even split")
    parser.add_argument("--prompts", type=Path, help="a text file, a prompt on each line")
    parser.add_argument("--new-tokens", type=int, default=8)
    arguments = parser.parse_args()

    prompts = PROMPTS
    if arguments.prompts is not None:
        prompts = [line for line in arguments.prompts.read_text().splitlines() if line.strip()]
    world = init_from_env()
    spec = llmpq.ModelSpec.from_hf(arguments.model)
    if arguments.plan is not None:
        plan = llmpq.Plan.load(arguments.plan)
    else:
        cuts = [rank * spec.num_layers // world.world_size for rank in range(world.world_size + 1)]
        plan = llmpq.Plan(
            stages=tuple(
                llmpq.Stage(rank=rank, layers=(cuts[rank], cuts[rank + 1]))
                for rank in range(world.world_size)
            ),
            bits=(arguments.bits,) * spec.num_layers,
            group_size=64,
            prefill_size=1,
            decode_size=2,
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    with llmpq.Pipeline(plan, arguments.model) as pipe:
        tokens = pipe.generate(
            batch["input_ids"],
            batch["attention_mask"],
            max_new_tokens=arguments.new_tokens,
            eos_token_id=tokenizer.eos_token_id,
        )
        read = torch.tensor([pipe.read_bytes])
    print(f"rank {world.rank} read {int(read) / 1e6:.1f} MB of weights")
    if tokens is not None:  # on rank 0
        for prompt, row in zip(prompts, tokens, strict=True):
            print(f"{prompt}{tokenizer.decode(row, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
