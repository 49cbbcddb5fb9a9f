"""Answers a file of prompts in waves, and resumes after an interruption with those not yet answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.data import read_prompts, tokenise
from llmpq.planner.plan import Plan
from llmpq.planner.waves import cut_waves
from llmpq.runtime.answer_file import AnswerFile, Request, digest_tree, find_unanswered
from llmpq.runtime.generation import read_rules
from llmpq.runtime.loader import digest_weights
from llmpq.runtime.pipeline import Pipeline
from shared.comms import Group, tree
from shared.errors import ConfigError, DataError
from shared.files import read_model_config

__all__ = ["Request", "answer", "digest", "find_unanswered", "pad_left", "read_requests"]

_NO_SETTINGS = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Keys of config.json that no answer depends on."""


def digest(plan: Plan, folder: str | Path, *, max_new_tokens: int, **sampling: Any) -> str:
    """16 hexadecimal digits of what answers depend on besides prompts.

    All weights are read once in a process.

    Args:
        plan: its widths, group size and rounding count, not where layers lie.
        folder: the model: its weights, configuration and generation config count.
        max_new_tokens: most tokens an answer has.
        **sampling: see `Pipeline.generate`.

    Raises:
        ConfigError: the model's folder is not as it has to be.
        DataError: a file of its weights is damaged.
    """
    config, _ = read_model_config(folder)
    shape = {key: value for key, value in config.items() if key not in _NO_SETTINGS}
    in_8_bits = sorted(
        {
            bits
            for tables in plan.forms.values()
            for bits, table in tables.items()
            if any(form == "int8" for _, form in table)
        }
    )
    of_plan = [plan.bits, plan.group_size, plan.dtype, plan.method, in_8_bits]
    of_model = [sorted(shape.items()), sorted(read_rules(folder).fields.items(), key=str)]
    weights = digest_weights(folder, plan)
    return digest_tree([*of_plan, *of_model, weights, max_new_tokens, sorted(sampling.items())])


def read_requests(
    folder: str | Path, path: str | Path
) -> tuple[list[Request], Callable[[list[int]], str] | None]:
    """Reads a file of prompts for a model.

    Args:
        folder: the Hugging Face model, with its tokenizer where prompts are texts.
        path: JSON Lines, see `read_prompts`.

    Returns:
        The prompts, and what turns answers' token ids into text; None if all prompts are token ids.

    Raises:
        ConfigError: the folder has no tokenizer, where one is needed.
        DataError: a line is no prompt.
    """
    from transformers import AutoTokenizer

    prompts = read_prompts(path)
    texts = tokenise(folder, prompts)
    requests = [
        Request(prompt.id, number, tuple(ids))
        for number, (prompt, ids) in enumerate(zip(prompts, texts, strict=True))
    ]
    if all(prompt.token_ids for prompt in prompts):
        return requests, None
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return requests, partial(tokenizer.decode, skip_special_tokens=True)


def answer(
    pipe: Pipeline,
    requests: Sequence[Request] | None,
    out: AnswerFile | str | Path,
    *,
    wave_size: int,
    max_new_tokens: int,
    decode: Callable[[list[int]], str] | None = None,
    on_answered: Callable[[int], None] = lambda _: None,
    **sampling: Any,
) -> int:
    """Answers what the file of answers lacks; every rank of the pipeline calls it.

    Waves are of prompts of like lengths (see `cut_waves`), the longest first, so that memory runs short
    at the beginning if at all. A wave's answers are written and synced before the next one begins.

    Args:
        pipe: an entered pipeline.
        requests: all prompts, on rank 0; ignored elsewhere.
        out: JSON Lines of answers on rank 0: "id", "prompt_hash", "settings" (16 digits of weights,
            widths, rounding, sampling and longest answer), "token_ids" and, with `decode`, "answer". It
            is locked meanwhile.
        wave_size: most prompts at once.
        max_new_tokens: most tokens an answer has.
        decode: text of token ids.
        on_answered: called on rank 0 with the number of answers in each wave.
        **sampling: see `Pipeline.generate`; `eos_token_id` among it.

    Returns:
        The number of prompts answered now.

    Raises:
        ConfigError: wave_size is below 1.
        DataError: the file of answers cannot be written, is written by another run, holds something
            else, or answers other prompts or under other settings.
        CommError: a stage died; waves written before stay.
    """
    if wave_size < 1:
        raise ConfigError(f"wave_size: expected at least 1, got {wave_size}")
    group, ends = Group.world(), sampling.get("eos_token_id")
    last_ones = {ends} if isinstance(ends, int) else set(ends or ())
    with ExitStack() as stack:
        told: bytes | Exception | None = None
        file, settings = out if isinstance(out, AnswerFile) else AnswerFile(out), ""
        if group.rank == 0:
            try:
                stack.enter_context(file)
                settings = digest(pipe.plan, pipe.folder, max_new_tokens=max_new_tokens, **sampling)
                left = find_unanswered(requests or (), file.path, settings)
                lengths = [len(request.token_ids) for request in left]
                waves = cut_waves(lengths, wave_size, max_new_tokens)
                told = json.dumps(
                    [
                        [(left[n].id, left[n].number, left[n].token_ids) for n in wave]
                        for wave in waves
                    ]
                ).encode()
            except (ConfigError, DataError) as error:
                if group.world_size == 1:
                    raise
                told = error
        if group.world_size > 1:
            told = tree.broadcast(group.control(), told)
        assert isinstance(told, bytes), "errors have been raised"
        count = 0
        for entries in json.loads(told):
            wave = [Request(name, number, tuple(ids)) for name, number, ids in entries]
            ids, mask = pad_left([request.token_ids for request in wave])
            numbers = torch.tensor([request.number for request in wave])
            tokens = pipe.generate(
                ids, mask, max_new_tokens=max_new_tokens, prompt_numbers=numbers, **sampling
            )
            if tokens is not None:
                answers = [_cut(row, last_ones) for row in tokens.tolist()]
                file.write(wave, answers, settings, decode)
                on_answered(len(wave))
            count += len(wave)
    return count


def _cut(tokens: list[int], ends: set[int]) -> list[int]:
    """An answer up to its end, or all of it."""
    last = next((at for at, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: last + 1]


def pad_left(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [texts, longest] padded on the left, and the mask of those that count."""
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :] = torch.tensor(text)
        mask[row, longest - len(text) :] = 1
    return ids, mask
