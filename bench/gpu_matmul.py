"""Rows of products with packed weights for bench/gpu.py."""

from collections.abc import Callable

from gpu_clock import Row, measure


def weight_matmul_rows(device: str, size: tuple[int, int], turns: int) -> list[Row]:
    """Products with 4- and 3-bit weights in groups of 128, against cuBLAS and torch's own int4.

    A weight has 121 MB at 4 bits: more than the second cache of its device.
    """
    import torch

    from shared.kernels.weight_matmul import PackedWeight, matmul, unpack

    rows_out, columns = size
    out = torch.empty(rows_out, columns, dtype=torch.bfloat16, device=device)
    copy = (lambda: out.copy_(out)), 2 * out.nbytes
    found = []
    for bits in (4, 3):
        packed = PackedWeight(
            data=torch.randint(
                0, 256, (rows_out, columns // 128, 16 * bits), dtype=torch.uint8, device=device
            ),
            scale=torch.rand(rows_out, columns // 128, device=device).mul_(1e-3).half(),
            zero=torch.randint(
                0, 1 << bits, (rows_out, columns // 128), dtype=torch.uint8, device=device
            ),
            bits=bits,
            in_features=columns,
            group_size=128,
        )
        dense = unpack(packed, torch.bfloat16)
        for tokens in (1, 16, 64, 2048) if device == "cuda" else (1, 3):
            x = torch.randn(tokens, columns, device=device).bfloat16()
            exact = x.float() @ dense.float().t()
            error = (matmul(x, packed).float() - exact).abs().max()
            peers: dict[str, Callable[[], object]] = {
                "cuBLAS bfloat16": lambda x=x, dense=dense: x @ dense.t()
            }
            if bits == 4 and device == "cuda":
                theirs = torch.ops.aten._convert_weight_to_int4pack(
                    torch.randint(
                        0, 256, (rows_out, columns // 2), dtype=torch.uint8, device=device
                    ),
                    8,
                )
                sides = torch.rand(columns // 128, rows_out, 2, device=device).bfloat16()
                peers["torch _weight_int4pack_mm"] = lambda x=x, theirs=theirs, sides=sides: (
                    torch.ops.aten._weight_int4pack_mm(x, theirs, 128, sides)
                )
            for name, peer in peers.items():
                found.append(
                    measure(
                        f"product with {bits}-bit weights, {tokens} tokens, against {name}",
                        f"{tokens} x {columns} by {rows_out}, bfloat16, groups of 128",
                        lambda x=x, packed=packed: matmul(x, packed),
                        bytes_moved=packed.num_bytes + 2 * tokens * (columns + rows_out),
                        copy=copy,
                        correct=bool(error <= 2**-6 * exact.abs().max()),
                        turns=turns,
                        baseline=(name, peer),
                    )
                )
    return found
