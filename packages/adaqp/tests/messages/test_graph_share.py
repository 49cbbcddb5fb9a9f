"""What a rank's share knows of others: weights its rows have there, and the ids rows go by."""

import pytest
import torch

import adaqp
from shared.errors import ConfigError


def weights_and_names(folder):
    """Weights of sent rows by node as the owner has them, as receivers have them; names of rows."""
    dg = adaqp.load(folder)
    op = dg.operator("gcn")
    sent = dg.global_ids[dg.pull.send_rows].tolist()
    at_owner = dict(zip(sent, dg.alpha_sq_at_owner(op).tolist(), strict=True))
    here = dict(zip(dg.part.halo_ids.tolist(), op.alpha_sq.tolist(), strict=True))
    names = [dg.row_names(route) for route in (dg.pull, dg.push)]
    expected = [dg.part.global_ids, dg.part.halo_ids]
    return at_owner, here, [torch.equal(*pair) for pair in zip(names, expected, strict=True)]


def test_owners_know_the_weights_of_their_rows_at_the_receivers(sbm, cut, pool2):
    one, other = pool2.run(weights_and_names, cut(sbm, 2)).results
    assert (one[0], other[0]) == (other[1], one[1])
    assert len(set(one[0].values())) > 10
    assert one[2] == other[2] == [True, True]


def test_one_rank_has_no_links_to_probe(sbm, cut):
    with pytest.raises(ConfigError, match="expected 2 or more ranks, got 1"):
        adaqp.load(cut(sbm, 1)).probe_links()
