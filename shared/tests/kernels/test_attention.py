"""Attention in every form against one root at a time, by hand."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from shared.errors import DataError
from shared.kernels import registry
from shared.kernels.attention import attend, cpu, reference

every_form = pytest.mark.parametrize("form", ["cpu", "gpu", "reference"], indirect=True)


@dataclass(frozen=True)
class Edges:
    starts: Tensor
    neighbors: Tensor
    edge_rows: Tensor
    edge_index: Tensor
    dt: Tensor


@pytest.fixture(autouse=True)
def one_thread(request):
    """Handing such small tensors to other threads takes longer than the work."""
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))  # noqa: PT021
    torch.set_num_threads(1)


def edges_of(counts, num_rows=7, edge_dim=3, seed=0, span=50.0) -> Edges:
    draw = torch.Generator().manual_seed(seed)
    num_edges = sum(counts)
    return Edges(
        starts=torch.tensor([0, *counts]).cumsum(0),
        neighbors=torch.randint(num_rows, (num_edges,), generator=draw),
        edge_rows=torch.randn(5, edge_dim, generator=draw).requires_grad_(),
        edge_index=torch.randint(5, (num_edges,), generator=draw),
        dt=torch.rand(num_edges, generator=draw, dtype=torch.float64) * span,
    )


def leaves_of(edges, dim, time_dim, heads, num_rows=7, seed=1) -> list[Tensor]:
    """Query, bias, rows, frequency and phase."""
    draw = torch.Generator().manual_seed(seed)
    num_roots, width = len(edges.starts) - 1, dim + edges.edge_rows.shape[1] + time_dim
    made = [
        torch.randn(num_roots, heads, width, generator=draw),
        torch.randn(num_roots, heads, generator=draw),
        torch.randn(num_rows, dim, generator=draw),
        10 ** -torch.arange(time_dim).float(),
        torch.randn(time_dim, generator=draw),
    ]
    return [tensor.requires_grad_() for tensor in made]


def doubled(edges, leaves) -> tuple[Edges, list[Tensor]]:
    features, *exact = (
        leaf.detach().double().requires_grad_() for leaf in (edges.edge_rows, *leaves)
    )
    return replace(edges, edge_rows=features), exact


def by_hand(query, bias, rows, edges, frequency, phase, slope) -> Tensor:
    found = []
    for root in range(len(query)):
        mine = slice(*edges.starts[root : root + 2].tolist())
        angle = edges.dt[mine, None] * frequency + phase
        features = edges.edge_rows[edges.edge_index[mine]]
        inputs = torch.cat([rows[edges.neighbors[mine]], features, angle.cos()], 1)
        score = F.leaky_relu(inputs @ query[root].T + bias[root], slope)
        found.append(score.softmax(0).T @ inputs)
    return torch.stack(found) if found else query * 0


def run(attend, edges, leaves, slope, device="cpu") -> tuple[Tensor, list[Tensor | None]]:
    """The result and a gradient of each leaf and of the edges' features, None where not asked."""
    moved = {name: column.detach().to(device) for name, column in vars(edges).items()}
    there = [leaf.detach().to(device) for leaf in leaves]
    asked = [*there, moved["edge_rows"]]
    for tensor, leaf in zip(asked, [*leaves, edges.edge_rows], strict=True):
        tensor.requires_grad_(leaf.requires_grad)
    query, bias, rows, frequency, phase = there
    out = attend(query, bias, rows, Edges(**moved), frequency, phase, slope)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=device).view(out.shape)
    (out * weight).sum().backward()
    grads = [tensor.grad if tensor.grad is None else tensor.grad.cpu() for tensor in asked]
    return out.detach().cpu(), grads


def assert_by_hand(attend, edges, leaves, slope, device="cpu", atol=2e-5):
    expected, expected_grads = run(by_hand, *doubled(edges, leaves), slope)
    out, grads = run(attend, edges, leaves, slope, device)
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=atol)
    for grad, wanted, leaf in zip(grads, expected_grads, [*leaves, edges.edge_rows], strict=True):
        # Of nothing, or of what no root reads, one form has zeros and another has none.
        grad, wanted = (torch.zeros_like(leaf) if g is None else g for g in (grad, wanted))
        scale = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(
            grad.double(), wanted.double(), atol=atol * (1 + scale), rtol=atol
        )


