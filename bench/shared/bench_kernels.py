"""The CPU kernels on one core: quantise, unpack and log-probabilities against torch, SpMM against
DGL and torch.sparse.

Every comparison runs ours and its rivals in turns on the same input, takes medians and checks
the results in the same function; the fastest rival is the baseline. The memory bandwidth beside
them is torch's copy, read plus written, timed in the same turns. Everything runs on the calling
thread and its own processor time is counted: on a quiet machine that is the time on the clock, on a
busy one it leaves out the turns of others.
"""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shared.claims import Claim
from shared.kernels.philox import stream_key
from shared.kernels.quantize import dequantize, packed_width, quantize
from shared.kernels.segment import CSR, spmm
from shared.kernels.token_log_probs import answer, gradients, partial_sums

PEERS = [
    {
        "peer": "torch, quantise and unpack",
        "setting": "plain operations in place, and the same functions through torch.compile",
        "why": "the compiler fuses the passes over memory; the faster of the two is the baseline",
    },
    {
        "peer": "DGL, SpMM",
        "setting": "a graph made from CSC once, dgl.ops on one thread",
        "why": "no conversion of formats is on the clock",
    },
    {
        "peer": "torch.sparse, SpMM",
        "setting": "a CSR tensor of float32 made once, `@` on one thread",
        "why": "CSR is the layout with an MKL kernel; the faster of DGL and torch.sparse is the baseline",
    },
    {
        "peer": "torch, log-probabilities",
        "setting": "one matrix product, log_softmax and autograd of both sums at once",
        "why": "the fewest products; memory for all logits is granted",
    },
]
NUM_ROWS, DIM = 100_000, 128
NUM_NODES, NUM_EDGES = 100_000, 3_000_000
TURNS = 9


@pytest.fixture(autouse=True)
def _one_thread(request):
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))  # noqa: PT021
    torch.set_num_threads(1)


def in_turns(benchmark, functions: dict[str, Callable[[], object]], turns: int = TURNS):
    """Seconds of each function [turns], run one after another in every turn."""
    seconds = {name: [] for name in functions}

    def turn() -> None:
        for name, function in functions.items():
            start = time.thread_time()
            function()
            seconds[name].append(time.thread_time() - start)

    turn()
    for times in seconds.values():
        times.clear()
    benchmark.pedantic(turn, rounds=turns)
    return {name: np.array(times) for name, times in seconds.items()}


def spread(times: np.ndarray) -> str:
    """Median and quartiles in milliseconds."""
    low, middle, high = np.percentile(times, [25, 50, 75]) * 1e3
    return f"{middle:.1f} ms ({low:.1f} to {high:.1f})"


