"""Products with 4-bit weights, 4096 x 4096 in groups of 128, on one thread, with weights out of cache.

Packed and dense forms against ATen's own 4-bit product at one token and at 512, and the dispatch
against the best form at each number of tokens. Every product takes the next of six weights, 8.9 MB
each, as a layer's turn comes again only after all others'.
"""

import random
import time
from itertools import cycle
from statistics import median

import pytest
import torch

from llmpq.runtime.linear import FORMS, QuantLinear, forms_table, measure_forms
from shared.claims import Claim
from shared.kernels import weight_matmul

REVISION = 2
SIZE, GROUP, WEIGHTS = 4096, 128, 6
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SINGLE = ("packed", "dense16", "dense32")
PEERS = [
    {
        "peer": "torch.ops.aten._weight_int4pack_mm_for_cpu",
        "setting": "bfloat16 activations, scales and zeros in bfloat16, groups of 128, weights packed "
        "beforehand, inner_k_tiles 1",
        "why": "torch's fused 4-bit product on CPUs, what torchao calls; it takes no larger groups "
        "faster",
    },
    {
        "peer": "torch.mm",
        "setting": "bfloat16, weights unpacked beforehand",
        "why": "what no form that unpacks can pass at 512 tokens",
    },
]


@pytest.fixture
def weights():
    """The same codes, scales and zero points, ours and ATen's."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    ours, theirs = [], []
    for _ in range(WEIGHTS):
        codes = torch.randint(0, 16, (SIZE, SIZE), generator=draw, dtype=torch.uint8)
        scale = torch.rand(SIZE, SIZE // GROUP, generator=draw).mul_(1e-3).add_(1e-3)
        scale = scale.bfloat16().half()
        zero = torch.randint(4, 12, scale.shape, generator=draw, dtype=torch.uint8)
        ours.append(weight_matmul.from_codes(codes, scale, zero, 4, group_size=GROUP))
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        # ATen's weight is (code - 8) * scale + offset.
        offset = (8 - zero.float()) * scale.float()
        sides = torch.stack([scale.float(), offset], 2).transpose(0, 1).contiguous().bfloat16()
        theirs.append((packed, sides))
    return ours, theirs


def in_turns(ways, turns):
    """Seconds of each way [turns], and what each gave last; the first turn warms up.

    Each turn has the ways in another drawn order, so that none always follows the same one: what ran
    before leaves caches and clocks as it likes. Each call takes the next weight, so that none finds its
    own in the cache. Results are those of the first weight.
    """
    taken, found = {name: [] for name in ways}, {}
    names, numbers, draw = list(ways), cycle(range(WEIGHTS)), random.Random(0)
    for turn in range(turns + 1):
        draw.shuffle(names)
        for name in names:
            way, number = ways[name], next(numbers)
            begun = time.perf_counter()
            way(number)
            if turn:
                taken[name].append(time.perf_counter() - begun)
    for name, way in ways.items():
        found[name] = way(0)
    return taken, found


def errors(found, x, weight):
    """Largest error of each product, in parts of the largest entry of the exact one."""
    exact = x.double() @ weight_matmul.unpack(weight).double().t()
    largest = exact.abs().max()
    return {name: float((y.double() - exact).abs().max() / largest) for name, y in found.items()}


@pytest.mark.parametrize(
    ("tokens", "form", "turns", "aim"), [(1, "packed", 60, 0.95), (512, "dense16", 7, 2.0)]
)
def bench_against_aten(tokens, form, turns, aim, weights, benchmark, record_claim):
    ours, theirs = weights
    x = torch.randn(tokens, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    dense = weight_matmul.unpack(ours[0], torch.bfloat16)
    ways = {
        "ours": lambda i: FORMS[form](x, ours[i]),
        "aten": lambda i: torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, theirs[i][0], GROUP, theirs[i][1]
        ),
        "unpacked": lambda _: x @ dense.t(),
    }
    taken, found = benchmark.pedantic(lambda: in_turns(ways, turns), rounds=1)
    wrong = errors({name: found[name] for name in ("ours", "aten")}, x, ours[0])
    middle = {name: median(seconds) for name, seconds in taken.items()}
    ratios = [b / a for a, b in zip(taken["ours"], taken["aten"], strict=True)]
    record_claim(
        Claim(
            name=f"4-bit product of {tokens} token{'s' * (tokens > 1)}, {form}",
            unit="ms",
            ours=1e3 * middle["ours"],
            baseline=1e3 * middle["aten"],
            baseline_name="ATen's int4",
            higher_is_better=False,
            correct=wrong["ours"] <= max(2 * wrong["aten"], 2**-8),
            detail=f"{turns} turns, one thread, bfloat16; largest error {wrong['ours']:.1e} of the "
            f"largest entry, ATen's {wrong['aten']:.1e}; bfloat16 product of unpacked weights "
            f"{1e3 * middle['unpacked']:.2f} ms",
            source="hatch run bench llmpq -k matmul",
        ),
        aim=aim,
        spread=(min(ratios), max(ratios)),
    )


def bench_int8(weights, benchmark, record_claim):
    """Both operands in 8 bits: no product here gains by it, as weights are rounded anew for each row."""
    ours, _ = weights
    x = torch.randn(512, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    ways = {form: lambda i, form=form: FORMS[form](x, ours[i]) for form in (*SINGLE, "int8")}
    taken, found = benchmark.pedantic(lambda: in_turns(ways, 5), rounds=1)
    wrong = errors(found, x, ours[0])
    middle = {name: median(seconds) for name, seconds in taken.items()}
    best = min(SINGLE, key=middle.__getitem__)
    # The integer product alone, of operands that are there: what no rounding, however fast, can pass.
    a, b = (torch.randint(-127, 128, (n, SIZE), dtype=torch.int8) for n in (512, SIZE))
    alone = in_turns({"product": lambda _: torch._int_mm(a, b.t())}, 5)[0]["product"]
    ratios = [one / two for one, two in zip(taken[best], taken["int8"], strict=True)]
    record_claim(
        Claim(
            name="4-bit product of 512 tokens, int8",
            unit="ms",
            ours=1e3 * middle["int8"],
            baseline=1e3 * middle[best],
            baseline_name=f"the best other form: {best}",
            higher_is_better=False,
            correct=wrong["int8"] <= 0.05,
            detail=f"5 turns, one thread; the integer product alone {1e3 * median(alone):.1f} ms; largest "
            f"error {wrong['int8']:.1e} of the largest entry, the other's {wrong[best]:.1e}",
            source="hatch run bench llmpq -k matmul",
        ),
        spread=(min(ratios), max(ratios)),
    )


def bench_dispatch(weights, benchmark, record_claim):
    ours, _ = weights
    table = forms_table(
        measure_forms(
            bits=4,
            in_features=SIZE,
            out_features=SIZE,
            tokens=TOKENS,
            forms=SINGLE,
            dtype=torch.bfloat16,
        )
    )
    layers = [QuantLinear(weight, forms=table) for weight in ours]

    def all_counts():
        rows = {}
        for tokens in TOKENS:
            x = torch.randn(tokens, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
            ways = {"dispatch": lambda i, x=x: layers[i](x)}
            for form in SINGLE:
                ways[form] = lambda i, x=x, form=form: FORMS[form](x, ours[i])
            turns = 5 if tokens > 64 else 15 if tokens > 4 else 60
            taken, found = in_turns(ways, turns)
            wrong = errors(found, x, ours[0])
            middle = {name: median(seconds) for name, seconds in taken.items()}
            rows[tokens] = middle, max(wrong.values())
        return rows

    rows = benchmark.pedantic(all_counts, rounds=1)
    best = {tokens: min(middle[form] for form in SINGLE) for tokens, (middle, _) in rows.items()}
    ratios = {tokens: best[tokens] / rows[tokens][0]["dispatch"] for tokens in TOKENS}
    worst = min(ratios, key=ratios.__getitem__)
    record_claim(
        Claim(
            name="4-bit dispatch, 1 to 512 tokens, at its worst number",
            unit="ms",
            ours=1e3 * rows[worst][0]["dispatch"],
            baseline=1e3 * best[worst],
            baseline_name="the best single form there",
            higher_is_better=False,
            correct=all(wrong <= 2**-6 for _, wrong in rows.values()),
            detail=f"one thread, bfloat16, table {table}; "
            + "; ".join(
                f"{tokens} tokens: "
                + ", ".join(f"{name} {1e3 * value:.2f}" for name, value in middle.items())
                for tokens, (middle, _) in rows.items()
            ),
            source="hatch run bench llmpq -k matmul",
        ),
        aim=1 / 1.05,
        spread=(min(ratios.values()), max(ratios.values())),
    )
