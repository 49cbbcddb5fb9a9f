"""Rows of products of int8 and fp8 codes for bench/gpu.py: scaled matmuls, and layers that qsync lowers."""

import sys
from collections.abc import Callable
from pathlib import Path

from gpu_clock import Row, measure

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/qsync/src"))

__all__ = ["lowered_layer_rows", "scaled_matmul_rows"]


def scaled_matmul_rows(device: str, sizes: tuple[int, ...], turns: int) -> list[Row]:
    """Square products with both factors quantised in the time, against bf16 and torch's own integer and fp8 ones.

    Args:
        device: where.
        sizes: rows, columns and inner dimension.
        turns: of each size.
    """
    import torch

    from shared.kernels.scaled_matmul import quantize_rows, scaled_matmul

    found = []
    for size in sizes:
        x = torch.randn(size, size, device=device).bfloat16()
        weight = torch.randn(size, size, device=device).bfloat16()
        exact = x.float() @ weight.float().t()
        for name, dtype, most_error in (
            ("int8", torch.int8, 0.02),
            ("fp8", torch.float8_e4m3fn, 0.06),
        ):

            def ours(dtype=dtype, x=x, weight=weight):
                return scaled_matmul(
                    quantize_rows(x, dtype), quantize_rows(weight, dtype), dtype=torch.bfloat16
                )

            peers: dict[str, Callable[[], object]] = {
                "bf16": lambda x=x, weight=weight: x @ weight.t()
            }
            if device == "cuda":
                peers[TORCH[name]] = _torch_product(name, x, weight)
            error = float((ours().float() - exact).norm() / exact.norm())
            for peer, call in peers.items():
                found.append(
                    measure(
                        f"product in {name} with quantisation, against {peer}",
                        f"{size} x {size} by {size}",
                        ours,
                        bytes_moved=2 * x.nbytes + x.nbytes,
                        copy=((lambda x=x: x.clone()), 2 * x.nbytes),
                        correct=error <= most_error,
                        turns=turns,
                        baseline=(peer, call),
                        note=f"relative error {error:.3f}",
                        package="qsync",
                        aim=1.6 if peer == "bf16" and size >= 8192 else None,
                    )
                )
    return found


TORCH = {"int8": "torch._int_mm in eager torch", "fp8": "torch._scaled_mm in eager torch"}


def _torch_product(name, x, weight):
    """Rows quantised by torch's operators, multiplied by torch's product of codes."""
    import torch

    largest = 127.0 if name == "int8" else 448.0

    def quantize(matrix):
        scale = matrix.abs().amax(1, keepdim=True).float() / largest
        codes = matrix.float() / scale
        if name == "int8":
            return codes.round().to(torch.int8), scale
        return codes.to(torch.float8_e4m3fn), scale

    def multiply():
        (a, a_scale), (b, b_scale) = quantize(x), quantize(weight)
        if name == "int8":
            return (torch._int_mm(a, b.t()) * a_scale * b_scale.t()).bfloat16()
        return torch._scaled_mm(
            a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16
        )

    return multiply


def lowered_layer_rows(
    device: str, tokens: int, dims: tuple[int, ...], precisions: tuple[str, ...], turns: int
) -> list[Row]:
    """Forward and backward pass of a feed-forward layer by precision, against bf16 autocast, and the plan's choice.

    Args:
        device: where.
        tokens: rows of the input.
        dims: widths; inner layers are four times as wide.
        precisions: those that the plan may choose.
        turns: of each width.
    """
    import torch

    import qsync

    found = []
    for dim in dims:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(dim, 4 * dim), torch.nn.GELU(), torch.nn.Linear(4 * dim, dim)
        ).to(device)
        x = torch.randn(tokens, dim, device=device, requires_grad=True)

        def loss_fn(model, batch):
            return model(batch).square().mean()

        def step(is_cast=False, model=model, x=x):
            model.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=is_cast):
                loss = loss_fn(model, x)
            loss.backward()
            return loss

        plan = qsync.plan(model, [x.detach()], loss_fn, precisions=precisions)

        def planned(plan=plan, model=model, step=step):
            qsync.apply(model, plan)
            return step()

        def lowered(precision, model=model, step=step):
            qsync.apply(model, qsync.Plan.uniform(model, precision))
            return step()

        def cast(model=model, step=step):
            qsync.apply(model, qsync.Plan.uniform(model, "fp32"))
            return step(is_cast=True)

        exact = float(lowered("fp32").detach())
        is_close = abs(float(planned().detach()) / exact - 1) <= 0.05
        chosen = ", ".join(plan.precision(name) for name in plan.operators)
        peers = {
            "bf16 autocast": cast,
            "uniform bf16": lambda lowered=lowered: lowered("bf16"),
        }
        for peer, call in peers.items():
            found.append(
                measure(
                    f"feed-forward step of the fastest plan, against {peer}",
                    f"{tokens} tokens, {dim} wide",
                    planned,
                    bytes_moved=6 * 4 * tokens * dim,
                    copy=((lambda x=x: x.detach().clone()), 2 * x.nbytes),
                    correct=is_close,
                    turns=turns,
                    baseline=(peer, call),
                    note=f"chosen: {chosen}",
                    package="qsync",
                    aim=1.0,
                )
            )
    return found
