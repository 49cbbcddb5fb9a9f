"""Trains PyG's convolutions, one for each relation and layer, on a HeteroData.

    python own_convolutions.py

The graph is generated: papers whose class is that of most of their authors. On several hosts, write a
plan of more parts and run the second half under torchrun; train_flights.py shows how.
"""

import tempfile

import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, SAGEConv

import heta

NUM_PAPERS, NUM_AUTHORS, NUM_CLASSES = 900, 300, 3


def make_data() -> HeteroData:
    """Generates the graph."""
    random = torch.Generator().manual_seed(0)
    field = torch.randint(NUM_CLASSES, (NUM_AUTHORS,), generator=random)
    label = torch.randint(NUM_CLASSES, (NUM_PAPERS,), generator=random)
    paper = torch.arange(NUM_PAPERS).repeat_interleave(4)
    author = torch.randint(NUM_AUTHORS, (len(paper),), generator=random)
    is_kept = (field[author] == label[paper]) | (torch.rand(len(paper), generator=random) < 0.2)
    paper, author = paper[is_kept], author[is_kept]
    is_train = torch.rand(NUM_PAPERS, generator=random) < 0.6
    data = HeteroData()
    data["paper"].x = torch.randn(NUM_PAPERS, 8, generator=random)
    data["paper"].y, data["paper"].train_mask, data["paper"].val_mask = label, is_train, ~is_train
    data["author"].num_nodes = NUM_AUTHORS  # no features: their rows are learned
    data["author", "writes", "paper"].edge_index = torch.stack([author, paper])
    data["paper", "written_by", "author"].edge_index = torch.stack([paper, author])
    return data


def make_convolution(
    layer: int, relation: tuple[str, str, str], src_dim: int, dst_dim: int, out_dim: int
) -> torch.nn.Module:
    """Makes the module of one relation in one layer; layers count from 1."""
    if relation[1] == "writes" and layer == 2:
        return GATConv((src_dim, dst_dim), out_dim, add_self_loops=False)
    return SAGEConv((src_dim, dst_dim), out_dim)


def main() -> None:
    """Converts, plans, trains and evaluates."""
    graph = heta.from_pyg(make_data())
    plan = heta.plan(graph, parts=1, hidden=16, fanouts=[8, 8], batch_size=128)
    with tempfile.TemporaryDirectory() as folder:
        plan.write(graph, f"{folder}/parts")
        part = heta.load(f"{folder}/parts")
        torch.manual_seed(0)
        model = heta.nn.HeteroModel(
            part, make_convolution, part.hidden, part.layers, part.num_classes, combine="mean"
        )
        trainer = heta.Trainer(part, model, rows=heta.RowAdam(lr=0.05))
        for _ in range(8):
            print(trainer.fit_epoch())
        scores = trainer.evaluate("val")
        print(scores)
        assert scores.accuracy > 0.5, "a third would be a guess"
        trainer.close()


if __name__ == "__main__":
    main()
