"""What happens when something breaks: every line of it has an error that says what to do."""

import os
import signal
from datetime import timedelta

import pytest
import torch

import adaqp
from adaqp.graphs.graph import from_edge_index
from adaqp.partitioning.partitioner import partition
from adaqp.policy import Exact, Fixed
from shared.comms import RankPool
from shared.errors import DataError, RankFailure, TopologyError


def nan_in_a_message(folder, bits):
    dg = adaqp.load(folder)
    x = torch.ones(dg.num_local, 4).requires_grad_()
    with torch.no_grad():
        if dg.rank == 1:
            x[dg.pull.send_rows[0]] = torch.nan
    with dg.messages(Fixed(bits) if bits else Exact()):
        out = dg.aggregate(x)
    return bool(torch.isnan(out).any())


def test_nan_in_a_message_names_layer_rank_and_node(sbm, cut):
    with (
        RankPool(2, timeout=timedelta(seconds=100)) as pool,
        pytest.raises(
            RankFailure, match=r"rank 1: the row of node \d+ holds NaN or infinity in forward0"
        ),
    ):
        pool.run(nan_in_a_message, cut(sbm, 2), 8)


def test_nan_travels_as_it_is_when_messages_are_exact(sbm, cut, pool2):
    assert pool2.run(nan_in_a_message, cut(sbm, 2), 0).results[0]


def killed_in_a_round(folder):
    dg = adaqp.load(folder)
    x = torch.ones(dg.num_local, 4).requires_grad_()
    dg.aggregate(x)
    if dg.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dg.aggregate(x)


def test_a_killed_rank_ends_all_others_naming_peer_and_round(sbm, cut):
    with (
        RankPool(2, timeout=timedelta(seconds=100)) as pool,
        pytest.raises(RankFailure) as caught,
    ):
        pool.run(killed_in_a_round, cut(sbm, 2))
    text = str(caught.value)
    assert "rank 1 of 2" in text
    assert "SIGKILL" in text
    assert "rank 1 failed in round 0" in text
    for pid in pool.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def lost_update(folder):
    dg = adaqp.load(folder)
    x = torch.randn(dg.num_local, 4).requires_grad_()
    with dg.messages(Fixed(8)) as messages:
        dg.aggregate(x).sum().backward()
        if dg.rank == 0:
            channel = messages.sides["forward0"]
            channel.set_bits(channel.send_bits, channel.recv_bits)
        dg.aggregate(x)


def test_tables_that_differ_are_refused(sbm, cut):
    with (
        RankPool(2, timeout=timedelta(seconds=100)) as pool,
        pytest.raises(RankFailure, match=r"forward0, from rank \d: .* packed by bit table"),
    ):
        pool.run(lost_update, cut(sbm, 2))


def load_only(folder):
    adaqp.load(folder)


def test_ranks_that_are_not_the_parts_are_refused(sbm, cut):
    with pytest.raises(TopologyError, match="was cut into 2 parts, but there are 1 ranks"):
        adaqp.load(cut(sbm, 2))


def test_parts_of_two_graphs_are_refused(sbm, directed, tmp_path):
    partition(sbm, 1, method="random", out=tmp_path / "a")
    partition(directed, 1, method="random", out=tmp_path / "b")
    part = tmp_path / "a" / "part0.safetensors"
    part.write_bytes((tmp_path / "b" / "part0.safetensors").read_bytes())
    with pytest.raises(DataError, match="the folder mixes two partitions"):
        adaqp.load(tmp_path / "a")
    part.unlink()
    with pytest.raises(DataError, match="is missing; copy the whole folder to every host"):
        adaqp.load(tmp_path / "a")
    with pytest.raises(DataError, match="holds no partition"):
        adaqp.load(tmp_path / "c")


def own_folder(folders):
    rank = int(torch.distributed.get_rank())
    adaqp.load(folders[rank])


def test_hosts_with_different_graphs_are_refused(sbm, directed, cut):
    with (
        RankPool(2, timeout=timedelta(seconds=100)) as pool,
        pytest.raises(RankFailure, match=r"ranks \[1\] hold parts of another graph than rank 0"),
    ):
        pool.run(own_folder, [cut(sbm, 2), cut(directed, 2)])


def test_a_tensor_of_other_rows_is_refused(sbm, cut):
    dg = adaqp.load(cut(sbm, 1))
    with pytest.raises(DataError, match=r"expected a tensor \[num_local=600, dim\], got \[7, 3\]"):
        dg.aggregate(torch.ones(7, 3))


def aggregate_once(folder, dim):
    dg = adaqp.load(folder)
    results = []
    for policy in (Exact(), Fixed(8), Fixed(2)):
        x = torch.full((dg.num_local, dim), 0.25).requires_grad_()
        with dg.messages(policy):
            out = dg.aggregate(x, "sum")
            out.sum().backward()
        results.append((out.detach(), x.grad))
    return [
        max(
            float((a - b).abs().max()) if a.numel() else 0.0
            for a, b in zip(r, results[0], strict=True)
        )
        for r in results
    ]


@pytest.mark.parametrize("dim", [1, 3, 7])
def test_constant_rows_and_odd_widths_are_exact(dim, directed, cut, pool2):
    # Constant rows quantise exactly, and so do the constant gradients of a sum.
    assert pool2.run(aggregate_once, cut(directed, 2), dim).results == [[0.0] * 3] * 2


def test_an_empty_halo_neither_hangs_nor_changes_anything(cut, pool2):
    loops = torch.arange(30)
    mask = loops < 10
    graph = from_edge_index(
        loops, loops, 30, torch.randn(30, 4), loops % 2, mask, ~mask & (loops < 20), loops >= 20
    )
    assert pool2.run(aggregate_once, cut(graph, 2), 5).results == [[0.0] * 3] * 2


def rows_and_gradients(folder, policy):
    dg = adaqp.load(folder)
    x = dg.feat.clone().requires_grad_()
    with dg.messages(policy):
        out = dg.aggregate(x, "sum")
        out.square().sum().backward()
    return dg.global_ids, out.detach(), x.grad


@pytest.mark.parametrize("policy", [Exact(), Fixed(8)], ids=["exact", "fixed"])
def test_a_peer_that_only_sends_and_one_that_does_neither(policy, pool3, tmp_path):
    # Rank 0 feeds rank 1; rank 2 neither sends nor receives. Rows are constant: 8 bits are exact.
    draw = torch.Generator().manual_seed(0)
    src = torch.cat([torch.randint(0, 10, (40,), generator=draw), torch.arange(20, 30)])
    dst = torch.cat([torch.randint(10, 20, (40,), generator=draw), torch.arange(20, 30)])
    node = torch.arange(30)
    feat = (node % 4).float()[:, None].expand(30, 5).contiguous()
    graph = from_edge_index(src, dst, 30, feat, node % 2, node < 10, node == 11, node > 20)
    partition(graph, 3, node // 10, out=tmp_path / "three")
    expected = torch.zeros(30, 5).index_add_(0, dst, feat[src])
    slope = torch.zeros(30, 5).index_add_(0, src, 2 * expected[dst])
    for ids, out, grad in pool3.run(rows_and_gradients, tmp_path / "three", policy).results:
        assert torch.allclose(out, expected[ids])
        assert torch.allclose(grad, slope[ids])
