"""Slots of tokens within their experts on one device, against torch's stable sort."""

from functools import partial

from gpu_clock import Row, measure

__all__ = ["route_rows"]


def route_rows(device: str, num_tokens: int, turns: int) -> list[Row]:
    """Slots and counts of two choices among 64 experts and of eight among 128, beside a copy."""
    import torch

    from shared.kernels.route import route

    rows = []
    for num_experts, k in ((64, 2), (128, 8)):
        experts = torch.rand(num_tokens, num_experts, device=device).topk(k).indices
        count = experts.numel()
        positions = torch.arange(count, device=device)

        def by_sort(
            experts: torch.Tensor = experts,
            positions: torch.Tensor = positions,
            num_experts: int = num_experts,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            keys, order = torch.sort(experts.view(-1).to(torch.uint8), stable=True)
            counts = torch.zeros(num_experts, dtype=torch.int64, device=keys.device)
            counts.index_add_(0, experts.view(-1), torch.ones_like(positions))
            starts = counts.cumsum(0) - counts
            slots = torch.empty_like(positions)
            slots[order] = positions - starts[keys.long()]
            return slots.view_as(experts), counts

        ours = partial(route, experts, num_experts)
        out = torch.empty_like(positions)
        rows.append(
            measure(
                "slots of tokens",
                f"{num_tokens} tokens, k = {k}, {num_experts} experts",
                ours,
                bytes_moved=16 * count,
                copy=((lambda out=out, positions=positions: out.copy_(positions)), 16 * count),
                correct=all(map(torch.equal, ours(), by_sort())),
                turns=turns,
                baseline=("torch, stable sort by expert", by_sort),
                package="lancet",
            )
        )
    return rows
