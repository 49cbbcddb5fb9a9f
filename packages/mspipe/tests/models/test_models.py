"""Models against their equations written out for one node at a time, in dictionaries."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from mspipe.data.batching import batches
from mspipe.data.events import Events
from mspipe.data.sampler import Sampler, index_of
from mspipe.evaluation import score_links
from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.row_layout import NO_MAIL, RowLayout, State
from mspipe.models import APAN, JODIE, TGN, mail_dim
from mspipe.models.base import TimeEncoding
from mspipe.models.hooked import Hooked
from shared.data.events import Events as Checked
from shared.errors import ConfigError
from shared.kernels.temporal import Adjacency, sample


def phi(model, span):
    frequency = [10 ** (-9 * i / 3) for i in range(4)]
    return torch.tensor([math.cos(span * f) for f in frequency])


class Walked:
    """The run of a model in which every occurrence is computed by itself, from lists of events."""

    def __init__(self, model, events):
        self.model, self.events = model, events
        self.memory = {}  # node -> (state, time)
        self.mail = {}  # node -> [(message, time)], oldest first
        self.past = []  # (t, src, dst, eid)

    def state(self, node):
        """A node's state and its time once its mail is applied."""
        memory, time = self.memory.get(node, (torch.zeros(8), self.events.t[0].item()))
        box = self.mail.get(node, [])
        if not box:
            return memory, time
        newest = box[-1][1]
        if isinstance(self.model, APAN):
            return self.read_box(memory, box, newest), newest
        given = torch.cat([box[-1][0], phi(self.model, newest - time)])
        return self.model.cell(given[None], memory[None])[0], newest

    def read_box(self, memory, box, newest):
        model, heads = self.model, []
        inputs = [torch.cat([m, phi(model, newest - t)]) for m, t in box]
        for head in range(2):
            part = slice(4 * head, 4 * head + 4)
            query = model.query(memory)[part]
            scores = torch.stack([F.leaky_relu(query @ model.key(x)[part], 0.2) for x in inputs])
            values = torch.stack([model.value(x)[part] for x in inputs])
            heads.append(scores.softmax(0) @ values)
        return F.relu(model.mlp(model.box_norm(torch.cat(heads) + memory)))

    def neighbors(self, node, t):
        """(neighbour, edge time, id) of the newest events strictly before, newest first."""
        found = []
        for when, src, dst, eid in self.past_before(t):
            found += [(dst, when, eid)] if src == node else []
            found += [(src, when, eid)] if dst == node != src else []
        return found[::-1][: self.model.fanout]

    def past_before(self, t):
        columns = zip(
            *(getattr(self.events, n).tolist() for n in ("t", "src", "dst", "eid")), strict=True
        )
        return [row for row in columns if row[0] < t]

    def embed(self, node, t):
        model = self.model
        state, time = self.state(node)
        if isinstance(model, APAN):
            return model.norm(state)
        if isinstance(model, JODIE):
            since = torch.tensor([(t - time) / (t - self.events.t[0].item() + 1)])
            return model.norm(state) * (1 + model.drift(since))
        layer = model.attention
        query = layer.query(torch.cat([state, phi(model, 0)]))
        near = [
            torch.cat([self.state(other)[0], self.events.features[eid], phi(model, t - when)])
            for other, when, eid in self.neighbors(node, t)
        ]
        heads = []
        for head in range(2):
            part = slice(4 * head, 4 * head + 4)
            if not near:
                heads.append(torch.zeros(4))
                continue
            scores = [F.leaky_relu(query[part] @ layer.key(x)[part], 0.2) for x in near]
            values = torch.stack([layer.value(x)[part] for x in near])
            heads.append(torch.stack(scores).softmax(0) @ values)
        return layer.norm(F.relu(layer.out(torch.cat([*heads, state]))))

    def batch(self, batch):
        """Logits of events and negatives; memory and mail then move on."""
        events, head = batch.events, self.model.head
        columns = [getattr(events, n).tolist() for n in ("src", "dst", "t", "eid")]
        rows = list(zip(*columns, strict=True))
        pos = torch.stack([head(self.embed(u, t), self.embed(v, t)) for u, v, t, _ in rows])
        neg = [
            [head(self.embed(u, t), self.embed(w, t)) for w in others]
            for (u, _, t, _), others in zip(rows, batch.negatives.tolist(), strict=True)
        ]
        states = {n: self.state(n) for u, v, *_ in rows for n in (u, v)}
        sent = []
        for u, v, t, eid in rows:
            messages = {
                own: torch.cat([states[own][0], states[other][0], self.events.features[eid]])
                for own, other in ((u, v), (v, u))
            }
            if isinstance(self.model, APAN):
                sent += [
                    ([n for n in {n for n, *_ in self.neighbors(own, t)} if n != own], message, t)
                    for own, message in messages.items()
                ]
            sent += [([own], message, t) for own, message in messages.items()]
        self.memory.update(states)
        if isinstance(self.model, APAN):
            boxes = {}
            for receivers, message, t in sent:
                for node in receivers:
                    boxes.setdefault(node, []).append((message, t))
            for node, new in boxes.items():
                self.mail[node] = (self.mail.get(node, []) + new)[-self.model.slots :]
        else:
            for (node,), message, t in sent:
                self.mail[node] = [(message, t)]
        return pos, torch.tensor(neg)


