"""Measures how much each layer suffers from rounding, and spends a given number of bytes best.

python choose_bits_for_a_size.py MODEL TEXT --megabytes 60

TEXT is a file of text like that to come. No device is asked: this is `llmpq plan` for those who only
want a smaller model. `llmpq export report/llmpq/plan.json --to compressed-tensors` writes it.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmpq

BITS = (3, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a Hugging Face causal LM")
    parser.add_argument("text", type=Path, help="a file of text")
    parser.add_argument("--megabytes", type=float, required=True, help="for all layers together")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("report/llmpq/plan.json"))
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
    ids = tokenizer(arguments.text.read_text(), return_tensors="pt")["input_ids"]
    pieces = [piece for piece in ids[:, :384].split(32, dim=1) if piece.shape[1] > 1]
    found = llmpq.sensitivity(model, pieces, bits=BITS, group_size=arguments.group_size)

    # One device that costs no time: what is left is the least loss within the bytes.
    spec = llmpq.ModelSpec.from_hf(arguments.model)
    layers, widths = found.noise.shape
    held = [spec.layer_bytes(bits, arguments.group_size) for bits in BITS]
    problem = llmpq.Problem(
        prefill_s=np.zeros((layers, 1, widths)),
        decode_s=np.zeros((layers, 1, widths)),
        weight_bytes=np.tile(held, (layers, 1)),
        kv_bytes=np.zeros(layers),
        memory_bytes=np.array([arguments.megabytes * 1e6]),
        noise=found.noise,
        num_prefill=1,
        num_decode=1,
        new_tokens=1,
        theta=1.0,
        max_noise=None,
    )
    solution = llmpq.solve(problem)
    bits = tuple(BITS[width] for width in solution.choice)
    plan = llmpq.Plan(
        stages=(llmpq.Stage(rank=0, layers=(0, layers)),),
        bits=bits,
        group_size=arguments.group_size,
        prefill_size=1,
        decode_size=1,
        model=spec.fingerprint,
        folder=str(arguments.model),
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plan.save(arguments.out)
    for layer, width in enumerate(bits):
        print(f"layer {layer}: {width} bits, {found.noise[layer, BITS.index(width)]:.2g} nats")
    print(f"{sum(spec.layer_bytes(width, arguments.group_size) for width in bits) / 1e6:.1f} MB")
    print(
        f"{problem.total_noise(solution.choice):.3g} nats a token expected; wrote {arguments.out}"
    )


if __name__ == "__main__":
    main()
