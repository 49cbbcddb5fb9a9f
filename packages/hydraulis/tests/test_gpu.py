"""Attention and training steps on a CUDA device, beside dense float64 and beside the CPU."""

from functools import partial

import pytest
import torch

from hydraulis.runtime.documents import attend_documents, attend_piece, attend_varlen
from hydraulis.runtime.engine import Engine
from hydraulis.runtime.step_loader import StepLoader
from shared.errors import ConfigError

from .runtime.test_attention import documents, make_model

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = (70, 1, 300, 2, 129)


def draw(heads, dtype, device):
    generator = torch.Generator().manual_seed(1)
    shape = (heads, sum(LENGTHS), 32)
    one = torch.randn(shape, generator=generator, dtype=torch.float64)
    return one.to(device, dtype).requires_grad_()


def dense(q, k, v, scale):
    """Each document alone, in float64."""
    parts, begin = [], 0
    times = q.shape[0] // k.shape[0]
    for length in LENGTHS:
        mine = [one[:, begin : begin + length].double() for one in (q, k, v)]
        a, b, c = mine[0], *(one.repeat_interleave(times, 0) for one in mine[1:])
        scores = (a @ b.transpose(1, 2) * scale).masked_fill(
            ~torch.ones(length, length, dtype=torch.bool, device=q.device).tril(), -torch.inf
        )
        parts.append(scores.softmax(-1) @ c)
        begin += length
    return torch.cat(parts, 1)


@pytest.mark.parametrize("marked", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_documents_attend_as_densely(kv_heads, marked):
    q, k, v = (draw(heads, torch.bfloat16, marked) for heads in (8, kv_heads, kv_heads))
    out = attend_documents(q, k, v, LENGTHS, 0.2)
    expected = dense(q, k, v, 0.2)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for got, want in zip(grads, wanted, strict=True):
        assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("marked", [pytest.param("cuda", marks=gpu)])
def test_pieces_return_their_log_sums(marked):
    q, k, v = (draw(8, torch.bfloat16, marked)[:, :64] for _ in range(3))
    out, lse = attend_piece(q, k, v, 0.2, is_causal=False)
    scores = q.double() @ k.double().transpose(1, 2) * 0.2
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("marked", [pytest.param("cuda", marks=gpu)])
def test_an_engine_learns_on_a_gpu(marked):
    model = make_model("llama").to(marked, torch.bfloat16)
    engine = Engine(model, partial(torch.optim.AdamW, lr=1e-2), max_tokens=64)
    loader = StepLoader(documents((30, 20, 9, 14) * 4), engine, tokens_per_step=64, seed=0)
    losses = [engine.step(step).loss for _ in range(4) for step in loader]
    assert losses[-1] < losses[0]


def test_shapes_and_types_where_there_is_no_gpu():
    q, k, v = (
        torch.empty(heads, 20, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    )
    out = attend_varlen(q, k, v, (5, 15), 0.25)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    with pytest.raises(ConfigError, match=r"expected float16 or bfloat16, got torch.float32; load"):
        attend_varlen(q.float(), k.float(), v.float(), (5, 15), 0.25)
