"""Trains a GCN on a graph with messages of chosen widths, and compares it with exact messages.

    python train_on_your_graph.py graph.npz --parts 4 --lam 0.3
    python train_on_your_graph.py                  # a small generated graph, two ranks

GRAPH is whatever `adaqp partition` reads: a PyG .pt, a DGL .bin, .npz arrays, an OGB folder or a
folder of tables. Ranks are processes of this machine; train_on_ranks.py runs on several.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import adaqp
from shared.comms import RankPool


def train_in_rank(
    folder: Path, policy: adaqp.Exact | adaqp.Adaptive, mbit_per_s: float, epochs: int
) -> tuple[float, int]:
    """Trains this rank's share; returns the accuracy on test nodes and the bytes it sent."""
    dg = adaqp.load(folder)
    torch.manual_seed(0)  # both policies start from the same weights
    model = adaqp.nn.gcn(dg, [dg.feat.shape[1], 32, dg.num_classes], dropout=0.2)
    # The link to choose widths for; left out, the adaptive policy measures the one that is there.
    links = adaqp.LinkTable.uniform(dg.num_parts, mbit_per_s * 1e6 / 8, latency_s=2e-4)
    with dg.messages(policy, links=links):
        trainer = adaqp.Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-2))
        history = trainer.fit(epochs)
        return trainer.evaluate()["test"], sum(history.bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("graph", nargs="?", help="a file or folder; generated when left out")
    parser.add_argument("--parts", type=int, default=2, help="ranks, one a part")
    parser.add_argument(
        "--method", default="random", help="random, or metis (needs pymetis or dgl)"
    )
    parser.add_argument("--mbit", type=float, default=100, help="Mbit/s of the link to plan for")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lam", type=float, default=0.5, help="1: only noise counts, 0: only time")
    arguments = parser.parse_args()
    if arguments.graph:
        graph = adaqp.data.read(arguments.graph)
    else:
        graph = adaqp.data.sbm(1_000, blocks=5, degree=10, mix=0.2, feat=32)

    policies = {
        "exact": adaqp.Exact(),
        # The first assignment comes once the rows' ranges have settled; before it, 4 bits for all.
        "adaptive": adaqp.Adaptive(lam=arguments.lam, every=10, first_at=5),
    }
    with tempfile.TemporaryDirectory() as folder:
        parts = Path(folder) / "parts"
        adaqp.partition(graph, arguments.parts, method=arguments.method, out=parts)
        with RankPool(arguments.parts) as pool:
            for name, policy in policies.items():
                results = pool.run(
                    train_in_rank, parts, policy, arguments.mbit, arguments.epochs
                ).results
                sent_bytes = sum(sent for _, sent in results)
                # Evaluation is exact and over all ranks, so every rank has the same accuracy.
                print(f"{name}: test accuracy {results[0][0]:.3f}, {sent_bytes / 1e6:.2f} MB sent")


if __name__ == "__main__":
    main()
