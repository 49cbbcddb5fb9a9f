import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import DataError
from shared.kernels import adam
from shared.kernels.adam import BLOCK, ESCAPE, AdamTensors, Hyper, reference
from shared.kernels.adam.factors import factors

ADAMW = Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
ADAM = Hyper(
    lr=1e-2, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.2, decoupled=False, maximize=True
)
DTYPES = [torch.float32, torch.bfloat16]
# Nothing, one element, a prime, around one block, and several blocks.
SIZES = [0, 1, 37, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]


def draw(n: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> AdamTensors:
    """Tensors after a few steps, with gradients of very different sizes."""
    g = torch.Generator().manual_seed(seed)
    param, grad, exp_avg = (torch.randn(n, generator=g) for _ in range(3))
    grad *= 10 ** (4 * torch.rand(n, generator=g) - 2)
    exp_avg_sq = torch.rand(n, generator=g) * 10 ** (-6 * torch.rand(n, generator=g))
    return AdamTensors(*(t.to(dtype).to(device) for t in (param, grad, exp_avg, exp_avg_sq)))


def copy(tensors: AdamTensors) -> AdamTensors:
    return AdamTensors(*(t.clone() for t in tensors))


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def same_bits(ours: AdamTensors, theirs: AdamTensors) -> bool:
    return all(torch.equal(words(a), words(b)) for a, b in zip(ours, theirs, strict=True))


def at_their_places(residual: adam.Residual) -> torch.Tensor:
    """The escaped values, by a loop over blocks, rows and elements."""
    values = torch.zeros(residual.codes.shape)
    codes, escapes = residual.codes.cpu(), residual.escapes.cpu().float()
    for block, first in enumerate(residual.bases.tolist()):
        at = first
        for row in range(3):
            for i in range(block * BLOCK, min((block + 1) * BLOCK, codes.shape[1])):
                if codes[row, i] == ESCAPE:
                    values[row, i] = escapes[at]
                    at += 1
    return values


@pytest.mark.parametrize("hyper", [ADAMW, ADAM], ids=["adamw", "adam"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES[1:])
def test_every_form_steps_stores_and_undoes_as_the_definition(form, n, dtype, hyper):
    before = draw(n, dtype)
    expected, ours = copy(before), AdamTensors(*(t.to(form.device) for t in copy(before)))
    theirs = adam.new_residual(expected.param)
    reference.step([expected], [factors(hyper, 3)], [theirs])
    residual = adam.new_residual(ours.param)
    kernel = form.of("adam")
    kernel.step([ours], [factors(hyper, 3)], [residual])
    assert same_bits(ours, expected)
    assert torch.equal(residual.codes.cpu(), theirs.codes)
    if form.name == "cpu":
        assert torch.equal(residual.bases, theirs.bases)
        assert torch.equal(words(residual.escapes), words(theirs.escapes))
    assert torch.equal(at_their_places(residual), at_their_places(theirs))
    approximate = copy(ours)
    kernel.undo([ours], [factors(hyper, 3)], [residual])
    assert same_bits(ours, before)
    kernel.undo([approximate], [factors(hyper, 3)], None)
    undone = copy(expected)
    reference.undo([undone], [factors(hyper, 3)], None)
    assert same_bits(approximate, undone)
    reference.undo([expected], [factors(hyper, 3)], [theirs])
    assert same_bits(expected, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_reach_as_far_as_the_definition_says_and_no_farther(form, dtype):
    """Averages far below their gradients, whose inverses are off by any number of units."""
    n = 20 * BLOCK
    before = draw(n, dtype)
    expected, ours = copy(before), AdamTensors(*(t.to(form.device) for t in copy(before)))
    theirs, residual = adam.new_residual(expected.param), adam.new_residual(ours.param)
    reference.step([expected], [factors(ADAMW, 3)], [theirs])
    form.of("adam").step([ours], [factors(ADAMW, 3)], [residual])
    assert torch.equal(residual.codes.cpu(), theirs.codes)
    unique = set(theirs.codes.unique().tolist())
    assert {-126, 126} <= unique
    assert not {-127, 127} & unique
    undone = copy(expected)
    reference.undo([undone], [factors(ADAMW, 3)], None)
    rows = zip(before[0:1] + before[2:], undone[0:1] + undone[2:], strict=True)
    off = torch.stack([words(value).long() - words(guess).long() for value, guess in rows])
    assert bool((theirs.codes[off.abs() == 127] == ESCAPE).all())
    assert {-127, 127} <= set(off.unique().tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_without_residual_makes_the_same_step(form, dtype):
    before = draw(2 * BLOCK + 9, dtype)
    expected, ours = copy(before), AdamTensors(*(t.to(form.device) for t in copy(before)))
    reference.step([expected], [factors(ADAMW, 1)], None)
    form.of("adam").step([ours], [factors(ADAMW, 1)], None)
    assert same_bits(ours, expected)
    assert not same_bits(ours, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_too_strange_to_be_restored(form, dtype):
    """NaN, infinities, subnormals, both zeros, everywhere an escape, and list overflow on a GPU."""
    odd = torch.tensor([0.0, -0.0, 1e-40, -1e-45, torch.inf, -torch.inf, torch.nan, 3e38, 1.0])
    n = 2 * BLOCK + 81
    before = AdamTensors(
        *(odd.repeat_interleave(9**k).repeat(n)[:n].to(dtype).to(form.device) for k in range(4))
    )
    for hyper in (
        ADAMW,
        ADAM,
        Hyper(lr=1.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=1.0, decoupled=True),
    ):
        ours, residual = copy(before), adam.new_residual(before.param)
        form.of("adam").step([ours], [factors(hyper, 5)], [residual])
        assert len(residual.escapes) > n
        expected = AdamTensors(*(tensor.cpu().clone() for tensor in before))
        reference.step([expected], [factors(hyper, 5)], None)
        for mine, defined in zip(ours, expected, strict=True):
            # Which NaN it is is nobody's to promise.
            assert torch.equal(mine.cpu().nan_to_num(nan=7.0), defined.nan_to_num(nan=7.0))
        form.of("adam").undo([ours], [factors(hyper, 5)], [residual])
        assert same_bits(ours, before)


@pytest.mark.parametrize("hyper", [ADAMW, ADAM], ids=["adamw", "adam"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_beside_a_guess_that_is_nan_escapes(form, dtype, hyper):
    """Words beside zeros, where they wrap, are those of NaN, which a form may make another of.

    Beside zero lies, too, an average of squares that bfloat16 has rounded below the square.
    """
    kind = words(torch.zeros(1, dtype=dtype)).dtype
    nan = torch.tensor([-1, torch.iinfo(kind).max, 3], dtype=kind).view(dtype)
    grads = torch.cat([nan, torch.tensor([1.3, 0.77, 3.1]).to(dtype)])
    values = torch.tensor([0.0, -0.0, 1.0, torch.inf]).to(dtype)
    grad, value = grads.repeat_interleave(len(values)).repeat(50), values.repeat(50 * len(grads))
    before = AdamTensors(value, grad, value.clone(), value.abs())
    expected, ours = copy(before), AdamTensors(*(t.to(form.device) for t in copy(before)))
    theirs, residual = adam.new_residual(expected.param), adam.new_residual(ours.param)
    reference.step([expected], [factors(hyper, 1)], [theirs])
    form.of("adam").step([ours], [factors(hyper, 1)], [residual])
    assert torch.equal(residual.codes.cpu(), theirs.codes)
    is_nan = grad.isnan()
    assert bool(is_nan.any())
    assert bool((theirs.codes[:, is_nan] == ESCAPE).all())
    assert not bool((theirs.codes[:, ~is_nan] == ESCAPE).all())
    form.of("adam").undo([ours], [factors(hyper, 1)], [residual])
    assert same_bits(ours, before)


def test_steps_of_several_parameters_use_their_own_numbers_and_lists(form):
    sizes = [5, BLOCK + 3, 2]
    before = [draw(n, torch.float32, form.device, seed=n) for n in sizes]
    steps = [1, 7, 2]
    alone, together = [copy(t) for t in before], [copy(t) for t in before]
    for of, step in zip(alone, steps, strict=True):
        form.of("adam").step([of], [factors(ADAM, step)], None)
    residuals = [adam.new_residual(of.param) for of in before]
    form.of("adam").step(together, [factors(ADAM, step) for step in steps], residuals)
    assert all(same_bits(a, b) for a, b in zip(alone, together, strict=True))
    form.of("adam").undo(together, [factors(ADAM, step) for step in steps], residuals)
    assert all(same_bits(a, b) for a, b in zip(before, together, strict=True))


def test_an_undo_without_its_step_reads_no_memory_that_is_not_its_own(form):
    of = draw(BLOCK + 5, torch.float32, form.device)
    torch.use_deterministic_algorithms(True)  # what is not set is filled with what is far from zero
    try:
        residual = adam.new_residual(of.param)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not residual.codes.any()
    assert not residual.bases.any()
    form.of("adam").undo([of], [factors(ADAMW, 1)], [residual])


def test_a_residual_is_used_again(form):
    """Buffers filled by a step with many escapes serve one with few, and the other way round."""
    of = draw(4 * BLOCK, torch.float32, form.device)
    residual = adam.new_residual(of.param)
    for step, scale in enumerate((1e4, 1e-4, 1e6, 1.0), 1):
        of.grad.copy_(draw(4 * BLOCK, torch.float32, seed=step).grad * scale)
        before = copy(of)
        form.of("adam").step([of], [factors(ADAMW, step)], [residual])
        after = copy(of)
        form.of("adam").undo([of], [factors(ADAMW, step)], [residual])
        assert same_bits(of, before)
        form.of("adam").step([of], [factors(ADAMW, step)], None)
        assert same_bits(of, after)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.5), (0.0, 0.9)])
def test_ten_steps_are_torchs_within_its_rounding(kind, maximize, dtype, rtol, betas):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(1003).to(dtype))
    torchs = kind(
        [parameter], lr=3e-3, betas=betas, weight_decay=0.1, maximize=maximize, fused=True
    )
    hyper = Hyper(
        lr=3e-3,
        beta1=betas[0],
        beta2=betas[1],
        eps=1e-8,
        weight_decay=0.1,
        decoupled=kind is torch.optim.AdamW,
        maximize=maximize,
    )
    ours = AdamTensors(
        parameter.detach().clone(), *(torch.zeros(1003, dtype=dtype) for _ in range(3))
    )
    start = ours.param.clone().float()
    for step in range(1, 11):
        parameter.grad = torch.randn(1003).to(dtype)
        ours.grad.copy_(parameter.grad)
        torchs.step()
        adam.step([ours], [step], hyper)
    state = torchs.state[parameter]
    for name in ("exp_avg", "exp_avg_sq"):
        theirs = state[name].float()
        off = (getattr(ours, name).float() - theirs).abs()
        assert float((off / (theirs.abs() + theirs.abs().mean())).max()) <= rtol
    moved = (parameter.detach().float() - start).abs().mean()
    off = (ours.param.float() - parameter.detach().float()).abs()
    assert float(off.max()) <= 10 * rtol * float(moved + start.abs().max())
    assert float(off.mean()) <= rtol * float(moved + start.abs().mean())


def test_a_step_equals_its_formula_in_double_precision():
    of = draw(5000, torch.float32)
    w, g, m, v = (t.double() for t in copy(of))
    adam.step([of], [4], ADAM)
    g = -g + 0.2 * w
    m = 0.8 * m + 0.2 * g
    v = 0.99 * v + 0.01 * g**2
    root = (v / (1 - 0.99**4)).sqrt()
    w -= 1e-2 * (m / (1 - 0.8**4)) / (root + 1e-6)
    torch.testing.assert_close(of.exp_avg.double(), m, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of.exp_avg_sq.double(), v, rtol=1e-5, atol=0)
    torch.testing.assert_close(of.param.double(), w, rtol=1e-6, atol=1e-6)


def test_without_residual_undoing_is_right_up_to_rounding():
    before = draw(5000, torch.float32)
    of = copy(before)
    adam.step([of], [4], ADAMW)
    adam.undo([of], [4], ADAMW)
    assert not torch.equal(of.exp_avg, before.exp_avg)
    torch.testing.assert_close(of.param, before.param, rtol=1e-6, atol=1e-6)
    largest = before.exp_avg.abs() + 0.1 * before.grad.abs()
    assert bool(((of.exp_avg - before.exp_avg).abs() <= 1e-6 * largest).all())
    assert float(of.exp_avg_sq.min()) >= 0


def test_two_threads_list_the_same_escapes(two_threads):
    before = draw(300_000, torch.float32)
    one, two = copy(before), copy(before)
    first, second = adam.new_residual(one.param), adam.new_residual(two.param)
    adam.step([two], [2], ADAMW, [second])
    torch.set_num_threads(1)
    adam.step([one], [2], ADAMW, [first])
    assert same_bits(one, two)
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.bases, second.bases)
    assert torch.equal(words(first.escapes), words(second.escapes))
    torch.set_num_threads(2)
    adam.undo([one], [2], ADAMW, [first])
    assert same_bits(one, before)


def test_memory_stays_below_three_and_a_half_bytes_a_parameter():
    torch.manual_seed(1)
    n = 200_000
    of = AdamTensors(torch.randn(n), *(torch.zeros(n) for _ in range(3)))
    residual = adam.new_residual(of.param)
    for step in range(1, 12):
        of.grad.normal_()
        adam.step([of], [step], ADAMW, [residual])
        assert 3 * n <= residual.num_bytes <= 3.5 * n


@given(seed=st.integers(0, 10**6), dtype=st.sampled_from(DTYPES))
def test_any_bits_differ_by_codes_that_lead_back(seed, dtype):
    g = torch.Generator().manual_seed(seed)
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    info = torch.iinfo(kind)
    bits = torch.randint(info.min, info.max + 1, (64,), generator=g, dtype=torch.int64)
    near = (bits + torch.randint(-140, 141, (64,), generator=g)).clamp(info.min, info.max)
    value, guess = bits.to(kind).view(dtype), near.to(kind).view(dtype)
    codes = adam.ulps_between(value, guess)
    fits = codes != ESCAPE
    assert torch.equal(words(adam.add_ulps(guess, codes))[fits], words(value)[fits])
    off = bits - near
    wanted = (off.abs() <= 126) & ~guess.isnan()
    # A difference over the whole range wraps to a small one, and wraps back.
    assert bool((fits == wanted)[off.abs() < 2 ** (info.bits - 1)].all())


def test_wrong_tensors_are_refused():
    of = draw(10, torch.float32)
    with pytest.raises(DataError, match="grad of parameter 0 to be contiguous"):
        adam.step([of._replace(grad=torch.zeros(20)[::2])], [1], ADAMW)
    with pytest.raises(DataError, match="float32 or bfloat16"):
        adam.step([AdamTensors(*(t.double() for t in of))], [1], ADAMW)
    with pytest.raises(DataError, match="exp_avg of parameter 1"):
        adam.step([of, of._replace(exp_avg=torch.zeros(9))], [1, 1], ADAMW)
    with pytest.raises(DataError, match="for each of 1 parameters"):
        adam.step([of], [1, 2], ADAMW)
    before = copy(of)
    with pytest.raises(DataError, match="residual of 10 values"):
        adam.step([of], [1], ADAMW, [adam.new_residual(torch.zeros(9))])
    assert same_bits(of, before)


def test_an_empty_parameter_steps():
    of = draw(0, torch.float32)
    residual = adam.new_residual(of.param)
    adam.step([of], [1], ADAMW, [residual])
    adam.undo([of], [1], ADAMW, [residual])
    assert residual.num_bytes == 0


def test_factors_follow_torchs_formulas():
    f = factors(ADAMW, 2)
    assert f.step_size == 1e-2 / (1 - 0.9**2)
    assert f.root_inverse == 1 / math.sqrt(1 - 0.999**2)
    assert f.decay == 1 - 1e-2 * 0.1
    assert factors(ADAM, 2).decay == 1
    assert factors(ADAM, 2).l2 == 0.2
    nothing = Hyper(lr=1.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=1.0, decoupled=True)
    assert factors(nothing, 1).decay_inverse == math.inf
