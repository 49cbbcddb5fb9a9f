"""Tasks: brute force over small ones, the split, determinism, and what responses are worth."""

import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.tasks import Arithmetic, DigitSort, match_each, match_fraction
from hybridflow.workers.batch.batch import Batch
from shared.errors import ConfigError

TASKS = [
    DigitSort(k=2),
    DigitSort(k=7, seed=3),
    Arithmetic(max_number=9),
    Arithmetic(max_number=40, operations="*"),
]


def prompts_of(task, batch):
    pairs = zip(batch["prompts"], batch["prompt_lengths"].tolist(), strict=True)
    return [task.tokenizer.decode(row[:length].tolist()) for row, length in pairs]


def answered(task, batch, responses):
    """The roll in which these token lists are the responses."""
    prompts = [
        row[:n].tolist() for row, n in zip(batch["prompts"], batch["prompt_lengths"], strict=True)
    ]
    rows = [torch.tensor(p + r) for p, r in zip(prompts, responses, strict=True)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    at = torch.arange(tokens.shape[1])
    lengths = torch.tensor([len(row) for row in rows])
    mask = (at >= batch["prompt_lengths"][:, None]) & (at < lengths[:, None])
    return batch | Batch(tokens=tokens, lengths=lengths, mask=mask)


def right_answers(task, batch):
    if isinstance(task, DigitSort):
        return [task.tokenizer.encode("".join(sorted(text))) for text in batch["digits"]]
    # The interpreter's own arithmetic is the judge.
    return [[*task.tokenizer.encode(str(eval(text))), 1] for text in batch["question"]]


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_have_everything_and_wrong_ones_less(task):
    batch = task.batch(0, 64)
    right = right_answers(task, batch)
    assert max(map(len, right)) <= task.num_new_tokens
    roll = answered(task, batch, right)
    assert task.exact_match(roll) == 1
    torch.testing.assert_close(
        task.token_rewards(roll, task.tokenizer)["rewards"].sum(1), torch.ones(64)
    )
    # One wrong token in every second row.
    wrong = [[2 + (ids[0] - 1) % 10, *ids[1:]] if k % 2 else ids for k, ids in enumerate(right)]
    roll = answered(task, batch, wrong)
    assert task.exact_match(roll) == 0.5
    rewards = task.token_rewards(roll, task.tokenizer)["rewards"].sum(1)
    expected = [(len(ids) - k % 2) / len(ids) for k, ids in enumerate(right)]
    torch.testing.assert_close(rewards, torch.tensor(expected))


@pytest.mark.parametrize("task", TASKS)
def test_batches_depend_on_seed_step_and_row_alone(task):
    again = pickle.loads(pickle.dumps(task))
    assert again == task
    for step, batch in zip(range(3, 5), again.batches(6, 2, start=3), strict=True):
        whole = task.batch(step, 6)
        assert prompts_of(task, batch) == prompts_of(task, whole)
        assert batch["sample_ids"].tolist() == list(range(step * 6, step * 6 + 6))
        assert prompts_of(task, task.batch(step, 3)) == prompts_of(task, whole)[:3]
    assert prompts_of(task, task.batch(0, 40)) != prompts_of(task, task.batch(1, 40))
    assert prompts_of(task, task.evaluation(9)) == prompts_of(task, task.evaluation(20))[:9]


def test_seeds_differ_in_training_and_agree_in_evaluation():
    one, other = DigitSort(seed=1), DigitSort(seed=2)
    assert one.batch(0, 40)["digits"] != other.batch(0, 40)["digits"]
    assert one.evaluation(40)["digits"] == other.evaluation(40)["digits"]


def test_training_never_sees_the_evaluation():
    for task in (*TASKS, DigitSort(k=3)):
        held_out = set(prompts_of(task, task.evaluation(300)))
        trained = {p for batch in task.batches(500, 4) for p in prompts_of(task, batch)}
        assert held_out
        assert not held_out & trained


def test_both_sides_together_are_all_prompts():
    """Of two digits: 2,000 draws miss one of 94 with a chance of 1e-7, 300 one of six hardly ever."""
    task = DigitSort(k=2)
    sides = prompts_of(task, task.batch(0, 2000)), prompts_of(task, task.evaluation(300))
    assert {*sides[0], *sides[1]} == {f"{a}{b}>" for a, b in itertools.product(range(10), repeat=2)}
    assert len(set(sides[1])) == 6


@pytest.mark.parametrize("operations", ["+", "-", "*", "+-", "+*", "-*", "+-*"])
def test_the_smallest_split_arithmetic_has_two_sides(operations):
    """Larger ones hold all its questions, so that both of their sides hold some too."""
    largest = next(n for n in itertools.count() if (n + 1) ** 2 * len(operations) >= 100)
    task = Arithmetic(max_number=largest, operations=operations)
    assert not set(task.batch(0, 200)["question"]) & set(task.evaluation(50)["question"])


@pytest.mark.parametrize(
    "task", [DigitSort(k=1), Arithmetic(max_number=0), Arithmetic(max_number=3)]
)
def test_few_questions_are_evaluated_as_trained(task):
    trained, evaluated = (
        set(prompts_of(task, b)) for b in (task.batch(0, 600), task.evaluation(600))
    )
    assert trained == evaluated
    assert len(trained) == task.num_questions


@pytest.mark.parametrize(
    ("operations", "largest", "longest"),
    [("+", 9, "18"), ("-", 9, "-9"), ("*", 12, "144"), ("+-", 99, "198"), ("-", 0, "0")],
)
def test_arithmetic_bounds_its_answers(operations, largest, longest):
    task = Arithmetic(max_number=largest, operations=operations)
    assert task.num_new_tokens == len(longest) + 1
    signs = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    everything = itertools.product(range(largest + 1), range(largest + 1), operations)
    assert max(len(str(signs[s](a, b))) for a, b, s in everything) == len(longest)


def test_an_arithmetic_answer_must_end():
    task = Arithmetic(max_number=5, operations="+")
    batch = task.batch(0, 1).repeat(4)
    ids = task.tokenizer.encode(batch["answer"][0])
    roll = answered(task, batch, [[*ids, 1], ids, [*ids, 0, 1], [1, *ids]])
    assert task.score(roll, task.tokenizer)["scores"].tolist() == [1, 0, 0, 0]


def test_scores_of_digits_are_shares_of_positions():
    task = DigitSort(k=4)
    batch = task.batch(0, 50)
    random = torch.Generator().manual_seed(0)
    responses = torch.randint(2, 12, (50, 4), generator=random).tolist()
    roll = answered(task, batch, responses)
    rewards = task.token_rewards(roll, task.tokenizer)["rewards"]
    scores = task.score(roll, task.tokenizer)["scores"]
    for row, (ids, digits) in enumerate(zip(responses, batch["digits"], strict=True)):
        hits = [str(token - 2) == right for token, right in zip(ids, sorted(digits), strict=True)]
        assert rewards[row].tolist() == [0] * 5 + [hit / 4 for hit in hits]
        assert scores[row] == sum(hits) / 4
    # A special token among the digits is no digit.
    right = right_answers(task, batch)
    assert task.exact_match(answered(task, batch, [[0, *ids[:3]] for ids in right])) == 0


@given(st.text("ab", max_size=5), st.text("ab", max_size=5))
def test_match_fraction_counts_positions(text, wanted):
    longest = max(len(text), len(wanted))
    padded = zip(text.ljust(longest, "?"), wanted.ljust(longest, "!"), strict=True)
    share = match_fraction(text, wanted)
    assert share == (sum(a == b for a, b in padded) / longest if longest else 1)
    assert (share == 1) == (text == wanted)
    each = match_each(text.encode(), wanted.encode()) if wanted else []
    assert len(each) == (len(text) if wanted else 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DigitSort(k=0),
        lambda: Arithmetic(max_number=-1),
        lambda: Arithmetic(max_number=3, operations="+/"),
        lambda: Arithmetic(max_number=3, operations=""),
        lambda: Arithmetic(max_number=3, operations="++"),
        lambda: DigitSort().batch(-1, 3),
        lambda: DigitSort().batch(0, 0),
        lambda: DigitSort().evaluation(0),
    ],
)
def test_tasks_that_are_none(make):
    with pytest.raises(ConfigError, match="expected"):
        make()
