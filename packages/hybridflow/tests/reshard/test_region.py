"""Two layouts in one region: what lives at one time never overlaps, and takes no more than it must."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.reshard.region import Region

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


def test_memory_that_training_leaves_free_goes_back_to_the_kernel():
    like = {"w": torch.empty(16 << 20, dtype=torch.uint8, device="meta")}
    region = Region([like, {}], [{}, {"v": like["w"]}])
    region.rising["w"].fill_(1)
    region.falling["v"].fill_(2)
    region.give_back()
    assert not region.rising["w"].any()  # fresh pages
    assert (region.falling["v"] == 2).all()
