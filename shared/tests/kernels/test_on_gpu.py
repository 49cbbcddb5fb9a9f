"""On a CUDA device, at sizes where every block is full: the Triton forms against the CPU's.

Needs torch, triton, numba and pytest only: `bench/gpu.py` runs this file without the root's
conftest.
"""

from types import SimpleNamespace

import pytest
import torch

from shared.kernels import adam, decode, row_adam
from shared.kernels.attention import attend
from shared.kernels.digest import digest
from shared.kernels.edge_softmax import edge_softmax, softmax_state
from shared.kernels.gather import gather, scatter_add
from shared.kernels.neighbors import relabel
from shared.kernels.neighbors import sample as sample_neighbors
from shared.kernels.quantize import dequantize, quantize
from shared.kernels.route import route
from shared.kernels.scaled_matmul import DTYPES, quantize_rows, scaled_matmul
from shared.kernels.segment import CSR, aggregate, segment_max, spmm
from shared.kernels.temporal import Adjacency, count_before, sample
from shared.kernels.token_log_probs import answer, gradients, partial_sums
from shared.kernels.weight_matmul import BITS, matmul, pack, unpack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dim", [128, 50, 602])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ten_million_integers_are_those_of_numba(bits, rounding, wire, dim):
    g = torch.Generator().manual_seed(0)
    num_rows = 10_000_000 // dim + 1
    x = torch.randn(num_rows, dim, generator=g) * torch.rand(num_rows, 1, generator=g) * 10
    index = torch.randperm(num_rows, generator=g)
    x[3, 0], x[5, dim - 1], x[7] = torch.nan, torch.inf, 0.25
    options = {"key": 0xDEADBEEFCAFEF00D, "rounding": rounding, "wire_dtype": wire}
    ours = quantize(x.cuda(), bits, index=index.cuda(), **options)
    theirs = quantize(x, bits, index=index, **options)
    assert torch.equal(ours.data.cpu(), theirs.data)
    assert torch.equal(ours.params.cpu().view(torch.int16), theirs.params.view(torch.int16))
    values = dequantize(*ours).cpu().view(torch.int32)
    finite = theirs.params.isfinite().all(1)
    assert int(finite.sum()) == num_rows - 2
    assert torch.equal(values[finite], dequantize(*theirs).view(torch.int32)[finite])


@pytest.mark.parametrize("dim", [128, 50])
@pytest.mark.parametrize("weighted", [True, False])
def test_spmm_equals_numba(dim, weighted):
    g = torch.Generator().manual_seed(1)
    dst, src = (torch.randint(0, 20_000, (400_000,), generator=g) for _ in range(2))
    weight = torch.rand(400_000, generator=g) if weighted else None
    csr = CSR.from_coo(dst, src, 20_000, 20_000, weight)
    x = torch.randn(20_000, dim, generator=g)
    for transpose in (False, True):
        for reduce in ("sum", "mean"):
            ours = spmm(csr.to("cuda"), x.cuda(), reduce=reduce, transpose=transpose).cpu()
            theirs = spmm(csr, x, reduce=reduce, transpose=transpose)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_from_coo_on_the_device_equals_the_cpu():
    g = torch.Generator().manual_seed(2)
    dst, src = (torch.randint(0, 3000, (50_000,), generator=g) for _ in range(2))
    ours, theirs = (
        CSR.from_coo(dst.to(device), src.to(device), 3000, 3000) for device in ("cuda", "cpu")
    )
    assert torch.equal(ours.indptr.cpu(), theirs.indptr)
    assert torch.equal(ours.indices.cpu(), theirs.indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gather_and_scatter_add_equal_numba(dtype):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(50_000, 130, generator=g).to(dtype)
    index = torch.randint(0, 50_000, (100_000,), generator=g)
    rows = gather(x.cuda(), index.cuda())
    assert torch.equal(rows.cpu(), x[index])
    ours = scatter_add(torch.zeros_like(x).cuda(), index.cuda(), rows).cpu()
    theirs = scatter_add(torch.zeros_like(x), index, x[index])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=eps, atol=max(eps, 1e-5))


