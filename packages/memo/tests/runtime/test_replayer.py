"""What the second run of a forward answers and compares, by calls that are made here."""

import pytest
import torch
from torch.nn import functional

from memo.runtime.recording.calls import NotRepeatable, RecordedCall, SavedView
from memo.runtime.recording.fingerprint import Fingerprint
from memo.runtime.recording.items import Item
from memo.runtime.recording.replayer import Complete, Replayer

ROWS, KEPT, WIDTH = 8, 4, 6


def make_arguments():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(
        WIDTH, WIDTH, generator=generator
    )


def record_product(rows, weight, first=0):
    """A product whose first rows are kept, and which saves its rows; the other ones are to be computed again."""
    out = functional.linear(rows, weight)
    item = Item.of("weight", [out], KEPT, ROWS)
    item.tensors = [out.clone()]
    item.tensors[0][KEPT:] = 0
    view = SavedView(0, tuple(rows.shape), rows.stride(), 0, rows.dtype)
    tail = Fingerprint(out[KEPT:], is_whole=True)
    return RecordedCall(first, first + 1, (view,), item, requires_grad=True, tail=tail), out


def make_replayer(rows, call, *others, is_exact=True):
    fingerprints = [Fingerprint(one, is_whole=True) for one in (rows, *others)]
    return Replayer([call], fingerprints, is_exact=is_exact)


def computing(change):
    """A product whose result is changed."""
    return lambda *args: change(functional.linear(*args))


@pytest.fixture
def product(monkeypatch):
    """Has a function taken for the product that it stands for."""

    def take(function):
        monkeypatch.setattr("memo.runtime.recording.replayer.PRODUCTS", {function: (0, 1)})
        return function

    return take


def test_rows_that_are_not_kept_are_computed_and_the_others_are_not():
    rows, weight = make_arguments()
    call, out = record_product(rows, weight)
    replayer = make_replayer(rows, call, out)
    answer = replayer.product(functional.linear, (rows, weight), {})
    torch.testing.assert_close(answer, out)
    assert answer.requires_grad
    assert torch.equal(replayer.saved[0], rows)
    assert not replayer.differs


@pytest.mark.parametrize("is_exact", [True, False])
def test_rows_that_come_out_otherwise_the_second_time_are_noticed(product, is_exact):
    """Nothing that is saved depends on them, so that they are compared themselves."""
    rows, weight = make_arguments()
    call, out = record_product(rows, weight)
    replayer = make_replayer(rows, call, out, is_exact=is_exact)
    with pytest.raises(Complete):
        replayer.product(product(computing(lambda one: one + 1)), (rows, weight), {})
    assert replayer.differs
    assert torch.equal(replayer.saved[-1], functional.linear(rows, weight)[KEPT:] + 1)


@pytest.mark.parametrize("is_rounding", [True, False])
def test_after_rows_that_round_otherwise_rounding_is_allowed(product, is_rounding):
    rows, weight = make_arguments()
    call, out = record_product(rows, weight)
    saved = out.tanh()
    replayer = make_replayer(rows, call, saved, out)
    change = (lambda one: one * (1 + 1e-6)) if is_rounding else (lambda one: one)
    replayer.product(product(computing(change)), (rows, weight), {})
    if is_rounding:
        replayer.save(saved * (1 + 1e-6))
        assert not replayer.differs
    else:
        with pytest.raises(Complete):
            replayer.save(saved * (1 + 1e-6))
        assert replayer.differs


def test_the_forward_ends_with_the_last_saved_tensor():
    rows, weight = make_arguments()
    call, out = record_product(rows, weight)
    replayer = make_replayer(rows, call, out)
    replayer.product(functional.linear, (rows, weight), {})
    with pytest.raises(Complete):
        replayer.save(out)
    assert not replayer.differs


def test_the_forward_ends_with_the_first_saved_tensor_that_differs():
    rows, weight = make_arguments()
    call, out = record_product(rows, weight)
    replayer = make_replayer(rows, call, out)
    with pytest.raises(Complete):
        replayer.product(functional.linear, (rows + 1, weight), {})
    assert replayer.differs
    assert len(replayer.saved) == 1


def test_calls_that_come_elsewhere_or_are_more_than_at_first_are_refused():
    rows, weight = make_arguments()
    call, out = record_product(rows, weight, first=1)
    with pytest.raises(NotRepeatable, match="takes another way"):
        make_replayer(rows, call, out).product(functional.linear, (rows, weight), {})
    with pytest.raises(NotRepeatable, match="takes another way"):
        Replayer([], [], is_exact=True).product(functional.linear, (rows, weight), {})
