"""Tools that a policy calls: parsing calls in its text, and running them.

A tool is a plain function from keyword arguments to text. Any failure (an unknown name, wrong
arguments, an exception, a result that is not text, a timeout) is returned to the policy as text and
never ends the run. A function that hangs cannot be stopped: its thread is abandoned, as a daemon
that does not keep the process alive.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Tool", "ToolAnswer", "ToolCall", "parse_calls", "run_calls"]

Tool = Callable[..., str]
_CALL = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)


class ToolCall(NamedTuple):
    """A tool's name, and its keyword arguments."""

    name: str
    arguments: Mapping[str, Any]


class ToolAnswer(NamedTuple):
    """Text that the policy reads, and whether it is an error."""

    text: str
    is_error: bool = False


def parse_calls(text: str) -> list[ToolCall]:
    r"""Parses calls of the form <tool>{"name": ..., "arguments": {...}}</tool>.

    Example:
        >>> parse_calls('Let me see. <tool>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool>')
        [ToolCall(name='add', arguments={'a': 1, 'b': 2})]

    Raises:
        ValueError: if the text between the tags is not a call; the policy reads the message.
    """
    calls = []
    for inside in _CALL.findall(text):
        try:
            found = json.loads(inside)
        except RecursionError as error:
            raise ValueError("a call is nested too deeply") from error
        found = found if isinstance(found, dict) else {}
        name, arguments = found.get("name"), found.get("arguments", {})
        is_call = isinstance(name, str) and isinstance(arguments, dict)
        if not is_call:
            raise ValueError(
                'a call is {"name": "...", "arguments": {...}} between <tool> and </tool>'
            )
        calls.append(ToolCall(name, arguments))
    return calls


def run_calls(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool],
    *,
    timeout_s: float,
    num_threads: int = 32,
) -> list[ToolAnswer]:
    """Runs calls in threads.

    Args:
        calls: of any number of conversations.
        tools: by name; they must be thread-safe.
        timeout_s: time limit of each call, in seconds.
        num_threads: calls that run at once.

    Returns:
        An answer to each call, in order.
    """
    answers: list[ToolAnswer] = []
    for start in range(0, len(calls), num_threads):
        answers += _run_together(calls[start : start + num_threads], tools, timeout_s)
    return answers


def _run_together(
    calls: Sequence[ToolCall], tools: Mapping[str, Tool], timeout_s: float
) -> list[ToolAnswer]:
    found: list[ToolAnswer | None] = [None] * len(calls)

    def run(k: int) -> None:
        found[k] = _run(calls[k], tools)

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [
        ToolAnswer(f"{call.name} gave no answer within {timeout_s:g} s", is_error=True)
        if answer is None
        else answer
        for call, answer in zip(calls, found, strict=True)
    ]


def _run(call: ToolCall, tools: Mapping[str, Tool]) -> ToolAnswer:
    if call.name not in tools:
        return ToolAnswer(f"no tool {call.name!r}; there are {', '.join(tools) or 'none'}", True)
    try:
        result = tools[call.name](**call.arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - also of a tool that calls `exit`
        return ToolAnswer(f"{call.name} failed: {type(error).__name__}: {error}", True)
    if not isinstance(result, str):
        return ToolAnswer(f"{call.name} returned {type(result).__name__}, and not text", True)
    return ToolAnswer(result)
