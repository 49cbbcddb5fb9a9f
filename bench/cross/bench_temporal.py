"""mspipe's TGN trained by gnnflow while its graph grows, beside mspipe alone on a list that is there.

Flights in batches of 600 events, each with the same negative, ten neighbours, widths of 100, one thread.
`ContinualTrainer` inserts five batches into the graph and then learns from them (`ms.Hooked`); the pipeline
learns from the same five, one stage after another, sampling from the whole list. They take turns. Seconds
are wall clock: of the loop those of inserting, sampling, fetching and training, without its evaluations.

With given weights both score every event alike, which is checked before training, over a graph that
grows by the batch. In training they come apart, for the loop remembers a batch after the step, by the new
weights, and the pipeline before it: their losses stay near each other, and no more is asked of them.
"""

import time
from statistics import median

import pytest
import torch

import gnnflow
import gnnflow.data
import mspipe as ms
from gnnflow.data.negatives import Negatives
from gnnflow.training.link_task import LinkTask
from gnnflow.training.rounds import StageClock
from shared.claims import Claim

BATCH, DIM, FANOUT = 600, 100, 10
HISTORY, CHUNK, NUM_CHUNKS = 30, 5, 8
MOST_APART = 0.1
NUM_BATCHES = HISTORY + CHUNK * NUM_CHUNKS
PEERS = [
    {
        "peer": "mspipe alone",
        "setting": "mode='sync', the whole list sorted beforehand, one thread, Adam with fused=True",
        "why": "nothing is inserted; with memory in this process there is little to overlap, and the loop "
        "overlaps nothing either",
    },
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Given(Negatives):
    """Negatives that are known beforehand, for the loop to draw."""

    def __init__(self, drawn):
        super().__init__()
        self._drawn = drawn

    def draw(self, events, num=1, *, stream=0):
        return self._drawn[events.eid]


def adam(params):
    # The loop lists the head's parameters twice, as the model's own and as the head's.
    return torch.optim.Adam(dict.fromkeys(params), 1e-3, fused=True)


def model_of(edge_dim):
    torch.manual_seed(0)
    return ms.models.TGN(DIM, edge_dim, fanout=FANOUT, dropout=0.0)


def pipeline(events):
    model = model_of(events.edge_dim)
    memory = ms.NodeMemory(events.num_nodes, DIM, model.mail_dim, start=events.t[0].item())
    return ms.Pipeline(model, memory, ms.Sampler(events, [FANOUT]), events.features, mode="sync")


def on_a_graph(events):
    """The same model with a memory that grows, and an empty graph with its sampler and features."""
    model = model_of(events.features.shape[1])
    memory = ms.NodeMemory(0, DIM, model.mail_dim, start=events.t[0].item())
    graph = gnnflow.TemporalGraph(undirected=True)
    sampler = gnnflow.TemporalSampler(graph, [FANOUT])
    return ms.Hooked(model, memory), graph, sampler, gnnflow.FeatureStore(edge=events.features)


def have_same_scores(events, stream, cut):
    """Whether a list and a graph that grows by the batch give the same scores with the same weights."""
    expected = list(pipeline(events).score(cut))
    hooked, graph, sampler, store = on_a_graph(stream)
    clock = StageClock(torch.device("cpu"))
    task = LinkTask(hooked.eval(), hooked.model.head, sampler, BATCH, clock)
    near = []
    with torch.no_grad():
        for index, out in enumerate(expected):
            part = stream[index * BATCH : (index + 1) * BATCH]
            graph.add_edges(part.src, part.dst, part.t, part.eid)
            found = task.score(part, out.batch.negatives, store)
            near += [
                torch.allclose(ours, theirs, atol=1e-6, rtol=1e-5)
                for ours, theirs in zip(found, (out.pos, out.neg), strict=True)
            ]
            hooked.commit(part)
    return all(near)


def learn(pipe, optimizer, cut):
    """Mean loss of a pass over batches."""
    losses = []
    for out in pipe.train(cut):
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    return sum(losses) / len(losses)


def bench_temporal(benchmark, record_claim):
    events = ms.data.flights(BATCH * NUM_BATCHES)
    stream = gnnflow.data.flights(BATCH * NUM_BATCHES)
    cut = list(ms.batches(events, BATCH))
    is_same = have_same_scores(events, stream, cut)

    pipe = pipeline(events)
    optimizer = adam(pipe.model.parameters())
    hooked, graph, sampler, store = on_a_graph(stream)
    trainer = gnnflow.ContinualTrainer(
        hooked, graph, sampler, store, head=hooked.model.head, warmup=(HISTORY + 1e-3) / NUM_BATCHES,
        every=CHUNK * BATCH, replay=0.0, num_negatives=1, batch_size=BATCH, optimizer=adam,
        fresh_optimizer=False, progress=False,
    )  # fmt: skip
    trainer.history.negatives = trainer.history.training_negatives = Given(
        torch.cat([batch.negatives for batch in cut])
    )
    seconds = {"graph": [], "alone": []}
    losses = {"graph": [], "alone": []}

    def take_turns():
        learn(pipe, optimizer, cut[:HISTORY])
        for index, one in enumerate(trainer.run(stream)):
            first = HISTORY + index * CHUNK
            begin = time.perf_counter()
            losses["alone"].append(learn(pipe, optimizer, cut[first : first + CHUNK]))
            seconds["alone"].append((time.perf_counter() - begin) / CHUNK)
            losses["graph"].append(one.loss)
            seconds["graph"].append((one.total_s - one.evaluate_s) / CHUNK)

    benchmark.pedantic(take_turns, rounds=1)
    typical = {name: 1e3 * median(found) for name, found in seconds.items()}
    spread = {n: f"{1e3 * min(s):.0f}-{1e3 * max(s):.0f} ms" for n, s in seconds.items()}
    benchmark.extra_info.update({n: f"{typical[n]:.1f} ms ({spread[n]})" for n in typical})
    apart = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
    ratios = [
        alone / graph for alone, graph in zip(seconds["alone"], seconds["graph"], strict=True)
    ]
    record_claim(
        Claim(
            name="TGN trained on flights in gnnflow's loop while the graph grows, a batch of 600 events",
            unit="ms",
            ours=typical["graph"],
            baseline=typical["alone"],
            baseline_name="mspipe alone, on the static list",
            higher_is_better=False,
            correct=is_same and apart < MOST_APART,
            detail=f"spread {spread['graph']}; {spread['alone']}; scores of {NUM_BATCHES} batches with given weights "
            f"equal (atol 1e-6, rtol 1e-5): {is_same}; mean losses of {CHUNK} batches apart by {100 * apart:.1f} % "
            "at most",
            source="hatch run bench cross/temporal",
        ),
        spread=(min(ratios), max(ratios)),
    )
