"""Rows of attention by document for bench/gpu.py."""

import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from gpu_clock import Row, measure

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/hydraulis/src"))


def document_rows(device: str, num_tokens: int, turns: int) -> list[Row]:
    """Attention inside packed documents, and with its gradients, against torch's varlen_attn alone.

    Documents halve in length, so that few are long; eight key heads for 32 query heads of 128 values.
    """
    import torch
    import torch.nn.functional as F
    from torch.nn.attention.varlen import varlen_attn

    from hydraulis.runtime.documents import attend_documents

    heads, kv_heads, dim = (32, 8, 128) if device == "cuda" else (4, 2, 16)
    lengths, left = [], num_tokens
    while left > 16:
        lengths.append(left // 2)
        left -= left // 2
    lengths.append(left)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = [
        torch.randn(num_tokens, count, dim, device=device, dtype=dtype).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    weight = torch.randn(num_tokens, heads, dim, device=device, dtype=dtype)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    def ours() -> torch.Tensor:
        q, k, v = (one.transpose(0, 1) for one in leaves)
        return attend_documents(q, k, v, tuple(lengths), dim**-0.5).transpose(0, 1)

    def kernel() -> torch.Tensor:
        q, k, v = leaves
        found = varlen_attn(
            q, k, v, ends, ends, lengths[0], lengths[0], scale=dim**-0.5, window_size=(-1, 0),
            enable_gqa=True,
        )  # fmt: skip
        assert isinstance(found, torch.Tensor)
        return found

    def dense() -> torch.Tensor:
        parts = []
        for first, last in zip(ends.tolist(), ends.tolist()[1:], strict=False):
            q, k, v = (one[first:last].transpose(0, 1).float() for one in leaves)
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        return torch.cat(parts, 1).transpose(0, 1)

    def forward(form: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [form()]

    def both(form: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        return list(torch.autograd.grad((form().float() * weight).sum(), leaves))

    def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
        return bool((got.float() - want.float()).norm() <= 0.02 * want.float().norm())

    out = torch.empty_like(weight)
    of_inputs = sum(one.nbytes for one in leaves)
    found = []
    for name, run, bytes_moved in (
        ("attention by document", forward, of_inputs + out.nbytes),
        ("attention by document, with gradients", both, 3 * of_inputs + 4 * out.nbytes),
    ):
        peer = kernel if device == "cuda" else dense
        found.append(
            measure(
                name,
                f"{num_tokens} tokens in {len(lengths)} documents, {heads} heads, {kv_heads} of keys",
                lambda run=run: run(ours),
                bytes_moved=bytes_moved,
                copy=((lambda: out.copy_(weight)), 2 * out.nbytes),
                correct=all(map(equal, run(ours), run(dense))),
                turns=turns,
                baseline=("torch varlen_attn", lambda run=run, peer=peer: run(peer)),
            )
        )
    return found
