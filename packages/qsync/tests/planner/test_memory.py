import pytest

from qsync.planner.memory import SavedTensor, count_saved_bytes
from shared.errors import DataError


def count(tensors, **precisions):
    return count_saved_bytes(tensors, lambda name: precisions.get(name, "fp32"))


LINEAR = [
    SavedTensor(op="fc", source="x", numel=1000, role="operand", num_scales=10),
    SavedTensor(op="fc", source="fc.weight", numel=200, role="weight", num_scales=20),
]


@pytest.mark.parametrize(
    ("precision", "num_bytes"),
    [("fp32", 4000), ("bf16", 2000 + 400), ("fp16", 2400), ("int8", 1000 + 40 + 200 + 80)],
)
def test_linear_keeps_its_operands_in_its_precision(precision, num_bytes):
    assert count(LINEAR, fc=precision) == num_bytes


def test_operators_share_an_input_that_none_of_them_casts():
    tensors = [SavedTensor(op=name, source="x", numel=100, role="operand") for name in "qkv"]
    assert count(tensors) == 400
    assert count(tensors, q="bf16") == 400 + 200
    assert count(tensors, q="bf16", k="bf16", v="bf16") == 600
    # An input that arrives in bf16 is kept as it is by all three.
    assert count(tensors, x="bf16", q="bf16", k="bf16", v="bf16") == 200
    assert count(tensors, x="int8", q="int8", k="int8", v="int8") == 3 * 104


def test_results_follow_their_operator_and_constants_stay():
    tensors = [
        SavedTensor(op="relu", source="relu", numel=100, role="result"),
        SavedTensor(op="drop", source="mask", numel=100, role="constant"),
        SavedTensor(op="fc", source="relu", numel=100, role="operand"),
    ]
    assert count(tensors) == 400 + 100
    assert count(tensors, relu="bf16", fc="bf16") == 200 + 100
    assert count(tensors, relu="bf16") == 200 + 100 + 400


def test_bad_record_is_refused():
    with pytest.raises(DataError, match="saved tensor of 'fc': expected a role of operand"):
        SavedTensor(op="fc", source="x", numel=-1, role="operand")
