"""Kernels of sampled heterogeneous graphs on one device: sampling, softmax over edges, maxima, row Adam."""

from functools import partial
from typing import Any

from gpu_clock import Row, measure


def hetero_rows(device: str, num_nodes: int, table_rows: int, turns: int) -> list[Row]:
    """Steps of a mini-batch beside a copy, and beside what torch offers for each.

    Args:
        device: where they run.
        num_nodes: of a random graph of degree 30.
        table_rows: of a table of learnable rows, a twentieth of which a step touches.
        turns: timed, after two that compile.
    """
    import torch

    from shared.kernels.segment import CSR

    src, dst = torch.randint(0, num_nodes, (2, 30 * num_nodes), device=device)
    csr = CSR.from_coo(dst, src, num_nodes, num_nodes)
    return [
        *_sample_rows(csr, turns),
        *_softmax_rows(csr, turns),
        _maximum_row(csr, turns),
        *_adam_rows(device, table_rows, turns),
    ]


def _copy(x: Any) -> tuple[Any, int]:
    import torch

    out = torch.empty_like(x)
    return (lambda: out.copy_(x)), 2 * x.nbytes


def _sample_rows(csr: Any, turns: int) -> list[Row]:
    import torch

    from shared.kernels.neighbors import relabel, sample

    host = csr.to("cpu")
    seeds = torch.randperm(csr.num_rows, device=csr.indptr.device)
    x = torch.empty(max(10 * csr.num_rows, 16), dtype=torch.int64, device=seeds.device)
    indptr, entries = sample(csr, seeds, 10, 7)
    expected = sample(host, seeds.cpu(), 10, 7)
    ids = csr.indices[entries]
    unique, positions = relabel(ids, csr.num_cols, seeds)
    return [
        measure(
            "sample of 10 in-edges",
            f"{len(seeds)} rows of degree 30",
            partial(sample, csr, seeds, 10, 7),
            # Of a row its id and two bounds; of an entry what is written.
            bytes_moved=32 * len(seeds) + 8 * len(entries),
            copy=_copy(x),
            correct=torch.equal(indptr.cpu(), expected[0])
            and torch.equal(entries.cpu(), expected[1]),
            turns=turns,
        ),
        measure(
            "relabel by first appearance",
            f"{len(seeds)} rows of degree 30, 10 ids each",
            partial(relabel, ids, csr.num_cols, seeds),
            bytes_moved=24 * len(ids),
            copy=_copy(x),
            correct=torch.equal(unique[positions], ids),
            turns=turns,
            baseline=(
                "torch.unique, which sorts",
                lambda: torch.unique(torch.cat([seeds, ids]), return_inverse=True),
            ),
        ),
    ]


def _softmax_rows(csr: Any, turns: int) -> list[Row]:
    import torch

    from shared.kernels.edge_softmax import edge_softmax, reference, softmax_state

    heads, dim = 4, 16
    logits = torch.randn(csr.nnz, heads, device=csr.indptr.device, requires_grad=True)
    values = torch.randn(csr.nnz, heads, dim, device=csr.indptr.device, requires_grad=True)
    shape = f"{csr.num_rows} rows, {csr.nnz} edges, {heads} heads"

    def weights() -> Any:
        return torch.autograd.grad(edge_softmax(csr.indptr, logits).square().sum(), logits)[0]

    def their_weights() -> Any:
        with torch.no_grad():
            weights = reference.edge_softmax(csr.indptr, logits)
            return reference.edge_softmax_backward(csr.indptr, weights, 2 * weights)

    def means() -> Any:
        state = softmax_state(csr.indptr, logits, values)
        return torch.autograd.grad((state.weighted / state.total[..., None]).sum(), values)[0]

    def their_means() -> Any:
        with torch.no_grad():
            _, powers, total, weighted = reference.softmax_state(csr.indptr, logits, values)
            grad = (1 / total)[..., None].expand_as(weighted)
            return reference.softmax_state_backward(csr.indptr, powers, values, -total, grad)[1]

    return [
        measure(
            name,
            size,
            ours,
            bytes_moved=moved,
            copy=_copy(values.detach()),
            correct=bool(torch.allclose(ours(), theirs(), rtol=1e-4, atol=1e-5)),
            turns=turns,
            baseline=("scatters in torch", theirs),
        )
        for name, size, ours, theirs, moved in (
            ("edge softmax, with gradient", shape, weights, their_weights, 9 * logits.nbytes),
            (
                "mergeable softmax of values, with gradients",
                f"{shape}, D = {dim}",
                means,
                their_means,
                3 * values.nbytes + 5 * logits.nbytes,
            ),
        )
    ]


def _maximum_row(csr: Any, turns: int) -> Row:
    import torch

    from shared.kernels.segment import segment_max

    dim = 64
    x = torch.randn(csr.num_cols, dim, device=csr.indptr.device)
    rows = torch.repeat_interleave(csr.indptr.diff())[:, None].expand(-1, dim)

    def scatter() -> Any:
        out = torch.full((csr.num_rows, dim), -torch.inf, device=x.device)
        return out.scatter_reduce_(0, rows, x[csr.indices], "amax")

    return measure(
        "maximum over in-edges, with its entry",
        f"{csr.num_rows} nodes, {csr.nnz} edges, D = {dim}",
        partial(segment_max, csr, x, empty=-torch.inf),
        bytes_moved=csr.nnz * (4 * dim + 8) + 12 * csr.num_rows * dim,
        copy=_copy(x),
        correct=torch.equal(segment_max(csr, x, empty=-torch.inf).out, scatter()),
        turns=turns,
        baseline=("gather and scatter_reduce in torch", scatter),
    )


def _adam_rows(device: str, table_rows: int, turns: int) -> list[Row]:
    import torch

    from shared.kernels import row_adam

    dim, touched = 64, max(table_rows // 20, 2)
    weight = torch.randn(table_rows, dim, device=device)
    first, second = torch.zeros(2, table_rows, dim, device=device)
    counts = torch.zeros(table_rows, dtype=torch.int32, device=device)
    totals = torch.zeros(table_rows, device=device)
    rows = torch.randperm(table_rows, device=device)[:touched]
    grads = torch.randn(touched, dim, device=device)
    theirs = torch.nn.Parameter(weight.clone())
    theirs.grad = torch.sparse_coo_tensor(rows[None], grads, weight.shape, check_invariants=True)
    sparse = torch.optim.SparseAdam([theirs], lr=1e-3)
    run = partial(row_adam.step, weight, first, second, counts, rows, grads, lr=1e-3)
    run()
    sparse.step()
    correct = bool(torch.allclose(weight, theirs, rtol=1e-5, atol=1e-6))
    shape = f"{touched} of {table_rows} rows, D = {dim}, float32"
    return [
        measure(
            "Adam of touched rows",
            shape,
            run,
            bytes_moved=7 * grads.nbytes + 24 * touched,
            copy=_copy(weight),
            correct=correct,
            turns=turns,
            baseline=("torch's SparseAdam", sparse.step),
            aim=5,
        ),
        measure(
            "row-wise AdaGrad of touched rows",
            shape,
            partial(row_adam.adagrad_step, weight, totals, rows, grads, lr=1e-3),
            bytes_moved=3 * grads.nbytes + 16 * touched,
            copy=_copy(weight),
            correct=correct,
            turns=turns,
        ),
    ]
