"""Rewards as plain functions of a sample and the text of its response.

A function may fail on a single sample: it raises, hangs, or does not return a number. `on_error`
decides what follows: fail and name the sample, reward it with 0, or mark its row to be dropped. In
worker processes a function that hangs or crashes affects nothing else. In this process exits are
errors of their row and changes of the process are undone (see `hybridflow.tasks.containment`), but a
crash of the interpreter ends it; a time limit is a signal, which works only in the main thread on Unix,
and cannot interrupt code that does not return to the interpreter. `in_process=False` has no such
restriction.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import numbers
import operator
import pickle
import reprlib
import signal
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hybridflow.tasks.containment import Containment
from hybridflow.tasks.reward_calls import (
    CallLimits,
    CallWorkers,
    RewardCall,
    RewardFailure,
    out_of_time,
)
from hybridflow.tasks.time_limits import OutOfTime
from hybridflow.tasks.tokenizers import as_tokenizer
from hybridflow.workers.batch.batch import Batch
from shared.errors import ConfigError, DataError

__all__ = ["Reward", "RewardOptions", "reward"]

log = logging.getLogger(__name__)

_LARGEST = torch.finfo(torch.float32).max
_POLICIES = ("fail", "zero", "drop")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOptions:
    """How a reward function is called.

    Attributes:
        time_limit_s: seconds of one call (a row, or all rows if batched); None: no limit.
        on_error: how a row without a valid reward is treated: "fail", "zero" or "drop".
        in_process: whether the function runs in this process, or in worker processes, which is the
            place for code that nobody has read.
        workers: number of processes, each with one row at a time.
        batched: whether the function takes lists of samples and texts, and returns a list.
        per_token: whether it returns a number for each token of the response.
        cpu_limit_s: processor time of one call, and of each process that it starts, in seconds; the
            worker process is killed. None: no limit.
        memory_limit_bytes: that a worker process, and each process that it starts, may allocate, what
            the function's imports take included; None: no limit.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    time_limit_s: float | None = None
    on_error: str = "fail"
    in_process: bool = True
    workers: int = 1
    batched: bool = False
    per_token: bool = False
    cpu_limit_s: float | None = None
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.on_error not in _POLICIES:
            raise ConfigError(
                f"reward.on_error: expected one of {_POLICIES}, got {self.on_error!r}"
            )
        if self.time_limit_s is not None and not 0 < self.time_limit_s < math.inf:
            raise ConfigError(
                f"reward.time_limit_s: expected seconds above 0, got {self.time_limit_s}; "
                "leave it out for no limit"
            )
        for name in ("cpu_limit_s", "memory_limit_bytes"):
            limit = getattr(self, name)
            if limit is not None and (self.in_process or not 0 < limit < math.inf):
                raise ConfigError(
                    f"reward.{name}: expected a number above 0 and in_process=False, got {limit} "
                    f"and in_process={self.in_process}; leave it out for no limit"
                )
        if self.workers < 1 or (self.workers > 1 and (self.in_process or self.batched)):
            raise ConfigError(
                f"reward.workers: {self.workers} is invalid with in_process={self.in_process}, "
                f"batched={self.batched}; several need in_process=False and batched=False"
            )
        if self.batched and self.per_token:
            raise ConfigError("reward: batched and per_token exclude each other; choose one")