@settings(max_examples=25)
@given(
    counts=st.lists(st.integers(0, 4), min_size=0, max_size=40),
    dim=st.sampled_from([0, 1, 5, 33]),
    edge_dim=st.sampled_from([0, 3]),
    time_dim=st.sampled_from([0, 2, 19]),
    heads=st.integers(1, 3),
    slope=st.sampled_from([1.0, 0.2]),
)
def test_two_forms_equal_one_root_at_a_time(counts, dim, edge_dim, time_dim, heads, slope):
    edges = edges_of(counts, edge_dim=edge_dim)
    leaves = leaves_of(edges, dim, time_dim, heads)
    assert_by_hand(cpu.attend, edges, leaves, slope)
    assert_by_hand(reference.attend, *doubled(edges, leaves), slope, atol=1e-10)


@every_form
@pytest.mark.parametrize(
    ("counts", "dim", "edge_dim", "time_dim", "heads", "slope"),
    [
        ([3, 0, 5, 1], 5, 3, 2, 2, 0.2),
        ([3, 0, 70, 1, 16], 5, 3, 2, 1, 1.0),
        ([2, 17], 33, 3, 19, 3, 0.2),
        ([4, 2, 0], 0, 3, 2, 2, 0.2),
        ([4, 2, 0], 5, 0, 2, 2, 1.0),
        ([4, 2, 0], 5, 3, 0, 1, 0.2),
        ([4, 2, 0], 1, 0, 0, 3, 1.0),
        ([4, 2], 0, 0, 0, 2, 1.0),
        ([9, 3], 300, 0, 0, 8, 0.2),
        ([0, 0], 5, 3, 2, 2, 0.2),
        ([], 5, 3, 2, 2, 0.2),
    ],
)
def test_every_form_equals_one_root_at_a_time(form, counts, dim, edge_dim, time_dim, heads, slope):
    edges = edges_of(counts, edge_dim=edge_dim)
    leaves = leaves_of(edges, dim, time_dim, heads)
    assert_by_hand(form.of("attention").attend, edges, leaves, slope, form.device)


@pytest.mark.parametrize("form", ["gpu"], indirect=True)
def test_a_program_takes_several_roots(form, monkeypatch):
    kernels = form.of("attention")
    monkeypatch.setattr(kernels, "PROGRAMS", 2)
    edges = edges_of([3, 0, 5, 1, 2])
    assert_by_hand(kernels.attend, edges, leaves_of(edges, 3, 2, 2), 0.2, form.device)


@every_form
@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("has_edges", [False, True])
@pytest.mark.parametrize("has_time", [False, True])
def test_gradients_nobody_asks_for_change_no_other(form, has_rows, has_edges, has_time):
    edges = edges_of([3, 0, 5, 2])
    leaves = leaves_of(edges, 4, 6, 2)
    attend = form.of("attention").attend
    everything = run(attend, edges, leaves, 0.2, form.device)[1]
    is_wanted = [True, True, has_rows, has_time, has_time, has_edges]
    for leaf, wanted in zip([*leaves, edges.edge_rows], is_wanted, strict=True):
        leaf.requires_grad_(wanted)
    some = run(attend, edges, leaves, 0.2, form.device)[1]
    for wanted, grad, other in zip(is_wanted, everything, some, strict=True):
        if wanted:
            torch.testing.assert_close(other, grad, atol=1e-6, rtol=1e-6)
        else:
            assert other is None


@every_form
def test_spans_of_years_keep_their_angle(form):
    edges = edges_of([5, 0, 9], span=3e9)
    leaves = leaves_of(edges, 2, 8, 2)
    out = run(form.of("attention").attend, edges, leaves, 1.0, form.device)[0]
    exact = run(by_hand, *doubled(edges, leaves), 1.0)[0]
    torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=0)