def torch_quantize(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same codes and planes by plain torch operations, with torch's own random numbers."""
    low, high = x.aminmax(dim=1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    codes = ((x - low) / scale).add_(torch.rand_like(x)).floor_().clamp_(max=2**bits - 1)
    planes = codes.to(torch.uint8).view(len(x), 8 // bits, -1)
    packed = planes[:, 0].clone()
    for k in range(1, 8 // bits):
        packed |= planes[:, k] << (k * bits)
    return packed, torch.cat([low, scale], 1)


def torch_dequantize(data: torch.Tensor, params: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    codes = (data[:, None] >> shifts).bitwise_and_(2**bits - 1).view(len(data), -1)
    return codes.float().mul_(params[:, 1:]).add_(params[:, :1])


@pytest.mark.parametrize("bits", [2, 4, 8])
def bench_quantize(benchmark, record_claim, bits):
    """Quantise and pack, then unpack, 100,000 rows of 128 float32."""
    x = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    packed = quantize(x, bits, key=stream_key(0))
    theirs = torch_quantize(x, bits)
    compiled_quantize = torch.compile(torch_quantize)
    compiled_dequantize = torch.compile(torch_dequantize)
    times = in_turns(
        benchmark,
        {
            "copy": lambda: out.copy_(x),
            "quantise": lambda: quantize(
                x, bits, key=stream_key(0), data=packed.data, params=packed.params
            ),
            "unpack": lambda: dequantize(*packed, out=out),
            "torch quantise": lambda: torch_quantize(x, bits),
            "torch unpack": lambda: torch_dequantize(*theirs, bits),
            "compiled quantise": lambda: compiled_quantize(x, bits),
            "compiled unpack": lambda: compiled_dequantize(*theirs, bits),
        },
    )
    # Both must stay within a step of the input and, over 12.8 M elements, be unbiased.
    correct = True
    compiled = compiled_quantize(x, bits)
    for values, params in (
        (dequantize(*packed), packed.params),
        (torch_dequantize(*theirs, bits), theirs[1]),
        (compiled_dequantize(*compiled, bits), compiled[1]),
    ):
        error, step = values - x, params[:, 1:]
        correct &= bool((error.abs() <= step * 1.001 + 1e-6).all())
        correct &= abs(float((error / step).mean())) < 5 * (1 / 6 / x.numel()) ** 0.5

    medians = {name: float(np.median(t)) for name, t in times.items()}
    bandwidth = 2 * x.numel() * 4 / medians["copy"]
    moved = x.numel() * 4 + NUM_ROWS * (packed_width(DIM, bits) + 8)
    benchmark.extra_info["copy"] = f"{bandwidth / 1e9:.1f} GB/s read plus written"
    for ours, aim in (("quantise", 0.9e9), ("unpack", 4.0e9)):
        share = moved / medians[ours] / bandwidth
        rivals = [f"torch {ours}", f"compiled {ours}"]
        baseline = min(rivals, key=medians.__getitem__)
        benchmark.extra_info[ours] = (
            f"{spread(times[ours])}, {share:.0%} of the copy's bandwidth; "
            + ", ".join(f"{rival} {spread(times[rival])}" for rival in rivals)
        )
        record_claim(
            Claim(
                name=f"{ours} at {bits} bits, one core",
                unit="G elements/s",
                ours=x.numel() / medians[ours] / 1e9,
                baseline=x.numel() / medians[baseline] / 1e9,
                baseline_name="torch, plain or compiled",
                higher_is_better=True,
                correct=correct,
                detail=f"aim {aim / 1e9} G elements/s; {NUM_ROWS} x {DIM} float32; {share:.0%} of the copy's "
                f"{bandwidth / 1e9:.1f} GB/s; errors within a step, mean 0",
                source="bench/shared/bench_kernels.py",
            ),
            # The aim is a rate: as a ratio it is what that rate would be of the baseline's.
            aim=aim / (x.numel() / medians[baseline]),
        )


def random_graph(kind: str) -> CSR:
    """3 M directed edges over 100,000 nodes: uniform, or 90 % within blocks of 2,000 neighbours."""
    g = torch.Generator().manual_seed(0)
    src = torch.randint(0, NUM_NODES, (NUM_EDGES,), generator=g)
    dst = torch.randint(0, NUM_NODES, (NUM_EDGES,), generator=g)
    if kind == "blocks":
        near = src // 2000 * 2000 + torch.randint(0, 2000, (NUM_EDGES,), generator=g)
        dst = torch.where(torch.rand(NUM_EDGES, generator=g) < 0.9, near, dst)
    return CSR.from_coo(dst, src, NUM_NODES, NUM_NODES)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dim", [128, 50])
@pytest.mark.parametrize("kind", ["blocks", "uniform"])
def bench_spmm(benchmark, record_claim, kind, dim, weighted):
    """Sum over in-edges, one thread."""
    dgl = pytest.importorskip("dgl", reason="a baseline is DGL 1.1.3")
    csr = random_graph(kind)
    g = torch.Generator().manual_seed(1)
    weight = torch.rand(csr.nnz, generator=g)
    x = torch.randn(NUM_NODES, dim, generator=g)
    graph = dgl.graph(
        ("csc", (csr.indptr, csr.indices, torch.arange(csr.nnz))), num_nodes=NUM_NODES
    )
    if weighted:
        csr = CSR(csr.indptr, csr.indices, csr.num_cols, weight)
        theirs_name, column = "u_mul_e_sum", weight[:, None]
        theirs = lambda: dgl.ops.u_mul_e_sum(graph, x, column)
    else:
        theirs_name = "copy_u_sum"
        theirs = lambda: dgl.ops.copy_u_sum(graph, x)
    sparse = torch.sparse_csr_tensor(
        csr.indptr.int(),  # MKL's own width: nothing is converted on the clock
        csr.indices.int(),
        weight if weighted else torch.ones(csr.nnz),
        size=(NUM_NODES, NUM_NODES),
    )
    ways = {
        "ours": lambda: spmm(csr, x),
        f"DGL {dgl.__version__} {theirs_name}": theirs,
        "torch.sparse CSR": lambda: sparse @ x,
    }
    times = in_turns(benchmark, ways, turns=5 if weighted else TURNS)
    error = max(float((spmm(csr, x) - ways[name]()).abs().max()) for name in list(ways)[1:])
    benchmark.extra_info.update({name: spread(t) for name, t in times.items()})
    medians = {name: float(np.median(t)) for name, t in times.items()}
    rival = min(list(ways)[1:], key=medians.__getitem__)
    record_claim(
        Claim(
            name=f"SpMM, {kind} graph, D={dim}, {'weighted' if weighted else 'plain'} sum",
            unit="ms",
            ours=medians["ours"] * 1e3,
            baseline=medians[rival] * 1e3,
            baseline_name="DGL or torch.sparse",
            higher_is_better=False,
            correct=error < 1e-4,
            detail="100k nodes, 3 M edges, one thread; "
            + ", ".join(f"{name} {spread(t)}" for name, t in times.items())
            + f"; largest difference {error:.1e}",
            source="bench/shared/bench_kernels.py",
        ),
        aim=1.0,
    )


def bench_token_log_probs(benchmark, record_claim):
    """Log-probabilities and entropies of 1,024 tokens of 32,000, with gradients, D = 64."""
    g = torch.Generator().manual_seed(0)
    num_rows, vocabulary, dim = 1024, 32_000, 64
    hidden = torch.randn(num_rows, dim, generator=g, requires_grad=True)
    weight = (torch.randn(vocabulary, dim, generator=g) / dim**0.5).requires_grad_()
    tokens = torch.randint(0, vocabulary, (num_rows,), generator=g)
    grads = torch.randn(2, num_rows, generator=g)

    def in_blocks() -> list[torch.Tensor]:
        said = answer(partial_sums(hidden, weight, tokens))
        given = gradients(hidden, weight, tokens, 1.0, said, *grads)
        return [said.log_probs, said.entropy, *given]

    def by_torch() -> list[torch.Tensor]:
        log_p = (hidden @ weight.t()).log_softmax(1)
        said = log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
        given = torch.autograd.grad(said, [hidden, weight], list(grads))
        return [*(part.detach() for part in said), *given]

    times = in_turns(benchmark, {"ours": in_blocks, "torch": by_torch}, turns=5)
    errors = [float((a - b).abs().max()) for a, b in zip(in_blocks(), by_torch(), strict=True)]
    ours, baseline = (float(np.median(times[name])) for name in ("ours", "torch"))
    record_claim(
        Claim(
            name="log-probabilities of tokens, few products a logit",
            unit="ms",
            ours=ours * 1e3,
            baseline=baseline * 1e3,
            baseline_name="all logits in torch",
            higher_is_better=False,
            correct=max(errors) < 1e-3,
            detail=f"{num_rows} rows, vocabulary {vocabulary}, D={dim}, with gradients, one thread; ours "
            f"{spread(times['ours'])}, torch {spread(times['torch'])}; largest difference "
            f"{max(errors):.1e}; logits are made twice, so that wide states cost time for memory",
            source="bench/shared/bench_kernels.py",
        ),
        aim=1.0,
    )
