"""Chooses the widths of all ranks' rows: gather variances, solve on rank 0, send widths to peers.

Rank 0 receives the variance of each group of rows (beta) and returns one width per group, as plain
tensors; each sender then sends the width of each row to the one peer that receives the row. The
problem itself is solved by `adaqp.planner.planner`.
"""

import numpy as np
import torch
from torch import Tensor

from adaqp.messages.channel import ChannelSide
from adaqp.messages.network import LinkTable
from adaqp.messages.wire import row_bytes
from adaqp.planner.planner import Assignment, Solution, assign, group_messages
from adaqp.planner.solvers import SCOPES
from adaqp.policy import Adaptive
from shared.comms.collectives import all_gather, all_to_all_v, gather_v, scatter_v
from shared.comms.group import Group

__all__ = ["assign_widths", "problem_of"]

# Columns of the table that each rank sends, one line per group of rows.
_CHANNEL, _PEER, _ROWS, _BETA = range(4)


def assign_widths(
    group: Group,
    sides: dict[str, ChannelSide],
    policy: Adaptive,
    links: LinkTable,
    wire_dtype: torch.dtype,
) -> list[Solution]:
    """Sets new widths on both ends of every exchange; all ranks call it together.

    Args:
        group: the ranks.
        sides: this rank's channel sides by name; every rank has the same names.
        policy: widths to choose from, weight of variance, solver and scope.
        links: seconds per byte and per message between every two ranks.
        wire_dtype: dtype of a row's scale and zero point, whose bytes are counted.

    Returns:
        On rank 0 one solution per problem; empty on other ranks.
    """
    names = sorted(sides)
    if not names:
        return []
    orders: list[tuple[int, int, np.ndarray, np.ndarray]] = []
    lines: list[np.ndarray] = []
    for number, name in enumerate(names):
        beta = sides[name].beta().double().cpu().numpy()
        for peer in range(group.world_size):
            mine = sides[name].route.sent_to(peer)
            if mine.stop == mine.start:
                continue
            order, offsets, group_beta = group_messages(beta[mine], policy.group_size)
            orders.append((number, peer, order, offsets))
            lines.append(
                np.stack(
                    [
                        np.full(len(group_beta), number),
                        np.full(len(group_beta), peer),
                        np.diff(offsets),
                        group_beta,
                    ],
                    axis=1,
                )
            )
    table = np.concatenate(lines) if lines else np.zeros((0, 4))
    flat = torch.from_numpy(table.astype(np.float64)).flatten()
    tables = gather_v(group, flat.to(group.device), 0)
    hidden = torch.tensor([sides[n].hidden_s for n in names], dtype=torch.float64)
    hidden = hidden.to(group.device)
    hidden_s = torch.stack(all_gather(group, hidden)).amin(0).cpu().numpy()
    solutions: list[Solution] = []
    answers: list[Tensor] | None = None
    if tables is not None:
        split = [t.cpu().numpy().reshape(-1, 4) for t in tables]
        shapes = [(sides[n].dim, sides[n].itemsize) for n in names]
        bits, solutions = _solve(split, shapes, policy, links, wire_dtype, hidden_s)
        answers = [torch.from_numpy(b.astype(np.uint8)).to(group.device) for b in bits]
    mine_bits = scatter_v(group, answers, 0).cpu().numpy()
    _send_widths(group, [sides[n] for n in names], orders, mine_bits)
    return solutions


