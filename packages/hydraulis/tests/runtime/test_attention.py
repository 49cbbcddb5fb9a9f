"""Attention by document, in one process and over ranks, beside dense attention and plain transformers."""

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from hydraulis.runtime.attention import PackedDocuments, attend
from hydraulis.runtime.documents import attend_documents
from hydraulis.runtime.ring import attend_ring, chunks
from hydraulis.runtime.ulysses import check_heads, gather_tokens, repeat_keys, scatter_tokens
from shared.comms import Group
from shared.errors import ConfigError

LENGTHS = (7, 1, 30, 2, 13)


def dense(q, k, v, lengths, scale):
    """Masked softmax over all pairs of tokens, in float64; the definition."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(document))
    seen = (document[:, None] == document) & (place[:, None] >= place)
    times = q.shape[0] // k.shape[0]
    k, v = (one.repeat_interleave(times, 0) for one in (k, v))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def draw(lengths, heads, kv_heads, dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(count, sum(lengths), dim) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def with_gradients(way, q, k, v, grad):
    """Output, and gradients of all three."""
    given_ = [one.clone().requires_grad_() for one in (q, k, v)]
    out = way(*given_)
    out.backward(grad)
    return [out.detach(), *(one.grad for one in given_)]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
)
def test_documents_are_attended_to_one_by_one(lengths, heads):
    q, k, v, grad = draw(lengths, *heads)
    found = with_gradients(lambda q, k, v: attend_documents(q, k, v, lengths, 0.3), q, k, v, grad)
    for one, other in zip(
        found,
        with_gradients(lambda q, k, v: dense(q, k, v, lengths, 0.3), q, k, v, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_err_by_their_rounding(dtype):
    q, k, v, grad = (one.to(dtype) for one in draw(LENGTHS, 4, 2))
    found = with_gradients(lambda q, k, v: attend_documents(q, k, v, LENGTHS, 0.3), q, k, v, grad)
    exact = with_gradients(
        lambda q, k, v: dense(q, k, v, LENGTHS, 0.3), *(one.double() for one in (q, k, v, grad))
    )
    eps = torch.finfo(dtype).eps
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=10 * eps, atol=10 * eps)


@given(length=st.integers(1, 300), size=st.integers(1, 6))
def test_a_ring_holds_every_token_once_and_shares_the_work(length, size):
    held = [[range(*one) for one in chunks(length, rank, size)] for rank in range(size)]
    tokens = [list(early) + list(late) for early, late in held]
    assert sorted(token for rank in tokens for token in rank) == list(range(length))
    work = [sum(token + 1 for token in rank) for rank in tokens]
    # Chunks differ by a token, and a token sees at most all.
    assert max(work) - min(work) <= 2 * (length + 1)


def places(lengths, ring, ulysses):
    """Tokens of each rank, by place in the ring and in Ulysses."""

    class Place:
        def __init__(self, rank, world_size):
            self.rank, self.world_size = rank, world_size

    found = {}
    for r in range(ring):
        for u in range(ulysses):
            packing = PackedDocuments.__new__(PackedDocuments)
            for name, value in (
                ("lengths", lengths),
                ("ring", Place(r, ring)),
                ("ulysses", Place(u, ulysses)),
            ):
                object.__setattr__(packing, name, value)
            found[r, u] = packing.tokens(), packing.ulysses_tokens()
    return found


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=5).map(tuple),
    ring=st.integers(1, 4),
    ulysses=st.integers(1, 3),
)
def test_ranks_share_all_tokens(lengths, ring, ulysses):
    found = places(lengths, ring, ulysses)
    tokens = torch.cat([one for one, _ in found.values()])
    assert tokens.sort().values.tolist() == list(range(sum(lengths)))
    for (_, u), (mine, counts) in found.items():
        assert counts[u] == len(mine)
        assert max(counts) - min(counts) <= 1


def groups(ring, ulysses):
    """This rank's ring and its ranks of Ulysses, which are neighbours; others take part in making them."""
    rings = [Group.of([u + ulysses * r for r in range(ring)]) for u in range(ulysses)]
    rows = [Group.of([u + ulysses * r for u in range(ulysses)]) for r in range(ring)]
    mine = [next((one for one in made if one.rank >= 0), None) for made in (rings, rows)]
    return [one if one is not None and one.world_size > 1 else None for one in mine]


