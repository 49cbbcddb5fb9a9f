"""Files of a user's own that lines of pages and help texts name, made small.

They are made in the yard's environment, which has every extra.
"""

import json
from pathlib import Path

__all__ = ["write_inputs"]


_ROOT = Path(__file__).parents[2]
_CLUSTER = """
hosts:
- name: here
  devices: [{like: CPU, name: mine, memory_bytes: 1e8}, {like: CPU, name: mine, memory_bytes: 1e8}]
"""
# Jobs for `diffusionpipe profile --build`, the first of which is right.
_JOBS = """
import torch
from torch import nn

import diffusionpipe as dp


def make(layers, **frozen):
    frozen = {"z": lambda batch: batch["x"] * 2} | frozen

    def inputs(batch, frozen, draw):
        return {"sample": frozen["z"], "target": batch["x"]}

    def loss(output, target):
        return (output - target).square().flatten(1).mean(1)

    return dp.Job(dp.chain(layers), frozen, inputs, loss), [{"x": torch.randn(8, 4)}] * 8


def train_alone():
    return make([nn.Linear(4, 4), nn.Tanh()])


def hand_over_a_unet():
    from diffusionpipe.data import build_unet

    return dp.Job.from_pipeline(build_unet((8, 16), text_dim=8, sample_size=8)), []


def use_batch_norm():
    return make([nn.Linear(4, 4), nn.BatchNorm1d(4)])


def freeze_nothing():
    linear = nn.Linear(4, 4)
    return make([linear, nn.Tanh()], tied=lambda batch: linear(batch["x"]))


def mix_samples():
    return make([nn.Linear(4, 4)], mean=lambda batch: batch["x"] - batch["x"].mean(0))
"""


def write_inputs(folder: Path) -> None:
    """Writes all files into a folder: tables, a graph, lengths, a model, prompts, texts, a trace."""
    script = _ROOT / "packages/swift/examples/train_replicas.py"
    (folder / "train.py").write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "cluster.yaml").write_text(_CLUSTER)
    (folder / "jobs.py").write_text(_JOBS)
    _write_events(folder)
    _write_visits(folder)
    _write_graph(folder / "graph.npz")
    lengths = [37 * at % 4000 + 1 for at in range(200)]
    (folder / "lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
    (folder / "trace.csv").write_text("lower,upper,size\n0,4,1024\n1,3,2048\n3,6,4096\n")
    prompts = [f"The verse number {at} says that" for at in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    (folder / "texts").mkdir(exist_ok=True)
    for at, prompt in enumerate(prompts, 1):
        (folder / "texts" / f"{at}.txt").write_text(f"{prompt}\n" * 20 * at)
    (folder / "text.txt").write_text("".join(f"{prompt}\n" for prompt in prompts) * 20)
    numbers = [(at % 7, at % 5, at % 7 - at % 5) for at in range(400)]
    (folder / "table.csv").write_text(
        "one,two,difference\n" + "".join(f"{a},{b},{c}\n" for a, b, c in numbers)
    )
    (folder / "wanted.csv").write_text("id\n" + "".join(f"{at}\n" for at in range(20)))
    _write_model(folder / "model")


def _write_events(folder: Path) -> None:
    import pandas as pd

    rows = range(600)
    events = pd.DataFrame(
        {
            "src": [at * 7 % 40 for at in rows],
            "dst": [40 + at * 5 % 20 for at in rows],
            "t": [at * 3600 for at in rows],
            "weight": [at % 9 / 9 for at in rows],
        }
    )
    events.to_csv(folder / "events.csv", index=False)
    events.to_parquet(folder / "events.parquet", index=False)
    names = {"src": "from", "dst": "to"}
    events.rename(columns=names).to_csv(folder / "other.csv", index=False)
    (folder / "empty.csv").write_text("")


def _write_visits(folder: Path) -> None:
    """Visits by ids and dates of the user's own; later ones, which are also flights after 2013."""
    import pandas as pd

    def make(hours: range) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "user": [f"user {at * 7 % 40}" for at in hours],
                "item": [f"item {at * 5 % 20}" for at in hours],
                "when": pd.Timestamp("2024-05-01") + pd.to_timedelta(list(hours), "h"),
                "amount": [at % 9 / 9 for at in hours],
                "note": ["cash" if at % 2 else "card" for at in hours],
            }
        )

    make(range(600)).to_csv(folder / "visits.csv", index=False, date_format="%Y-%m-%dT%H:%M:%S")
    # 4,037 aircraft, then 104 airports, as shared.data.flights numbers them.
    rows = range(600, 640)
    new = make(rows).assign(
        src=[at * 7 % 4037 for at in rows],
        dst=[4037 + at % 104 for at in rows],
        t=[1_390_000_000 + at for at in rows],
    )
    new.to_csv(folder / "new.csv", index=False, date_format="%Y-%m-%dT%H:%M:%S")
    new.to_parquet(folder / "new.parquet", index=False)


def _write_graph(path: Path) -> None:
    import numpy as np

    draw = np.random.default_rng(0)
    num_nodes = 400
    masks = {
        f"{name}_mask": np.arange(num_nodes) % 10 == at
        for at, name in enumerate(("train", "val", "test"))
    }
    src, dst = draw.integers(0, num_nodes, (2, 3000))
    np.savez(
        path,
        src=src,
        dst=dst,
        feat=draw.standard_normal((num_nodes, 16), dtype=np.float32),
        label=draw.integers(0, 4, num_nodes),
        **masks,
    )


def _write_model(folder: Path) -> None:
    """A Llama of two layers with random weights, and a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["The", "verse", "number", "says", "that", "and", "of", "in", "[UNK]", "[EOS]"] + [
        str(at) for at in range(12)
    ]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # Four tensor shards divide the vocabulary, as an example of `hybridflow plan` has them.
    config = LlamaConfig(
        vocab_size=len(words) + -len(words) % 4, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]")
    fast.save_pretrained(folder)
