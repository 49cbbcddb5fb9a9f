"""Rewards: against a loop over rows, and with functions that raise, hang, crash and lie."""

import contextlib
import importlib
import logging
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.tasks.rewards import Reward, RewardOptions, reward
from hybridflow.tasks.tokenizers import CharTokenizer
from hybridflow.workers.batch.batch import Batch
from shared.errors import ConfigError, DataError

CHARS = CharTokenizer("0123456789")

# Worker processes import it by name; what it does with a row depends on the row's text.
THEIRS = """
import os, signal, subprocess, time
from hybridflow.tasks.rewards import reward

@reward(in_process=False, time_limit_s=0.3, on_error="drop", workers=2)
def careful(sample, text):
    if text == "11":
        raise KeyError("eleven")
    if text == "22":
        time.sleep(60)
    if text == "33":
        os._exit(7)
    return float(text) + sample["bonus"] + (os.getpid() if text == "99" else 0)

@reward(in_process=False, time_limit_s=2, on_error="drop")
def busy(sample, text):
    child = subprocess.Popen(["sleep", "60"])
    with open(sample["path"], "w") as file:
        file.write(str(child.pid))
    if text == "7":
        os._exit(7)
    child.wait()

@reward(in_process=False, on_error="drop", cpu_limit_s=0.1)
def tireless(sample, text):
    while text == "1":
        pass
    return 1.0

@reward(in_process=False, on_error="drop", memory_limit_bytes=8 << 30)
def greedy(sample, text):
    return float(len(bytearray(16 << 30 if text == "1" else 1)))

@reward(in_process=False, on_error="drop", workers=2)
def deadly(sample, text):
    if text == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "3" and not os.fork():
        time.sleep(60)  # the copy keeps what its worker answers by
    if text in "13":
        os._exit(7)
    return 1.0

@reward(in_process=False)
def strict(sample, text):
    return 1 / (int(text) - 3)
"""


