"""Log-probabilities of tokens in every form against torch's log_softmax in float64."""

import gc
import json
from functools import partial
from inspect import unwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from shared.errors import DataError
from shared.kernels import registry
from shared.kernels.token_log_probs import answer, cpu, gradients, merge, partial_sums, reference

every_form = pytest.mark.parametrize("form", ["cpu", "gpu", "reference"], indirect=True)
fast_form = pytest.mark.parametrize("form", ["cpu", "gpu"], indirect=True)


@pytest.fixture(autouse=True)
def one_thread(request):
    """Handing such small tensors to other threads takes longer than the work."""
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))  # noqa: PT021
    torch.set_num_threads(1)


@pytest.fixture
def chosen(form, monkeypatch):
    """Has `form` chosen by the dispatcher, with blocks small enough for several of them."""
    kernels = form.of("token_log_probs")
    monkeypatch.setattr(registry, "chosen_forms", {})
    monkeypatch.setenv(registry.SWITCH, {"gpu": "triton"}.get(form.name, form.name))
    shrink(monkeypatch.setattr, kernels, most_rows=9, most_logits=9 * 21)
    return form


def shrink(setattr, kernels, most_rows, most_logits, side=16):
    if kernels is reference:
        return
    setattr(kernels, "MOST_ROWS", most_rows)
    setattr(kernels, "MOST_LOGITS", most_logits)
    if kernels is not cpu:
        tile = {"ROWS": side, "COLS": side, "DIMS": 16, "num_warps": 4, "num_stages": 1}
        setattr(kernels, "TILES", {2: tile, 4: tile})
        setattr(kernels, "MOST_SHARES", 2)


def drawn(rows=7, vocabulary=12, dim=5, seed=0, dtype=torch.float32):
    """States, a head, tokens, and gradients of both answers."""
    draw = torch.Generator().manual_seed(seed)
    make = partial(torch.randn, generator=draw, dtype=torch.float64)
    hidden, weight = make(rows, dim).to(dtype), make(vocabulary, dim).to(dtype)
    tokens = torch.randint(0, vocabulary, (rows,), generator=draw)
    wide = torch.promote_types(dtype, torch.float32)
    return hidden, weight, tokens, make(rows).to(wide), make(rows).to(wide)


def by_torch(hidden, weight, tokens, *grads, temperature=1.0, dtype=torch.float64):
    """Answers and gradients by autograd through all logits, these at least in float32."""
    states, head = (part.detach().to(dtype).requires_grad_() for part in (hidden, weight))
    logits = (states @ head.t()).to(torch.promote_types(dtype, torch.float32)) / temperature
    log_p = logits.log_softmax(1)
    found = log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    total = sum((part * grad).sum() for part, grad in zip(found, grads, strict=True))
    return [*(part.detach() for part in found), *torch.autograd.grad(total, [states, head])]


def by_kernel(hidden, weight, tokens, *grads, temperature=1.0, device="cpu"):
    there = {"hidden": hidden, "weight": weight, "tokens": tokens}
    there = {name: tensor.to(device) for name, tensor in there.items()}
    found = answer(partial_sums(**there, temperature=temperature))
    of_log_prob, of_entropy = (grad.to(device) for grad in grads)
    given = gradients(
        **there,
        temperature=temperature,
        found=found,
        grad_log_probs=of_log_prob,
        grad_entropy=of_entropy,
    )
    return [part.cpu() for part in (found.log_probs, found.entropy, *given)]


def assert_near(found, wanted, atol):
    for mine, true in zip(found, wanted, strict=True):
        scale = max(1.0, float(true.abs().max())) if true.numel() else 1.0
        torch.testing.assert_close(mine.double(), true.double(), atol=atol * scale, rtol=0)