@pytest.mark.parametrize("name", ["tgn", "jodie", "apan"])
@pytest.mark.parametrize("loops", [False, True])
def test_a_run_equals_one_node_at_a_time(toy, name, loops):
    events = toy.stream(60, 6, 4, seed=3, loops=loops)
    pipe = toy.pipeline(events, name)
    walked = Walked(pipe.model.eval(), events)
    with torch.no_grad():
        for out in pipe.score(batches(events, 9, num_negatives=2)):
            pos, neg = walked.batch(out.batch)
            torch.testing.assert_close(out.pos, pos, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(out.neg, neg, atol=2e-5, rtol=1e-4)
    found = pipe.memory.read(torch.arange(events.num_nodes))
    assert len(walked.memory) > 6
    for node in range(events.num_nodes):
        memory, time = walked.memory.get(node, (torch.zeros(8), events.t[0].item()))
        torch.testing.assert_close(found.memory[node], memory, atol=1e-5, rtol=1e-4)
        assert float(found.memory_times[node]) == time
        times = found.mail_times[node].reshape(-1).tolist()
        box = walked.mail.get(node, [])
        assert [t for t in times if t != NO_MAIL] == [t for _, t in box]
        if box and name != "apan":
            torch.testing.assert_close(found.mail[node], box[-1][0], atol=1e-5, rtol=1e-4)


def test_gradients_reach_the_updater(toy):
    events = toy.stream(200)
    for name in toy.models:
        pipe = toy.pipeline(events, name, mode="sync")
        for out in pipe.train(batches(events, 50)):
            pipe.model.zero_grad()
            out.loss.backward()
        without = [n for n, p in pipe.model.named_parameters() if p.grad is None]
        # A recurrent key's bias moves all scores alike, and has a gradient of rounding all the same.
        assert without == []
        cell = pipe.model.mlp.weight if name == "apan" else pipe.model.cell.weight_ih
        assert float(cell.grad.abs().max()) > 0


@pytest.mark.unchecked
def test_models_learn(toy):
    plain = toy.stream(1500, seed=1)
    # Features tell which of four kinds of destination an event is about.
    angle = (plain.dst % 4) * torch.pi / 2
    features = torch.stack([angle.cos(), angle.sin(), torch.zeros(1500)], 1)
    events = Events(plain.src, plain.dst, plain.t, features)
    for name in toy.models:
        losses = toy.train(toy.pipeline(events, name), events, size=100, epochs=6)
        assert sum(losses[-15:]) / 15 < sum(losses[:15]) / 15 - 0.1, name


def test_a_node_without_mail_keeps_what_it_has(toy):
    for name, make in toy.models.items():
        model = make()
        layout = RowLayout(model.dim, model.mail_dim, model.slots)
        memory = NodeMemory(3, layout.dim, layout.mail_dim, layout.slots)
        state = memory.read(torch.arange(3))
        state.memory.copy_(torch.randn(3, 8))
        updated = model.update(state)
        assert torch.equal(updated.memory, state.memory), name
        assert updated.times.tolist() == [0, 0, 0]
        # One that has mail changes, and the others do not.
        mail_times = state.mail_times.clone()
        mail_times[1] = 5
        moved = model.update(State(state.memory, state.memory_times, state.mail, mail_times))
        assert torch.equal(moved.memory[[0, 2]], state.memory[[0, 2]])
        assert not torch.equal(moved.memory[1], state.memory[1])
        assert moved.times.tolist() == [0, 5, 0]


def test_time_is_encoded_in_64_bits():
    encoding = TimeEncoding(5)
    spans = torch.tensor([0.0, 31_536_000_017.0], dtype=torch.float64)
    expected = [[math.cos(s * 10 ** (-9 * i / 4)) for i in range(5)] for s in spans.tolist()]
    torch.testing.assert_close(encoding(spans), torch.tensor(expected), atol=1e-5, rtol=0)
    assert not list(encoding.parameters())


def test_sizes_that_make_no_sense_are_refused(unchecked):
    assert mail_dim(100, 16) == 216
    for make, told in (
        (lambda: TGN(0), "dim of at least 1"),
        (lambda: TGN(8, -1), "edge_dim of at least 0"),
        (lambda: TGN(8, num_heads=3), "num_heads to divide dim"),
        (lambda: JODIE(8, time_dim=0), "time_dim of at least 1"),
        (lambda: APAN(8, slots=1), "slots of at least 2"),
        (lambda: APAN(9), "num_heads to divide dim"),
    ):
        with pytest.raises(ConfigError, match=told):
            make()


def test_sampled_rows_name_the_right_nodes(toy):
    events = toy.stream(200)
    nodes, times = torch.tensor([3, 25, 3, 99]), torch.tensor([100, 300, 500, 500])
    sampled = Sampler(events, [4]).sample(nodes, times)
    assert torch.equal(sampled.nodes, sampled.nodes.unique())
    assert sampled.nodes[sampled.roots].tolist() == nodes.tolist()
    walked = Walked(TGN(8, 3, fanout=4), events)
    for root, (node, t) in enumerate(zip(nodes.tolist(), times.tolist(), strict=True)):
        part = slice(*sampled.starts[root : root + 2].tolist())
        found = zip(
            sampled.nodes[sampled.neighbors[part]].tolist(),
            (t - sampled.dt[part]).tolist(),
            sampled.eids[part].tolist(),
            strict=True,
        )
        assert list(found) == [(n, when, eid) for n, when, eid in walked.neighbors(node, t)]
    with pytest.raises(ConfigError, match="one number of 0 or more"):
        Sampler(events, [4, 4])


def test_ids_are_numbered():
    for ids in ([5, 2, 5, 9], [], [10**12, 3, 10**12]):
        ids = torch.tensor(ids, dtype=torch.int64)
        different, place = index_of(ids)
        assert torch.equal(different, ids.unique())
        assert torch.equal(different[place], ids)


def shifted(events, seconds):
    times = events.t if isinstance(seconds, int) else events.t.double()
    return Events(events.src, events.dst, times + seconds, events.features)


@pytest.mark.parametrize("name", ["tgn", "jodie", "apan"])
@pytest.mark.parametrize("seconds", [1_000_000_000, 1e9 + 0.5])
def test_results_do_not_depend_on_where_time_starts(toy, name, seconds):
    events = toy.stream(200)
    runs = [shifted(events, start) for start in (0, seconds)]
    pipes = [toy.pipeline(run, name) for run in runs]
    losses = []
    for pipe, run in zip(pipes, runs, strict=True):
        torch.manual_seed(0)
        losses.append(toy.train(pipe, run, epochs=1))
    assert losses[0] == losses[1]
    memories = [pipe.memory.read(torch.arange(events.num_nodes)) for pipe in pipes]
    assert torch.equal(memories[0].memory, memories[1].memory)
    asked = events.src[:9], events.dst[:9], events.t[-1] + torch.arange(9)
    scores = [
        score_links(pipes[0], *asked),
        score_links(pipes[1], *asked[:2], asked[2].double() + seconds),
    ]
    assert torch.equal(*scores)


def test_times_before_the_first_event_have_scores(toy):
    events = shifted(toy.stream(60), 1000)
    pipe = toy.pipeline(events, "jodie")
    first = int(events.t[0])
    asked = torch.arange(first - 3, first + 1)
    scores = score_links(pipe, events.src[:1].expand(4), events.dst[:1].expand(4), asked)
    assert scores.isfinite().all()


def test_ranks_that_embed_shares_of_the_first_events_begin_alike(toy):
    events = toy.stream(60)
    adjacency = Adjacency.from_edges(events.src, events.dst, events.t)
    embedded = []
    for share in (slice(20), slice(10, 20), slice(0)):
        torch.manual_seed(0)
        model = toy.models["jodie"]().eval()
        hooked = Hooked(model, NodeMemory(1, model.dim, model.mail_dim))
        for roots in (events[share], events[40:]):
            block = sample(adjacency, roots.src, roots.t, model.fanout)
            inputs = SimpleNamespace(
                edges=[SimpleNamespace(values=events.features, index=block.eids)]
            )
            rows = hooked(SimpleNamespace(layers=[block]), inputs)
            part = events[:20]
            hooked.commit(Checked(part.src, part.dst, part.t, None, events.features[part.eid]))
        embedded.append(rows)
    assert torch.equal(embedded[0], embedded[1])
    assert torch.equal(embedded[0], embedded[2])


@pytest.mark.parametrize("name", ["tgn", "jodie"])
def test_a_hooked_memory_begins_with_the_first_event_that_it_meets(toy, name):
    events = toy.stream(60)
    embedded = []
    for run in (events, shifted(events, 1_000_000_000)):
        torch.manual_seed(0)
        model = toy.models[name]().eval()
        hooked = Hooked(model, NodeMemory(1, model.dim, model.mail_dim))
        adjacency = Adjacency.from_edges(run.src, run.dst, run.t)
        for part in (run[:20], run[20:40]):
            hooked.commit(Checked(part.src, part.dst, part.t, None, run.features[part.eid]))
        kept = hooked.state()
        again = Hooked(model, NodeMemory(1, model.dim, model.mail_dim))
        again.load_state(kept)
        block = sample(adjacency, run.src[40:], run.t[40:], model.fanout)
        inputs = SimpleNamespace(edges=[SimpleNamespace(values=run.features, index=block.eids)])
        asked = SimpleNamespace(layers=[block]), inputs
        assert torch.equal(hooked(*asked), again(*asked))
        embedded.append(hooked(*asked))
    assert torch.equal(*embedded)