def make_roll(*texts, **objects):
    """A prompt of two tokens, then the text and the end token."""
    rows = [torch.tensor([2, 3, *CHARS.encode(text), 1]) for text in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    at = torch.arange(tokens.shape[1])
    mask = (at >= 2) & (at < torch.tensor([len(row) for row in rows])[:, None])
    ids = torch.arange(len(texts)) + 100
    return Batch(tokens=tokens, mask=mask, sample_ids=ids, **objects)


@reward
def plain(sample, text):
    """Sums of digits."""
    return sum(map(int, text)) + sample["bonus"]


@given(st.lists(st.tuples(st.text("0123456789", max_size=6), st.integers(-99, 99)), min_size=1))
def test_scores_are_a_loop_over_rows(rows):
    texts, bonus = [text for text, _ in rows], [number for _, number in rows]
    roll = make_roll(*texts, bonus=bonus)
    expected = torch.tensor([sum(map(int, text)) + number for text, number in rows]).float()
    scored = plain(roll, CHARS)
    assert scored.keys() == ["scores"]
    assert torch.equal(scored["scores"], expected)
    assert scored.meta == {"reward_errors": 0}

    @reward(batched=True)
    def together(samples, texts):
        return np.array([plain.function(s, t) for s, t in zip(samples, texts, strict=True)])

    assert torch.equal(together(roll, CHARS)["scores"], expected)

    @reward(per_token=True)
    def each(sample, text):
        assert sample["response_tokens"] == [*CHARS.encode(text), 1]
        return torch.arange(len(text) + 1) + sample["bonus"]

    rewards = each(roll, CHARS)["rewards"]
    assert rewards.shape == roll["tokens"].shape
    for row, (text, number) in enumerate(rows):
        made = [float(k + number) for k in range(len(text) + 1)]
        assert rewards[row].tolist() == [0, 0, *made] + [0] * (rewards.shape[1] - 2 - len(made))


def test_masked_tokens_inside_a_response_are_not_read():
    roll = make_roll("1234", bonus=[0])
    roll["mask"][0, 3] = False
    assert plain(roll, CHARS)["scores"].tolist() == [1 + 3 + 4]
    rewards = reward(per_token=True)(lambda sample, text: [1, 2, 3, 4])(roll, CHARS)["rewards"]
    assert rewards.tolist() == [[0, 0, 1, 0, 2, 3, 4]]


def test_a_batch_without_rows_has_no_scores():
    roll = make_roll("1", bonus=[0]).rows(0, 0)
    assert plain(roll, CHARS)["scores"].shape == (0,)
    assert reward(batched=True)(lambda samples, texts: [])(roll, CHARS)["scores"].shape == (0,)


def misbehave(sample, text):
    answers = {"1": math.nan, "2": math.inf, "3": 1e300, "4": None, "5": "1.0", "6": [1.0]}
    answers |= {"7": True, "8": np.float64(0.5), "9": torch.tensor(0.25)}
    return answers[text]


@pytest.mark.parametrize("text", list("0123456"))
def test_wrong_answers_name_sample_row_and_reason(text):
    told = "it raised KeyError: '0'" if text == "0" else "expected a finite number"
    with pytest.raises(DataError, match=rf"misbehave, sample 101 \(row 1\): {told}") as caught:
        reward(misbehave)(make_roll("7", text), CHARS)
    if text == "0":
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.value.__cause__.__traceback__ is not None


@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_policies_count_log_once_and_go_on(policy, caplog):
    roll = make_roll(*"0123456789")
    roll.meta["reward_errors"] = 5
    with caplog.at_level(logging.WARNING):
        scored = reward(on_error=policy)(misbehave)(roll, CHARS)
    assert scored["scores"].tolist() == [0] * 7 + [1, 0.5, 0.25]
    assert scored.meta["reward_errors"] == 12
    assert (roll | scored).meta["reward_errors"] == 12
    assert len(caplog.records) == 1
    assert "7 of 10 rows failed, the first: reward misbehave, sample 100" in caplog.text
    assert ("is_dropped" in scored) == (policy == "drop")
    if policy == "drop":
        assert scored["is_dropped"].tolist() == [True] * 7 + [False] * 3


def test_wrong_counts_say_how_many_came():
    roll = make_roll("12", "345")
    with pytest.raises(DataError, match="expected 2 numbers, one for each sample, got 3"):
        reward(batched=True)(lambda samples, texts: [1, 2, 3])(roll, CHARS)
    with pytest.raises(DataError, match=r"row 1\): expected 4 numbers.*token.*, got 3"):
        reward(per_token=True)(lambda sample, text: [1, 2, 3])(roll, CHARS)
    dropped = reward(per_token=True, on_error="drop")(lambda sample, text: [1, 2, 3])(roll, CHARS)
    assert dropped["is_dropped"].tolist() == [False, True]
    assert dropped["rewards"].tolist() == [[0, 0, 1, 2, 3, 0], [0] * 6]


def test_one_bad_number_of_a_batched_function_is_one_rows():
    given = reward(batched=True, on_error="drop")(lambda samples, texts: [1, math.nan, 3])
    scored = given(make_roll("1", "2", "3"), CHARS)
    assert scored["scores"].tolist() == [1, 0, 3]
    assert scored["is_dropped"].tolist() == [False, True, False]


def test_a_time_limit_in_this_process_rings_through_handlers():
    @reward(time_limit_s=0.1, on_error="zero")
    def slow(sample, text):
        with contextlib.suppress(Exception):
            while text == "1":
                pass
        return 2.0

    handler = signal.getsignal(signal.SIGALRM)
    start = time.monotonic()
    scored = slow(make_roll("1", "2", "1"), CHARS)  # the first and the last would never end
    assert time.monotonic() - start >= 0.2
    assert scored["scores"].tolist() == [0, 2, 0]
    assert signal.getsignal(signal.SIGALRM) is handler
    with pytest.raises(DataError, match=r"longer than time_limit_s=0\.1"):
        Reward(slow.function, RewardOptions(time_limit_s=0.1))(make_roll("1"), CHARS)


def test_an_alarm_that_was_set_before_still_rings():
    rung = []
    handler = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    before = signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        reward(time_limit_s=5)(lambda sample, text: 1)(make_roll(*"123"), CHARS)
        deadline = time.monotonic() + 60
        while not rung and time.monotonic() < deadline:
            pass
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)
    assert rung


def test_a_time_limit_in_another_thread_is_refused():
    caught = []

    def run():
        try:
            reward(time_limit_s=1)(plain.function)(make_roll("1", bonus=[0]), CHARS)
        except ConfigError as error:
            caught.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]
    assert "in_process=False" in caught[0]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A user's module, which worker processes can import too."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "their_rewards.py").write_text(THEIRS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        module = importlib.import_module("their_rewards")
        yield module
        for one in (module.careful, module.deadly, module.strict):
            one.close()


@pytest.mark.slow
def test_worker_processes_survive_whatever_rows_do(theirs):
    texts = ["4", "11", "5", "99", "22", "33"]
    scored = theirs.careful(make_roll(*texts, bonus=[0.5] * 6), CHARS)
    assert scored["is_dropped"].tolist() == [False, True, False, False, True, True]
    assert scored["scores"][:3].tolist() == [4.5, 0, 5.5]
    assert scored["scores"][3] not in (0, 99.5, 99.5 + os.getpid())
    assert scored.meta["reward_errors"] == 3


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("texts", ["1212", "143214"])
def test_rows_that_kill_their_worker_are_errors_of_their_own(theirs, texts):
    scored = theirs.deadly(make_roll(*texts), CHARS)
    assert scored["is_dropped"].tolist() == [text != "4" for text in texts]