class Reward:
    """A reward function and its options; made by `reward`."""

    def __init__(self, function: Callable[..., Any], options: RewardOptions) -> None:
        self.function, self.options = function, options
        self.__module__ = getattr(function, "__module__", type(function).__module__)
        self.__qualname__ = getattr(function, "__qualname__", repr(function))
        self.__doc__ = function.__doc__
        self._workers: CallWorkers | None = None
        self._undone: set[str] = set()

    def __repr__(self) -> str:
        return f"Reward({self.__qualname__}, {self.options})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        # A decorated function's name refers to this object, so pickle finds it by that name.
        with contextlib.suppress(AttributeError, KeyError):
            if operator.attrgetter(self.__qualname__)(sys.modules[self.__module__]) is self:
                return self.__qualname__
        return Reward, (self.function, self.options)

    def __call__(self, roll: Batch, tokenizer: Any) -> Batch:
        """Rewards each row's response.

        The function receives a row's object columns as a dict, with "response_tokens", the list of
        the response's token ids, end token included; and the response's text, without end token.

        Args:
            roll: with tokens [B, W], mask [B, W] of the response, and sample_ids [B].
            tokenizer: a `Tokenizer`, or one of transformers.

        Returns:
            scores, float32 [B], or per token rewards, float32 [B, W], which are 0 outside of
            responses and where the function failed; is_dropped, bool [B], if policy is "drop".
            `meta["reward_errors"]` is the number of rows that failed, added to roll's.

        Raises:
            DataError: a row's reward is invalid and the policy is "fail", or columns do not fit.
            ConfigError: the time limit needs the main thread, or the function cannot be imported.
        """
        calls, counts = self._calls(roll, tokenizer), roll["mask"].sum(1).tolist()
        found: list[Any] = [None] * len(roll)
        with contextlib.closing(self._outcomes(calls, roll)) as outcomes:
            for call, values in outcomes:
                for row, outcome in zip(call.rows, values, strict=True):
                    found[row] = outcome
                    if isinstance(outcome, RewardFailure) and self.options.on_error == "fail":
                        raise DataError(self._tell(roll, row, outcome)) from outcome.cause
        failed = [row for row, outcome in enumerate(found) if isinstance(outcome, RewardFailure)]
        if failed:
            self._warn(roll, failed, found[failed[0]])
        for row in failed:
            found[row] = [0.0] * (counts[row] if self.options.per_token else 1)
        flat = torch.tensor([value for values in found for value in values], dtype=torch.float32)
        errors = roll.meta.get("reward_errors", 0) + len(failed)
        rewarded = Batch(meta={"reward_errors": errors})
        mask = roll["mask"]
        if self.options.per_token:
            # Indexing by a mask visits elements row by row, which is the order of the values here.
            rewards = torch.zeros(mask.shape, device=mask.device)
            rewards[mask] = flat.to(mask.device)
            rewarded["rewards"] = rewards
        else:
            rewarded["scores"] = flat.to(mask.device)
        if self.options.on_error == "drop":
            is_dropped = torch.zeros(len(roll), dtype=torch.bool, device=mask.device)
            is_dropped[failed] = True
            rewarded["is_dropped"] = is_dropped
        return rewarded

    def close(self) -> None:
        """Ends the worker processes; the next call starts new ones."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _calls(self, roll: Batch, tokenizer: Any) -> list[RewardCall]:
        tokenizer, tokens, mask = as_tokenizer(tokenizer), roll["tokens"].cpu(), roll["mask"].cpu()
        if mask.shape != tokens.shape or mask.dtype != torch.bool:
            raise DataError(
                f"mask: expected bool {list(tokens.shape)} as tokens are, got {mask.dtype} "
                f"{list(mask.shape)}; mark the tokens that the policy made"
            )
        objects = {name: column for name, column in roll.items() if isinstance(column, list)}
        samples, texts = [], []
        made, end = tokens[mask].tolist(), 0
        for row, count in enumerate(mask.sum(1).tolist()):
            ids = made[end : end + count]
            end += count
            sample = {name: column[row] for name, column in objects.items()}
            samples.append({**sample, "response_tokens": ids})
            texts.append(tokenizer.decode(ids))
        if self.options.batched:
            return [RewardCall(range(len(roll)), samples, texts)] if samples else []
        pairs = enumerate(zip(samples, texts, strict=True))
        return [RewardCall(range(row, row + 1), sample, text) for row, (sample, text) in pairs]

    def _outcomes(
        self, calls: list[RewardCall], roll: Batch
    ) -> Generator[tuple[RewardCall, list[Any]], None, None]:
        if self.options.in_process:
            if self.options.time_limit_s is not None:
                self._check_alarm()
            with Containment(self._seed(roll["tokens"].cpu().numpy())) as containment:
                for call in calls:
                    yield call, self._answers(call, containment, self.options.time_limit_s)
            if new := set(containment.changed) - self._undone:
                self._undone |= new
                log.warning(
                    "reward %s changed the process, and it was undone: %s",
                    self.__qualname__, ", ".join(sorted(new)),
                )  # fmt: skip
            return
        if self._workers is None:
            try:
                pickled = pickle.dumps(self._answers_alone)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"reward {self.__qualname__}: in_process=False needs a function that another "
                    f"process can import, got {error}; define it at the top of a module, or use "
                    "in_process=True"
                ) from error
            options = self.options
            limits = CallLimits(
                time_s=options.time_limit_s,
                cpu_s=options.cpu_limit_s,
                memory_bytes=options.memory_limit_bytes,
            )
            self._workers = CallWorkers(pickled, options.workers, limits)
        try:
            yield from self._workers.run(calls)
        except ConfigError:  # workers that cannot start are not kept
            self.close()
            raise

    def _answers_alone(self, call: RewardCall) -> list[Any]:
        """`_answers` in a worker process."""
        samples = call.sample if self.options.batched else [call.sample]
        tokens = np.concatenate([sample["response_tokens"] for sample in samples])
        with Containment(self._seed(tokens), may_exit=True) as containment:
            return self._answers(call, containment)

    def _seed(self, tokens: np.ndarray) -> int:
        """Of random numbers that the function draws: the same when a run is resumed."""
        return zlib.crc32(self.__qualname__.encode() + np.ascontiguousarray(tokens).tobytes())

    def _answers(
        self, call: RewardCall, containment: Containment, limit_s: float | None = None
    ) -> list[Any]:
        """The result of each row of a call: its numbers, or a failure."""
        options = self.options
        try:
            with containment.call(limit_s):
                given = self.function(call.sample, call.text)
                values = list(given) if options.batched or options.per_token else [given]
                groups = [values] if options.per_token else [[value] for value in values]
                checked = [_checked(group) for group in groups]
            if options.per_token:
                expected, each = len(call.sample["response_tokens"]), "token of the response"
            else:
                expected, each = len(call.rows), "sample"
            if len(values) != expected:
                reason = f"expected {expected} numbers, one for each {each}, got {len(values)}"
                return [RewardFailure(reason)] * len(call.rows)
            return checked
        except OutOfTime:
            return [out_of_time(limit_s)] * len(call.rows)
        except BaseException as error:  # noqa: BLE001 - the caller applies the policy to it
            containment.raise_interruption()
            return [_describe(error, containment)] * len(call.rows)

    def _check_alarm(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if not (is_main and hasattr(signal, "setitimer")):
            raise ConfigError(
                f"reward {self.__qualname__}: time_limit_s in this process needs the main thread of "
                f"Unix, and this is {threading.current_thread().name!r} on {sys.platform}; set "
                "in_process=False"
            )

    def _tell(self, roll: Batch, row: int, failure: RewardFailure) -> str:
        return (
            f"reward {self.__qualname__}, sample {int(roll['sample_ids'][row])} (row {row}): "
            f"{failure.reason}; mend it, or set on_error to 'zero' or 'drop'"
        )

    def _warn(self, roll: Batch, failed: list[int], first: RewardFailure) -> None:
        told = self._tell(roll, failed[0], first)
        log.warning("%d of %d rows failed, the first: %s", len(failed), len(roll), told)


def reward(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Decorator that turns a function (sample, text) -> float into a `Reward`.

    Args:
        function: called with a row's object columns and its response's text. If batched, it takes
            lists of both and returns a list of numbers; if per_token, it returns a number for each
            token in sample["response_tokens"].
        **options: fields of `RewardOptions`.

    Returns:
        The `Reward`, or a decorator that makes one.

    Raises:
        ConfigError: an option is unknown or out of range.
    """
    known = RewardOptions.__dataclass_fields__
    if unknown := sorted(options.keys() - known.keys()):
        raise ConfigError(f"reward: expected the options {', '.join(known)}, got {unknown[0]!r}")
    chosen = RewardOptions(**options)
    return Reward(function, chosen) if function else functools.partial(Reward, options=chosen)


def _describe(error: BaseException, containment: Containment) -> RewardFailure:
    """The failure of a row whose function raised; exits that it asked for are plain errors."""
    reason = f"it raised {type(error).__name__}"
    try:
        with containment.call():  # the error may have a text that is code too
            reason = f"{reason}: {error}"
            lines = "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 - the first error is what counts
        containment.raise_interruption()
        return RewardFailure(reason)
    return RewardFailure(reason, error if isinstance(error, Exception) else RuntimeError(lines))


def _checked(values: Iterable[Any]) -> list[float] | RewardFailure:
    found = []
    for value in values:
        number = value.item() if hasattr(value, "item") else value
        # NaN compares as false.
        if not (isinstance(number, numbers.Real) and abs(float(number)) <= _LARGEST):
            return RewardFailure(f"expected a finite number of float32, got {reprlib.repr(value)}")
        found.append(float(number))
    return found
