import itertools
import math
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.comms import Group, RankPool, Tree, tree
from shared.errors import CommError, ConfigError, DataError, RankFailure

trees = st.builds(
    Tree,
    world_size=st.integers(1, 200),
    arity=st.integers(1, 9),
    ranks_per_host=st.integers(1, 9),
)


@given(trees)
def test_all_ranks_hang_below_rank_0(shape):
    assert sorted(shape.subtree(0)) == list(range(shape.world_size))
    assert shape.parent(0) is None
    for rank in range(shape.world_size):
        assert all(shape.parent(child) == rank for child in shape.children(rank))


@given(trees)
def test_one_message_leaves_each_host(shape):
    leaving = [
        rank
        for rank in range(1, shape.world_size)
        if shape.parent(rank) // shape.ranks_per_host != rank // shape.ranks_per_host
    ]
    assert len(leaving) == -(-shape.world_size // shape.ranks_per_host) - 1


@given(trees)
def test_nobody_has_more_peers_than_told(shape):
    for rank in range(shape.world_size):
        children = shape.children(rank)
        at_home = [c for c in children if c // shape.ranks_per_host == rank // shape.ranks_per_host]
        assert len(at_home) <= shape.arity
        assert len(children) - len(at_home) <= shape.arity


def test_ten_thousand_ranks_are_few_steps_away():
    shape = Tree(world_size=10_000, arity=8, ranks_per_host=8)

    def depth(rank: int) -> int:
        return 0 if rank == 0 else 1 + depth(shape.parent(rank))

    # 1,250 hosts in a tree of eight, and one step on the host.
    assert max(map(depth, range(10_000))) <= math.ceil(math.log(1250 * 7 + 1, 8)) + 1


@pytest.mark.parametrize("field", ["world_size", "arity", "ranks_per_host"])
def test_trees_of_nothing(field):
    with pytest.raises(ConfigError, match="positive"):
        Tree(**{"world_size": 4, field: 0})


SHAPES = [
    {"arity": arity, "ranks_per_host": hosts} for arity, hosts in itertools.product((1, 2), (1, 2))
]


def joined(parts: list[bytes]) -> bytes:
    return b"+".join(parts)


def messages(shape: dict) -> tuple:
    group = Group.world()
    layout = Tree(world_size=group.world_size, **shape)
    gathered = tree.gather(group, b"%d" % group.rank * group.rank, joined, layout)
    parts = [b"%d" % rank * (3 - rank) for rank in range(4)] if group.rank == 0 else None
    mine = tree.scatter(group, parts, layout)
    said = tree.broadcast(group, b"all" if group.rank == 0 else None, layout)
    nothing = tree.broadcast(group, b"" if group.rank == 0 else None, layout)
    return gathered, mine, said, nothing


@pytest.mark.parametrize("shape", SHAPES)
def test_messages_up_and_down(pool_of_four, shape):
    results = pool_of_four.run(messages, shape).results
    assert sorted(results[0][0].split(b"+")) == [b"", b"1", b"22", b"333"]
    assert [r[0] for r in results[1:]] == [None] * 3
    assert [r[1] for r in results] == [b"000", b"11", b"2", b""]
    assert [r[2:] for r in results] == [(b"all", b"")] * 4


def counted() -> tuple[int, int]:
    group = Group.world()
    before = group.ledger.snapshot()
    tree.gather(group, b"x" * 100, joined, Tree(world_size=4, arity=1))
    moved = group.ledger.snapshot().diff(before).by_op()["tree_gather"]
    return moved.sent_bytes, moved.received_bytes


def test_the_ledger_counts_messages_and_their_lengths(pool_of_four):
    head = 16
    assert pool_of_four.run(counted).results == [
        (0, head + 302),
        (head + 302, head + 201),
        (head + 201, head + 100),
        (head + 100, 0),
    ]


def default_tree() -> tuple:
    group = Group.world()
    alone = Group.of([1, 2])
    inside = tree.gather(alone, b"x", joined) if alone.rank >= 0 else None
    return Tree.of(group), tree.gather(group, b"%d" % group.rank, joined), inside


def test_default_tree_knows_the_hosts(pool_of_four):
    shape, gathered, _ = pool_of_four.run(default_tree).results[0]
    assert shape == Tree(world_size=4, arity=8, ranks_per_host=4)
    assert gathered == b"0+1+2+3"
    assert [r[2] for r in pool_of_four.run(default_tree).results] == [None, b"x+x", None, None]


def tree_of_uneven_hosts(sizes: list[str]) -> tuple[Tree, bytes | None, int]:
    world = Group.world()
    # Another object of the same ranks, which have agreed on no tree yet.
    group = Group(world.process_group, world.ranks, world.timeout, world.ledger)
    told = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = sizes[group.rank]
    try:
        gathered = tree.gather(group, b"%d" % group.rank, joined)
        before = group.ledger.snapshot()
        shape = Tree.of(group)
        return shape, gathered, len(group.ledger.snapshot().diff(before).by_op())
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = told


def test_hosts_of_different_numbers_of_ranks_agree_on_one_tree(pool_of_four):
    results = pool_of_four.run(tree_of_uneven_hosts, ["3", "3", "3", "1"]).results
    assert [shape for shape, *_ in results] == [Tree(world_size=4)] * 4
    assert sorted(results[0][1].split(b"+")) == [b"0", b"1", b"2", b"3"]
    assert [num_ops for *_, num_ops in results] == [0] * 4  # once agreed, nothing is sent
    results = pool_of_four.run(tree_of_uneven_hosts, ["2"] * 4).results
    assert [shape for shape, *_ in results] == [Tree(world_size=4, ranks_per_host=2)] * 4


def failing_merge(kind: type[Exception]) -> tuple[str, str]:
    """Rank 2 cannot merge: rank 0 learns it, tells all, and the group is good for more."""
    group = Group.world()
    chain = Tree(world_size=4, arity=1)

    def merge(parts: list[bytes]) -> bytes:
        if group.rank == 2:
            raise kind("two tensors of one name")
        return joined(parts)

    failure: Exception | None = None
    try:
        assert tree.gather(group, b"x", merge, chain) is None
        assert group.rank != 0
    except (CommError, DataError) as error:
        failure = error
    try:
        tree.scatter(group, failure, chain)
    except (CommError, DataError) as error:
        assert tree.broadcast(group, b"on" if group.rank == 0 else None) == b"on"
        return type(error).__name__, str(error)
    raise AssertionError("a failure was lost")


@pytest.mark.parametrize(("kind", "arrives"), [(DataError, "DataError"), (KeyError, "CommError")])
def test_a_rank_that_fails_is_known_to_all(pool_of_four, kind, arrives):
    for name, text in pool_of_four.run(failing_merge, kind).results:
        assert name == arrives
        assert text.startswith("rank 2: ")
        assert "two tensors of one name" in text


def wrong_parts(op: str) -> str:
    group = Group.world()
    try:
        tree.scatter(group, [b""]) if op == "scatter" else tree.broadcast(group, None)
    except ConfigError as error:
        return str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize("op", ["scatter", "broadcast"])
def test_wrong_parts_are_refused_everywhere(pool_of_four, op):
    results = pool_of_four.run(wrong_parts, op).results
    assert all(f"{op} needs bytes" in text for text in results)


def waiting_for_the_dead() -> None:
    group = Group.world()
    if group.rank == 2:
        os._exit(7)
    tree.gather(group, b"x", joined, Tree(world_size=3, arity=1))


def test_a_dead_rank_is_named_by_the_root():
    with RankPool(3) as pool, pytest.raises(RankFailure) as caught:
        pool.run(waiting_for_the_dead)
    text = str(caught.value)
    assert "rank 2 of 3 failed running waiting_for_the_dead: exited with 7" in text
    # Rank 0 never talks to rank 2: it was told by rank 1.
    assert re.search(
        r"rank 0 of 3: .*CommError: rank 1: receiving from rank 2 failed", text, re.DOTALL
    )
