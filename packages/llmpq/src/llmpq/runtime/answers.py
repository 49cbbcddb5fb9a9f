"""Answers a file of prompts in waves, and resumes after an interruption with those not yet answered."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.data import read_prompts, tokenise
from llmpq.planner.plan import Plan
from llmpq.runtime.pipeline import Pipeline
from shared.comms import Group, tree
from shared.errors import ConfigError, DataError
from shared.files import naming_full_disk

__all__ = ["Request", "answer", "digest", "find_unanswered", "pad_left", "read_requests"]

_BEGINNING = b'{"id": '
"""How every line of a file of answers begins."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to answer.

    Attributes:
        id: names it in the file of answers.
        number: among all prompts, which decides its draws.
        token_ids: the prompt.
    """

    id: str
    number: int
    token_ids: tuple[int, ...]

    @property
    def prompt_hash(self) -> str:
        """16 hexadecimal digits of the token ids, by which an answer names its prompt."""
        return _digest(self.token_ids)


def _digest(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()[:16]


def digest(plan: Plan, *, max_new_tokens: int, **sampling: Any) -> str:
    """16 hexadecimal digits of what answers depend on besides prompts.

    Args:
        plan: its widths and rounding count, not where layers lie.
        max_new_tokens: most tokens an answer has.
        **sampling: see `Pipeline.generate`.
    """
    of_plan = [plan.bits, plan.group_size, plan.dtype, plan.method]
    return _digest([*of_plan, max_new_tokens, sorted(sampling.items())])


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
    out: str | Path,
    *,
    wave_size: int,
    max_new_tokens: int,
    decode: Callable[[list[int]], str] | None = None,
    on_answered: Callable[[int], None] = lambda _: None,
    **sampling: Any,
) -> int:
    """Answers what the file of answers lacks; every rank of the pipeline calls it.

    Waves are of prompts of like lengths, the longest first, so that memory runs short at the
    beginning if at all. A wave's answers are written and synced before the next one begins.

    Args:
        pipe: an entered pipeline.
        requests: all prompts, on rank 0; ignored elsewhere.
        out: JSON Lines of answers on rank 0: "id", "prompt_hash", "settings" (16 digits of widths,
            rounding, sampling and longest answer), "token_ids" and, with `decode`, "answer".
        wave_size: most prompts at once.
        max_new_tokens: most tokens an answer has.
        decode: text of token ids.
        on_answered: called on rank 0 with the number of answers in each wave.
        **sampling: see `Pipeline.generate`; `eos_token_id` among it.

    Returns:
        The number of prompts answered now.

    Raises:
        ConfigError: wave_size is below 1.
        DataError: the file of answers holds something else, or answers other prompts or under other
            settings.
        CommError: a stage died; waves written before stay.
    """
    if wave_size < 1:
        raise ConfigError(f"wave_size: expected at least 1, got {wave_size}")
    group, out = Group.world(), Path(out)
    settings = digest(pipe.plan, max_new_tokens=max_new_tokens, **sampling)
    told: bytes | Exception | None = None
    if group.rank == 0:
        try:
            left = find_unanswered(requests or (), out, settings)
        except DataError as error:
            if group.world_size == 1:
                raise
            told, left = error, []
        left.sort(key=lambda one: (-len(one.token_ids), one.number))
        waves = [left[at : at + wave_size] for at in range(0, len(left), wave_size)]
        tree_of = [[(one.id, one.number, one.token_ids) for one in wave] for wave in waves]
        told = told or json.dumps(tree_of).encode()
    if group.world_size > 1:
        told = tree.broadcast(group.control(), told)
    assert isinstance(told, bytes), "errors have been raised"
    count = 0
    for wave in json.loads(told):
        found = [Request(name, number, tuple(ids)) for name, number, ids in wave]
        ids, mask = pad_left([one.token_ids for one in found])
        numbers = torch.tensor([one.number for one in found])
        tokens = pipe.generate(
            ids, mask, max_new_tokens=max_new_tokens, prompt_numbers=numbers, **sampling
        )
        if tokens is not None:
            _append(out, found, tokens, settings, sampling.get("eos_token_id"), decode)
            on_answered(len(found))
        count += len(found)
    return count


def find_unanswered(
    requests: Sequence[Request], path: str | Path, settings: str | None = None
) -> list[Request]:
    """Prompts that a file of answers lacks; an unfinished last line is cut off.

    Args:
        requests: all prompts.
        path: the file of answers; it need not exist.
        settings: digits that answers were made under; None for any.

    Raises:
        DataError: a line is no answer, answers another prompt under the id of one of these, or was
            made under other settings.
    """
    path = Path(path)
    if not path.exists():
        return list(requests)
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    hash_of = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            found = json.loads(line.decode())
            hash_of[str(found["id"])] = found["prompt_hash"]
            made_under = found["settings"]
            found["token_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{path}:{number}: expected an answer with "id", "prompt_hash", "settings" and '
                f'"token_ids", got {line[:80]!r}; give another --out'
            ) from error
        if settings not in (None, made_under):
            raise DataError(
                f"{path}:{number}: expected answers under this plan's widths and these settings of "
                f"sampling and length, got one made under others; give another --out"
            )
    for one in requests:
        if hash_of.get(one.id, one.prompt_hash) != one.prompt_hash:
            raise DataError(
                f"{path}: expected answers to these prompts, got one to another prompt of id "
                f"{one.id!r}; give another --out"
            )
    rest = data[len(whole) :]
    if rest[: len(_BEGINNING)] != _BEGINNING[: len(rest)]:
        raise DataError(
            f"{path}: expected answers, got a last line {rest[:80]!r}; give another --out"
        )
    if rest:  # the process was killed while it wrote
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return [one for one in requests if one.id not in hash_of]


def pad_left(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [texts, longest] padded on the left, and the mask of those that count."""
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :] = torch.tensor(text)
        mask[row, longest - len(text) :] = 1
    return ids, mask


def _append(
    out: Path,
    wave: Sequence[Request],
    tokens: Tensor,
    settings: str,
    ends: int | Sequence[int] | None,
    decode: Callable[[list[int]], str] | None,
) -> None:
    last_ones = {ends} if isinstance(ends, int) else set(ends or ())
    lines = []
    for one, row in zip(wave, tokens.tolist(), strict=True):
        last = next((at for at, token in enumerate(row) if token in last_ones), len(row) - 1)
        record: dict[str, Any] = {
            "id": one.id, "prompt_hash": one.prompt_hash, "settings": settings,
            "token_ids": row[: last + 1],
        }  # fmt: skip
        if decode is not None:
            record["answer"] = decode(row[: last + 1])
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    with naming_full_disk(out), open(out, "ab") as file:
        file.write("".join(lines).encode())
        file.flush()
        os.fsync(file.fileno())
