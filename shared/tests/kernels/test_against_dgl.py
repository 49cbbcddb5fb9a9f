import pytest
import torch

from shared.kernels.segment import CSR, spmm


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
