"""Models of reward and cost: trained on pairs, and what is learnt against them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

import hybridflow as hy

MODEL = {**hy.PRESETS["tiny-llama"], "vocab_size": 16}
TASK = hy.tasks.DigitSort(k=2)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pairs(step, num=128):
    """Prompts with two answers, of which the one with more right digits is preferred.

    Wrong tokens are any: a policy finds what its judge has never seen, and is praised for it.
    """
    draw = torch.Generator().manual_seed(step)
    batch = TASK.batch(step, num)
    right = batch["prompts"][:, :2].sort(1).values
    is_right = torch.rand(2, num, 2, generator=draw) < 0.5
    # No two answers are equally good: of such, one is made wholly right or wholly wrong.
    tied = is_right[0].sum(1) == is_right[1].sum(1)
    is_right[0, tied] = ~is_right[1, tied].all(1, keepdim=True)
    other = (right + torch.randint(1, 16, (2, num, 2), generator=draw)) % 16
    answers = torch.where(is_right, right, other)
    better = is_right[1].sum(1) > is_right[0].sum(1)
    answers[:, better] = answers.flip(0)[:, better]
    lengths = torch.full((num,), 5)
    return hy.Batch(
        chosen=torch.cat([batch["prompts"], answers[0]], 1), chosen_lengths=lengths,
        rejected=torch.cat([batch["prompts"], answers[1]], 1), rejected_lengths=lengths,
    )  # fmt: skip


def fitted(pool, steps):
    """A reward model that has seen some batches of pairs, and its last accuracies."""
    optimizer = hy.AdamW(lr=2e-3, schedule="cosine", num_steps=steps, num_warmup_steps=10)
    model = hy.RewardModel(MODEL, pool, optimizer=optimizer)
    told = [model.fit(pairs(step))["accuracy"] for step in range(steps)]
    return model, told


def test_scores_are_those_of_the_hugging_face_classifier(tmp_path):
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config.num_labels = 1
    torch.manual_seed(0)
    theirs = LlamaForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    lengths = torch.tensor([3, 6, 5])
    tokens = torch.randint(1, 16, (3, 6))
    tokens[torch.arange(6) >= lengths[:, None]] = 0
    with hy.Workers.inline() as workers:
        pool = workers.pool(1)
        batch = hy.Batch(tokens=tokens, lengths=lengths)
        scores = hy.RewardModel(str(tmp_path), pool).scores(batch).result()["scores"]
        costs = hy.CostModel(str(tmp_path), pool).scores(batch).result()["costs"]
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=(tokens != 0).long()).logits[:, 0]
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(costs, expected)


def test_pairs_teach_an_order_on_one_rank_and_the_same_on_two(pair):
    with hy.Workers.inline() as workers:
        _, one = fitted(workers.pool(1), 3)
    _, two = fitted(pair, 3)
    assert one == pytest.approx(two, abs=1e-9)


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["ppo", "safe"])
def test_what_a_reward_model_prefers_is_learnt(name):
    """A reward model is trained on pairs, and then a policy against it."""
    with hy.Workers.inline() as workers:
        pool = workers.pool(1)
        model, accuracy = fitted(pool, 300)
        assert sum(accuracy[-20:]) / 20 > 0.9
        optimizer = hy.AdamW(lr=1e-3, schedule="cosine", num_steps=200, num_warmup_steps=10)
        common = {
            "actor": hy.Actor(MODEL, pool, optimizer=optimizer),
            "critic": hy.Critic(MODEL, pool, optimizer=optimizer),
            "score": lambda roll: model.scores(roll.select("tokens", "lengths")),
            "sampling": hy.Sampling(max_new_tokens=2),
            "num_updates": 2,
        }
        if name == "ppo":
            algorithm = hy.algos.PPO(**common)
        else:
            algorithm = hy.algos.SafeRLHF(
                cost_critic=hy.Critic(MODEL, pool, optimizer=optimizer, seed=5),
                cost=lambda roll: hy.Batch(costs=(roll["tokens"][:, 3] == 11).float() - 0.1),
                **common,
            )
        greedy = hy.Sampling(max_new_tokens=2, temperature=0)
        asked = TASK.evaluation(128)
        told = list(hy.loops.run(algorithm, lambda step: TASK.batch(step, 256), steps=100))
        found = common["actor"].generate(asked, greedy).result()
        share = float(TASK.score(found, TASK.tokenizer)["scores"].mean())
    assert told[-1]["reward"] > told[0]["reward"] + 1
    assert share > 0.6
