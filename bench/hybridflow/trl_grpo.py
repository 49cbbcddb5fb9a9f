"""TRL's GRPO trainer on digits to sort: seconds of a training step of 256 responses.

Reads one JSON object a line, {"folder": of a model, "steps": n, "lr": r}, trains so many steps from
that folder, and answers with the seconds of each and the mean rewards.
"""

import itertools
import json
import os
import random
import sys
import tempfile
import time
from statistics import mean

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from datasets import Dataset  # pyrefly: ignore
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyrefly: ignore

K, WORDS = 2, ["<pad>", "<end>", *"0123456789>"]


def tokenizer():
    """One token a character, numbered as CharTokenizer's are."""
    plain = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, "<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>")
    made.padding_side = "left"
    return made


def score(prompts, completions, **_):
    found = []
    for prompt, answer in zip(prompts, completions, strict=True):
        right, said = sorted(prompt.rstrip(">")), answer.replace(" ", "")
        found.append(sum(a == b for a, b in zip(said, right, strict=False)) / K)
    return found


class Clock(TrainerCallback):
    """Seconds between the ends of steps."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *_, **__):
        self.ends.append(time.perf_counter())


def train(folder, steps, lr):
    draw = random.Random(0)
    rows = [{"prompt": "".join(draw.choices("0123456789", k=K)) + ">"} for _ in range(32 * steps)]
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], save_strategy="no",
        per_device_train_batch_size=128, steps_per_generation=2, num_generations=8,
        max_completion_length=K, beta=0.0, epsilon=0.2, epsilon_high=0.28, learning_rate=lr,
        max_steps=2 * steps, disable_tqdm=True, num_iterations=1,
        loss_type="dapo", scale_rewards="group", max_grad_norm=1.0,
        gradient_checkpointing=False, logging_strategy="no", logging_nan_inf_filter=False,
        dataloader_pin_memory=False, shuffle_dataset=False, log_completions=False,
    )  # fmt: skip
    clock, rewards = Clock(), []

    def kept_score(**asked):
        found = score(**asked)
        rewards.append(mean(found))
        return found

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder), reward_funcs=kept_score, args=settings,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    # Two optimizer steps, the first of which generates for both, are one of ours.
    ends = clock.ends[1::2]
    return [b - a for a, b in itertools.pairwise(ends)], rewards


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        seconds, rewards = train(asked["folder"], asked["steps"], asked["lr"])
        print(json.dumps({"seconds": seconds, "rewards": rewards}), file=answers, flush=True)


if __name__ == "__main__":
    main()
