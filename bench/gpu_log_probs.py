"""Rows of log-probabilities of tokens for bench/gpu.py: times, and the most memory, against all logits in torch."""

from collections.abc import Callable
from functools import partial

import torch

from gpu_clock import Row, measure

__all__ = ["log_probs_rows"]


def log_probs_rows(device: str, num_rows: int, vocabulary: int, turns: int) -> list[Row]:
    """Log-probabilities and entropies of tokens against all logits in torch, at two widths.

    Heads of 0.5 and 1.5 billion parameters: few products a logit, so that torch is bound by memory.
    """
    from shared.kernels.token_log_probs import answer, gradients, partial_sums

    found = []
    for dim in (896, 1536) if device == "cuda" else (20, 40):
        hidden = torch.randn(num_rows, dim, device=device).bfloat16().requires_grad_()
        weight = (torch.randn(vocabulary, dim, device=device) / dim**0.5).bfloat16()
        weight.requires_grad_()
        tokens = torch.randint(0, vocabulary, (num_rows,), device=device)
        grads = torch.randn(2, num_rows, device=device)

        def fused(
            backward: bool, hidden=hidden, weight=weight, tokens=tokens, grads=grads
        ) -> list[torch.Tensor]:
            said = answer(partial_sums(hidden, weight, tokens))
            given = gradients(hidden, weight, tokens, 1.0, said, *grads) if backward else ()
            return [said.log_probs, said.entropy, *given]

        def plain(
            backward: bool, hidden=hidden, weight=weight, tokens=tokens, grads=grads
        ) -> list[torch.Tensor]:
            with torch.set_grad_enabled(backward):
                log_p = (hidden @ weight.t()).float().log_softmax(1)
                said = log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
            given = torch.autograd.grad(said, [hidden, weight], list(grads)) if backward else ()
            return [*(part.detach() for part in said), *given]

        out = torch.empty_like(weight)
        for name, backward in (("log-probs", False), ("log-probs, with gradients", True)):
            exact = plain(backward, hidden=in_float32(hidden), weight=in_float32(weight))
            correct = all(
                bool((ours - theirs).abs().max() <= 2**-7 * max(1.0, float(theirs.abs().max())))
                for ours, theirs in zip(fused(backward), exact, strict=True)
            )
            del exact
            shape = f"{num_rows} rows, vocabulary {vocabulary}, D = {dim}, bfloat16"
            note = ""
            if device == "cuda":
                ours, theirs = (peak_bytes(partial(way, backward)) for way in (fused, plain))
                # Beside the gradients, a block of slopes and what torch makes of it.
                correct &= ours <= 2 * (hidden.nbytes + weight.nbytes) * backward + 2**29
                note = f"{ours / 1e6:.0f} MB at most, torch {theirs / 1e6:.0f}"
            found.append(
                measure(
                    name,
                    shape,
                    partial(fused, backward),
                    bytes_moved=(1 + backward) * (hidden.nbytes + weight.nbytes),
                    copy=((lambda out=out, weight=weight: out.copy_(weight)), 2 * weight.nbytes),
                    correct=correct,
                    turns=turns,
                    baseline=("all logits in torch", partial(plain, backward)),
                    note=note,
                )
            )
    return found


def peak_bytes(function: Callable[[], object]) -> int:
    """Most memory of the device in use at once, above what was before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def in_float32(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a leaf: in half types torch rounds logits, by up to 2^-6 where they are 4 to 8."""
    return x.detach().float().requires_grad_()