@every_form
def test_scores_beyond_exponentials_keep_their_softmax(form):
    edges = edges_of([40, 3])
    leaves = leaves_of(edges, 2, 2, 2)
    with torch.no_grad():
        leaves[0] *= 8
        leaves[1] += 200
    out = run(form.of("attention").attend, edges, leaves, 1.0, form.device)[0]
    exact = run(by_hand, *doubled(edges, leaves), 1.0)[0]
    torch.testing.assert_close(out.double(), exact, atol=2e-4, rtol=0)


@every_form
def test_strided_input_is_read_in_its_own_steps(form):
    edges = edges_of([3, 0, 5, 2])
    leaves = leaves_of(edges, 4, 6, 2)
    query, bias, rows, frequency, phase = (leaf.detach().to(form.device) for leaf in leaves)
    there = Edges(**{name: column.detach().to(form.device) for name, column in vars(edges).items()})
    strided = {
        name: torch.stack([column, column], -1)[..., 0] for name, column in vars(there).items()
    }
    attend = form.of("attention").attend
    expected = attend(query, bias, rows, there, frequency, phase, 0.2)
    # Columns before rows, each number twice.
    query, bias, rows = (torch.stack([x.mT, x.mT], -1)[..., 0].mT for x in (query, bias, rows))
    out = attend(query, bias, rows, Edges(**strided), frequency, phase, 0.2)
    assert torch.equal(out, expected)


def test_gradients_by_finite_differences():
    edges, leaves = edges_of([3, 0, 1, 2], edge_dim=2, span=2.0), []
    edges, leaves = doubled(edges, leaves_of(edges, 2, 3, 2))

    def output(query, bias, rows, frequency, phase, edge_rows):
        of = replace(edges, edge_rows=edge_rows)
        return attend(query, bias, rows, of, frequency, phase, 0.2)

    assert torch.autograd.gradcheck(output, (*leaves, edges.edge_rows), fast_mode=True)


def test_threads_change_no_bit():
    edges = edges_of([10] * 900, num_rows=50, edge_dim=16)
    leaves = leaves_of(edges, 100, 100, 2, num_rows=50)
    found = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        out, grads = run(attend, edges, leaves, 0.2)
        found.append([out, *grads])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_the_switch_and_the_type_choose_a_form(monkeypatch):
    monkeypatch.setattr(registry, "chosen_forms", {})
    edges = edges_of([3, 0, 5])
    leaves = leaves_of(edges, 4, 2, 2)
    for form, is_double in ((cpu, False), (reference, False), (reference, True)):
        came = doubled(edges, leaves) if is_double else (edges, leaves)
        if form is reference and not is_double:
            monkeypatch.setenv(registry.SWITCH, "reference")
        else:
            monkeypatch.delenv(registry.SWITCH, raising=False)
        assert torch.equal(run(attend, *came, 0.2)[0], run(form.attend, *came, 0.2)[0])


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        ("neighbors", 7, r"expected neighbors in \[0, 7\), got 0 to 7"),
        ("neighbors", -1, r"expected neighbors in \[0, 7\), got -1 to"),
        ("edge_index", 5, r"expected edge_index in \[0, 5\), got 0 to 5"),
        ("edge_index", -2, r"expected edge_index in \[0, 5\), got -2 to"),
    ],
)
def test_an_index_out_of_range_is_refused(index, value, text):
    edges = edges_of([10, 10])
    getattr(edges, index)[:2] = torch.tensor([0, value])
    with pytest.raises(DataError, match=text):
        run(attend, edges, leaves_of(edges, 4, 2, 2), 0.2)


def test_a_query_that_does_not_fit_is_refused():
    edges = edges_of([3, 2])
    query, bias, *others = leaves_of(edges, 4, 2, 2)
    for wrong in ([query[..., :-1], bias], [query[:1], bias[:1]]):
        with pytest.raises(DataError, match=r"expected query \[2, heads, 9\], got \["):
            run(attend, edges, [*wrong, *others], 0.2)
