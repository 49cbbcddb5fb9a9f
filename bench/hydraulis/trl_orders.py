"""Which documents meet in a micro-batch, by TRL's packing and by transformers' `batch_rebalance`, by their code.

Reads one JSON object a line and answers it by the documents of each rank's micro-batches:
{"what": "pack", "lengths": [...], "cap": n, "ranks": n, "seed": n}, dealt as `SFTTrainer` deals its rows, or
{"what": "rebalance", "lengths": [...], "documents": of a step, "slots": of a step, "ranks": n, "seed": n}.
"""

import json
import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset, disable_caching, disable_progress_bars  # pyrefly: ignore
from torch.utils.data import BatchSampler, RandomSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler
from trl import pack_dataset  # pyrefly: ignore


def packed(asked):
    """Rows of whole documents; every token is its document's number, by which they are told apart."""
    lengths = asked["lengths"]
    rows = Dataset.from_dict({"input_ids": [[i] * n for i, n in enumerate(lengths)]})
    rows = pack_dataset(rows, asked["cap"], "bfd", {"batch_size": None})
    draw = torch.Generator().manual_seed(asked["seed"])
    batches = BatchSampler(RandomSampler(rows, generator=draw), 1, drop_last=False)
    order = [row for (row,) in batches]
    ranks = asked["ranks"]
    found = []
    for rank in range(ranks):
        dealt = BatchSamplerShard(
            BatchSampler(order, 1, drop_last=False), ranks, rank, even_batches=False
        )
        found.append([list(dict.fromkeys(rows[row]["input_ids"])) for (row,) in dealt])
    return found


def rebalanced(asked):
    """Micro-batches of each rank, `slots` of them a step."""
    return [
        list(
            BatchRebalanceSampler(
                asked["lengths"], asked["documents"], asked["ranks"], asked["slots"],
                seed=asked["seed"], rank=rank, drop_last=False,
            )
        )
        for rank in range(asked["ranks"])
    ]  # fmt: skip


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    disable_caching()
    disable_progress_bars()
    ways = {"pack": packed, "rebalance": rebalanced}
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(ways[asked["what"]](asked)), file=answers, flush=True)


if __name__ == "__main__":
    main()
