"""Trains with checkpoints; started again after an interruption, it resumes to the same losses, to the bit.

python resume.py --stop-after 1     # leaves after one pass, as a killed process would
python resume.py                    # resumes from the checkpoint
"""

import argparse
from pathlib import Path

import torch

import mspipe as ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("report/mspipe/resume"))
    parser.add_argument("--stop-after", type=int, help="passes after which this process leaves")
    arguments = parser.parse_args()

    # The same stream, model and settings each time: a checkpoint of another run is refused. The
    # optimizer's own settings are yours to keep.
    events = ms.data.zipf(num_nodes=120, num_events=600, seed=3, edge_dim=4)
    train, validation = events.split(0.8)
    torch.manual_seed(0)
    model = ms.models.JODIE(dim=16, edge_dim=4)
    memory = ms.NodeMemory(events.num_nodes, model.dim, model.mail_dim)
    pipe = ms.Pipeline(model, memory, ms.Sampler(events, [0]), events.features)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    # At each save the pipeline runs empty, so save as rarely as you can afford to lose.
    settings = ms.Settings(epochs=3, batch_size=60, save_every=4)
    epochs = ms.fit(
        pipe,
        optimizer,
        train,
        validation,
        settings,
        checkpoint=arguments.checkpoint,
        progress=False,
    )
    for epoch in epochs:
        # Passes of earlier processes come first, as they were.
        print(f"epoch {epoch.index}: loss {epoch.loss:.9f}, AP {epoch.scores['ap']:.6f}")
        if epoch.index == arguments.stop_after:
            break


if __name__ == "__main__":
    main()
