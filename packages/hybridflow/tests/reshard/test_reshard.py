"""Moving weights between layouts: the fewest bytes, each element once, in place, and back again."""

import gc
import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybridflow.models.config import DecoderConfig
from hybridflow.models.decoder import Decoder, Shard
from hybridflow.models.pieces import initialize, num_bytes, pieces, weight_shapes
from hybridflow.models.sharding import shard_over
from hybridflow.reshard import plan
from hybridflow.reshard.planner import find_held_boxes, find_wanted_boxes, plan_boxes
from hybridflow.reshard.transition import Transition, buckets
from hybridflow.reshard.vote import VOTE
from hybridflow.workers.batch.layout import Layout, generation_groups, generation_layout
from shared.comms.group import Group
from shared.errors import ConfigError, DataError
from shared.topology.boxes import Box


def tree(**changed):
    """A decoder that eight shards and eight stages divide, but for what is changed."""
    return {
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 2,
        "max_position_embeddings": 8,
        **changed,
    }


def boxes_of(config, src, dst, is_sharded, is_disjoint):
    """What each rank of both layouts holds and wants, made here from shards alone."""
    sources = [
        find_held_boxes(config, src, rank, is_sharded=is_sharded) for rank in range(src.num_ranks)
    ]
    wanted = [find_held_boxes(config, dst, rank) for rank in range(dst.num_ranks)]
    if is_disjoint:
        return [*sources, *({} for _ in wanted)], [*({} for _ in sources), *wanted]
    return sources, wanted


def marked(shape, boxes):
    """How many of the boxes hold each element."""
    found = np.zeros(shape, dtype=np.int64)
    whole = Box((0,) * len(shape), tuple(shape))
    for box in boxes:
        found[box.within(whole)] += 1
    return found


def assert_is_exact(config, found, sources, wanted):
    """Every wanted element comes once, from a holder, and only what is missing travels."""
    received = [0] * len(sources)
    for name, shape in weight_shapes(config).items():
        held = [marked(shape, boxes.get(name, ())) for boxes in sources]
        asked = [marked(shape, boxes.get(name, ())) for boxes in wanted]
        came = [np.zeros(shape, dtype=np.int64) for _ in sources]
        for src, dst, box in found.transfers.get(name, ()):
            part = marked(shape, [box])
            assert (held[src][part > 0] == 1).all(), (name, src, box)
            came[dst] += part
            received[dst] += box.numel * (src != dst)
        for rank, (had, got, want) in enumerate(zip(held, came, asked, strict=True)):
            assert had.max(initial=0) <= 1
            assert np.array_equal(got, want), (name, rank)
    missing = [
        sum(
            int((marked(shape, w.get(name, ())) > marked(shape, s.get(name, ()))).sum())
            for name, shape in weight_shapes(config).items()
        )
        for s, w in zip(sources, wanted, strict=True)
    ]
    assert received == missing
    assert found.received_bytes == [2 * count for count in missing]
    assert sum(found.sent_bytes) == sum(found.received_bytes) == sum(found.pair_bytes().values())
    assert found.held == [2 * sum(b.numel for bs in s.values() for b in bs) for s in sources]
    assert found.wanted == [2 * sum(b.numel for bs in w.values() for b in bs) for w in wanted]
    assert list(found) == found.received_bytes
    assert len(found) == len(sources)


def inner(max_ranks):
    """Layouts p, t, d and the p_g, t_g that divide them."""
    return [
        (p, t, d, p_g, t_g)
        for p, t, d in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2))
        for p_g, t_g in itertools.product((1, 2, 4), (1, 2, 4, 8))
        if p * t * d <= max_ranks and p % p_g == 0 and t % t_g == 0 and (p, t) != (p_g, t_g)
    ]


ALL = pytest.param(8, marks=pytest.mark.slow)


