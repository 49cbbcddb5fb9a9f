"""The sampler beside DGL's and row Adam beside torch's, one thread each, in turns."""

import time
from statistics import median

import torch

import heta
from shared.claims import Claim
from shared.kernels import row_adam
from shared.kernels.neighbors import sample

PEERS = [
    {
        "peer": "DGL's sampler",
        "setting": "1.1.3, `sample_neighbors` on the same graph as csc, without replacement, one thread, "
        "without copying features or edge ids",
        "why": "its fastest call for one hop; ours draws relation by relation and numbers nothing either",
    },
    {
        "peer": "torch.optim.SparseAdam",
        "setting": "coalesced gradients, one thread",
        "why": "torch's only optimizer that leaves other rows alone",
    },
]
TURNS, SEEDS, FANOUT = 11, 2048, 10


def bench_sampler(benchmark, record_claim):
    """One hop into flights, all relations, then into what it reached."""
    import dgl

    torch.set_num_threads(1)
    graph = heta.data.flights("late15")
    theirs = dgl.heterograph(graph.edges, num_nodes_dict=graph.num_nodes).formats("csc")
    roots = graph.schema.roots
    generator = torch.Generator().manual_seed(0)
    turns = [
        torch.randperm(graph.num_nodes["flight"], generator=generator)[:SEEDS] for _ in range(TURNS)
    ]
    csrs = {relation: graph.csr(relation) for relation in roots}

    def ours(seeds, key):
        return sum(len(sample(csr, seeds, FANOUT, key)[1]) for csr in csrs.values())

    def dgl_once(seeds, _):
        block = dgl.sampling.sample_neighbors(
            theirs, {"flight": seeds}, FANOUT, copy_ndata=False, copy_edata=False
        )
        return sum(block.num_edges(relation) for relation in roots)

    counts, seconds = compare(ours, dgl_once, turns)
    benchmark.pedantic(lambda: ours(turns[0], 0), rounds=3)
    record_claim(
        claim(
            "edges of one hop, 2,048 flights, fan-out 10", "DGL's sample_neighbors", seconds, counts
        ),
        aim=2.0,
        spread=spread_of(seconds),
    )


def bench_row_adam(benchmark, record_claim):
    """1 M rows of 64, of which 50,000 are touched."""
    torch.set_num_threads(1)
    rows, dim, touched = 1_000_000, 64, 50_000
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(rows, dim, generator=generator)
    weight, first, second = start.clone(), torch.zeros(rows, dim), torch.zeros(rows, dim)
    steps = torch.zeros(rows, dtype=torch.int32)
    embedding = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SparseAdam([embedding], lr=0.01)
    turns = [
        (
            torch.randperm(rows, generator=generator)[:touched],
            torch.randn(touched, dim, generator=generator),
        )
        for _ in range(TURNS)
    ]
    # SparseAdam counts the steps of the whole table: the first step is the same, later ones are not.
    ids, grads = turns[0]
    row_adam.step(weight, first, second, steps, ids, grads, lr=0.01)
    embedding.grad = torch.sparse_coo_tensor(ids[None], grads, (rows, dim)).coalesce()
    optimizer.step()
    is_equal = bool(torch.allclose(weight, embedding.detach(), rtol=1e-5, atol=1e-6))
    is_moved = bool((weight[ids] != start[ids]).any())

    def ours(turn, _):
        row_adam.step(weight, first, second, steps, turn[0], turn[1], lr=0.01)

    def theirs(turn, _):
        embedding.grad = torch.sparse_coo_tensor(turn[0][None], turn[1], (rows, dim)).coalesce()
        began = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - began

    _, seconds = compare(ours, theirs, turns, is_told=True)
    benchmark.pedantic(lambda: ours(turns[0], 0), rounds=3)
    record_claim(
        claim(
            "Adam on 50,000 of 1 M rows of 64",
            "torch.optim.SparseAdam",
            seconds,
            (is_equal and is_moved, True),
        ),
        aim=5.0,
        spread=spread_of(seconds),
    )


def compare(ours, theirs, turns, is_told=False):
    """Results of the first turn, and seconds of each; the first turn compiles."""
    first, seconds = (), ([], [])
    for number, turn in enumerate(turns):
        results, taken = [], []
        for run in (ours, theirs):
            began = time.perf_counter()
            results.append(run(turn, number))
            told = results[-1] if is_told and run is theirs else None
            taken.append(told or time.perf_counter() - began)
        if number == 0:
            first = tuple(results)
            continue
        for kept, s in zip(seconds, taken, strict=True):
            kept.append(s)
    return first, seconds


def spread_of(seconds):
    """The least and the largest ratio of a turn."""
    ratios = [theirs / ours for ours, theirs in zip(*seconds, strict=True)]
    return min(ratios), max(ratios)


def claim(name, baseline, seconds, results):
    """A claim of medians; correct if both ways gave the same."""
    return Claim(
        name=name,
        unit="ms",
        ours=median(seconds[0]) * 1e3,
        baseline=median(seconds[1]) * 1e3,
        baseline_name=baseline,
        higher_is_better=False,
        correct=results[0] == results[1] and bool(results[0]),
        detail=f"both gave {results[0]}",
    )
