"""Conversations with tools: what stands in a row, what is masked, and whatever goes wrong."""

import json
import threading
import time
from functools import partial

import pytest
import torch

from hybridflow.models import pieces
from hybridflow.models.config import read_config
from hybridflow.models.decoder import Decoder
from hybridflow.models.sequences import log_probs, select_asked
from hybridflow.rollout.agent import AgentLoop
from hybridflow.rollout.native import generator as native
from hybridflow.rollout.rows import responses
from hybridflow.rollout.sampling import Sampling
from hybridflow.rollout.tools import ToolCall, parse_calls, run_calls
from hybridflow.tasks.tokenizers import ByteTokenizer
from hybridflow.workers.batch.batch import Batch
from shared.errors import ConfigError, DataError

TOKENIZER = ByteTokenizer()
END = TOKENIZER.end_token


def batch_of(prompts, **more):
    tokens = [TOKENIZER.encode(prompt) for prompt in prompts]
    padded = torch.zeros(len(tokens), max(map(len, tokens)), dtype=torch.int64)
    for row, of in zip(padded, tokens, strict=True):
        row[: len(of)] = torch.tensor(of)
    return Batch(
        prompts=padded,
        prompt_lengths=torch.tensor([len(of) for of in tokens]),
        sample_ids=torch.arange(len(tokens)) + 10,
        **more,
    )


def call(name, **arguments):
    return f"<tool>{json.dumps({'name': name, 'arguments': arguments})}</tool>"


class Scripted:
    """A policy that says what it is told to, by sample and turn; cut off at the turn's length.

    Given a version, it tells of its weights, which then change from turn to turn.
    """

    def __init__(self, script, version=None):
        self.script, self.said, self.num_calls, self.seeds = script, {}, 0, []
        self.version = version

    def __call__(self, prompts, sampling, *, sample_ids, step):
        self.num_calls += 1
        self.seeds.append(sampling.seed)
        made = []
        for sample in sample_ids.tolist():
            turn = self.said.get(sample, 0)
            self.said[sample] = turn + 1
            tokens = [*TOKENIZER.encode(self.script[sample][turn]), END]
            made.append(tokens[: sampling.max_new_tokens])
        worth = [[-0.5 - k for k in range(len(tokens))] for tokens in made]
        versions = None if self.version is None else [self.version + self.num_calls] * len(made)
        return responses(prompts, made, worth, num_steps=0, versions=versions)


def add(a, b):
    return str(a + b)


def loop_of(script, tools=None, **more):
    settings = {"max_turns": 5, "max_tokens": 400, "tool_timeout_s": 5.0, **more}
    tools = {"add": add} if tools is None else tools
    policy = script if callable(script) else Scripted(script)
    return AgentLoop(generate=policy, tokenizer=TOKENIZER, tools=tools, **settings)


SAMPLING = Sampling(max_new_tokens=120, end_token=END)


def segments(found, row):
    """Texts of a row, and whether they are the policy's; its end tokens are taken off."""
    start, stop = int(found["prompt_lengths"][row]), int(found["lengths"][row])
    tokens, mask = (
        found["tokens"][row, start:stop].tolist(),
        found["mask"][row, start:stop].tolist(),
    )
    told, k = [], 0
    while k < len(tokens):
        end = next((j for j in range(k, len(tokens)) if mask[j] != mask[k]), len(tokens))
        told.append((TOKENIZER.decode(tokens[k:end]), mask[k]))
        k = end
    return told


def expected_rows(prompt, parts, width):
    """Tokens and mask of a conversation, put together from its text."""
    tokens, mask = TOKENIZER.encode(prompt), [False] * len(TOKENIZER.encode(prompt))
    for text, is_made in parts:
        part = TOKENIZER.encode(text) + [END] * is_made
        tokens, mask = tokens + part, mask + [is_made] * len(part)
    missing = width - len(tokens)
    return tokens + [0] * missing, mask + [False] * missing


