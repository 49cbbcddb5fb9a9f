"""Fingerprints of tensors: what they notice, and for which tensors they can be made."""

import pytest
import torch

from memo.runtime.recording.fingerprint import Fingerprint, fingerprints_of_turn

GRID = torch.arange(2 * 64 * 48, dtype=torch.float32).view(2, 64, 48)
TENSORS = {
    "rows of odd length": GRID[..., :47].contiguous(),
    "slices": GRID[..., 3:20],
    "transposed": GRID.mT,
    "half": GRID.bfloat16(),
    "bytes": GRID % 3 == 0,
    "complex": torch.complex(GRID, GRID)[:, :8],
    "conjugated": torch.complex(GRID, GRID)[:, :8].conj(),
    "long": GRID.double(),
    "whole numbers": GRID.long(),
    "a row": GRID[0, 0],
    "a number": torch.tensor(3.0),
}


def changed(tensor, index):
    """A contiguous tensor with another entry."""
    flat = tensor.clone().view(-1)
    flat[index] = ~flat[index] if flat.dtype == torch.bool else 2 * flat[index] + 1
    return flat.view(tensor.shape)


@pytest.mark.parametrize("name", TENSORS)
def test_one_entry_that_differs_is_noticed_where_all_bits_are_compared(name):
    tensor = TENSORS[name]
    fingerprint = Fingerprint(tensor, is_whole=True)
    assert fingerprint.matches(tensor, is_exact=True)
    assert fingerprint.matches(tensor, is_exact=False)
    if tensor.is_contiguous() and not tensor.is_conj():
        for index in (0, tensor.numel() // 2 + (tensor.numel() > 2), tensor.numel() - 1):
            assert not fingerprint.matches(changed(tensor, index), is_exact=True)


def test_rows_that_change_places_are_noticed_where_all_bits_are_compared():
    order = list(range(64))
    order[3], order[5] = 5, 3
    fingerprint = Fingerprint(GRID, is_whole=True)
    assert not fingerprint.matches(GRID[:, order], is_exact=True)
    assert not fingerprint.matches(GRID[:, order], is_exact=False), "rounding shows everywhere"


def test_samples_move_on_so_that_every_row_is_seen():
    found = 0
    for shift in range(8):
        other = GRID.clone()
        other[:, 37] += 1
        found += not Fingerprint(GRID, shift=shift).matches(other, is_exact=True)
    assert found == 1


def test_rounding_matches_only_where_bits_do_not_count():
    noise = 1 + 1e-6 * torch.randn(GRID.shape, generator=torch.Generator().manual_seed(0))
    for is_whole in (False, True):
        fingerprint = Fingerprint(GRID, is_whole=is_whole)
        assert fingerprint.matches(GRID * noise, is_exact=False)
        assert not fingerprint.matches(GRID * noise, is_exact=True)
        assert not fingerprint.matches(GRID * 1.01, is_exact=False)


def test_other_shapes_and_dtypes_never_match():
    fingerprint = Fingerprint(GRID)
    for other in (GRID[:1], GRID.double(), GRID.flatten(1)):
        assert not fingerprint.matches(other, is_exact=False)


def test_layers_take_turns_in_being_compared_bit_by_bit():
    other = GRID.clone()
    other[0, 1, 1] += 1  # between samples

    def is_whole(turn, number):
        return not fingerprints_of_turn(turn, number)(GRID).matches(other, is_exact=True)

    turns = [[turn for turn in range(32, 48) if is_whole(16 * turn, number)] for number in (0, 1)]
    assert turns == [list(range(32, 48)), []]
    assert all(is_whole(turn, 5) for turn in (0, 1, 11, 27))
    assert not any(is_whole(turn, 5) for turn in (16, 32, 48))