def problem_of(
    tables: list[np.ndarray],
    shapes: list[tuple[int, int]],
    policy: Adaptive,
    links: LinkTable,
    wire_dtype: torch.dtype,
    hidden_s: float,
) -> Assignment:
    """The assignment problem of the channels in `tables`.

    Args:
        tables: for each sender, float64 [num_groups, 4]: channel, receiver, rows, beta.
        shapes: (columns, bytes per value) of each channel.
        policy, links, wire_dtype: as in `assign_widths`.
        hidden_s: seconds of sending that cost nothing.
    """
    num_ranks = len(tables)
    everything = np.concatenate(tables)
    sender = np.repeat(np.arange(num_ranks), [len(t) for t in tables])
    layer = everything[:, _CHANNEL].astype(np.int64)
    receiver = everything[:, _PEER].astype(np.int64)
    layers, local_layer = np.unique(layer, return_inverse=True)
    pairs = num_ranks * num_ranks
    per_row = np.array(
        [
            [row_bytes(b, *shapes[number], wire_dtype) for b in policy.bits]
            for number in range(len(shapes))
        ]
    )
    num_layers = max(len(layers), 1)
    shift = (np.arange(num_ranks)[None, :] - np.arange(num_ranks)[:, None]) % num_ranks
    used = np.tile(shift.flatten() > 0, num_layers)
    # A rank has no channel to itself: number the others densely.
    dense = np.cumsum(used) - 1
    rounds = np.concatenate(
        [shift.flatten() - 1 + number * (num_ranks - 1) for number in range(num_layers)]
    )
    return Assignment(
        beta=everything[:, _BETA],
        channel=dense[local_layer * pairs + sender * num_ranks + receiver],
        bytes=everything[:, [_ROWS]] * per_row[layer],
        bits=np.array(policy.bits),
        round_of=rounds[used],
        s_per_byte=np.tile(links.s_per_byte.flatten(), num_layers)[used],
        latency_s=np.tile(links.latency_s.flatten(), num_layers)[used],
        lam=policy.lam,
        hidden_s=hidden_s if policy.overlap_aware else 0.0,
    )


def _solve(
    tables: list[np.ndarray],
    shapes: list[tuple[int, int]],
    policy: Adaptive,
    links: LinkTable,
    wire_dtype: torch.dtype,
    hidden_s: np.ndarray,
) -> tuple[list[np.ndarray], list[Solution]]:
    """Widths for each sender's groups, in the order in which the sender listed them."""
    bits = [np.zeros(len(t), dtype=np.int64) for t in tables]
    solutions = []
    for scope in SCOPES.get(policy.scope)(len(shapes)):
        keep = [np.isin(t[:, _CHANNEL], scope) for t in tables]
        part = [t[k] for t, k in zip(tables, keep, strict=True)]
        hidden = float(hidden_s[scope].sum())
        problem = problem_of(part, shapes, policy, links, wire_dtype, hidden)
        solution = assign(problem, solver=policy.solver)
        solutions.append(solution)
        ends = np.cumsum([len(t) for t in part])[:-1]
        for mine, kept, chosen in zip(bits, keep, np.split(solution.bits, ends), strict=True):
            mine[kept] = chosen
    return bits, solutions


def _send_widths(
    group: Group,
    sides: list[ChannelSide],
    orders: list[tuple[int, int, np.ndarray, np.ndarray]],
    bits: np.ndarray,
) -> None:
    """Spreads group widths to rows and sends each peer the widths of the rows it will receive."""
    send_bits = [np.zeros(len(c.send_bits), dtype=np.uint8) for c in sides]
    start = 0
    for number, peer, order, offsets in orders:
        chosen = bits[start : start + len(offsets) - 1]
        start += len(chosen)
        rows = np.empty(len(order), dtype=np.uint8)
        rows[order] = np.repeat(chosen, np.diff(offsets))
        send_bits[number][sides[number].route.sent_to(peer)] = rows
    peers = range(group.world_size)
    sends = [
        torch.from_numpy(
            np.concatenate([b[c.route.sent_to(p)] for b, c in zip(send_bits, sides, strict=True)])
        ).to(group.device)
        for p in peers
    ]
    sizes = [[s.stop - s.start for s in (c.route.received_from(p) for c in sides)] for p in peers]
    recvs = [torch.empty(sum(size), dtype=torch.uint8, device=group.device) for size in sizes]
    all_to_all_v(group, sends, recvs)
    by_peer = [r.split(size) for r, size in zip(recvs, sizes, strict=True)]
    for number, side in enumerate(sides):
        device = side.route.send_rows.device
        side.set_bits(
            torch.from_numpy(send_bits[number]).to(device),
            torch.cat([by_peer[p][number] for p in peers]).to(device),
        )