@pytest.mark.parametrize("policy", ["recent", "uniform"])
@pytest.mark.parametrize("time_dtype", [torch.int64, torch.float64])
@pytest.mark.parametrize("is_pinned", [False, True])
def test_temporal_samples_equal_numba(policy, time_dtype, is_pinned):
    g = torch.Generator().manual_seed(3)
    src, dst = (torch.randint(0, 5_000, (300_000,), generator=g) for _ in range(2))
    times = torch.randint(0, 100_000, (300_000,), generator=g).sort().values.to(time_dtype)
    host = Adjacency.from_edges(src, dst, times, num_nodes=5_000)
    columns = {
        name: getattr(host, name).cuda()
        for name in ("table", "num_blocks", "directory", "since", "neighbors", "times", "eids")
    }
    if is_pinned:
        columns |= {n: getattr(host, n).pin_memory() for n in ("neighbors", "times", "eids")}
    device = Adjacency(**columns)
    roots = torch.randint(-1, 5_010, (40_000,), generator=g)
    bounds = torch.randint(0, 100_000, (40_000,), generator=g).to(time_dtype)
    for since in (None, bounds - 5_000):
        options = {"policy": policy, "replace": False, "key": 7}
        theirs = sample(host, roots, bounds, 10, since=since, **options)
        since_there = None if since is None else since.cuda()
        ours = sample(device, roots.cuda(), bounds.cuda(), 10, since=since_there, **options)
        for name in ("nodes", "times", "dt", "eids", "row"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name)), name
    ends = torch.randint(0, 100_000, (5_000,), generator=g).to(time_dtype)
    assert torch.equal(count_before(device, ends.cuda()).cpu(), count_before(host, ends))


def test_attention_equals_numba():
    g = torch.Generator().manual_seed(4)
    num_roots, num_edges, num_rows = 20_000, 200_000, 5_000
    leaves = {
        "query": torch.randn(num_roots, 2, 216, generator=g) / 10,
        "bias": torch.randn(num_roots, 2, generator=g),
        "rows": torch.randn(num_rows, 100, generator=g),
        "frequency": 10 ** torch.linspace(0, -9, 100),
        "phase": torch.randn(100, generator=g),
        "edge_rows": torch.randn(1_000, 16, generator=g),
    }
    index = {
        "starts": torch.arange(0, num_edges + 1, 10),
        "neighbors": torch.randint(0, num_rows, (num_edges,), generator=g),
        "edge_index": torch.randint(0, 1_000, (num_edges,), generator=g),
        "dt": torch.rand(num_edges, generator=g, dtype=torch.float64) * 1e6,
    }
    weight = torch.randn(num_roots, 2, 216, generator=g)
    found = []
    for device in ("cuda", "cpu"):
        asked = {name: leaf.to(device).requires_grad_() for name, leaf in leaves.items()}
        there = {name: column.to(device) for name, column in index.items()}
        edges = SimpleNamespace(**there, edge_rows=asked["edge_rows"])
        inputs = {name: leaf for name, leaf in asked.items() if name != "edge_rows"}
        # No bend at zero, where rounding would choose between two gradients of a score.
        out = attend(**inputs, edges=edges, slope=1.0)
        grads = torch.autograd.grad((out * weight.to(device)).sum(), list(asked.values()))
        found.append([out, *grads])
    for name, *pair in zip(["out", *leaves], *found, strict=True):
        ours, theirs = (tensor.detach().cpu() for tensor in pair)
        # Sums of up to 200,000 gradients are compared by their size, not by their smallest entry.
        atol = 2e-5 * max(1.0, float(theirs.abs().max()))
        assert float((ours - theirs).abs().max()) <= atol, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_probs_of_tokens_equal_those_of_all_logits(dtype):
    g = torch.Generator().manual_seed(5)
    rows, vocabulary, dim = 1_000, 50_257, 400
    hidden = torch.randn(rows, dim, generator=g).to(dtype)
    weight = (torch.randn(vocabulary, dim, generator=g) / 10).to(dtype)
    tokens = torch.randint(0, vocabulary, (rows,), generator=g)
    grads = torch.randn(2, rows, generator=g)
    found = []
    for device, wide in (("cuda", dtype), ("cpu", torch.float32)):
        inputs = hidden.to(device, wide), weight.to(device, wide), tokens.to(device)
        said = answer(partial_sums(*inputs, 0.7))
        given = gradients(*inputs, 0.7, said, *grads.to(device))
        found.append([said.log_probs, said.entropy, *given])
    names = ("log_probs", "entropy", "grad_hidden", "grad_weight")
    for name, ours, theirs in zip(names, *found, strict=True):
        # Answers are float32 whatever the type; a gradient is rounded twice, as a slope and in all.
        eps = 2e-6 if name in names[:2] else max(2e-6, 2 * torch.finfo(dtype).eps)
        atol = 10 * eps * max(1.0, float(theirs.abs().max()))
        assert float((ours.cpu().float() - theirs).abs().max()) <= atol, name


