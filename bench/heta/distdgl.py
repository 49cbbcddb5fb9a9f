"""DistDGL beside us: cuts a graph by METIS, and trains the same R-GCN on one server and trainer a host.

    python distdgl.py prepare GRAPH HOSTS FOLDER
    DGL_ROLE=server ... python distdgl.py work FOLDER
    DGL_ROLE=client ... python distdgl.py work FOLDER RANK HOSTS MASTER

A trainer reads one JSON object a line, {"steps": n}, and answers with its seconds of each step. It is
DistDGL at its best here: a partition by METIS, features and learnable rows (DistEmbedding with its
sparse Adam) in shared memory, `DistNodeDataLoader` with sampler processes, DistributedDataParallel,
and only the relations that reach the seeds in each layer.
"""

import json
import os
import sys
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

HIDDEN, FANOUTS, LR = 64, [10, 10], 0.01


def read_graph(name: str):
    """A graph of heta's data room, as "mag_like:0.2"."""
    data = import_module("heta.data")
    kind, _, argument = name.partition(":")
    return data.mag_like(float(argument)) if kind == "mag_like" else data.flights(argument)


def prepare(name: str, num_hosts: int, folder: str) -> None:
    """Writes DistDGL's parts of a graph."""
    import dgl

    graph = read_graph(name)
    g = dgl.heterograph(graph.edges, num_nodes_dict=graph.num_nodes)
    for node_type, rows in graph.feat.items():
        g.nodes[node_type].data["feat"] = rows
    g.nodes[graph.target].data["label"] = graph.label
    g.nodes[graph.target].data["train_mask"] = graph.masks["train"] & (graph.label >= 0)
    dgl.distributed.partition_graph(
        g, "graph", num_hosts, folder, part_method="metis",
        balance_ntypes={graph.target: g.nodes[graph.target].data["train_mask"]}, graph_formats="csc",
    )  # fmt: skip
    about = {
        "target": graph.target,
        "classes": graph.num_classes,
        "learnable": graph.schema.learnable,
    }
    Path(folder, "about.json").write_text(json.dumps(about))


def new_rows(shape, dtype):
    """Initial learnable rows; pickled by name, so that it stands at the top."""
    return torch.randn(shape, dtype=dtype) * shape[1] ** -0.5


class Model(torch.nn.Module):
    """R-GCN of two layers, each with the relations that reach the seeds."""

    def __init__(self, g, about: dict, dims: dict[str, int]) -> None:
        import dgl.nn.pytorch as dglnn

        super().__init__()
        target = about["target"]
        roots = [e for e in g.canonical_etypes if e[2] == target]
        below = {e[0] for e in roots}
        first = [e for e in g.canonical_etypes if e[2] in below]

        def conv(width: int):
            return dglnn.GraphConv(
                width, HIDDEN, norm="right", bias=False, allow_zero_in_degree=True
            )

        self.first = dglnn.HeteroGraphConv({e[1]: conv(dims[e[0]]) for e in first}, aggregate="sum")
        self.last = dglnn.HeteroGraphConv({e[1]: conv(HIDDEN) for e in roots}, aggregate="sum")
        self.head = torch.nn.Linear(HIDDEN, about["classes"])
        self.target = target

    def forward(self, blocks, rows):
        hidden = {t: torch.relu(x) for t, x in self.first(blocks[0], rows).items()}
        return self.head(self.last(blocks[1], hidden)[self.target])


def work(folder: str, rank: int, num_hosts: int, master: str) -> None:
    """Trains as one trainer, until its input ends."""
    import torch.distributed as dist

    dgl: Any = import_module("dgl")

    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"], net_type="socket")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{master}", rank=rank, world_size=num_hosts,
        timeout=timedelta(minutes=20),
    )  # fmt: skip
    about = json.loads(Path(folder, "about.json").read_text())
    target = about["target"]
    g = dgl.distributed.DistGraph("graph", part_config=f"{folder}/graph.json")
    train = dgl.distributed.node_split(
        g.nodes[target].data["train_mask"], g.get_partition_book(), ntype=target, force_even=True
    )
    learnable = {
        t: dgl.distributed.DistEmbedding(
            g.num_nodes(t), HIDDEN, name=f"rows-{t}", init_func=new_rows
        )
        for t in about["learnable"]
    }
    dims = {t: HIDDEN if t in learnable else g.nodes[t].data["feat"].shape[1] for t in g.ntypes}
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Model(g, about, dims))
    optimizer = torch.optim.Adam(model.parameters(), LR)
    sparse = (
        dgl.distributed.optim.SparseAdam(list(learnable.values()), lr=LR) if learnable else None
    )
    sampler = dgl.dataloading.NeighborSampler(FANOUTS)
    batch_size = int(os.environ["HETA_BATCH"]) // num_hosts
    loader = dgl.dataloading.DistNodeDataLoader(
        g, {target: train}, sampler, batch_size=batch_size, shuffle=True, drop_last=True
    )
    batches = iter(loader)
    print(json.dumps({"ready": len(train)}), flush=True)
    for line in sys.stdin:
        seconds, losses = [], []
        for _ in range(json.loads(line)["steps"]):
            dist.barrier()
            began = time.perf_counter()
            try:
                inputs, seeds, blocks = next(batches)
            except StopIteration:
                batches = iter(loader)
                inputs, seeds, blocks = next(batches)
            rows = {
                t: learnable[t](ids) if t in learnable else g.nodes[t].data["feat"][ids]
                for t, ids in inputs.items()
                if len(ids)
            }
            label = g.nodes[target].data["label"][seeds[target]].long()
            loss = torch.nn.functional.cross_entropy(model(blocks, rows), label)
            optimizer.zero_grad()
            if sparse is not None:
                sparse.zero_grad()  # else rows of all earlier steps are updated again
            loss.backward()
            optimizer.step()
            if sparse is not None:
                sparse.step()
            seconds.append(time.perf_counter() - began)
            losses.append(loss.item())
        print(json.dumps({"seconds": seconds, "losses": losses}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
