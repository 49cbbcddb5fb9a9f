"""Two layouts in one region: what lives at one time never overlaps, and takes no more than it must."""

import ctypes
import mmap

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.models.config import read_config
from hybridflow.models.decoder import Decoder, Shard
from hybridflow.models.pieces import initialize
from hybridflow.reshard.planner import find_held_boxes
from hybridflow.reshard.region import Region
from hybridflow.reshard.transition import Transition
from hybridflow.workers.batch.layout import Layout

ALIGNMENT = 64
SIZES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9_000), max_size=3), st.lists(st.integers(0, 9_000), max_size=3)
    ),
    min_size=1,
    max_size=6,
)


def describe(side, sizes):
    return [
        {
            f"{side}.{k}.{i}": torch.empty(size, dtype=torch.uint8, device="meta")
            for i, size in enumerate(bucket)
        }
        for k, bucket in enumerate(sizes)
    ]


def aligned(tensors):
    return sum(-(-t.numel() // ALIGNMENT) * ALIGNMENT for t in tensors.values())


@given(SIZES)
def test_buckets_trade_places_without_touching_what_is_live(sizes):
    rising, falling = (
        describe("up", [up for up, _ in sizes]),
        describe("down", [d for _, d in sizes]),
    )
    region = Region(rising, falling)
    marks = {name: 1 + k % 250 for k, name in enumerate([*region.rising, *region.falling])}
    live = {name: place.fill_(marks[name]) for name, place in region.falling.items()}
    most = aligned(region.falling)

    def trade(arriving, places, leaving):
        nonlocal most
        for name in arriving:
            live[name] = places[name].fill_(marks[name])
        most = max(most, aligned(live))
        for name, values in live.items():
            assert (values == marks[name]).all(), name
        for name in leaving:
            del live[name]

    for up, down in zip(rising, falling, strict=True):
        trade(up, region.rising, down)
    assert set(live) == set(region.rising)
    for up, down in zip(reversed(rising), reversed(falling), strict=True):
        trade(down, region.falling, up)
    assert set(live) == set(region.falling)
    assert region.num_bytes == most
    region.give_back()
    for name, values in live.items():
        assert (values == marks[name]).all(), name


MADV_PAGEOUT = 21  # Python has no name for it


def reclaim(values):
    """Has the kernel take what it may of these pages, as when memory is short."""
    first = values.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = values.data_ptr() + values.nbytes - first
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), MADV_PAGEOUT) == 0


def test_the_kernel_may_take_what_training_leaves_free_and_no_more():
    like = {"w": torch.empty(300 * mmap.PAGESIZE + 100, dtype=torch.uint8, device="meta")}
    region = Region([like, {}], [{}, {"v": like["w"]}])
    for is_given_back in (False, True):
        region.rising["w"].fill_(1)
        region.falling["v"].fill_(2)
        if is_given_back:
            region.give_back()
        reclaim(region.rising["w"])
        reclaim(region.falling["v"])
        assert (region.falling["v"] == 2).all()
        left = int(region.rising["w"].sum())
        assert (left < 100 * mmap.PAGESIZE) == is_given_back


def test_a_move_back_to_training_lets_the_kernel_take_generations_memory():
    config = read_config("config:tiny-llama")
    training = Decoder(config, Shard(config, 0, 1, 0, 1))
    initialize(training, 3)
    generation = Decoder(config, Shard(config, 0, 1, 0, 1), device="meta")
    boxes = [find_held_boxes(config, Layout(), 0)]
    move = Transition(training, generation, boxes, boxes, None)
    before = [parameter.detach().clone() for parameter in training.parameters()]
    move.to_generation()
    places = [parameter.data for parameter in generation.parameters()]
    move.to_training()
    for place in places:
        reclaim(place)
    assert sum(int(place.count_nonzero()) for place in places) < 0.5 * sum(
        p.numel() for p in before
    )
    for parameter, values in zip(training.parameters(), before, strict=True):
        assert torch.equal(parameter, values)
