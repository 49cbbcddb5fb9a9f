"""Rows of lancet for bench/gpu.py: a layer of Qwen3-30B-A3B, what runs beside its experts, and compiled regions.

The group is this one rank, whose exchanges are copies: operators are timed, exchanges are not. The layer has the
model's configuration and random weights, in bf16. Regions run in float32: in bf16 the last bit, which Inductor
rounds otherwise, would choose other experts for some tokens, and lancet would refuse what it compiled.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/lancet/src"))

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lancet
from gpu_clock import Figure, Row, measure, timed
from lancet.data import build_qwen3_moe
from lancet.graph.operations import Op, OpGraph
from lancet.graph.reachability import find_ancestors, find_descendants
from lancet.runtime.executor import CAPTURED
from shared.comms import Group
from shared.comms.init import join, leave, open_store

__all__ = [
    "build_layer",
    "compare_gradients",
    "compare_overlap",
    "count_movable_s",
    "is_near",
    "make_states",
    "moe_rows",
]

REGIONS_AIM = 0.95
MOST_DIFFERENCE = {torch.bfloat16: 0.05, torch.float32: 1e-3}
"""Largest accepted difference of two losses, and of two gradients relative to their norm."""
Batch = Mapping[str, Tensor]


@contextmanager
def join_alone(device: str) -> Iterator[Group]:
    """A world of this process, over NCCL on a GPU."""
    timeout = timedelta(minutes=5)
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(0)
    group = join(0, 1, open_store("127.0.0.1", timeout), backend=backend, timeout=timeout)
    try:
        yield group
    finally:
        leave()


def build_layer(device: str) -> nn.Module:
    """A layer of Qwen3-30B-A3B, or a small one, below a head of a few tokens."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "hidden_size": 2048, "num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    }  # fmt: skip
    if device == "cpu":
        sizes |= {
            "hidden_size": 32, "num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        }  # fmt: skip
    config = Qwen3MoeConfig(
        vocab_size=256, num_hidden_layers=1, norm_topk_prob=True, use_cache=False,
        output_router_logits=False, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=choose_dtype(device))


def choose_dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def make_states(model: Any, num_tokens: int) -> dict[str, Tensor]:
    """What comes to a layer, for two sequences, and labels."""
    weight = model.lm_head.weight
    vocabulary, width = weight.shape
    generator = torch.Generator(weight.device).manual_seed(1)
    draw = {"generator": generator, "device": weight.device}
    return {
        "inputs_embeds": torch.randn(2, num_tokens // 2, width, dtype=weight.dtype, **draw),
        "labels": torch.randint(vocabulary, (2, num_tokens // 2), **draw),
    }


def differentiate(model: Any, batch: Batch) -> Tensor:
    """Runs a model's forward and backward pass, compiled or not; returns the loss."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def compare_gradients(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of a gradient, relative to the reference's norm; NaN if one is not finite."""
    differences = []
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            gradient: Any = parameter.grad
            own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            expected = other.grad.float()
            differences.append((own.float() - expected).norm() / expected.norm())
    return float(torch.stack(differences).max())


def is_near(model: nn.Module, reference: nn.Module, batch: Batch) -> bool:
    """Whether two models of the same weights, compiled or not, have the same loss and gradients."""
    loss, expected = (float(differentiate(each, batch)) for each in (model, reference))
    limit = MOST_DIFFERENCE[next(reference.parameters()).dtype]
    return abs(loss / expected - 1) < limit and compare_gradients(model, reference) < limit


def count_movable_s(ops: Sequence[Op]) -> float:
    """Seconds of operators that may run beside an all-to-all: neither waits for the other.

    What waits for an all-reduce, as dividing its sum does, lancet does not move.
    """
    graph = OpGraph(ops)
    ancestors, descendants = find_ancestors(graph.needs), find_descendants(graph.needs)
    movable = 0
    for i in graph.communications:
        if ops[i].kind == "all_to_all":
            movable |= ~(ancestors[i] | descendants[i])
    for i in graph.communications:
        if ops[i].kind == "all_reduce":
            movable &= ~descendants[i]
    return sum(graph.time_s[i] for i in graph.compute if movable >> i & 1)


def layer_rows(
    group: Group, whole: nn.Module, batch: Batch, turns: int, shape: str
) -> list[Row | Figure]:
    """A layer's passes operator by operator, in captured order, and what an order could move."""
    torch._dynamo.reset()
    divided = lancet.parallelize(deepcopy(whole), group)
    backend = lancet.Backend(group, partition=None)
    backend.use_order(CAPTURED)
    compiled: Any = torch.compile(divided, backend=backend, fullgraph=True)
    differentiate(compiled, batch)  # captures, and times each operator
    correct = is_near(compiled, whole, batch)
    executor = next(each for each in backend.executors if each.captured.direction == "backward")
    ops = executor.list_ops()
    backward_s = sum(op.time_s for op in ops if op.kind == "compute")
    movable_s = count_movable_s(ops)
    num_bytes = sum(parameter.nbytes for parameter in whole.parameters())
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=batch["labels"].device)
    return [
        measure(
            "forward and backward pass of a layer of Qwen3-30B-A3B, captured by lancet", shape,
            partial(differentiate, compiled, batch), bytes_moved=3 * num_bytes,
            copy=(lambda: buffer.copy_(buffer.clone()), 4 * num_bytes), correct=correct, turns=turns,
            baseline=("transformers' layer, uncompiled", partial(differentiate, whole, batch)),
            package="lancet", note="exchanges are copies on one rank",
        ),
        Figure(
            name="operators of its backward pass that may run beside an all-to-all", shape=shape,
            unit="ms", ours=movable_s * 1e3, baseline=backward_s * 1e3,
            baseline_name="all of its operators, timed one by one", ratio=movable_s / backward_s,
            correct=correct and movable_s > 0, package="lancet", note=f"{len(ops)} operations",
        ),
    ]  # fmt: skip


def compare_overlap(model: Any, states: Tensor, turns: int, shape: str) -> Figure:
    """The experts' products beside copies of their rows on another stream, which take about as long."""
    device: Any = torch.get_device_module(states.device)
    block, side = model.model.layers[0].mlp, device.Stream()
    hidden = states.flatten(0, 1)
    with torch.no_grad():
        _, weights, ids = block.gate(hidden)
    rows = hidden.repeat_interleave(ids.shape[1], 0)
    received = torch.zeros_like(rows)

    @torch.no_grad()
    def multiply() -> Tensor:
        return block.experts(hidden, ids, weights)

    def copy(count: int = 1) -> None:
        for _ in range(count):
            received.copy_(rows)

    seconds = timed({"products": multiply, "copy": copy}, turns)
    count = max(1, round(median(seconds["products"]) / median(seconds["copy"])))

    def run_both() -> Tensor:
        side.wait_stream(device.current_stream())
        with device.stream(side):
            copy(count)
        result = multiply()
        device.current_stream().wait_stream(side)
        return result

    seconds = timed({"products": multiply, "copies": partial(copy, count), "both": run_both}, turns)
    alone_s, copies_s, both_s = map(median, seconds.values())
    received.zero_()
    correct = torch.equal(run_both(), multiply()) and torch.equal(received, rows)
    longer_s = max(alone_s, copies_s)
    return Figure(
        name="experts' products of Qwen3-30B-A3B beside a device copy", shape=shape, unit="ms",
        ours=both_s * 1e3, baseline=longer_s * 1e3, baseline_name="the longer of both alone",
        ratio=longer_s / both_s, correct=correct, package="lancet",
        note=f"alone {alone_s * 1e3:.3f} ms; {count} copies of {rows.nbytes / 1e6:.0f} MB {copies_s * 1e3:.3f} ms",
    )  # fmt: skip


def region_rows(
    group: Group, device: str, num_layers: int, num_tokens: int, turns: int
) -> list[Row]:
    """A model by lancet, the operators between its exchanges compiled, beside the whole by Inductor."""
    torch._dynamo.reset()
    width, expert_width = (2048, 768) if device == "cuda" else (32, 16)
    whole: Any = build_qwen3_moe(
        hidden_size=width, num_layers=num_layers, expert_width=expert_width
    )
    whole.to(device)
    ids = torch.randint(256, (4, num_tokens // 4), generator=torch.Generator().manual_seed(1))
    batch = dict.fromkeys(("input_ids", "labels"), ids.to(device))
    divided = lancet.parallelize(deepcopy(whole), group)
    backend = lancet.Backend(group, partition=None, regions=True)
    ours: Any = torch.compile(divided, backend=backend, fullgraph=True)
    # transformers' first call installs hooks under a lock, which no compiler captures.
    differentiate(whole, batch)
    theirs: Any = torch.compile(whole, fullgraph=True)
    differentiate(ours, batch)  # captures, plans and compiles
    is_trained_alike = is_near(ours, theirs, batch)
    report = backend.report()
    num_regions = report.regions.num_regions if report.regions else 0
    num_bytes = sum(parameter.nbytes for parameter in whole.parameters())
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return [
        measure(
            "forward and backward pass, regions compiled by Inductor",
            f"{num_tokens} tokens, Qwen3-MoE of {num_layers} layers of {width}, 8 experts of {expert_width}, float32",
            partial(differentiate, ours, batch), bytes_moved=3 * num_bytes,
            copy=(lambda: buffer.copy_(buffer.clone()), 4 * num_bytes),
            correct=is_trained_alike and num_regions > 0, turns=turns,
            baseline=("the whole model by Inductor", partial(differentiate, theirs, batch)),
            package="lancet", aim=REGIONS_AIM, note="; ".join([str(report.regions), *report.sentences]),
        )
    ]  # fmt: skip


def moe_rows(device: str, num_tokens: int, turns: int) -> list[Row | Figure]:
    """A layer's passes, its overlap, and on a GPU regions: a rehearsal has no minutes for C++ compilers."""
    whole = build_layer(device)
    batch = make_states(whole, num_tokens)
    shape = f"{num_tokens} tokens, {str(choose_dtype(device)).removeprefix('torch.')}"
    rows: list[Row | Figure] = []
    with join_alone(device) as group:
        rows += layer_rows(group, whole, batch, turns, shape)
        rows.append(compare_overlap(whole, batch["inputs_embeds"], turns, shape))
        if device == "cuda":
            rows += region_rows(group, device, 4, num_tokens // 4, turns)
    return rows
