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


def write_inputs(folder: Path) -> None:
    """Writes all files into a folder: tables of events, a graph, lengths, a model, prompts, a trace."""
    script = _ROOT / "packages/swift/examples/train_replicas.py"
    (folder / "train.py").write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "cluster.yaml").write_text(_CLUSTER)
    _write_events(folder)
    _write_graph(folder / "graph.npz")
    lengths = [37 * at % 4000 + 1 for at in range(200)]
    (folder / "lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
    (folder / "trace.csv").write_text("lower,upper,size\n0,4,1024\n1,3,2048\n3,6,4096\n")
    prompts = [f"The verse number {at} says that" for at in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    (folder / "texts").mkdir()
    for at, prompt in enumerate(prompts, 1):
        (folder / "texts" / f"{at}.txt").write_text(f"{prompt}\n" * 20 * at)
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
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]")
    fast.save_pretrained(folder)
