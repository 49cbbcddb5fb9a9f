"""Trains a GCN on a graph of yours and writes a class for every node.

python train_on_your_graph.py graph.npz
python train_on_your_graph.py          # a small generated graph

The file holds src, dst [edges], feat [nodes, dim], label [nodes] (-1: unknown) and the bool arrays
train_mask, val_mask, test_mask [nodes].
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

import adaqp


def read_graph(path: Path | None) -> adaqp.Graph:
    if path is None:
        return adaqp.data.sbm(1_000, blocks=5, degree=8, feat=16, noise=2.0)
    with np.load(path) as arrays:
        feat = arrays["feat"]
        masks = [arrays[f"{split}_mask"] for split in ("train", "val", "test")]
        return adaqp.from_edge_index(
            arrays["src"], arrays["dst"], len(feat), feat, arrays["label"], *masks
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("graph", nargs="?", type=Path, help="an .npz file; generated if left out")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("classes.npy"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    graph = read_graph(arguments.graph)

    # One part for one rank; train_on_ranks.py has the same lines for several.
    with tempfile.TemporaryDirectory() as folder:
        adaqp.partition(graph, parts=1, method="random", out=folder)
        dg = adaqp.load(folder)
    dims = [graph.feat.shape[1], arguments.hidden, dg.num_classes]
    model = adaqp.nn.gcn(dg, dims)
    trainer = adaqp.Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-2))
    history = trainer.fit(arguments.epochs, eval_every=10)
    for epoch, accuracy in zip(history.evaluated_at, history.accuracy["val"], strict=True):
        print(f"epoch {epoch}: loss {history.loss[epoch - 1]:.4f}, validation {accuracy:.3f}")
    print(f"test accuracy {trainer.evaluate()['test']:.3f}")

    # A rank's rows stand in an order of their own; global_ids says which nodes they are.
    classes = np.empty(dg.num_nodes, dtype=np.int64)
    classes[dg.global_ids] = trainer.predict().argmax(1)
    np.save(arguments.out, classes)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
