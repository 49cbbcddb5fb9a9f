"""Trains on a stream with checkpoints; started again after an interruption, it resumes where it was.

python resume.py --rounds 2     # stops after two rounds, as a killed process would
python resume.py                # resumes from the checkpoint to the end
"""

import argparse
from pathlib import Path

import torch

import gnnflow as gf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("report/gnnflow/resume"))
    parser.add_argument("--rounds", type=int, help="stop after so many rounds of this process")
    arguments = parser.parse_args()

    # The same stream, model, sampling and settings each time: resuming checks all of them. The
    # checkpoint holds no graph, which is rebuilt from the events.
    events = gf.data.zipf(num_nodes=300, num_events=2_000, seed=7)
    torch.manual_seed(0)
    graph = gf.TemporalGraph(undirected=True)
    trainer = gf.ContinualTrainer(
        gf.models.TFTGN(dim=16, num_blocks=1),
        graph,
        gf.TemporalSampler(graph, [8]),
        warmup=0.4,
        every=200,
        num_negatives=5,
        checkpoint=arguments.checkpoint,
        checkpoint_every=1,  # rounds; more of them where writing takes longer than training
        progress=False,
    )
    rounds = trainer.run(events)
    for result in rounds:
        # Rounds of earlier processes come first, as they were.
        print(f"round {result.index}: AP {result.ap:.6f}, loss {result.loss:.6f}")
        if result.index == arguments.rounds:
            rounds.close()
            break


if __name__ == "__main__":
    main()
