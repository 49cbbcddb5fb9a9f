"""Which documents meet in a micro-batch, as verl balances a batch over ranks and then each rank's tokens.

Reads one JSON object a line, {"lengths": [...], "cap": n, "ranks": n}, and answers by the documents of each
rank's micro-batches, as many on every rank.
"""

import json
import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from tensordict import TensorDict  # pyrefly: ignore
from verl.utils.seqlen_balancing import (  # pyrefly: ignore
    calculate_workload,
    get_seqlen_balanced_partitions,
    rearrange_micro_batches,
)


def split(lengths, cap, least):
    """Micro-batches of one rank."""
    rows = [torch.zeros(n, dtype=torch.int64) for n in lengths]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    batch = TensorDict({"input_ids": ids}, batch_size=[len(rows)])
    return rearrange_micro_batches(batch, cap, min_num_micro_batch=least)[1]


def balanced(asked):
    lengths, cap = asked["lengths"], asked["cap"]
    work = calculate_workload(torch.tensor(lengths)).tolist()
    shares = get_seqlen_balanced_partitions(work, asked["ranks"], equal_size=False)
    least = None
    for _ in range(2):  # the second time with as many as the rank with the most
        found = [
            [[share[i] for i in part] for part in split([lengths[i] for i in share], cap, least)]
            for share in shares
        ]
        least = max(map(len, found))
    return found


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(balanced(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