def test_rows_are_what_tokenising_the_conversation_again_gives():
    script = {
        10: [f"Sum: {call('add', a=1, b=2)}", f"and {call('add', a=3, b=4)}", "It is 7."],
        11: ["I know it."],
        12: [call("add", a=1, b=1) + call("add", a=2, b=2), "Both."],
    }
    prompts = ["1+2+4?", "Hm", "two sums"]
    policy = Scripted(script)
    found = loop_of(policy).run(batch_of(prompts, digits=[1, 2, 3]), SAMPLING, version=4)
    talks = [
        [(script[10][0], True), ("<result>3</result>", False), (script[10][1], True),
         ("<result>7</result>", False), (script[10][2], True)],
        [(script[11][0], True)],
        [(script[12][0], True), ("<result>2</result><result>4</result>", False),
         (script[12][1], True)],
    ]  # fmt: skip
    width = found["prompts"].shape[1] + 400
    for row, (prompt, parts) in enumerate(zip(prompts, talks, strict=True)):
        tokens, mask = expected_rows(prompt, parts, width)
        assert found["tokens"][row].tolist() == tokens
        assert found["mask"][row].tolist() == mask
        assert int(found["lengths"][row]) == len([t for t in tokens if t])
    assert found["num_turns"].tolist() == [3, 1, 2]
    assert found["tool_errors"].tolist() == [0, 0, 0]
    assert policy.num_calls == 3
    mask = found["mask"]
    assert torch.equal(found["versions"], torch.where(mask, 4, -1).int())
    assert (found["rollout_log_probs"][mask] < 0).all()
    assert not found["rollout_log_probs"][~mask].any()
    # Log-probabilities stand at the tokens that the policy gave them with.
    row, lengths = 0, [len(TOKENIZER.encode(text)) + 1 for text in script[10]]
    expected = [-0.5 - k for length in lengths for k in range(length)]
    assert found["rollout_log_probs"][row][mask[row]].tolist() == expected
    assert found["group"].tolist() == found["sample_ids"].tolist() == [10, 11, 12]
    assert found["digits"] == [1, 2, 3]


def test_columns_are_those_of_a_generation():
    found = loop_of({sample: ["ab"] for sample in range(20, 24)}).run(
        batch_of(["x", "yz"]), Sampling(max_new_tokens=3, num_samples=2, end_token=END)
    )
    kinds = {name: found[name].dtype for name in found}
    assert kinds == {
        "prompts": torch.int64, "prompt_lengths": torch.int64, "sample_ids": torch.int64,
        "tokens": torch.int64, "lengths": torch.int64, "mask": torch.bool,
        "rollout_log_probs": torch.float32, "versions": torch.int32, "group": torch.int64,
        "num_turns": torch.int64, "tool_errors": torch.int64,
    }  # fmt: skip
    assert found["group"].tolist() == [10, 10, 11, 11]
    assert found["lengths"].tolist() == [4, 4, 5, 5]


def test_a_turn_has_the_version_that_its_server_tells():
    policy = Scripted({10: [call("add", a=1, b=2), "3"]}, version=6)
    found = loop_of(policy).run(batch_of(["1+2?"]), SAMPLING, version=1)
    turns = [len(TOKENIZER.encode(text)) + 1 for text in policy.script[10]]
    versions = found["versions"][0]
    assert versions[found["mask"][0]].tolist() == [7] * turns[0] + [8] * turns[1]
    assert (versions[~found["mask"][0]] == -1).all()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("boom"), "boom failed: KeyError: 'x'"),
        (call("leave"), "leave failed: SystemExit: 3"),
        (call("number"), "number returned int, and not text"),
        (call("nothing"), "nothing returned NoneType, and not text"),
        (call("add", a=1), "add failed: TypeError: add() missing 1 required positional argument"),
        (call("other"), "no tool 'other'; there are boom, leave"),
        ("<tool>{name: add}</tool>", "the call can not be read: Expecting property name"),
        ('<tool>["add"]</tool>', "the call can not be read: a call is"),
        ('<tool>{"name": "add", "arguments": 3}</tool>', "the call can not be read: a call is"),
    ],
)
def test_a_tool_that_fails_is_told_to_the_policy(said, told):
    def boom():
        raise KeyError("x")

    def leave():
        raise SystemExit(3)

    tools = {
        "boom": boom, "leave": leave, "add": add, "number": lambda: 3, "nothing": lambda: None,
    }  # fmt: skip
    found = loop_of({10: [said, "I see."]}, tools).run(batch_of(["?"]), SAMPLING)
    first, answer, last = segments(found, 0)
    assert first == (said, True)
    assert answer[0].startswith(f"<result>{told}")
    assert not answer[1]
    assert last == ("I see.", True)
    assert found["tool_errors"].tolist() == [1]


