"""Rows of training steps on documents for bench/gpu.py: balanced beside packed, and how well a cost fits."""

import sys
from pathlib import Path

from gpu_clock import Row, measure, timed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/hydraulis/src"))

_RANKS = 8


def step_rows(device: str, max_tokens: int, turns: int) -> list[Row]:
    """A step's slowest rank of eight, played one after the other on this device.

    Documents are Python's own source files, in bytes. Ours are planned by the cost that was measured here;
    the baseline packs them best fit, the longest first, as TRL's `bfd` does, and deals rows to ranks in
    turn. The step takes as long as its slowest rank, which alone is timed.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import hydraulis as hy
    from hydraulis.planner.baselines import best_fit_decreasing
    from hydraulis.planner.steps import plan_ranks
    from hydraulis.runtime.attention import PackedDocuments, attend
    from hydraulis.runtime.loss import LossModel

    heads, width = (16, 2048) if device == "cuda" else (2, 32)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_attention_heads=heads,
        num_hidden_layers=4, max_position_embeddings=max_tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config).to(device, dtype)
    loss = LossModel(model)
    texts = [one for one in hy.data.python_source(limit=400) if 2 <= len(one) <= max_tokens]
    order = np.random.default_rng(0).permutation(len(texts))
    count = int(np.searchsorted(np.cumsum([len(texts[i]) for i in order]), 24 * max_tokens))
    texts = [texts[i] for i in order[: max(count, _RANKS)]]
    lengths = np.array([len(one) for one in texts])

    def run(micro_batches: list[list[int]]) -> torch.Tensor:
        """Forward and backward passes; the sum of losses."""
        total = torch.zeros((), device=device)
        for part in micro_batches:
            packing = PackedDocuments(lengths=tuple(len(texts[i]) for i in part))
            rows = [torch.frombuffer(bytearray(texts[i]), dtype=torch.uint8).long() for i in part]
            labels = torch.cat([torch.cat((row[1:], row.new_full((1,), -100))) for row in rows])
            ids, positions = torch.cat(rows).to(device), packing.positions().to(device)
            with attend(model):
                found = loss(ids, positions, labels.to(device), packing)
                found.backward()
            total += found.detach()
        model.zero_grad(set_to_none=True)
        return total

    cost = hy.measure_cost(model, max_tokens)
    ours = plan_ranks(lengths, _RANKS, cost, max_tokens)
    packed = best_fit_decreasing(lengths.tolist(), max_tokens)
    theirs = [packed[rank::_RANKS] for rank in range(_RANKS)]
    names = [(way, rank) for way in ("ours", "theirs") for rank in range(_RANKS)]
    plans = {"ours": ours, "theirs": theirs}
    played = timed({f"{w} {r}": lambda w=w, r=r: run(plans[w][r]) for w, r in names}, 3)
    seconds = {name: float(np.median(taken)) for name, taken in played.items()}
    slowest = {
        way: max(range(_RANKS), key=lambda rank, way=way: seconds[f"{way} {rank}"]) for way in plans
    }
    sums = [sum(float(run(mine)) for mine in plans[way]) for way in plans]
    predicted = [sum(cost.micro_batch_s(lengths[part]) for part in ours[r]) for r in range(_RANKS)]
    errors = [abs(p / seconds[f"ours {r}"] - 1) for r, p in enumerate(predicted)]
    weights = sum(one.nbytes for one in model.parameters())
    buffer = torch.empty(max(weights // 4, 1), device=device)
    return [
        measure(
            "training step, slowest of 8 ranks",
            f"{len(texts)} documents, {max_tokens} tokens a micro-batch, Llama of 4 layers of {width}",
            lambda: run(ours[slowest["ours"]]),
            bytes_moved=3 * weights,
            copy=(lambda: buffer.copy_(buffer.clone()), 2 * buffer.nbytes),
            correct=abs(sums[0] / sums[1] - 1) < 0.01,
            turns=turns,
            baseline=("best fit, dealt in turn", lambda: run(theirs[slowest["theirs"]])),
            note=f"the cost that planned it errs by {np.mean(errors):.1%} on average",
        )
    ]
