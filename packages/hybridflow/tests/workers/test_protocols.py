"""Every built-in protocol on several meshes, against the definitions of HybridFlow's Table 3."""

import pytest

from hybridflow import Mesh, Protocol, remote
from hybridflow.workers.batch.layout import ORDERS, Layout
from hybridflow.workers.protocols import BUILT_IN
from shared.errors import ConfigError

_MESHES = [
    ("1-1-1", "1-1"),
    ("1-1-4", "1-1"),
    ("1-4-2", "1-2"),
    ("1-4-2", "1-4"),
    ("4-1-2", "2-1"),
    ("2-2-2", "1-1"),
    ("2-2-2", "2-1"),
    ("2-4-3", "1-2"),
]


def _mesh(train, generate, order):
    return Mesh.of(Layout.parse(train, order), generate)


def _places(mesh):
    """(p, t, d) of each rank, from the definition of the two orders."""
    train = mesh.train
    found = []
    for rank in range(train.num_ranks):
        rest, t = divmod(rank, train.tp)
        p, d = (
            (rest % train.pp, rest // train.pp)
            if train.order == "dp-pp-tp"
            else (rest // train.dp, rest % train.dp)
        )
        found.append((p, t, d))
    return found


def _micro(mesh, p, t):
    """m = (p mod a) b + t mod b, and whether the rank is first of generation's pipeline and shards."""
    a = mesh.train.pp // mesh.generate.pp_size
    b = mesh.train.tp // mesh.generate.tp_size
    return (p % a) * b + t % b, (p // a, t // b) == (0, 0)


def _table(name, mesh):
    """Shares and collectors as the table words them."""
    train, places = mesh.train, _places(mesh)
    ranks = range(len(places))
    p_last = train.pp - 1
    d_g = train.pp * train.tp // (mesh.generate.pp_size * mesh.generate.tp_size)
    whole = [None] * len(places)
    by_d = [(d, train.dp) for _, _, d in places]
    last = sorted(
        (d, r) for r, (p, t, d) in zip(ranks, places, strict=True) if (p, t) == (p_last, 0)
    )
    micro = [_micro(mesh, p, t) for p, t, _ in places]
    replica = [d * d_g + m for (_, _, d), (m, _) in zip(places, micro, strict=True)]
    firsts = sorted((replica[r], r) for r in ranks if micro[r][1])
    return {
        "one-to-all": (whole, list(ranks)),
        "all-to-all": (whole, list(ranks)),
        "rank-zero": (whole, [0]),
        "dp": ([(r, len(places)) for r in ranks], list(ranks)),
        "3d": (by_d, [r for _, r in last]),
        "3d-metrics": (by_d, [r for _, r in last]),
        "3d-all-micro-dp": ([(k, train.dp * d_g) for k in replica], [r for _, r in firsts]),
        "3d-pp-only": (
            whole,
            [
                r
                for _, r in sorted((p, r) for r, (p, t, d) in enumerate(places) if (t, d) == (0, 0))
            ],
        ),
        "pp-as-dp": (
            [(d * train.pp + p, train.dp * train.pp) for p, _, d in places],
            [r for _, _, r in sorted((d, p, r) for r, (p, t, d) in enumerate(places) if t == 0)],
        ),
    }[name]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("train", "generate"), _MESHES)
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_protocols_are_the_tables(name, train, generate, order):
    mesh = _mesh(train, generate, order)
    shares, collectors = BUILT_IN[name].checked(mesh)
    assert (shares, collectors) == _table(name, mesh)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("train", "generate"), _MESHES)
@pytest.mark.parametrize(
    "name", [name for name, protocol in BUILT_IN.items() if protocol.answer == "rows"]
)
def test_joined_answers_have_every_share_once_and_in_order(name, train, generate, order):
    shares, collectors = BUILT_IN[name].checked(_mesh(train, generate, order))
    answered = [shares[rank] for rank in collectors]
    count = answered[0][1]
    assert answered == [(k, count) for k in range(count)]


def test_the_papers_example():
    # Training 1-4-2, generation 1-2-2-2; the paper counts ranks from one.
    mesh = Mesh.of(Layout.parse("1-4-2"), "1-2")
    shares, collectors = BUILT_IN["3d-all-micro-dp"].checked(mesh)
    assert [share[0] for share in shares] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert collectors == [0, 1, 4, 5]
    assert BUILT_IN["3d"].checked(mesh) == ([(0, 2)] * 4 + [(1, 2)] * 4, [0, 4])


def _own(**changes):
    settings = {
        "name": "own",
        "shares": lambda mesh: [(rank // 2, mesh.num_ranks // 2) for rank in range(mesh.num_ranks)],
        "collectors": lambda mesh: range(0, mesh.num_ranks, 2),
        "answer": "rows",
    }
    return Protocol(**settings | changes)


def test_a_users_protocol():
    shares, collectors = _own().checked(Mesh.of(Layout(dp=4)))
    assert (shares, collectors) == ([(0, 2), (0, 2), (1, 2), (1, 2)], [0, 2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shares": lambda mesh: [(0, 1)]}, "expected 4 shares of one number of parts"),
        ({"shares": lambda mesh: [(0, 2), (1, 2), (0, 3), (1, 3)]}, "of one number of parts"),
        ({"shares": lambda mesh: [(k, 3) for k in range(4)]}, r"there is no share \(3, 3\)"),
        ({"shares": lambda mesh: [(-1, 4)] * 4}, r"there is no share \(-1, 4\)"),
        ({"shares": lambda mesh: [(0, 2)] * 4}, r"each of 2 parts .* got only \[0\]"),
        (
            {"collectors": lambda mesh: []},
            r"collectors among the ranks 0\.\.3, each once, got \[\]",
        ),
        (
            {"collectors": lambda mesh: [4]},
            r"collectors among the ranks 0\.\.3, each once, got \[4\]",
        ),
        ({"collectors": lambda mesh: [0, 0]}, r"each once, got \[0, 0\]"),
        ({"answer": "one"}, "answer 'one' needs one collector"),
    ],
)
def test_bad_protocols_of_users_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        _own(**changes).checked(Mesh.of(Layout(dp=4)))


def test_unknown_protocols_are_refused_with_what_there_is():
    with pytest.raises(
        ConfigError, match=r"no protocol '4d'; use a built-in one \(one-to-all, 3d,"
    ):
        remote(protocol="4d")


def test_generation_that_does_not_divide_training_is_refused():
    with pytest.raises(ConfigError, match="generate 1-3"):
        Mesh.of(Layout.parse("1-4-2"), "1-3")
