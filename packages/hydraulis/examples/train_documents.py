"""Trains a small Llama on a folder of text files of any length, alone or under torchrun; resumes after a stop.

torchrun --nproc-per-node 2 train_documents.py --documents ./texts --folder ./run
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, LlamaConfig

import hydraulis as hy
from shared.comms.init import joined


def main() -> None:
    """Trains, saves behind every ten steps and at the end, and prints who waited for whom."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--documents", type=Path, help="of .txt files; Python's own source by default"
    )
    parser.add_argument("--folder", type=Path, default=Path("report/hydraulis/train"))
    parser.add_argument("--max-tokens", type=int, default=2048, help="that a rank holds at once")
    parser.add_argument("--steps", type=int, default=4, help="step to train to")
    given = parser.parse_args()
    if given.documents is None:
        texts = [text[::16] for text in hy.data.python_source(limit=200)]
    else:
        texts = [path.read_bytes() for path in sorted(given.documents.glob("*.txt"))]
        if not any(texts):
            parser.error(f"{given.documents}: expected a folder of .txt files, got none with text")
        texts = [text for text in texts if text]
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    with joined() as group:
        model = AutoModelForCausalLM.from_config(config)
        engine = hy.Engine(
            model, partial(torch.optim.AdamW, lr=1e-3), max_tokens=given.max_tokens
        )  # a byte is a token
        loader = hy.StepLoader(
            texts, engine, tokens_per_step=8 * given.max_tokens, too_long="truncate"
        )
        step_number = 0
        if given.folder.exists():
            state = {**engine.sharded_state_dict(), "loader": loader.state_dict(), "step": 0}
            dcp.load(state, checkpoint_id=given.folder)
            engine.load_sharded_state_dict(state)
            loader.load_state_dict(state["loader"])
            step_number = state["step"]
            if group.rank == 0:
                print(f"resumed from step {step_number} of {given.folder}")
        while step_number < given.steps:
            for step in loader:
                loss = engine.step(step).loss
                step_number += 1
                if group.rank == 0:
                    print(f"step {step_number}: loss {loss:.4f}")
                if step_number % 10 == 0 or step_number == given.steps:
                    state = {
                        **engine.sharded_state_dict(),
                        "loader": loader.state_dict(),
                        "step": step_number,
                    }
                    dcp.save(
                        state, storage_writer=dcp.FileSystemWriter(given.folder, overwrite=True)
                    )
                if step_number == given.steps:
                    break
        report = engine.report()
        if group.rank == 0:
            print(report)


if __name__ == "__main__":
    main()
