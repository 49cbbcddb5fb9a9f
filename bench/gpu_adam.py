"""Adam's fused step with its residual, its undo, and digests on one device."""

from functools import partial

from gpu_clock import Row, measure


def adam_rows(device: str, num_parameters: int, turns: int) -> list[Row]:
    """The step against torch's fused one, its exact undo, and a digest, beside a copy.

    Each turn takes the same step number again, of whatever the turn before left: as much work.
    """
    import torch

    from shared.kernels import adam
    from shared.kernels.digest import digest

    hyper = adam.Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        param = torch.randn(num_parameters, device=device).to(dtype)
        grad = torch.randn_like(param) * 1e-2
        of = adam.AdamTensors(param, grad, torch.zeros_like(param), torch.zeros_like(param))
        residual = adam.new_residual(param)
        correct = True
        for number in range(1, 6):
            grad.normal_(std=1e-2)
            before = [tensor.clone() for tensor in of]
            adam.step([of], [number], hyper, [residual])
            adam.undo([of], [number], hyper, [residual])
            correct &= all(map(torch.equal, of, before))
            adam.step([of], [number], hyper, [residual])
        theirs = torch.nn.Parameter(param.clone())
        theirs.grad = grad
        fused = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.1, fused=True)
        out = torch.empty_like(param)
        size = param.nbytes
        shape = f"{num_parameters} {str(dtype).removeprefix('torch.')}"
        copy = (lambda param=param, out=out: out.copy_(param)), 2 * size
        rows.append(
            measure(
                "AdamW's step with residual",
                shape,
                partial(adam.step, [of], [9], hyper, [residual]),
                bytes_moved=7 * size + residual.num_bytes,
                copy=copy,
                correct=correct,
                turns=turns,
                baseline=("torch's fused AdamW", fused.step),
                note=f"{residual.num_bytes / num_parameters:.2f} B a parameter",
            )
        )
        rows.append(
            measure(
                "exact undo of AdamW's step",
                shape,
                partial(adam.undo, [of], [9], hyper, [residual]),
                bytes_moved=7 * size + residual.num_bytes,
                copy=copy,
                correct=correct,
                turns=turns,
            )
        )
    x = torch.randn(num_parameters, device=device)
    out = torch.empty_like(x)
    rows.append(
        measure(
            "digest",
            f"{num_parameters} float32",
            partial(digest, x),
            bytes_moved=x.nbytes,
            copy=((lambda: out.copy_(x)), 2 * x.nbytes),
            correct=digest(x) == digest(x.cpu()),
            turns=turns,
        )
    )
    return rows