@pytest.mark.slow
def test_worker_processes_are_kept_and_replaced(theirs):
    roll = make_roll(*"12345678", bonus=[0] * 8)
    assert theirs.careful(roll, CHARS)["scores"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    # A quick one may have answered everything before the other was up; this tells who has answered.
    victim = round(float(theirs.careful(make_roll("99", bonus=[0]), CHARS)["scores"][0])) - 99
    before = {process.pid: process for process in multiprocessing.active_children()}
    before[victim].kill()
    before[victim].join()
    assert theirs.careful(roll, CHARS)["scores"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    now = {process.pid for process in multiprocessing.active_children()}
    assert before.keys() - now == {victim}
    assert len(now - before.keys()) == 1
    assert pickle.loads(pickle.dumps(theirs.careful)) is theirs.careful


@pytest.mark.slow
@pytest.mark.parametrize("text", ["6", "7"])
def test_what_a_call_has_started_ends_with_its_worker(theirs, tmp_path, text):
    """When the call runs out of time, and when its worker dies under it."""
    path = tmp_path / "child"
    found = theirs.busy(make_roll(text, path=np.array([str(path)], dtype=object)), CHARS)
    assert found["is_dropped"].tolist() == [True]
    child, until = int(path.read_text()), time.monotonic() + 10
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(child)
    theirs.busy.close()


def is_running(pid):
    """Whether a process is there, and not only its exit status."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_worker_process_stands_by_where_calls_have_a_time_limit(theirs, tmp_path):
    roll = make_roll("6", path=np.array([str(tmp_path / "child")], dtype=object))
    others = {child.pid for child in multiprocessing.active_children()}
    found = []
    for _ in range(2):
        theirs.busy(roll, CHARS)
        found.append({child.pid for child in multiprocessing.active_children()} - others)
    theirs.busy.close()
    # Each call's own worker was killed: there are the one that stood by, and a new one.
    assert [len(pids) for pids in found] == [2, 2]
    assert len(found[0] & found[1]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "told"), [("tireless", "processor time"), ("greedy", "Memory")])
def test_limits_of_processor_time_and_memory(theirs, caplog, name, told):
    function = getattr(theirs, name)
    assert function(make_roll("2", "1", "2"), CHARS)["is_dropped"].tolist() == [False, True, False]
    assert told in caplog.text
    function.close()


@pytest.mark.slow
def test_a_failure_in_a_worker_process_brings_its_traceback(theirs):
    with pytest.raises(DataError, match=r"strict, sample 102 \(row 2\): it raised Zero") as caught:
        theirs.strict(make_roll("1", "2", "3", "4"), CHARS)
    assert "return 1 / (int(text) - 3)" in str(caught.value.__cause__)
    with pytest.raises(DataError, match="row 0: its object columns cannot be sent"):
        theirs.strict(make_roll("1", odd=[lambda: 0]), CHARS)
    # What was under way when the first call failed is not taken for an answer to this one.
    assert theirs.strict(make_roll("4", "5"), CHARS)["scores"].tolist() == [1, 0.5]


@pytest.mark.slow
def test_functions_that_workers_can_not_import_are_refused(tmp_path, monkeypatch):
    local = reward(in_process=False)(lambda sample, text: 1)
    with pytest.raises(ConfigError, match="at the top of a module"):
        local(make_roll("1"), CHARS)
    (tmp_path / "gone_rewards.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    gone_rewards = importlib.import_module("gone_rewards")
    (tmp_path / "gone_rewards.py").unlink()
    before = multiprocessing.active_children()
    with pytest.raises(ConfigError, match="gone_rewards"):
        gone_rewards.strict(make_roll("1"), CHARS)
    assert set(multiprocessing.active_children()) == set(before)


def test_rewards_pickle_with_and_without_their_name():
    assert pickle.loads(pickle.dumps(plain)) is plain
    # The name stands for the function itself here.
    again = pickle.loads(pickle.dumps(Reward(misbehave, RewardOptions(on_error="zero"))))
    assert (again.function, again.options.on_error) == (misbehave, "zero")
    assert plain.__doc__ == "Sums of digits."


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"on_error": "ignore"}, "on_error"),
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"time_limit_s": math.nan}, "time_limit_s"),
        ({"workers": 2}, "in_process=False"),
        ({"workers": 0, "in_process": False}, "workers"),
        ({"workers": 2, "in_process": False, "batched": True}, "batched=True"),
        ({"batched": True, "per_token": True}, "exclude each other"),
        ({"timeout": 3}, "expected the options time_limit_s, .* got 'timeout'"),
    ],
)
def test_options_that_contradict(options, told):
    with pytest.raises(ConfigError, match=told):
        reward(**options)


def test_columns_that_do_not_fit():
    roll = make_roll("12")
    with pytest.raises(DataError, match="no column 'mask'"):
        plain(roll.drop("mask"), CHARS)
    with pytest.raises(DataError, match="mask: expected bool"):
        plain(Batch(tokens=roll["tokens"], mask=roll["mask"].float()), CHARS)
