import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import DataError
from shared.kernels.digest import digest, reference
from shared.kernels.philox import stream_key

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """splitmix64's finaliser in Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def total(words: list[int]) -> int:
    return sum(mix((w + (i + 1) * 0x9E3779B97F4A7C15) & MASK) for i, w in enumerate(words)) & MASK


@pytest.mark.parametrize("n", [1, 2, 7, 4095, 4096, 4097, 9001])
def test_every_form_sums_what_pythons_integers_sum(form, n):
    g = torch.Generator().manual_seed(n)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=g, dtype=torch.int64)
    words[0] = -1
    expected = total([int(w) & MASK for w in words])
    two = [words.to(form.device), words[: n // 2 + 1].to(form.device)]
    ours = form.of("digest").sums(two)
    assert ours[0] & MASK == expected
    assert [x & MASK for x in ours] == [x & MASK for x in reference.sums(two)]


def test_threads_make_no_difference(two_threads):
    x = torch.arange(3_000_000, dtype=torch.float32)
    many = digest(x)
    torch.set_num_threads(1)
    assert digest(x) == many


def test_order_shapes_and_bytes_enter_and_types_do_not():
    x = torch.arange(24, dtype=torch.float32)
    distinct = [
        digest(x),
        digest(x.view(4, 6)),
        digest(x.view(6, 4)),
        digest(x.view(24, 1)),
        digest(x.flip(0)),
        digest([x, x]),
        digest([x, x.flip(0)]),
        digest([x.flip(0), x]),
        digest([x[:12], x[12:]]),
        digest([]),
        digest([torch.empty(0)]),
        digest([torch.empty(0), torch.empty(0)]),
        digest(torch.empty(0, 3)),
        digest(torch.zeros(1, dtype=torch.uint8)),
        digest(torch.zeros(2, dtype=torch.uint8)),
        digest(torch.zeros(())),
        digest(torch.zeros(1)),
    ]
    assert len(set(distinct)) == len(distinct)
    assert digest(x) == digest([x]) == digest(x.view(torch.int32))
    assert digest(x.view(4, 6).t()) == digest(x.view(4, 6).t().contiguous())
    assert digest(x) != digest(x.view(torch.int16))
    assert all(0 <= d < 1 << 64 for d in distinct)


def test_a_place_in_memory_makes_no_difference():
    raw = torch.arange(100, dtype=torch.uint8)
    for start in range(9):
        for size in (0, 1, 7, 8, 9, 63):
            part = raw[start : start + size]
            assert digest(part) == digest(part.clone())
    parameter = torch.nn.Parameter(torch.ones(3))
    assert digest(parameter) == digest(torch.ones(3))
    z = torch.randn(4, dtype=torch.complex64)
    assert digest(z.conj()) == digest(z.conj().resolve_conj())


@given(
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool]
    ),
    n=st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
def test_one_changed_bit_or_two_swapped_values_show(dtype, n, seed):
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (n * dtype.itemsize,), generator=g, dtype=torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    x = raw.view(dtype)
    other = raw.clone()
    other[int(torch.randint(0, len(raw), (1,), generator=g))] ^= 1
    assert digest(x) != digest(other.view(dtype))
    order = torch.randperm(n, generator=g)
    if not torch.equal(raw, x[order].view(torch.uint8)):
        assert digest(x) != digest(x[order])


def test_signs_that_flip_in_pairs_show():
    """High bits only, in many pairs of places: all digests differ."""
    x = torch.ones(64)
    seen = {digest(x)}
    for i in range(64):
        for j in range(i):
            y = x.clone()
            y[[i, j]] *= -1
            seen.add(digest(y))
    assert len(seen) == 1 + 64 * 63 // 2


def test_it_is_the_documented_fold():
    x = torch.tensor([[1, 2, 3]], dtype=torch.int64)
    expected = stream_key(stream_key(1), 1, 3, 2, 8, total([1, 2, 3]))
    assert digest(x) == expected


def test_sparse_tensors_are_refused():
    with pytest.raises(DataError, match="expected dense tensors"):
        digest([torch.ones(2), torch.ones(2).to_sparse()])