@pytest.mark.parametrize("max_ranks", [4, ALL])
def test_bytes_of_grouped_layouts_are_the_papers_formula(max_ranks):
    raw = tree()
    config = DecoderConfig.parse(raw)
    width, vocabulary, layers = config.hidden_size, config.vocab_size, config.num_layers
    norms = 2 * width  # a layer's, which every shard holds whole
    ends = 2 * vocabulary * width + width
    of_layers = num_bytes(config, 1) - ends - layers * norms
    for p, t, d, p_g, t_g in inner(max_ranks):
        found = plan(f"{p}-{t}-{d}", f"{p_g}-{t_g}", raw, itemsize=2)
        groups = generation_groups(f"{p}-{t}-{d}", f"{p_g}-{t_g}")
        share = (t * p - t_g * p_g) / (t_g * p_g * t * p)
        for rank in range(p * t * d):
            pp, at = groups.train.coordinates(rank)[0], groups.coordinates(rank)
            wanted = share * of_layers + norms * layers * (1 / p_g - 1 / p)
            # Embedding and head lie on the first and the last stage only.
            for end, end_g in ((0, 0), (p - 1, p_g - 1)):
                rows = (at.pp == end_g) / t_g - (pp == end) / t
                wanted += rows * vocabulary * width
            wanted += width * ((at.pp == p_g - 1) - (pp == p - 1))
            assert found[rank] == 2 * wanted, (p, t, d, p_g, t_g, rank)


