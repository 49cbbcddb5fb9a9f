"""Attention of one new token a place, in every form, against torch's own, a place at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from shared.errors import DataError
from shared.kernels.decode import Places, attend, cpu, reference

every_form = pytest.mark.parametrize("form", ["cpu", "gpu", "reference"], indirect=True)


@pytest.fixture(autouse=True)
def one_thread(request):
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))  # noqa: PT021
    torch.set_num_threads(1)


def drawn(
    kv_heads=2, together=2, dim=6, prompt_positions=9, positions=5, num_places=7, seed=0
) -> list:
    """Arguments of `attend`; what lies beyond the positions in use is no number."""
    draw = torch.Generator().manual_seed(seed)
    num_prompts, num_slots = 3, num_places + 2
    angle = torch.randn(num_places, dim // 2, generator=draw)
    places = Places(
        torch.randperm(num_slots, generator=draw)[:num_places],
        torch.randint(num_prompts, (num_places,), generator=draw),
        torch.zeros(num_places, dtype=torch.int64),
        torch.randint(positions, (num_places,), generator=draw),
    )
    lengths = torch.randint(1, prompt_positions + 1, (num_prompts,), generator=draw)
    places = places._replace(prompt_lengths=lengths[places.prompts])
    qkv = torch.randn(num_places, kv_heads * (together + 2), dim, generator=draw)
    prompt = torch.randn(2, num_prompts, kv_heads, dim, prompt_positions, generator=draw)
    own = torch.randn(2, num_slots, kv_heads, dim, positions, generator=draw)
    prompt[:, torch.arange(prompt_positions) >= lengths[:, None, None].expand(
        -1, kv_heads, dim)[..., None]] = torch.nan  # fmt: skip
    for slot, made in zip(places.slots, places.made, strict=True):
        own[:, slot, :, :, made:] = torch.nan
    return [qkv, angle.cos(), angle.sin(), prompt, own, places]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of coordinates as complex numbers, times e^(i angle)."""
    half = x.shape[-1] // 2
    made = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)
    return torch.cat([made.real, made.imag], -1)


def by_hand(qkv, cos, sin, prompt, own, places) -> tuple[Tensor, Tensor]:
    """One place after another by torch's attention; what is seen, and `own` afterwards."""
    kv_heads, own, found = prompt.shape[2], own.clone(), []
    for row, (slot, at, length, made) in enumerate(zip(*map(Tensor.tolist, places), strict=True)):
        q, k, v = qkv[row].split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads])
        own[0, slot, :, :, made], own[1, slot, :, :, made] = turned(k, cos[row], sin[row]), v
        keys, values = torch.cat(
            [prompt[:, at, :, :, :length], own[:, slot, :, :, : made + 1]], -1
        ).transpose(-1, -2)
        q = turned(q, cos[row], sin[row])[:, None]
        found.append(F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)[:, 0])
    return torch.stack(found) if found else qkv[:, : -2 * kv_heads], own


def doubled(inputs) -> list:
    return [*(tensor.double() for tensor in inputs[:-1]), inputs[-1]]


def assert_by_hand(attend, inputs, device="cpu", dtype=torch.float32, atol=1e-5):
    inputs = [*(tensor.to(dtype) for tensor in inputs[:-1]), inputs[-1]]
    expected, expected_own = by_hand(*doubled(inputs))
    there = [tensor.to(device) for tensor in inputs[:-1]]
    out = attend(*there, Places(*(index.to(device) for index in inputs[-1])))
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().double(), expected, atol=atol, rtol=atol)
    torch.testing.assert_close(
        there[4].cpu().double(), expected_own, atol=atol, rtol=atol, equal_nan=True
    )


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    together=st.integers(1, 3),
    dim=st.sampled_from([2, 6, 16, 34]),
    prompt_positions=st.sampled_from([1, 7, 33]),
    positions=st.sampled_from([1, 4, 17]),
    num_places=st.sampled_from([0, 1, 5]),
)
def test_two_forms_equal_one_place_at_a_time(**sizes):
    for form in (cpu, reference):
        assert_by_hand(form.attend, drawn(**sizes))


@every_form
@pytest.mark.parametrize("sizes", [{}, {"together": 3, "dim": 10, "prompt_positions": 40}])
def test_every_form_equals_one_place_at_a_time(form, sizes):
    assert_by_hand(form.of("decode").attend, drawn(**sizes), form.device)


@every_form
def test_a_place_may_look_at_no_prompt(form):
    inputs = drawn(positions=3)
    inputs[-1].prompt_lengths[::2] = 0
    assert_by_hand(form.of("decode").attend, inputs, form.device)


@pytest.mark.parametrize("form", ["gpu", "reference"], indirect=True)
def test_half_types_are_summed_in_float32(form):
    attend = form.of("decode").attend
    assert_by_hand(attend, drawn(prompt_positions=30), form.device, torch.bfloat16, atol=2e-2)


def test_types_take_the_form_that_serves_them():
    inputs = drawn()
    expected, _ = by_hand(*doubled(inputs))
    torch.testing.assert_close(attend(*doubled(inputs)), expected, rtol=0, atol=1e-14)
    assert_by_hand(attend, inputs)
    assert_by_hand(attend, inputs, dtype=torch.bfloat16, atol=2e-2)


def test_scores_far_apart_are_no_trouble():
    """Weights of 1 and of nothing, whose exponentials would be infinite or vanish."""
    for factor in (1e-3, 30.0, 3000.0):
        inputs = drawn(prompt_positions=30)
        inputs[0][:, :4] *= factor
        assert_by_hand(cpu.attend, inputs, atol=2e-4)


@pytest.mark.usefixtures("two_threads")
def test_two_threads_do_what_one_does():
    qkv, cos, sin, prompt, own, places = drawn(num_places=300, dim=64, prompt_positions=64)
    found = cpu.attend(qkv, cos, sin, prompt, own.clone(), places)
    torch.set_num_threads(1)
    assert torch.equal(found, cpu.attend(qkv, cos, sin, prompt, own, places))


def test_heads_that_do_not_fit_are_refused():
    qkv, *rest = drawn()
    with pytest.raises(DataError, match="a multiple of 2 heads of 6"):
        attend(qkv[:, :-1], *rest)
    with pytest.raises(DataError, match="3 angles"):
        attend(qkv, rest[0][:, :2], rest[1][:, :2], *rest[2:])