def attended(ring, ulysses, lengths, heads, dtype):
    """This rank's tokens, output and gradients."""
    mine = groups(ring, ulysses)
    if Group.world().rank >= ring * ulysses:
        return None
    packing = PackedDocuments(lengths=lengths, ring=mine[0], ulysses=mine[1])
    local = packing.tokens()
    q, k, v, grad = (one[:, local].to(dtype) for one in draw(lengths, *heads))
    counts = packing.ulysses_tokens()

    def way(q, k, v):
        if packing.ulysses is not None:
            k, v = (repeat_keys(one, ulysses) for one in (k, v))
            q, k, v = (gather_tokens(one, counts, packing.ulysses) for one in (q, k, v))
        if packing.ring is None:
            out = attend_documents(q, k, v, lengths, 0.3)
        else:
            out = attend_ring(q, k, v, lengths, 0.3, packing.ring)
        return out if packing.ulysses is None else scatter_tokens(out, counts, packing.ulysses)

    return local, with_gradients(way, q, k, v, grad)


@pytest.mark.parametrize(
    ("ring", "ulysses", "lengths", "heads"),
    [
        (2, 1, LENGTHS, (4, 2)),
        (3, 1, LENGTHS, (4, 4)),
        (4, 1, (1, 2, 3), (2, 1)),
        (1, 2, LENGTHS, (4, 2)),
        (1, 4, (1, 1, 50), (4, 2)),
        (2, 2, LENGTHS, (4, 4)),
        (2, 2, (3, 64, 1, 5), (8, 1)),
    ],
)
def test_ranks_together_compute_dense_attention(ranks, ring, ulysses, lengths, heads):
    found = ranks.run(attended, ring, ulysses, lengths, heads, torch.float64).results
    q, k, v, grad = draw(lengths, *heads)
    expected = with_gradients(lambda q, k, v: dense(q, k, v, lengths, 0.3), q, k, v, grad)
    for local, parts in found[: ring * ulysses]:
        for one, other in zip(parts, expected, strict=True):
            torch.testing.assert_close(one, other[:, local], rtol=1e-9, atol=1e-9)


def test_a_ring_in_bfloat16_errs_by_its_rounding(ranks):
    found = ranks.run(attended, 4, 1, LENGTHS, (4, 2), torch.bfloat16).results
    q, k, v, grad = (one.bfloat16().double() for one in draw(LENGTHS, 4, 2))
    expected = with_gradients(lambda q, k, v: dense(q, k, v, LENGTHS, 0.3), q, k, v, grad)
    for local, parts in found:
        for one, other in zip(parts, expected, strict=True):
            torch.testing.assert_close(one.double(), other[:, local], rtol=0.08, atol=0.08)


CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    ),
    "qwen3": Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, max_position_embeddings=256,
    ),
}  # fmt: skip


def make_model(family):
    torch.manual_seed(0)
    # A copy, as those who train a model change its configuration.
    return AutoModelForCausalLM.from_config(deepcopy(CONFIGS[family])).double()


def documents(lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 97, (length,), generator=generator) for length in lengths]


def one_by_one(model, texts):
    """Sum of next-token losses of each document alone by plain transformers."""
    total = torch.zeros((), dtype=torch.float64)
    for ids in texts:
        if len(ids) > 1:
            logits = model(input_ids=ids[None]).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
    return total


def packed(model, texts, packing):
    """The same of this rank's tokens, all documents in one row."""
    local = packing.tokens()
    labels = torch.cat([torch.cat((ids[1:], ids.new_full((1,), -100))) for ids in texts])
    ids, positions = torch.cat(texts)[local], packing.positions()[local]
    with attend(model):
        out = model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, packing=packing
        )
    logits = out.logits[0]
    return torch.nn.functional.cross_entropy(logits, labels[local], reduction="sum")


def loss_and_gradients(model, loss):
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_documents_train_as_if_alone(family):
    model, texts = make_model(family), documents(LENGTHS)
    expected, known = loss_and_gradients(model, one_by_one(model, texts))
    for order in ((0, 1, 2, 3, 4), (4, 2, 0, 3, 1)):
        model.zero_grad()
        shuffled = [texts[at] for at in order]
        packing = PackedDocuments(lengths=tuple(map(len, shuffled)))
        loss, grads = loss_and_gradients(model, packed(model, shuffled, packing))
        assert loss == pytest.approx(expected, rel=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, known[name], rtol=1e-9, atol=1e-11)
    # Were documents to see each other, the loss would be another one.
    whole = packed(model, texts, PackedDocuments(lengths=(sum(LENGTHS),)))
    assert abs(whole.item() - expected) > 1e-3