def test_bytes_without_stages_are_the_formula_of_the_whole_model_and_norms_stay():
    raw = tree()
    config = DecoderConfig.parse(raw)
    total = num_bytes(config, 2) - 2 * config.hidden_size * (2 * config.num_layers + 1)
    for t, t_g in [(2, 1), (4, 2), (8, 2), (4, 4)]:
        assert set(plan(f"1-{t}-1", f"1-{t_g}", raw)) == {(t - t_g) * total // (t_g * t)}


@pytest.mark.parametrize(("t", "d"), [(2, 1), (2, 2), (4, 1)])
def test_gathering_all_shards_is_v_and_gathering_all_ranks_is_ds_chat(t, d):
    raw = tree(hidden_size=16)  # whose halves norms divide into too
    config = DecoderConfig.parse(raw)
    norms = 2 * config.hidden_size * (2 * config.num_layers + 1)
    total = num_bytes(config, 2) - norms
    assert set(plan(f"1-{t}-{d}", "1-1", raw)) == {(t - 1) * total // t}
    everywhere = plan(f"1-{t}-{d}", "1-1", raw, is_sharded=True)
    assert set(everywhere) == {(t * d - 1) * total // (t * d) + (d - 1) * norms // d}
    for t_g in (1, 2, 4):
        if t % t_g == 0:
            assert max(plan(f"1-{t}-{d}", f"1-{t_g}", raw)) <= (t - 1) * total // t


BOTH = {"num_key_value_heads": 2, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("changed", "max_ranks"), [(BOTH, 4), pytest.param({}, 8, marks=pytest.mark.slow)]
)
def test_grouped_plans_are_exact_and_stay_in_micro_groups(changed, max_ranks):
    raw = tree(**changed)
    config = DecoderConfig.parse(raw)
    for p, t, d, p_g, t_g in inner(max_ranks):
        found = plan(f"{p}-{t}-{d}", f"{p_g}-{t_g}", raw)
        groups = generation_groups(f"{p}-{t}-{d}", f"{p_g}-{t_g}")
        ranks = range(p * t * d)
        sources = [find_held_boxes(config, groups.train, rank) for rank in ranks]
        wanted = [find_wanted_boxes(config, groups, rank) for rank in ranks]
        group_of = {rank: k for k, group in enumerate(groups.micro_dp) for rank in group}
        assert all(group_of[src] == group_of[dst] for src, dst in found.pair_bytes())
        if p * t == max_ranks:
            assert_is_exact(config, found, sources, wanted)
        else:
            missing = [w - h for w, h in zip(found.wanted, found.held, strict=True)]
            assert found.received_bytes == missing  # as what is held lies inside what is wanted


LAYOUTS = st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3).filter(lambda at: np.prod(at) <= 6)


@settings(max_examples=10)
@given(
    src=LAYOUTS,
    dst=LAYOUTS,
    kv_heads=st.sampled_from([1, 3, 12]),
    layers=st.integers(4, 5),
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    is_tied=st.booleans(),
    is_sharded=st.booleans(),
)
def test_any_pair_of_layouts_moves_exactly_what_is_missing(
    src, dst, kv_heads, layers, family, is_tied, is_sharded
):
    src, dst = Layout(*src), Layout(*dst)
    fits = [k for k in (1, 2, 3, 4) if not (kv_heads % k and k % kv_heads)]
    assume(src.tp in fits and dst.tp in fits)
    raw = tree(
        model_type=family,
        vocab_size=12,
        num_attention_heads=12,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        hidden_size=7,  # which replicas that share out do not divide
        tie_word_embeddings=is_tied,
    )
    config = DecoderConfig.parse(raw)
    is_disjoint = src.num_ranks != dst.num_ranks
    found = plan(src, dst, raw, is_sharded=is_sharded, is_disjoint=is_disjoint)
    assert_is_exact(config, found, *boxes_of(config, src, dst, is_sharded, is_disjoint))


@pytest.mark.parametrize("generate", ["1-1", "1-2", "1-1-4", "1-4"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_disjoint_ranks_receive_all_they_want(generate, is_sharded):
    raw = tree()
    found = plan("1-2-2", generate, raw, is_disjoint=True, is_sharded=is_sharded)
    assert found.received_bytes[:4] == [0] * 4
    assert found.received_bytes[4:] == found.wanted[4:]
    assert min(found.wanted[4:]) > num_bytes(DecoderConfig.parse(raw), 2) // 5
    assert all(src < 4 <= dst for src, dst in found.pair_bytes())
    assert max(found.sent_bytes[:4]) <= 1.05 * sum(found.sent_bytes) / 4


@pytest.mark.parametrize("layers", [5, 6, 11])
def test_stages_that_layers_do_not_divide_stay_in_groups_too(layers):
    raw = tree(num_hidden_layers=layers)
    for generate in ("1-1", "2-1"):
        found = plan("4-1-1", generate, raw)
        missing = [w - h for w, h in zip(found.wanted, found.held, strict=True)]
        assert found.received_bytes == missing


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_replicas_send_alike(replicas):
    raw = tree()
    largest = 2 * 24 * 8
    found = plan(f"1-1-{replicas}", "1-1-1", raw, is_disjoint=True)
    sent = found.sent_bytes[:replicas]
    assert max(sent) - min(sent) <= largest
    assert sum(sent) == num_bytes(DecoderConfig.parse(raw), 2)
    grouped = plan("1-4-2", "1-2", raw).sent_bytes
    assert len(set(grouped)) == 1


def test_plans_that_can_not_be_are_refused():
    with pytest.raises(ConfigError, match="pass is_disjoint=True"):
        plan("1-2-2", "1-1-2", tree())
    with pytest.raises(ConfigError, match="takes 3 ranks, and there are 4"):
        plan("1-2-2", "1-3", tree())
    with pytest.raises(ConfigError, match="16 tensor shards do not divide"):
        plan("1-16-1", "1-1", tree())
    with pytest.raises(ConfigError, match="9 pipeline stages need a layer each"):
        plan("9-1-1", "1-1", tree())
    with pytest.raises(DataError, match="no rank holds anything"):
        plan_boxes([{}, {}], [{}, {"a": [Box((0,), (2,))]}], 2)


@pytest.mark.parametrize("bucket_bytes", [1, 1500, 4000, 1 << 30])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_buckets_are_whole_layers_of_about_the_bytes_asked_for(bucket_bytes, is_sharded):
    found = plan("2-1-2", "1-1", tree(), is_sharded=is_sharded)
    cut = list(buckets(found, bucket_bytes))
    assert sorted(name for bucket in cut for name in bucket) == sorted(found.transfers)

    def size(names, rank):
        moved = (t for name in names for t in found.transfers[name])
        return 2 * sum(box.numel for _, dst, box in moved if dst == rank)

    for bucket in cut:
        layers = {name.split(".")[2] if ".layers." in name else name for name in bucket}
        largest = max(size(bucket, rank) for rank in range(4))
        assert largest <= bucket_bytes or len(layers) == 1
        for layer in layers:
            whole = {n for n in found.transfers if f".layers.{layer}." in n or n == layer}
            assert whole <= bucket
    assert len(cut) == {1: 7, 1 << 30: 1}.get(bucket_bytes, len(cut))


SEED = 3

TRANSITIONS = {
    "grouped": ("1-4-1", "1-2", {}),
    "gathered whole, bfloat16": ("1-4-1", "1-1", {"num_key_value_heads": 2}, torch.bfloat16),
    "stages": ("4-1-1", "2-1", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "stages and shards": ("2-2-1", "1-1", {"model_type": "qwen3"}),
    "replicas": ("1-2-2", "1-1", {"model_type": "qwen2"}),
    "more shards than training": ("1-2-2", "1-4", {"num_key_value_heads": 2}),
    "across": ("1-4-1", "2-2-1", {"tie_word_embeddings": True}),
    "shared out": ("1-2-2", "1-2", {"num_key_value_heads": 1}),
    "shared out whole": ("1-1-4", "1-1", {"hidden_size": 7, "model_type": "qwen3"}),
    "shared out by stage": ("2-1-2", "1-1", {"tie_word_embeddings": True}),
}


NESTED = ("grouped", "gathered whole, bfloat16", "stages", "stages and shards", "replicas")


def storage_bytes():
    """Bytes that all tensors' storages span now, of those made since gc.freeze()."""
    spans = set()
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.is_floating_point():
            values = thing.to_local() if hasattr(thing, "to_local") else thing  # of a DTensor
            if values.device.type == "cpu":
                storage = values.untyped_storage()
                spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total, end = 0, 0
    for first, last in sorted(spans):  # weights of two layouts may have places that overlap
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def there_and_back(train, generate, changed, dtype, is_sharded, is_nested, bucket_bytes):
    """Runs on each rank: what is measured of a transition; values are compared here."""
    world = Group.world()
    gc.collect()
    gc.freeze()
    config = DecoderConfig.parse(tree(**changed))
    layout = Layout.parse(train)
    groups = generation_layout(layout, generate)
    pp, tp, dp = layout.coordinates(world.rank)
    at = groups.coordinates(world.rank)
    shard = Shard(config, pp, layout.pp, tp, layout.tp)
    gen_shard = Shard(config, at.pp, groups.pp_size, at.tp, groups.tp_size)
    wanted, twin = Decoder(config, gen_shard, dtype=dtype), Decoder(config, shard, dtype=dtype)
    model = Decoder(config, shard, dtype=dtype)
    for one in (wanted, twin, model):
        initialize(one, SEED)
    share = (dp, layout.dp) if is_sharded else (0, 1)
    if is_sharded:
        ranks = next(ranks for ranks in layout.groups("dp") if world.rank in ranks)
        shard_over(model, Group.of(ranks, members_only=True))
    domains = [list(range(4))] if is_sharded else groups.micro_dp
    micro = next(ranks for ranks in domains if world.rank in ranks)
    group = Group.of(micro, members_only=True) if len(micro) > 1 else None
    generator = Decoder(config, gen_shard, device="meta", dtype=dtype)
    sources = [find_held_boxes(config, layout, r, is_sharded=is_sharded) for r in micro]
    itemsize = dtype.itemsize
    held = itemsize * sum(p.box.numel for p in pieces(model, share))
    others = storage_bytes() - held
    moved = Transition(
        model,
        generator,
        sources,
        [find_wanted_boxes(config, groups, r) for r in micro],
        group,
        share,
        bucket_bytes,
    )
    seen, me = [], micro.index(world.rank)
    bucket = itemsize * max(
        sum(piece.box.numel for name in names for piece in moved.training.pieces.get(name, ()))
        for names in moved.buckets
    )
    # As the test asks for it.
    most = itemsize * sum(p.numel() for p in wanted.parameters())
    limit = most + bucket
    if not is_nested:
        limit = (held + most if is_sharded else max(held, most)) + largest_bucket(
            moved, me, itemsize
        )
    limit += others
    for side in (moved.training, moved.generation):
        side.allocate = watched(side.allocate, seen, limit)
    adams = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, twin)]
    told = []
    for round_ in range(2):
        before = world.ledger.snapshot()
        parameters = {name: id(p) for name, p in model.named_parameters()}
        moved.to_generation()
        moved.to_generation()
        there = world.ledger.snapshot()
        for piece in pieces(generator):
            expected = piece.view(wanted) if round_ == 0 else None
            assert expected is None or torch.equal(piece.view(generator), expected), piece
        if not is_sharded:
            assert sum(p.numel() for p in model.parameters()) == 0
        assert len(list(generator.parameters())) == len(list(wanted.parameters()))
        moved.to_training()
        moved.to_training()
        back = world.ledger.snapshot()
        for side in (moved.training, moved.generation):
            vars(side).pop("allocate", None)  # from here on there are optimizers' states too
        assert sum(p.numel() for p in generator.parameters() if p.device.type != "meta") == 0
        assert {name: id(p) for name, p in model.named_parameters()} == parameters
        for piece in pieces(model, share):
            whole = next(p for p in pieces(twin) if p.name == piece.name)
            assert torch.equal(piece.view(model), whole.view(twin)[piece.box.within(whole.box)])
        # The optimizer's state still belongs to these parameters: a twin that stayed agrees.
        for one, adam in zip((model, twin), adams, strict=True):
            for p in one.parameters():
                p.grad = p.detach() * 0.5
            adam.step()
        assert all(adams[0].state[p]["step"] == round_ + 1 for p in model.parameters())
        told.append([
            weight_bytes(part)
            for part in (there.diff(before), back.diff(there))
        ])  # fmt: skip
    return {
        "told": told,
        "plans": [
            (p.received_bytes[me], p.sent_bytes[me]) for p in (moved.plan, moved.plan_back)
        ],
        "peak": moved.peak_bytes,
        "measured": max(seen) - others,
        "held": held,
        "wanted": itemsize * sum(p.numel() for p in wanted.parameters()),
        "kept": held if is_sharded else 0,
        "bucket": largest_bucket(moved, me, itemsize),
        "training_bucket": bucket,
    }  # fmt: skip


def weight_bytes(snapshot):
    """Bytes received and sent, but for the ranks' votes on going on."""
    cells = [cell for (_, _, phase), cell in snapshot.cells.items() if phase != VOTE]
    return sum(cell.received_bytes for cell in cells), sum(cell.sent_bytes for cell in cells)


def watched(allocate, seen, limit):
    """The same, but what lives afterwards is written down."""

    def measured(names):
        allocate(names)
        found, deadline = storage_bytes(), time.monotonic() + 60
        # The thread that sent a message may let go of it a moment after it has arrived.
        while found > limit and time.monotonic() < deadline:
            time.sleep(0.001)
            found = storage_bytes()
        seen.append(found)

    return measured


def largest_bucket(moved, me, itemsize):
    """Of this rank's training weights and messages, in bytes."""
    most = 0
    for bucket in moved.buckets:
        for found in (moved.plan, moved.plan_back):
            boxes = [t for name in bucket for t in found.transfers[name]]
            messages = sum(b.numel for s, d, b in boxes if s != d and me in (s, d))
            held = [b.numel for name in bucket for b in (p.box for p in own(moved, name))]
            most = max(most, itemsize * (messages + sum(held)))
    return most


def own(moved, name):
    return [*moved.training.pieces.get(name, ()), *moved.generation.pieces.get(name, ())]


@pytest.fixture(scope="module")
def four_ranks(ranks):
    ranks.run(storage_bytes)  # so that what is imported does not count as a test's time
    return ranks


@pytest.mark.parametrize("name", TRANSITIONS)
def test_weights_arrive_bit_for_bit_and_come_back_with_the_bytes_of_the_plan(name, four_ranks):
    train, generate, changed, *dtype = TRANSITIONS[name]
    is_sharded = name.startswith("shared out")
    bucket_bytes = {"grouped": 2000, "across": 1 << 20}.get(name, 1)
    dtype = dtype[0] if dtype else torch.float32
    arguments = (train, generate, changed, dtype, is_sharded, name in NESTED, bucket_bytes)
    for rank in four_ranks.run(there_and_back, *arguments).results:
        there, back = rank["plans"]
        back = (0, 0) if is_sharded else back
        assert rank["told"] == [[there, back]] * 2
        if name in NESTED:
            assert back == (0, 0)
            assert rank["peak"] <= rank["wanted"] + rank["bucket"]
            # Weights alone, as storages were counted when each bucket had been allocated.
            assert rank["measured"] <= rank["wanted"] + rank["training_bucket"]
        bound = rank["kept"] + max(rank["held"] * (not is_sharded), rank["wanted"])
        assert rank["peak"] <= bound + rank["bucket"]
        assert rank["peak"] >= rank["wanted"]
        assert rank["wanted"] <= rank["measured"] <= bound + rank["bucket"]