@settings(max_examples=25)
@given(
    rows=st.integers(0, 9),
    vocabulary=st.integers(1, 17),
    dim=st.integers(1, 5),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    most_rows=st.integers(1, 10),
    most_logits=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_blocks_of_any_shape_equal_torch(
    rows, vocabulary, dim, temperature, most_rows, most_logits, seed
):
    given = drawn(rows, vocabulary, dim, seed, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch.setattr, cpu, most_rows, most_logits)
        found = by_kernel(*given, temperature=temperature)
    assert_near(found, by_torch(*given, temperature=temperature), 1e-12)


@every_form
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(
    ("rows", "vocabulary", "dim", "temperature"),
    [
        (7, 12, 5, 1.0),
        (1, 1, 1, 0.5),
        (16, 32, 16, 0.7),
        (17, 97, 33, 1.7),
        (40, 65, 15, 1.0),
        (2, 211, 48, 0.7),
    ],
)
def test_every_form_equals_torch(form, rows, vocabulary, dim, temperature):
    given = drawn(rows, vocabulary, dim)
    found = by_kernel(*given, temperature=temperature, device=form.device)
    assert_near(found, by_torch(*given, temperature=temperature), 1e-5)


@every_form
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("output", [0, 1], ids=["log-prob", "entropy"])
def test_either_answer_has_gradients_of_its_own(form, output):
    *given, of_log_prob, of_entropy = drawn(5, 40, 6)
    given += [of_log_prob * (output == 0), of_entropy * (output == 1)]
    assert_near(by_kernel(*given, device=form.device), by_torch(*given), 1e-5)


@every_form
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_of_the_vocabulary_are_the_whole(form, num_shards):
    hidden, weight, tokens, *grads = drawn(11, 30, 6)
    wanted = by_torch(hidden, weight, tokens, *grads, temperature=0.7)
    size = len(weight) // num_shards
    states, places = hidden.to(form.device), tokens.to(form.device)
    shards = [
        (head.to(form.device), places - size * k) for k, head in enumerate(weight.split(size))
    ]
    sums = [partial_sums(states, head, here, 0.7) for head, here in shards]
    found = answer(merge(torch.stack(sums, 1)))
    one, other = (grad.to(form.device) for grad in grads)
    of_hidden, of_weight = zip(
        *(gradients(states, head, here, 0.7, found, one, other) for head, here in shards),
        strict=True,
    )
    merged = found.log_probs, found.entropy, sum(of_hidden), torch.cat(of_weight)
    assert_near([part.cpu() for part in merged], wanted, 1e-5)


@every_form
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
def test_extreme_logits_keep_finite_answers_and_gradients(form, scale):
    hidden = torch.tensor([[scale], [-scale], [0.0], [scale]])
    weight = torch.tensor([[1.0], [-1.0], [0.5], *[[0.0]] * 40])
    tokens = torch.tensor([0, 0, 2, 42])
    given = hidden, weight, tokens, torch.ones(4), torch.ones(4)
    found = by_kernel(*given, device=form.device)
    wanted = by_torch(*given)
    assert all(part.isfinite().all() for part in found)
    for mine, true in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-6, atol=1e-6)
    # Of the head only: a state's gradient differs by roundings of 1e30 times a probability.
    assert_near(found[3:], wanted[3:], 1e-5)


@every_form
@pytest.mark.usefixtures("chosen")
def test_no_rows_have_no_answers_and_no_gradients(form):
    found = by_kernel(*drawn(0, 40, 6), device=form.device)
    assert [part.shape for part in found] == [(0,), (0,), (0, 6), (40, 6)]
    assert not found[3].any()


@every_form
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_as_near_as_torch(form, dtype):
    given = drawn(20, 100, 32, dtype=dtype)
    found = by_kernel(*given, device=form.device)
    assert [part.dtype for part in found] == [torch.float32] * 2 + [dtype] * 2
    plain, exact = by_torch(*given, dtype=dtype), by_torch(*given)
    for mine, theirs, true in zip(found, plain, exact, strict=True):
        assert (mine - true).abs().max() <= 2 * (theirs - true).abs().max()
    # Logits are not rounded to the half type, which is most of torch's error.
    assert_near(found[:2], exact[:2], 1e-5)


@fast_form
@pytest.mark.usefixtures("chosen")
def test_gradients_of_half_types_are_summed_in_float32(form, monkeypatch):
    # The first row's gradient is 512 times that of each other: a bfloat16 would not grow by one.
    monkeypatch.setattr(form.of("token_log_probs"), "MOST_ROWS", 1)
    hidden, weight, tokens, *_ = drawn(1, 5, 6, dtype=torch.bfloat16)
    grads = torch.ones(40)
    grads[0] = 512
    given = hidden.expand(40, -1), weight, tokens.expand(40), grads, torch.zeros(40)
    found, exact = by_kernel(*given, device=form.device)[3], by_torch(*given)[3]
    assert_near([found], [exact], 2 * torch.finfo(torch.bfloat16).eps)