def test_decoding_equals_numba():
    g = torch.Generator().manual_seed(6)
    num_places, kv_heads, dim = 256, 4, 128
    angle = torch.randn(num_places, dim // 2, generator=g)
    inputs = (
        torch.randn(num_places, 6 * kv_heads, dim, generator=g),
        angle.cos(),
        angle.sin(),
        torch.randn(2, 32, kv_heads, dim, 512, generator=g),
        torch.randn(2, num_places, kv_heads, dim, 300, generator=g),
    )
    places = decode.Places(
        torch.randperm(num_places, generator=g),
        torch.randint(32, (num_places,), generator=g),
        torch.randint(1, 513, (num_places,), generator=g),
        torch.randint(300, (num_places,), generator=g),
    )
    qkv, cos, sin, prompt, own = (tensor.cuda() for tensor in inputs)
    on_gpu = decode.Places(*(index.cuda() for index in places))
    ours = decode.attend(qkv, cos, sin, prompt, own, on_gpu)
    theirs = decode.attend(*inputs, places)
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.cpu(), inputs[4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [64, 128, 100])
@pytest.mark.parametrize("bits", BITS)
def test_products_with_packed_weights_equal_numba(bits, group_size, dtype):
    g = torch.Generator().manual_seed(6)
    packed = pack(torch.randn(1_000, 1_500, generator=g), bits, group_size=group_size)
    there = packed.to("cuda")
    for tokens in (1, 70):
        x = torch.randn(tokens, 1_500, generator=g).to(dtype)
        ours, theirs = matmul(x.cuda(), there).cpu().float(), matmul(x, packed).float()
        most = max(1e-5, 2 * torch.finfo(dtype).eps) * float(theirs.abs().max())
        assert float((ours - theirs).abs().max()) <= most
    assert torch.equal(unpack(there, dtype).cpu(), unpack(packed, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_steps_as_numba_does_and_a_hundred_million_elements_return(dtype):
    hyper = adam.Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=False)
    n = 100_000_000
    param, grad = (torch.randn(n, device="cuda").to(dtype) for _ in range(2))
    of = adam.AdamTensors(param, grad, torch.zeros_like(param), torch.zeros_like(param))
    residual = adam.new_residual(param)
    for number in range(1, 4):
        grad.normal_()
        before = [tensor.clone() for tensor in of]
        adam.step([of], [number], hyper, [residual])
        part = slice(n - 1_000_003, n)
        theirs = adam.AdamTensors(*(tensor[part].cpu() for tensor in before))
        adam.step([theirs], [number], hyper)
        assert all(torch.equal(a[part].cpu(), b) for a, b in zip(of, theirs, strict=True))
        adam.undo([of], [number], hyper, [residual])
        assert all(map(torch.equal, of, before))
        adam.step([of], [number], hyper, [residual])


def test_digests_of_a_device_are_those_of_numba():
    x = torch.randn(50_000_003, device="cuda")
    assert digest([x, x[1:].half()]) == digest([x.cpu(), x[1:].half().cpu()])


def skewed_csr(num_rows: int, num_edges: int) -> CSR:
    """Degrees from 0 to some ten thousand."""
    g = torch.Generator().manual_seed(7)
    dst = (torch.rand(num_edges, generator=g) ** 3 * num_rows).long()
    return CSR.from_coo(dst, torch.randint(0, 30_000, dst.shape, generator=g), num_rows, 30_000)


@pytest.mark.parametrize("fanout", [-1, 0, 1, 10, 25, 100])
def test_sampled_neighbours_are_those_of_numba(fanout):
    csr = skewed_csr(20_000, 1_000_000)
    rows = torch.randint(0, 20_000, (15_000,), generator=torch.Generator().manual_seed(8))
    ours = sample_neighbors(csr.to("cuda"), rows.cuda(), fanout, 0xDEADBEEFCAFEF00D)
    theirs = sample_neighbors(csr, rows, fanout, 0xDEADBEEFCAFEF00D)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
    ids = csr.indices[theirs[1]]
    ours = relabel(ids.cuda(), 30_000, rows.cuda())
    theirs = relabel(ids, 30_000, rows)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (4, 16), (3, 50)])
