from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import TopologyError
from shared.topology import Mesh

meshes = st.dictionaries(
    st.sampled_from(["pp", "dp", "cp", "tp"]), st.integers(1, 4), min_size=1
).map(lambda axes: Mesh(axes=axes))


@given(meshes)
def test_places_and_ranks_are_one_to_one(mesh):
    places = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank_at(**place) for place in places] == list(range(mesh.size))
    # The last axis runs fastest, as itertools.product's last factor does.
    assert [tuple(place.values()) for place in places] == list(
        product(*(range(size) for size in mesh.axes.values()))
    )


@given(meshes)
def test_groups_along_an_axis_cover_the_ranks_once(mesh):
    for axis, size in mesh.axes.items():
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for group in groups:
            assert [mesh.coordinate(rank)[axis] for rank in group] == list(range(size))
            others = [{**mesh.coordinate(rank), axis: 0} for rank in group]
            assert all(other == others[0] for other in others)


def test_large_mesh():
    mesh = Mesh(axes={"pp": 10, "dp": 125, "tp": 8})
    assert mesh.size == 10_000
    assert mesh.groups("tp")[0] == list(range(8))
    assert len(mesh.groups("dp")) == 80


@pytest.mark.parametrize("axes", [{}, {"dp": 0}, {"": 2}])
def test_bad_axes(axes):
    with pytest.raises(TopologyError, match="named axes of at least one rank"):
        Mesh(axes=axes)


def test_places_outside():
    mesh = Mesh(axes={"dp": 2, "tp": 3})
    with pytest.raises(TopologyError, match=r"ranks 0\.\.5: 6"):
        mesh.coordinate(6)
    with pytest.raises(TopologyError, match=r"axis 'tp' has places 0\.\.2: 3"):
        mesh.rank_at(dp=0, tp=3)
    with pytest.raises(TopologyError, match=r"names the axes \['dp', 'tp'\], got \['dp'\]"):
        mesh.rank_at(dp=0)
    with pytest.raises(TopologyError, match="not 'pp'"):
        mesh.groups("pp")
    with pytest.raises(TopologyError, match="a world of 6 ranks, it is not initialised"):
        mesh.to_device_mesh("cpu")