@every_form
@pytest.mark.usefixtures("chosen")
def test_strided_input_is_read_in_its_own_steps(form):
    hidden, weight, tokens, *grads = drawn(12, 40, 6)
    strided = [torch.stack([part.mT, part.mT], -1)[..., 0].mT for part in (hidden, weight)]
    assert not any(part.is_contiguous() for part in strided)
    given = *strided, torch.stack([tokens, tokens], 1)[:, 0], *grads
    found = by_kernel(*given, device=form.device)
    assert_near(found, by_torch(hidden, weight, tokens, *grads), 1e-5)


def peak_bytes(function, path) -> int:
    """Most memory of torch's CPU allocator that a call has held at once, of what it took itself."""
    # Triton's interpreter leaves tensors in cycles, which live until the collector happens to run:
    # it runs all the time here, over what the call makes alone.
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20, 1, 1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            function()
    finally:
        gc.set_threshold(*thresholds)  # what was there stays frozen, as what was imported is
    recorded.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Addr"], event["args"]["Bytes"])
        for event in events
        if event["name"] == "[memory]"
    )
    held: dict[int, int] = {}
    most = 0
    for _, address, change in changes:
        if change > 0:
            held[address] = change
        else:
            held.pop(address, None)
        most = max(most, sum(held.values()))
    return most


@fast_form
def test_memory_is_independent_of_the_vocabulary(form, monkeypatch, tmp_path):
    if form.device == "cuda":
        pytest.skip("bench/gpu.py measures memory on a device")
    monkeypatch.setattr(registry, "chosen_forms", {})
    rows, dim, small, large = 32, 8, 256, 1024
    shrink(monkeypatch.setattr, form.of("token_log_probs"), rows, rows * 64, side=32)
    peaks = {}
    for name in (form.name, "reference"):
        monkeypatch.setenv(registry.SWITCH, {"gpu": "triton"}.get(name, name))
        for vocabulary in (small, large):
            hidden, head, tokens, one, other = drawn(rows, vocabulary, dim)
            found = answer(partial_sums(hidden, head, tokens))
            ways = {
                "forward": partial(partial_sums, hidden, head, tokens),
                "backward": partial(gradients, hidden, head, tokens, 1.0, found, one, other),
            }
            for way, function in ways.items():
                peaks[name, way, vocabulary] = peak_bytes(function, tmp_path / "trace.json")
    of_logits, of_weight = (4 * size * (large - small) for size in (rows, dim))
    for way, needed in (("forward", 0), ("backward", of_weight)):
        grown, plain = (
            peaks[name, way, large] - peaks[name, way, small] for name in (form.name, "reference")
        )
        assert grown <= needed + of_logits / 50
        assert plain >= needed + of_logits


@pytest.mark.parametrize(
    ("weight", "tokens", "text"),
    [
        (torch.zeros(3, 4), torch.zeros(2).long(), r"expected a head \[vocabulary, 5\]"),
        (torch.zeros(3, 5).half(), torch.zeros(2).long(), "got .3, 5. of torch.float16"),
        (torch.zeros(0, 5), torch.zeros(2).long(), r"at least 1, got \[0, 5\]"),
        (torch.zeros(3, 5), torch.zeros(3).long(), "expected 2 tokens, one a row, got 3"),
    ],
)
def test_what_does_not_fit_is_refused(weight, tokens, text):
    with pytest.raises(DataError, match=text):
        # The hook that checks shapes would refuse some first, with an error of its own.
        unwrap(partial_sums)(torch.zeros(2, 5), weight, tokens)


def test_the_switch_and_the_type_choose_a_form(monkeypatch):
    made = []
    for kernels in (cpu, reference):
        plain = kernels.partial_sums
        monkeypatch.setattr(
            kernels,
            "partial_sums",
            lambda *given, name=kernels.__name__, plain=plain: made.append(name) or plain(*given),
        )
    monkeypatch.setattr(registry, "chosen_forms", {})
    monkeypatch.delenv(registry.SWITCH, raising=False)
    partial_sums(*drawn()[:3])
    monkeypatch.setenv(registry.SWITCH, "reference")
    partial_sums(*drawn()[:3])
    partial_sums(*drawn(dtype=torch.float64)[:3])
    assert [name.rsplit(".", 1)[1] for name in made] == ["cpu", "reference", "cpu"]