def test_tools_that_hang_are_left_behind_together():
    forever, both = threading.Event(), threading.Barrier(2)

    def hang():
        both.wait(60)
        forever.wait(120)
        return "late"

    script = {10: [call("hang") + call("add", a=1, b=1), "ok"], 11: [call("hang"), "ok"]}
    # The sum is given its answer's time too.
    found = loop_of(script, {"hang": hang, "add": add}, tool_timeout_s=1.5).run(
        batch_of(["a", "b"]), SAMPLING
    )
    assert not both.broken
    assert not both.n_waiting, "one hangs after the other"
    forever.set()
    late = "<result>hang gave no answer within 1.5 s</result>"
    assert segments(found, 0)[1] == (late + "<result>2</result>", False)
    assert segments(found, 1)[1] == (late, False)
    assert found["tool_errors"].tolist() == [1, 1]


def test_calls_of_a_turn_run_at_the_same_time_but_so_many():
    changed, running, most = threading.Condition(), [0], [0]

    def slow():
        with changed:
            running[0] += 1
            most[0] = max(most[0], running[0])
            changed.notify_all()
            assert changed.wait_for(lambda: most[0] >= 3, 60)
        time.sleep(0.02)  # for a fourth one, if it were let in
        with changed:
            running[0] -= 1
        return "x"

    answers = run_calls([ToolCall("slow", {})] * 7, {"slow": slow}, timeout_s=100, num_threads=3)
    assert [answer.text for answer in answers] == ["x"] * 7
    assert most[0] == 3


def test_the_last_turn_calls_nothing():
    called = []

    def note():
        called.append(1)
        return "n"

    found = loop_of({10: [call("note")] * 9}, {"note": note}, max_turns=3).run(
        batch_of(["go"]), SAMPLING
    )
    assert found["num_turns"].tolist() == [3]
    assert len(called) == 2
    assert segments(found, 0)[-1] == (call("note"), True)


def test_a_turn_that_its_length_cuts_off_is_the_last():
    said = call("add", a=1, b=2) + " and so on"
    cut = len(call("add", a=1, b=2)) + 3
    found = loop_of({10: [said, "never"]}).run(
        batch_of(["go"]), Sampling(max_new_tokens=cut, end_token=END)
    )
    assert segments(found, 0) == [(said[:cut], True)]
    assert found["num_turns"].tolist() == [1]


@pytest.mark.parametrize("room", [0, -1])
def test_a_turn_begins_only_where_a_whole_one_fits(room):
    said = call("add", a=1, b=2)
    answer = "<result>3</result>"
    turn = len(said) + 1
    script = {10: [said] * 5, 11: ["short"]}
    max_tokens = turn + len(answer) + turn + room
    found = loop_of(script, max_tokens=max_tokens).run(
        batch_of(["go", "and go"]), Sampling(max_new_tokens=turn, end_token=END)
    )
    assert found["num_turns"].tolist() == [2 + room, 1]
    assert segments(found, 0)[-1] == (said, True)
    assert found["tokens"].shape[1] == len("and go") + max_tokens
    assert int(found["lengths"][0]) <= len("go") + max_tokens


def test_long_answers_are_cut():
    script = {10: [call("long"), "ok"]}
    found = loop_of(script, {"long": lambda: "z" * 99}, max_answer_tokens=12).run(
        batch_of(["go"]), SAMPLING
    )
    assert segments(found, 0)[1] == ("<result>zzzz", False)


def test_own_forms_of_calls_and_answers_are_used():
    def parse(text):
        return [ToolCall("add", {"a": 2, "b": 3})] if "!" in text else []

    found = loop_of(
        {10: ["five!", "ok"]}, parse=parse, write=lambda answers: f"[{answers[0]}]",
        encode=lambda text: [2, *TOKENIZER.encode(text)],
    ).run(batch_of(["go"]), SAMPLING)  # fmt: skip
    assert segments(found, 0) == [("five!", True), ("[5]", False), ("ok", True)]
    assert found["tokens"][0, 2 + 6] == 2


