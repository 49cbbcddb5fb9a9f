import pytest
import torch

from qsync.profiler.casts import fit_casts
from qsync.profiler.transfers import list_buckets, split_parameters
from shared.topology import Link


def test_every_cast_of_a_plan_has_a_fit():
    fits = fit_casts(["int8", "fp16"], torch.device("cpu"))
    # int8 takes and gives bf16 gradients; nothing is cast from int8 codes.
    floats = ("fp32", "bf16", "fp16")
    assert set(fits) == {
        (source, target) for source in floats for target in (*floats, "int8") if source != target
    }
    for fit in fits.values():
        assert fit.time_s(2**22) > fit.time_s(2**12) > 0
    # Quantising reads a tensor twice and divides: it is dearer than dropping bits.
    assert fits["fp32", "int8"].time_s(2**22) > fits["bf16", "fp16"].time_s(2**12)


def test_buckets_are_those_of_ddp():
    from torch import distributed

    shapes = [(300, 400), (400,), (2000, 1000), (1000,), (4000, 1000), (50, 20), (700, 700)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    model = torch.nn.ParameterList(parameters)
    expected, _ = distributed._compute_bucket_assignment_by_size(
        parameters[::-1], [2**20, 25 * 2**20]
    )
    order = parameters[::-1]
    assert [[id(each) for each in bucket] for bucket in split_parameters(model)] == [
        [id(order[i]) for i in indices] for indices in expected
    ]
    assert len(expected) == 2 or len(expected) == 3


def test_buckets_hold_the_operators_of_their_parameters():
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024, bias=False),
        torch.nn.LayerNorm(1024),
        torch.nn.Linear(1024, 512),
        torch.nn.Linear(512, 4).requires_grad_(False),
    )
    buckets = list_buckets(model, ["0", "2", "3"], Link(alpha_s=1.0, beta_s_per_byte=1e-6))
    # The last layer is frozen; the norm's gradient comes just before its predecessor's.
    assert buckets.ops == [("2",), ("0",)]
    sizes = [4 * (512 * 1024 + 512), 4 * (512 * 1024 + 2 * 1024)]
    assert buckets.transfer_s == pytest.approx([1 + 1e-6 * size for size in sizes])


def test_a_tied_weight_is_ready_when_the_first_of_its_operators_has_run_backward():
    table, head = torch.nn.Embedding(9, 6), torch.nn.Linear(6, 9, bias=False)
    head.weight = table.weight
    model = torch.nn.Sequential(table, torch.nn.Linear(6, 6), head)
    buckets = list_buckets(model, ["0", "1", "2"], Link(alpha_s=1.0, beta_s_per_byte=0.0))
    assert buckets.ops == [("1", "0")]
