import pytest
import torch

from shared.kernels.edge_softmax import edge_softmax
from shared.kernels.neighbors import sample
from shared.kernels.segment import CSR, aggregate, spmm


@pytest.mark.parametrize("dim", [1, 50, 128])
def test_spmm_equals_dgl_forward_and_transposed(dim):
    dgl = pytest.importorskip("dgl", reason="dgl is an extra")
    g = torch.Generator().manual_seed(0)
    dst, src = torch.randint(0, 40, (500,), generator=g), torch.randint(0, 60, (500,), generator=g)
    weight, x = torch.rand(500, generator=g), torch.randn(60, dim, generator=g)
    csr = CSR.from_coo(dst, src, 40, 60, weight)
    graph = dgl.create_block((src, dst), num_src_nodes=60, num_dst_nodes=40)
    expected = dgl.ops.u_mul_e_sum(graph, x, weight[:, None])
    torch.testing.assert_close(spmm(csr, x), expected, rtol=1e-5, atol=1e-5)
    plain = CSR(csr.indptr, csr.indices, 60)
    torch.testing.assert_close(spmm(plain, x), dgl.ops.copy_u_sum(graph, x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        spmm(plain, x, reduce="mean"), dgl.ops.copy_u_mean(graph, x), rtol=1e-5, atol=1e-5
    )
    back = dgl.create_block((dst, src), num_src_nodes=40, num_dst_nodes=60)
    y = torch.randn(40, dim, generator=g)
    torch.testing.assert_close(
        spmm(csr, y, transpose=True),
        dgl.ops.u_mul_e_sum(back, y, weight[:, None]),
        rtol=1e-5,
        atol=1e-5,
    )


def test_edge_softmax_and_maximum_equal_dgl_with_gradients():
    dgl = pytest.importorskip("dgl", reason="dgl is an extra")
    g = torch.Generator().manual_seed(0)
    dst, src = torch.randint(0, 40, (500,), generator=g), torch.randint(0, 60, (500,), generator=g)
    csr = CSR.from_coo(dst, src, 41, 60)
    row = torch.repeat_interleave(torch.arange(41), csr.indptr.diff())
    # Edges in the order of the matrix, so that both sides have the same.
    graph = dgl.create_block((csr.indices, row), num_src_nodes=60, num_dst_nodes=41)
    logits, grad = torch.randn(500, 3, generator=g), torch.randn(500, 3, generator=g)
    x, of_out = torch.randn(60, 7, generator=g), torch.randn(41, 7, generator=g)
    outcomes = []

    def theirs_max(x):
        # This operator leaves -inf in rows without edges, where message passing has 0.
        out = dgl.ops.copy_u_max(graph, x)
        return out.masked_fill(out == -torch.inf, 0)

    for softmax, maximum in (
        (lambda e: edge_softmax(csr.indptr, e), lambda x: aggregate(csr, x, "max")),
        (lambda e: dgl.ops.edge_softmax(graph, e), theirs_max),
    ):
        leaves = logits.clone().requires_grad_(), x.clone().requires_grad_()
        outs = softmax(leaves[0]), maximum(leaves[1])
        outcomes.append([*outs, *torch.autograd.grad(outs, leaves, (grad, of_out))])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_samples_are_distributed_as_dgls_are():
    """Chi-square of how often each edge of a row of 20 is among 6 drawn, for both samplers."""
    dgl = pytest.importorskip("dgl", reason="dgl is an extra")
    num_rows, degree, fanout = 3000, 20, 6
    src = torch.arange(degree).repeat(num_rows)
    dst = torch.arange(num_rows).repeat_interleave(degree)
    graph = dgl.heterograph(
        {("u", "e", "v"): (src, dst)}, num_nodes_dict={"u": degree, "v": num_rows}
    )
    theirs = dgl.sampling.sample_neighbors(graph, {"v": torch.arange(num_rows)}, fanout)
    csr = CSR.from_coo(dst, src, num_rows, degree)
    _, entries = sample(csr, torch.arange(num_rows), fanout, 5)
    expected = num_rows * fanout / degree
    variance = expected * (1 - fanout / degree) * degree / (degree - 1)
    for drawn in (csr.indices[entries], theirs.edges()[0]):
        counts = torch.bincount(drawn, minlength=degree)
        assert int(counts.sum()) == num_rows * fanout
        # Of 19 degrees of freedom: one in a million exceeds 66.
        assert float(((counts - expected) ** 2).sum()) / variance < 66