def test_bad_settings_are_refused():
    for change in ({"max_turns": 0}, {"tool_timeout_s": 0.0}):
        with pytest.raises(ConfigError, match="expected at least one turn"):
            loop_of({}, **change)
    loop = loop_of({}, max_tokens=10)
    for sampling in (
        Sampling(max_new_tokens=11, end_token=1),
        Sampling(max_new_tokens=5, end_token=None),
    ):
        with pytest.raises(ConfigError, match="expected an end token and turns that fit"):
            loop.run(batch_of(["go"]), sampling)
    empty = Batch(
        prompts=torch.zeros(0, 3, dtype=torch.int64), prompt_lengths=torch.zeros(0).long(),
        sample_ids=torch.zeros(0).long(),
    )  # fmt: skip
    with pytest.raises(DataError, match="a batch of no rows"):
        loop.run(empty, Sampling(max_new_tokens=5, end_token=1))


def test_calls_are_read_from_any_text():
    assert parse_calls("nothing here") == []
    assert parse_calls('<tool>{"name": "now"}</tool>') == [ToolCall("now", {})]
    assert parse_calls('<tool>\n{"name": "now"}\n</tool> <tool>') == [ToolCall("now", {})]
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_calls(f"<tool>{'[' * 100_000}</tool>")


@pytest.fixture(scope="module")
def model():
    config = {
        "model_type": "llama", "vocab_size": 259, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }  # fmt: skip
    made = Decoder(read_config(config), dtype=torch.float64).requires_grad_(False)
    pieces.initialize(made, 1)
    # The end token is likely, so that turns end before their length does.
    pieces_of = {piece.name: piece for piece in pieces.pieces(made)}
    pieces_of["lm_head.weight"].view(made)[END] *= 6
    return made


def always(text):
    """Any turn calls a tool, which tells its length."""
    return [ToolCall("count", {"text": text})]


def real_loop(model, **more):
    settings = {"max_turns": 4, "max_tokens": 50, "parse": always, **more}
    return AgentLoop(
        generate=partial(native.generate, model), tokenizer=TOKENIZER,
        tools={"count": lambda text: str(len(text))}, write=" ".join, **settings,
    )  # fmt: skip


REAL = Sampling(max_new_tokens=9, num_samples=3, end_token=END, seed=5)


def test_log_probs_of_a_real_model_are_teacher_forced_ones(model):
    found = real_loop(model).run(batch_of(["hello", "a", "xyz"]), REAL, step=2)
    assert len(set(found["num_turns"].tolist())) > 1
    assert max(found["num_turns"].tolist()) >= 3
    tokens, mask = found["tokens"], found["mask"]
    expected, _ = log_probs(model, model(select_asked(tokens, mask)), tokens, mask)
    torch.testing.assert_close(found["rollout_log_probs"], expected, rtol=0, atol=1e-12)


def test_a_conversation_of_a_real_model_does_not_depend_on_the_others(model):
    whole = batch_of(["hello", "a", "xyz"])
    found = real_loop(model).run(whole, REAL, step=2)
    alone = real_loop(model).run(whole.rows(2, 3), REAL, step=2)
    for name in ("tokens", "lengths", "mask", "num_turns", "group"):
        assert torch.equal(found[name][6:9], alone[name])
    other = real_loop(model).run(whole, REAL, step=3)
    assert not torch.equal(found["tokens"], other["tokens"])


def test_one_turn_of_a_real_model_is_a_generation(model):
    batch = batch_of(["hello", "a"])
    found = real_loop(model, max_turns=1).run(batch, REAL)
    prompts = [TOKENIZER.encode("hello"), TOKENIZER.encode("a")]
    ids = torch.tensor([30, 31, 32, 33, 34, 35])
    expected = native.generate(model, list(map(torch.tensor, prompts)), REAL, sample_ids=ids)
    width = expected.tokens.shape[1]
    assert torch.equal(found["tokens"][:, :width], expected.tokens)
    assert torch.equal(found["lengths"], expected.lengths)


def test_turns_draw_other_numbers():
    policy = Scripted({10: [call("add", a=1, b=1)] * 2 + ["ok"]})
    loop_of(policy).run(batch_of(["go"]), Sampling(max_new_tokens=80, end_token=END, seed=7))
    assert policy.seeds[0] == 7
    assert len(set(policy.seeds)) == 3