def test_edge_softmax_and_its_state_equal_numba_with_gradients(heads, dim, dtype):
    csr = skewed_csr(5_000, 200_000)
    logits = torch.randn(200_000, heads, dtype=dtype) * 3
    logits[::17] = -torch.inf
    values = torch.randn(200_000, heads, dim, dtype=dtype)
    outcomes = []
    for device in ("cuda", "cpu"):
        indptr = csr.indptr.to(device)
        leaves = [each.to(device).requires_grad_() for each in (logits, values)]
        weights, state = edge_softmax(indptr, leaves[0]), softmax_state(indptr, *leaves)
        loss = weights.square().sum() + (state.weighted / (state.total[..., None] + 1)).sum()
        outcomes.append([weights, *state, *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [50, 128, 300])
def test_aggregations_equal_numba_with_gradients(dim, dtype):
    csr = skewed_csr(5_000, 200_000)
    x = torch.randn(30_000, dim).to(dtype)
    x[3] = torch.nan
    found, expected = (
        segment_max(csr.to("cuda"), x.cuda(), empty=-torch.inf),
        segment_max(csr, x, empty=-torch.inf),
    )
    assert torch.equal(found.argmax.cpu(), expected.argmax)
    torch.testing.assert_close(found.out.cpu(), expected.out, rtol=0, atol=0, equal_nan=True)
    x[3] = 0
    for reduce in ("sum", "mean", "max"):
        outcomes = []
        for device in ("cuda", "cpu"):
            leaf = x.to(device).requires_grad_()
            out = aggregate(csr.to(device), leaf, reduce)
            outcomes.append([out, *torch.autograd.grad(out.square().sum(), leaf)])
        eps = 2 * torch.finfo(dtype).eps
        for ours, theirs in zip(*outcomes, strict=True):
            most = max(1e-5, eps) * float(theirs.abs().max())
            assert float((ours.cpu() - theirs).abs().max()) <= most


@pytest.mark.parametrize("dim", [1, 50, 64, 1500])
def test_row_adam_and_adagrad_step_as_numba_does(dim):
    g = torch.Generator().manual_seed(9)
    tables = [torch.randn(30_000, dim, generator=g), *torch.zeros(2, 30_000, dim)]
    counts, totals = torch.zeros(30_000, dtype=torch.int32), torch.zeros(30_000)
    there = [tensor.cuda() for tensor in (*tables, counts, totals)]
    for _ in range(4):
        rows = torch.randperm(30_000, generator=g)[:7_000]
        grads = torch.randn(7_000, dim, generator=g)
        here = [*tables, counts, rows, grads]
        row_adam.step(*here, lr=0.1, weight_decay=0.01)
        row_adam.adagrad_step(tables[0], totals, rows, grads, lr=0.1)
        given = [*there[:4], rows.cuda(), grads.cuda()]
        row_adam.step(*given, lr=0.1, weight_decay=0.01)
        row_adam.adagrad_step(there[0], there[4], rows.cuda(), grads.cuda(), lr=0.1)
    for ours, theirs in zip(there, (*tables, counts, totals), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "b_rows", "columns"), [(4096, 2048, 1000), (77, 300, 129)])
def test_scaled_products_equal_the_cpus(rows, b_rows, columns, dtype):
    x, w = torch.randn(rows, columns), torch.randn(b_rows, columns) / 30
    x[5], x[7, 3] = 0, torch.nan
    bias = torch.randn(b_rows)
    outcomes = []
    for device in ("cuda", "cpu"):
        a, b = (quantize_rows(each.to(device), dtype) for each in (x, w))
        out = scaled_matmul(a, b, bias.to(device)).cpu()
        outcomes.append([a.codes.float().cpu(), a.scale.cpu(), out])
    (codes, scale, out), (expected_codes, expected_scale, expected) = outcomes
    assert torch.equal(codes, expected_codes)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    tolerance = 1e-5 if dtype == torch.int8 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("num_experts", "k"), [(64, 2), (513, 8)])
def test_slots_of_tokens_are_those_of_numba(num_experts, k):
    g = torch.Generator().manual_seed(7)
    experts = torch.randint(0, num_experts, (100_003, k), generator=g)
    used = torch.randint(0, 1000, (num_experts,), generator=g)
    ours = route(experts.cuda(), num_experts, used.cuda())
    for on_device, expected in zip(ours, route(experts, num_experts, used), strict=True):
        assert torch.equal(on_device.cpu(), expected)
