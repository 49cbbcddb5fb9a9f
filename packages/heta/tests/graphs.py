"""Small graphs and plans that several tests share."""

import torch

from heta.graph.hetero_graph import HeteroGraph
from heta.partitioning.closure import closure
from heta.partitioning.plan import PartPlan, Plan

WRITES = ("author", "writes", "paper")
CITES = ("paper", "cites", "paper")
CITED_BY = ("paper", "cited.by", "paper")
HAS = ("field", "rev:has", "paper")
WRITTEN = ("paper", "rev_writes", "author")
PAID = ("place", "pays", "author")
PAYS = ("author", "rev_pays", "place")
HAD = ("paper", "has", "field")


def scholars(num_papers=60, seed=0, learnable=True):
    """Papers with features; authors and fields with learnable rows; places with features."""
    random = torch.Generator().manual_seed(seed)
    nodes = {"paper": num_papers, "author": 40, "field": 12, "place": 5}

    def edges(src, dst, count):
        return (
            torch.randint(nodes[src], (count,), generator=random),
            torch.randint(nodes[dst], (count,), generator=random),
        )

    drawn = {
        WRITES: edges("author", "paper", 150),
        CITES: edges("paper", "paper", 200),
        CITED_BY: edges("paper", "paper", 120),
        HAS: edges("field", "paper", 90),
        WRITTEN: edges("paper", "author", 140),
        PAID: edges("place", "author", 50),
        PAYS: edges("author", "place", 50),
        HAD: edges("paper", "field", 80),
    }
    # The last papers have no in-edges at all.
    drawn = {
        relation: (src, dst % (num_papers - 3)) if relation[2] == "paper" else (src, dst)
        for relation, (src, dst) in drawn.items()
    }
    feat = {
        "paper": torch.randn(num_papers, 7, generator=random),
        "place": torch.randn(5, 3, generator=random),
    }
    if not learnable:
        feat |= {
            "author": torch.randn(40, 5, generator=random),
            "field": torch.randn(12, 4, generator=random),
        }
    is_train = torch.rand(num_papers, generator=random) < 0.7
    return HeteroGraph(
        nodes,
        drawn,
        feat,
        target="paper",
        label=torch.randint(3, (num_papers,), generator=random),
        masks={"train": is_train, "val": ~is_train},
    )


def plan_by_hand(
    graph,
    assignment,
    *,
    layers=2,
    uses_dst=True,
    hidden=8,
    fanouts=None,
    strategy="raf",
    hosts=None,
    head_dim=None,
):
    """A plan with these roots for each part: relations, or (relation, index, count) where cut."""
    schema = graph.schema
    parts = []
    for chosen in assignment:
        shares = {each[0]: each[1:] for each in chosen if isinstance(each[0], tuple)}
        roots = [each[0] if isinstance(each[0], tuple) else each for each in chosen]
        hops = tuple(map(frozenset, closure(schema, roots, layers)))
        types = {graph.target} | {t for hop in hops for r in hop for t in (r[0], r[2])}
        parts.append(
            PartPlan(
                roots=tuple(r for r in schema.relations if r in roots),
                shares=shares,
                relations=hops,
                feature_types=tuple(sorted(types & set(graph.feat))),
                owned_rows=(),
                fetched_rows=(),
                held_bytes=0,
                compute_s=0.0,
                sent_bytes=0.0,
            )
        )
    owner = {}
    for node_type in schema.learnable:
        users = [
            i
            for i, part in enumerate(parts)
            if any(node_type in (r[0], r[2]) for hop in part.relations for r in hop)
        ]
        owner[node_type] = users[-1] if users else 0
    if hosts:
        parts = parts * hosts
    return Plan(
        schema=schema,
        strategy=strategy,
        layers=layers,
        num_parts=len(parts),
        fanouts=tuple(fanouts or [-1] * layers),
        batch_size=16,
        hidden=hidden,
        uses_dst=uses_dst,
        assign="time",
        parts=tuple(parts),
        row_owner=owner if strategy == "raf" else {},
        step_s=0.0,
        sent_bytes=0.0,
        alternatives=(),
        alpha_s=0.0,
        beta_s_per_byte=0.0,
        head_dim=head_dim,
    )