def trained(family, ring, ulysses):
    mine = groups(ring, ulysses)
    model, texts = make_model(family), documents(LENGTHS)
    packing = PackedDocuments(lengths=LENGTHS, ring=mine[0], ulysses=mine[1])
    return loss_and_gradients(model, packed(model, texts, packing))


@pytest.mark.parametrize(("family", "ring", "ulysses"), [("llama", 4, 1), ("qwen3", 2, 2)])
def test_ranks_together_train_as_one(ranks, family, ring, ulysses):
    found = ranks.run(trained, family, ring, ulysses).results
    model = make_model(family)
    expected, known = loss_and_gradients(model, one_by_one(model, documents(LENGTHS)))
    assert sum(loss for loss, _ in found) == pytest.approx(expected, rel=1e-12)
    for name, grad in known.items():
        torch.testing.assert_close(sum(one[name] for _, one in found), grad, rtol=1e-9, atol=1e-11)


def test_what_would_be_computed_otherwise_is_refused():
    model, texts = make_model("llama"), documents((5, 9))
    packing = PackedDocuments(lengths=(5, 9))
    ids = torch.cat(texts)[None]
    with attend(model):
        with pytest.raises(ConfigError, match=r"one row of this rank's 14 tokens, got 1 of 13"):
            model(input_ids=ids[:, 1:], use_cache=False, packing=packing)
        with pytest.raises(ConfigError, match=r"one row .* got 2 of 14"):
            model(input_ids=ids.repeat(2, 1), use_cache=False, packing=packing)
        with pytest.raises(ConfigError, match=r"expected packing=.* or cu_seq_lens_q .* neither"):
            model(input_ids=ids, use_cache=False)
    config = model.config
    assert config._attn_implementation == "sdpa"
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with attend(model), pytest.raises(ConfigError, match=r"no dropout .* got 0\.1"):
        model(input_ids=ids, use_cache=False, packing=packing)
    config = Qwen3Config(
        **{
            **CONFIGS["qwen3"].to_dict(),
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 0,
            "layer_types": None,
        }
    )
    sliding = AutoModelForCausalLM.from_config(config)
    with (
        attend(sliding),
        pytest.raises(ConfigError, match=r"sliding window of at least .* 9 tokens, got 8"),
    ):
        sliding(input_ids=ids, use_cache=False, packing=packing)


def refused():
    packing = PackedDocuments(lengths=(12,), ulysses=Group.world())
    shape = {**CONFIGS["qwen3"].to_dict(), "num_attention_heads": 6, "num_key_value_heads": 6}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape))
    ids = torch.zeros(1, len(packing.tokens()), dtype=torch.int64)
    with attend(model), pytest.raises(ConfigError, match=r"divides 6 query heads.* got 4"):
        model(input_ids=ids, use_cache=False, packing=packing)


def test_heads_that_ranks_cannot_share_are_refused(ranks):
    ranks.run(refused)
    for heads in ((8, 8, 4), (8, 2, 4), (8, 4, 2), (12, 1, 4)):
        check_heads(*heads)
    for heads in ((6, 6, 4), (12, 3, 2), (8, 3, 4)):
        with pytest.raises(ConfigError, match="take a smaller one, or ring attention"):
            check_heads(*heads)


@pytest.mark.parametrize("family", CONFIGS)
def test_attention_is_narrowed_under_autocast_as_torchs_own(family):
    model, texts = make_model(family).float(), documents((14,))
    with torch.autocast("cpu", torch.bfloat16):
        expected, known = loss_and_gradients(model, one_by_one(model, texts))
        model.zero_grad()
        found = packed(model, texts, PackedDocuments(lengths=(14,)))
        loss, grads = loss_and_gradients(model, found)
    assert loss == pytest.approx(expected, rel=1e-3)
    for name, grad in grads.items():
        assert (grad - known[name]).norm() <= 0.02 * known[name].norm(), name


def test_activations_recomputed_outside_are_refused():
    model, texts = make_model("llama"), documents((5, 9))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    packing = PackedDocuments(lengths=(5, 9))
    ids = torch.cat(texts)[None]
    with attend(model):
        model(input_ids=ids, use_cache=False, packing=packing).logits.sum().backward()
        loss = model(input_ids=ids, use_cache=False, packing=packing).logits.sum()
    with pytest.raises((ConfigError, torch.utils.checkpoint.CheckpointError)):
        loss.backward()
