"""Train on prompts and a reward of your own.

    python train_on_your_prompts.py --data prompts.jsonl --model ./my-model --steps 500

Each line of the data is a JSON object with "prompt"; the reward gets its other keys as `sample`. The
defaults take seconds: a tiny Llama with random weights, whose tokens are bytes, and eight prompts
that are answered best by digits.
"""

import argparse

import hybridflow as hy
from hybridflow.tasks.prompts import Prompts
from hybridflow.tasks.tokenizers import ByteTokenizer

ROWS = [{"prompt": f"Say number {k}:", "allowed": "0123456789"} for k in range(8)]


@hy.reward(time_limit_s=1.0, on_error="zero")  # one bad sample does not end a long run
def uses_allowed(sample: dict, text: str) -> float:
    """Share of the response's characters that the row allows."""
    return sum(character in sample["allowed"] for character in text) / max(1, len(text))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on prompts and a reward of your own.")
    parser.add_argument("--data", default=ROWS, help=".jsonl or .parquet file of prompts")
    parser.add_argument("--model", help="Hugging Face folder; a tiny Llama when left out")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--num-prompts", type=int, default=4, help="prompts a step")
    parser.add_argument("--num-samples", type=int, default=8, help="responses a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=4, help="longest response")
    parser.add_argument(
        "--lr", type=float, default=5e-3, help="learning rate; 1e-6 for real models"
    )
    parser.add_argument("--save", help="folder of a checkpoint to write at the end")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.model:
        from transformers import AutoTokenizer

        model, tokenizer = arguments.model, AutoTokenizer.from_pretrained(arguments.model)
    else:
        tokenizer = ByteTokenizer()
        model = {**hy.PRESETS["tiny-llama"], "vocab_size": 272}  # 259 tokens, rounded up to 16
    prompts = Prompts(
        arguments.data, tokenizer, batch_size=arguments.num_prompts, seed=0, max_prompt_tokens=512
    )
    with hy.Workers.inline() as workers:  # hy.Workers.local(4): four processes of this machine
        actor = hy.Actor(
            model, workers.pool(workers.num_ranks), optimizer=hy.AdamW(lr=arguments.lr)
        )
        algorithm = hy.algos.GRPO(
            actor=actor,
            score=lambda roll: uses_allowed(roll, tokenizer),
            sampling=hy.Sampling(
                max_new_tokens=arguments.max_new_tokens, num_samples=arguments.num_samples
            ),
            num_updates=2,
        )
        rewards = []
        for metrics in hy.loops.run(algorithm, prompts.batch, steps=arguments.steps):
            rewards.append(metrics["reward"])
            print(f"step {len(rewards)}: reward {rewards[-1]:.3f}")
        if arguments.save:
            hy.Checkpoint(arguments.save).save(arguments.steps, {"actor": actor}, {})
    print(f"reward from {rewards[0]:.3f} to {rewards[-1]:.3f}")


if __name__ == "__main__":
    main()
