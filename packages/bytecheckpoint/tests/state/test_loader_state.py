from collections import Counter
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import bytecheckpoint as bcp
from bytecheckpoint.state.loader_state import LoaderState
from bytecheckpoint.state.read_order import find_records
from bytecheckpoint.state.shuffle import shuffle_samples
from bytecheckpoint.state.tracked_loader import TrackedLoader
from shared.errors import ConfigError, DataError

LENGTH = 7


class Numbers:
    """Map-style: sample i is i."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return index


class Documents(IterableDataset):
    """Streams packed sequences; document i is i + 1 tokens (i, 0), (i, 1), ... as numbers."""

    def __init__(self, order, length=LENGTH):
        self.order = order
        self.length = length

    def __iter__(self):
        yield from self.order.pack(document, self.length)

    def state_dict(self):
        return {"nested": [self.order.state_dict()]}

    def load_state_dict(self, state):
        self.order.load_state_dict(state["nested"][0])


def document(index):
    return 1000 * index + torch.arange(index % 11 + 1)


def tokens_of(num_samples):
    return Counter(t for i in range(num_samples) for t in document(i).tolist())


def split(world_size, states, **options):
    """One LoaderState a rank, going on from the given states."""
    orders = [LoaderState(rank=r, world_size=world_size, **options) for r in range(world_size)]
    if states is not None:
        for rank, order in enumerate(orders):
            order.load_rank_states(states, rank, world_size)
    return orders


@pytest.mark.parametrize("num_samples", [1, 2, 3, 64, 65, 1000])
def test_shuffled_is_a_permutation_that_differs_by_seed_and_epoch(num_samples):
    places = np.arange(num_samples)
    orders = [
        shuffle_samples(places, num_samples, seed, epoch) for seed in (0, 1) for epoch in (0, 1)
    ]
    for order in orders:
        assert sorted(order.tolist()) == places.tolist()
    if num_samples >= 64:
        assert len({tuple(order.tolist()) for order in orders}) == 4
        assert np.array_equal(shuffle_samples(places[7:9], num_samples, 0, 0), orders[0][7:9])


def test_shuffled_has_no_preference():
    # Sample 3 of 10 stands anywhere equally often; so does each sample at place 0.
    num_epochs = 600
    orders = np.array([shuffle_samples(np.arange(10), 10, 5, epoch) for epoch in range(num_epochs)])
    for seen in (orders[:, 0], np.argmax(orders == 3, axis=1)):
        counts = np.bincount(seen, minlength=10)
        chi_squared = ((counts - num_epochs / 10) ** 2 / (num_epochs / 10)).sum()
        assert chi_squared < 27.9, "nine degrees of freedom exceed this once in a thousand"
    neighbours = np.abs(np.diff(shuffle_samples(np.arange(5000), 5000, 5, 0)))
    assert 5000 / 3 * 0.95 < neighbours.mean() < 5000 / 3 * 1.05


def test_order_is_fixed_for_good():
    # Checkpoints hold positions in this order: it may not change with any release.
    assert list(LoaderState(10, seed=3, rank=0, world_size=1)) == [3, 9, 5, 7, 2, 1, 4, 8, 6, 0]


legs = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(0, 9), min_size=7, max_size=7)), max_size=5
)


@given(num_samples=st.integers(1, 60), legs=legs, shuffle=st.booleans(), last=st.integers(1, 7))
def test_each_sample_of_an_epoch_is_seen_once_over_any_changes(num_samples, legs, shuffle, last):
    # Each leg is a number of ranks and how many samples each of them takes, unevenly.
    options = {"num_samples": num_samples, "shuffle": shuffle, "seed": 9}
    seen, states = Counter(), None
    for world_size, counts in legs:
        orders = split(world_size, states, **options)
        for order, count in zip(orders, counts, strict=False):
            seen.update(take(order, count))
        states = [order.state_dict() for order in orders]
    orders = split(last, states, **options)
    end = max(order.epoch for order in orders)
    end = max([end, *(epoch for epoch, _ in seen)])
    for order in orders:
        while order.epoch <= end:
            epoch = order.epoch
            seen.update((epoch, index) for index in order)
    assert seen == Counter((e, i) for e in range(end + 1) for i in range(num_samples))


@settings(max_examples=12)
@given(num_samples=st.integers(1, 60), legs=legs, last=st.integers(1, 7))
def test_even_ranks_take_the_stream_in_step_and_lose_nothing(num_samples, legs, last):
    seen, states, options = [], None, {"num_samples": num_samples, "seed": 2, "even": True}
    for world_size, (count, *_) in [*legs, (last, [5])]:
        orders = split(world_size, states, **options)
        seen += [index for order in orders for _, index in take(order, count)]
        assert len({order.remaining for order in orders}) == 1
        states = [order.state_dict() for order in orders]
        assert all(state["ahead"] == b"" for state in states)
    epochs = -(-len(seen) // num_samples)
    stream = [
        shuffle_samples(np.arange(num_samples), num_samples, 2, epoch) for epoch in range(epochs)
    ]
    assert Counter(seen) == Counter(np.concatenate([*stream, []]).tolist()[: len(seen)])


def test_what_even_ranks_leave_of_an_epoch_comes_first_on_other_ranks():
    options = {"num_samples": 10, "shuffle": False, "even": True}
    orders = split(4, None, **options)
    assert sorted(i for order in orders for i in order) == list(range(8))
    orders = split(2, [order.state_dict() for order in orders], **options)
    assert [list(order) for order in orders] == [[8, 0, 2, 4, 6, 8], [9, 1, 3, 5, 7, 9]]


@given(num_samples=st.integers(1, 40), legs=legs, last=st.integers(1, 7))
def test_packing_emits_every_token_once_over_any_changes(num_samples, legs, last):
    seen, states, options = Counter(), None, {"num_samples": num_samples, "seed": 4}
    for world_size, counts in [*legs, (last, [10**6] * last)]:
        orders = split(world_size, states, **options)
        for order, count in zip(orders, counts, strict=False):
            if order.epoch:
                continue
            for sequence in islice(order.pack(document, LENGTH), count):
                assert len(sequence) <= LENGTH
                seen.update(sequence.tolist())
        states = [order.state_dict() for order in orders]
    assert seen == tokens_of(num_samples)


def test_packing_gives_whole_sequences_but_for_the_last():
    (order,) = split(1, None, num_samples=31)
    lengths = [len(sequence) for sequence in order.pack(document, LENGTH)]
    assert set(lengths[:-1]) == {LENGTH}
    (order,) = split(1, None, num_samples=31)
    assert len(list(order.pack(document, LENGTH, drop_last=True))) == len(lengths) - 1
    assert order.buffer == []


@pytest.mark.parametrize("kind", ["plain", "stateful"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_prefetched_batches_are_not_lost(kind, num_workers):
    # Two legs of other numbers of ranks and workers, then the rest of the epoch and another one.
    seen, states = Counter(), None
    for world_size, workers, batches in [(3, num_workers, 2), (2, num_workers, 4), (4, 0, 99)]:
        loaders = tracked(kind, world_size, workers)
        for rank, loader in enumerate(loaders):
            if states is not None:
                loader.load_rank_states(states, rank, world_size)
            assert loader.epoch == 0
            seen.update(i for batch in islice(loader, batches) for i in batch.tolist())
        states = [loader.state_dict() for loader in loaders]
    assert seen == Counter(range(101))
    again = tracked(kind, 2, 0)
    for rank, loader in enumerate(again):
        loader.load_rank_states(states, rank, 2)
        assert loader.epoch == 1
        seen.update(i for batch in loader for i in batch.tolist())
        assert loader.epoch == 2
    assert seen == Counter(dict.fromkeys(range(101), 2))


@pytest.mark.parametrize("kind", ["plain", "stateful"])
@pytest.mark.parametrize(
    ("num_workers", "batches"), [(0, 0), (0, 3), (0, 25), (0, 26), (2, 3), (2, 25), (2, 26)]
)
def test_same_ranks_go_on_with_the_very_next_batch(kind, num_workers, batches):
    def read(loader, count):
        return [batch.tolist() for batch in islice(loader, count)]

    # 101 samples in batches of 4: the last, of one sample, is the 26th.
    (whole,) = tracked(kind, 1, 0)
    expected = [read(whole, 99), read(whole, 99)]
    (first,) = tracked(kind, 1, num_workers)
    assert read(first, batches) == expected[0][:batches]
    (second,) = tracked(kind, 1, num_workers)
    second.load_rank_states([first.state_dict()], 0, 1)
    # All batches were given out but the loop did not ask for more: the epoch is still this one.
    assert second.epoch == 0
    assert read(second, 99) == expected[0][batches:]
    assert second.epoch == 1
    assert read(second, 99) == expected[1]


@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_a_loop_left_by_break_goes_on_where_it_was(kind):
    (loader,) = tracked(kind, 1, 2)
    seen = [i for batch in islice(loader, 5) for i in batch.tolist()]
    seen += [i for batch in loader for i in batch.tolist()]
    assert sorted(seen) == list(range(101))


@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_who_knows_the_number_of_batches_need_not_ask_for_another(kind):
    (loader,) = tracked(kind, 1, 0)
    for epoch in range(3):
        batches = iter(loader)
        seen = [i for _ in range(26) for i in next(batches).tolist()]
        assert loader.epoch == epoch
        assert sorted(seen) == list(range(101))


@pytest.mark.parametrize("is_persistent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_packing_in_workers_is_split_anew(is_persistent):
    StatefulDataLoader = stateful()

    def make(rank, world_size, num_workers):
        order = LoaderState(60, seed=1, rank=rank, world_size=world_size)
        options = {"persistent_workers": True} if is_persistent and num_workers else {}
        return order.track(
            StatefulDataLoader(
                Documents(order), batch_size=None, num_workers=num_workers, **options
            )
        )

    seen, states = Counter(), None
    for world_size, num_workers, sequences in [(2, 2, 5), (2, 2, 4), (1, 0, 7), (2, 2, 999)]:
        loaders = [make(rank, world_size, num_workers) for rank in range(world_size)]
        for rank, loader in enumerate(loaders):
            if states is not None:
                loader.state_dict()  # as a load describes what it loads into; starts the workers
                loader.load_rank_states(states, rank, world_size)
            for sequence in islice(loader, sequences):
                seen.update(sequence.tolist())
        states = [loader.state_dict() for loader in loaders]
    assert seen == tokens_of(60)
    for epoch in (1, 2):
        # The next epochs of the same loaders: nothing of an old buffer comes again.
        assert {loader.epoch for loader in loaders} == {epoch}
        seen = Counter(t for loader in loaders for s in loader for t in s.tolist())
        assert seen == tokens_of(60)
    (loader,) = [make(0, 1, 2)]
    loader.load_rank_states(states, 0, 1)
    assert loader.epoch == 1
    assert Counter(t for s in loader for t in s.tolist()) == tokens_of(60)


def test_a_loop_that_counts_on_leaves_the_loaded_state_as_it_is():
    order = LoaderState(6, rank=0, world_size=1)
    loader = order.track(stateful()(Numbers(6), batch_size=2, sampler=order))
    order.counters["tokens"] = 5
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    order.counters["tokens"] += 1
    assert next(find_records(state))["counters"] == {"tokens": 5}


@pytest.mark.parametrize("in_worker", [False, True])
def test_neither_a_position_nor_a_sequence_shares_memory_with_the_reader(in_worker, monkeypatch):
    # A worker's queue moves the memory of what it sends, in a thread beside the reader.
    if in_worker:
        worker = SimpleNamespace(id=0, num_workers=1)
        monkeypatch.setattr("bytecheckpoint.state.read_order.get_worker_info", lambda: worker)
    order = LoaderState(3, shuffle=False, rank=0, world_size=1)
    long, seen = torch.arange(300), []
    for sequence in order.pack(lambda index: long[100 * index : 100 * (index + 1)], 30):
        seen += sequence.tolist()
        order.buffer.append({"nested": [1]})
        state = order.state_dict()
        *tensors, plain = state["buffer"]
        for tensor in [sequence, *tensors]:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        if in_worker:
            # It stays where it is, and the next position has the same: only what is new is copied.
            assert all(tensor.is_shared() for tensor in tensors)
            again = order.state_dict()["buffer"]
            assert all(one is other for one, other in zip(tensors, again[:-1], strict=True))
        else:
            for tensor in tensors:
                tensor.fill_(-1)
        sequence.fill_(-1)
        assert plain == order.buffer.pop() == {"nested": [1]}
    assert seen == list(range(300)) == long.tolist()


def test_what_is_added_to_the_buffer_between_two_sequences_is_not_lost():
    order = LoaderState(1, shuffle=False, rank=0, world_size=1)
    read = order.pack(lambda index: torch.arange(100), 30)
    first = next(read)
    order.buffer.append(torch.arange(100, 125))
    assert torch.cat([first, *read]).tolist() == list(range(125))


@pytest.mark.parametrize("length", [30, 130])
def test_documents_may_share_memory_with_the_next_ones(length):
    order = LoaderState(3, shuffle=False, rank=0, world_size=1)
    room = torch.empty(100, dtype=torch.int64)

    def fetch(index):
        return torch.arange(100 * index, 100 * (index + 1), out=room)

    assert torch.cat(list(order.pack(fetch, length))).tolist() == list(range(300))


class Streamed(Documents):
    """The samples themselves."""

    def __iter__(self):
        yield from self.order


@pytest.mark.parametrize("layouts", [((1, 0), (1, 2)), ((1, 2), (2, 2))])
def test_as_many_ranks_as_there_were_readers_may_read_in_workers(layouts):
    # Their workers are other readers than those whose positions were saved.
    StatefulDataLoader = stateful()
    seen, states = Counter(), []
    for world_size, num_workers in layouts:
        loaders = [
            order.track(StatefulDataLoader(Streamed(order), batch_size=2, num_workers=num_workers))
            for order in split(world_size, None, num_samples=20, shuffle=False)
        ]
        if states:
            for rank, loader in enumerate(loaders):
                loader.load_rank_states(states, rank, world_size)
        batches = [batch for loader in loaders for batch in islice(loader, 99 if states else 3)]
        seen.update(i for batch in batches for i in batch.tolist())
        states = [loader.state_dict() for loader in loaders]
    assert seen == Counter(range(20))


def test_as_many_ranks_go_on_exactly_though_unevenly():
    options = {"num_samples": 40, "seed": 3}
    whole = [
        [s.tolist() for s in order.pack(document, LENGTH)] for order in split(3, None, **options)
    ]
    orders = split(3, None, **options)
    first = [
        [s.tolist() for s in islice(order.pack(document, LENGTH), 2 * order.rank + 1)]
        for order in orders
    ]
    orders = split(3, [order.state_dict() for order in orders], **options)
    rest = [[s.tolist() for s in order.pack(document, LENGTH)] for order in orders]
    assert [one + other for one, other in zip(first, rest, strict=True)] == whole


def test_buffers_are_dealt_out_whole_and_in_order():
    orders = split(3, None, num_samples=10)
    for order in orders:
        order.buffer.extend([10 * order.rank, 10 * order.rank + 1])
        order.counters["tokens"] = 5
    states = [order.state_dict() for order in orders]
    held = [order.buffer for order in split(4, states, num_samples=10)]
    assert [item for items in held for item in items] == [0, 1, 10, 11, 20, 21]
    assert {len(items) for items in held} == {1, 2}
    assert split(1, states, num_samples=10)[0].counters == {"tokens": 5}


def test_what_does_not_belong_together_is_refused():
    orders = split(2, None, num_samples=10, dataset="a")
    states = [order.state_dict() for order in orders]
    with pytest.raises(
        DataError, match="dataset 'b', as this run reads, got one in data of dataset 'a'"
    ):
        split(1, states, num_samples=10, dataset="b")
    with pytest.raises(
        DataError, match="num_samples 11, as this run reads, got one in data of num_samples 10"
    ):
        split(2, states, num_samples=11, dataset="a")
    for changes in ({"seed": 1}, {"shuffle": False}):
        (name,) = changes
        with pytest.raises(DataError, match=f"as this run reads, got one in data of {name} "):
            split(2, states, num_samples=10, dataset="a", **changes)
    with pytest.raises(DataError, match="all 2 readers"):
        split(1, states[:1], num_samples=10, dataset="a")
    with pytest.raises(DataError, match="all 2 readers"):
        split(1, [states[0], states[0]], num_samples=10, dataset="a")
    with pytest.raises(DataError, match="reader 1 of 2, got that of reader 0 of 2"):
        orders[1].load_state_dict(states[0])
    with pytest.raises(
        DataError, match="expected 'taken' in a loader's position to be of type int, got '3'"
    ):
        orders[0].load_state_dict(states[0] | {"taken": "3"})
    for changes in ({"seen": 4}, {"ahead": b"\2"}, {"since": 1}):
        with pytest.raises(DataError, match="different checkpoints"):
            split(1, [states[0], states[1] | changes], num_samples=10, dataset="a")
    with pytest.raises(DataError, match="as many workers on every rank, got readers of 2 and of 4"):
        split(1, [states[0], states[1] | {"num_readers": 4}], num_samples=10, dataset="a")
    with pytest.raises(DataError, match="equal counters"):
        split(1, [states[0], states[1] | {"counters": {"n": 1}}], num_samples=10, dataset="a")
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        LoaderState(10, rank=2, world_size=2)


def test_positions_are_found_wherever_they_lie():
    first, second = (order.state_dict() for order in split(2, None, num_samples=10))
    found = list(find_records({"a": [{"b": (first, 3)}], "c": second, "d": "text"}))
    assert [id(one) for one in found] == [id(first), id(second)]


def test_loaders_that_cannot_be_counted_are_refused():
    StatefulDataLoader = stateful()
    (order,) = split(1, None, num_samples=10)
    with pytest.raises(ConfigError, match="pass it as the loader's `sampler`"):
        order.track(DataLoader(Numbers(10), batch_size=2))
    with pytest.raises(ConfigError, match="StatefulDataLoader"):
        order.track(DataLoader(Documents(order), batch_size=None))
    with pytest.raises(ConfigError, match="snapshot_every_n_steps to be 1, got 4"):
        order.track(StatefulDataLoader(Numbers(10), sampler=order, snapshot_every_n_steps=4))
    with pytest.raises(ConfigError, match="in_order"):
        order.track(DataLoader(Numbers(10), sampler=order, num_workers=2, in_order=False))
    with pytest.raises(ConfigError, match="expected a loader that saves its position"):
        TrackedLoader(DataLoader(Numbers(10)))


def test_a_stateful_loader_without_an_order_loads_on_as_many_ranks_only():
    StatefulDataLoader = stateful()
    first = [TrackedLoader(StatefulDataLoader(Numbers(10), batch_size=2)) for _ in range(2)]
    assert [len(list(islice(loader, rank + 1))) for rank, loader in enumerate(first)] == [1, 2]
    states = [loader.state_dict() for loader in first]
    second = TrackedLoader(StatefulDataLoader(Numbers(10), batch_size=2))
    second.load_rank_states(states, 1, 2)
    assert [batch.tolist() for batch in second] == [[4, 5], [6, 7], [8, 9]]
    with pytest.raises(ConfigError, match="saved by 2 ranks of 0 workers and would be loaded by 3"):
        second.load_rank_states(states, 0, 3)


def test_positions_of_many_skewed_readers_stay_small():
    # 1,000 ranks of 4 workers, some a batch of 32 ahead: two bits a sample in reach, not a list.
    orders = split(4000, None, num_samples=10**9)
    states = [order.state_dict() | {"taken": 32 * (order.rank % 2)} for order in orders]
    (order,) = split(1, states, num_samples=10**9)
    assert len(order.state_dict()["ahead"]) <= 4000 * 32 / 8 + 1
    assert len(order) == 10**9 - 2000 * 32


def save_on_ranks(folder):
    order = LoaderState(60, seed=1)
    loader = order.track(stateful()(Documents(order), batch_size=None, num_workers=2))
    seen = [t for sequence in islice(loader, 3 + order.rank) for t in sequence.tolist()]
    bcp.save(folder, {"loader": loader, "order": LoaderState(10)})
    return seen


def test_loaders_of_two_ranks_go_on_in_one_process(tmp_path, pool):
    seen = Counter(t for tokens in pool.run(save_on_ranks, tmp_path / "c").results for t in tokens)
    order = LoaderState(60, seed=1)
    loader = order.track(stateful()(Documents(order), batch_size=None, num_workers=0))
    bcp.load(tmp_path / "c", {"loader": loader, "order": LoaderState(10)})
    seen.update(t for sequence in loader for t in sequence.tolist())
    assert seen == tokens_of(60)


def stateful():
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


def take(order, count):
    """(epoch, index) of the next samples, over ends of epochs."""
    taken = []
    while len(taken) < count:
        epoch = order.epoch
        taken += [(epoch, index) for index in islice(order, count - len(taken))]
    return taken


def tracked(kind, world_size, num_workers):
    loader = stateful() if kind == "stateful" else DataLoader
    orders = split(world_size, None, num_samples=101, seed=6)
    return [
        order.track(loader(Numbers(101), batch_size=4, sampler=order, num_workers=num_workers))
        for order in orders
    ]
