"""Generate on one pool of ranks while another trains, on one machine or many.

    python two_pools.py
    torchrun --nproc-per-node 2 two_pools.py
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d two_pools.py

Half of the ranks train the actor as replicas, the other half generate the next batch with its last
weights. Under torchrun `main` runs once, in the process of rank 0; the other processes serve it.
"""

import argparse
import os

import hybridflow as hy

TASK = hy.tasks.DigitSort(k=2)  # "53>" wants "35"
MODEL = {**hy.PRESETS["tiny-llama"], "vocab_size": 16}


def score(roll: hy.Batch) -> hy.Batch:
    return TASK.score(roll, TASK.tokenizer)


def start_workers() -> hy.Workers:
    # Workers.local exchanges messages on CPUs; GPUs want torchrun or Ray.
    return hy.Workers.torchrun() if "TORCHELASTIC_RUN_ID" in os.environ else hy.Workers.local(2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate on one pool while another trains.")
    parser.add_argument("--steps", type=int, default=4, help="training steps")
    parser.add_argument("--eta", type=int, default=1, help="most steps that weights may be old")
    arguments = parser.parse_args()
    with start_workers() as workers:
        half = workers.num_ranks // 2
        learn, draw = workers.pool(workers.num_ranks - half), workers.pool(half)
        actor = hy.Actor(MODEL, learn, optimizer=hy.AdamW(lr=1e-3))
        loop = hy.loops.Asynchronous(
            algorithm=hy.algos.GRPO(
                actor=actor, score=score, sampling=hy.Sampling(max_new_tokens=2, num_samples=8)
            ),
            rollouts=[hy.Rollout(MODEL, draw)],
            prompts=lambda step: TASK.batch(step, 16),
            eta=arguments.eta,
            # Responses are of older weights: each token weighs as the trainer's policy would have it.
            correct=hy.loops.Correction(actor=actor),
        )
        for step, metrics in enumerate(loop.run(arguments.steps)):
            print(
                f"step {step}: reward {metrics['reward']:.3f} staleness {metrics['staleness']:.0f}"
            )


if __name__ == "__main__":  # other processes import this file too
    main()
