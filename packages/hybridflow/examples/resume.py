"""Train with checkpoints: started again after an interruption, it resumes where it was.

    python resume.py --folder runs/sort --steps 200

An interrupted and resumed run ends with the same numbers as an uninterrupted one, to the bit in
the same layout: prompts and random numbers depend on the step's number, so that the models and that
number are all there is to save. --stop-after N ends after N steps, to try it.
"""

import argparse

import hybridflow as hy

TASK = hy.tasks.DigitSort(k=2)  # "53>" wants "35"
MODEL = {**hy.PRESETS["tiny-llama"], "vocab_size": 16}


def score(roll: hy.Batch) -> hy.Batch:
    return TASK.score(roll, TASK.tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with checkpoints.")
    parser.add_argument(
        "--folder", default="report/hybridflow/sort", help="folder of the checkpoints"
    )
    parser.add_argument("--steps", type=int, default=6, help="training steps in all")
    parser.add_argument("--every", type=int, default=2, help="steps between saves")
    parser.add_argument("--stop-after", type=int, help="end after so many steps of this start")
    arguments = parser.parse_args()
    checkpoint = hy.Checkpoint(arguments.folder, keep=2)
    with hy.Workers.inline() as workers:
        # The schedule's length is the whole run's, whatever part of it this start does.
        optimizer = hy.AdamW(lr=1e-3, schedule="cosine", num_steps=arguments.steps)
        actor = hy.Actor(MODEL, workers.pool(1), optimizer=optimizer)
        groups = {"actor": actor}
        start = 0
        if checkpoint.latest() is not None:
            start = checkpoint.load(groups)["next_step"]
            print(f"resumed from step {start}")
        algorithm = hy.algos.GRPO(
            actor=actor, score=score, sampling=hy.Sampling(max_new_tokens=2, num_samples=8)
        )
        left = arguments.steps - start
        count = left if arguments.stop_after is None else min(left, arguments.stop_after)
        steps = hy.loops.run(algorithm, lambda step: TASK.batch(step, 16), start=start, steps=count)
        for step, metrics in enumerate(steps, start):
            print(f"step {step}: reward {metrics['reward']:.6f} norm {metrics['grad_norm']:.6f}")
            if (step + 1) % arguments.every == 0 or step + 1 == arguments.steps:
                checkpoint.save(step + 1, groups, {"next_step": step + 1})


if __name__ == "__main__":
    main()
