"""Models of each family, small enough for a test, as Hugging Face folders."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SHAPE = {"vocab_size": 131, "hidden_size": 48}
GATED = {
    **SHAPE, "intermediate_size": 112, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = {
    "llama": {**GATED, "tie_word_embeddings": True},
    "mistral": {**GATED, "sliding_window": None},
    "qwen2": GATED,
    "qwen3": {**GATED, "head_dim": 12},
    "opt": {
        **SHAPE, "ffn_dim": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
        "word_embed_proj_dim": 32, "max_position_embeddings": 128,
    },
    "bloom": {**SHAPE, "n_layer": 5, "n_head": 4},
}  # fmt: skip


def make(family: str, folder: Path, **changed: object) -> Path:
    """Writes a model whose next tokens are not all alike, with some settings changed."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        family, **FAMILIES[family] | changed, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


WORDS = ("the", "rain", "falls", "on", "a", "green", "hill", "and", "no", "one", "sees", "it")


def add_tokenizer(folder: Path) -> Path:
    """Gives a model a tokenizer that knows a few words."""
    vocabulary = {word: number for number, word in enumerate(("<pad>", "<s>", "</s>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder
