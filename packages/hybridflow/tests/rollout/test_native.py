"""Native generation against Hugging Face's, against its own definition, and on its schedule."""

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hybridflow.models import pieces
from hybridflow.models.config import read_config
from hybridflow.models.decoder import Decoder, Shard
from hybridflow.models.sequences import generated_mask, log_probs, select_asked
from hybridflow.rollout.native.generator import generate
from hybridflow.rollout.sampling import Sampling, draw, uniforms
from shared.comms.group import Group
from shared.errors import ConfigError, DataError

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def pair(family="llama", seed=0, **more):
    """The same random weights in a Hugging Face model and in ours, in float64."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**SIZES, "num_key_value_heads": 2, **more})
    theirs = AutoModelForCausalLM.from_config(config).double().eval()
    for name, weight in theirs.named_parameters():
        # Norms of one and biases of zero would hide that they are missing.
        if name.endswith(("norm.weight", "bias")):
            weight.data += 0.3 * torch.randn_like(weight)
    ours = Decoder(read_config(theirs), dtype=torch.float64)
    state = theirs.state_dict()
    missing = pieces.load(ours, lambda name, box: state[name][_slices(box)])
    assert not missing
    return theirs, ours.requires_grad_(False)


def _slices(box):
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


def prompts_of(lengths, seed=1):
    chosen = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=chosen) for length in lengths]


def responses(found):
    """The response tokens of each sample."""
    rows = zip(found.tokens, found.prompt_lengths, found.lengths, strict=True)
    return [row[start:stop].tolist() for row, start, stop in rows]


@pytest.fixture(scope="module")
def model():
    return pair()[1]


LENGTHS = [3, 9, 1, 5, 9, 2]
FAMILIES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-all-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-head-dim": ("llama", {"head_dim": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 10}),
    "mistral": ("mistral", {"sliding_window": None}),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_tokens_are_those_of_hugging_face(kind):
    family, more = FAMILIES[kind]
    theirs, ours = pair(family, **more)
    prompts = prompts_of(LENGTHS)
    width = max(LENGTHS)
    padded = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(p) for p in prompts]).long()
    free = theirs.generate(
        padded, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0
    )[:, width:]
    # A token that ends one of them early, so that ending is looked at too.
    end = int(free[1, 4])
    expected = theirs.generate(
        padded, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0,
        eos_token_id=end,
    )[:, width:].tolist()  # fmt: skip
    expected = [row[: row.index(end) + 1] if end in row else row for row in expected]
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    assert responses(generate(ours, prompts, sampling)) == free.tolist()
    sampling = Sampling(max_new_tokens=12, temperature=0.0, end_token=end)
    found = generate(ours, prompts, sampling, num_places=4)
    assert responses(found) == expected
    assert len(responses(found)[1]) <= 5


def test_float32_too_has_the_tokens_of_hugging_face():
    """Where a kernel of its own attends, in another order than torch sums."""
    theirs, ours = pair()
    theirs, ours = theirs.float(), ours.float()
    (prompt,) = prompts_of([9])
    expected = theirs.generate(
        prompt[None], attention_mask=torch.ones(1, 9), max_new_tokens=40, do_sample=False
    )
    found = generate(ours, [prompt], Sampling(max_new_tokens=40, num_samples=2, temperature=0))
    assert torch.equal(found.tokens, expected.expand(2, -1))
    told = torch.log_softmax(theirs(expected[:, :-1]).logits[0, 8:], -1)
    made = told.gather(1, expected[0, 9:, None])[:, 0]
    torch.testing.assert_close(found.log_probs[:, 9:], made.expand(2, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_log_probs_are_those_of_the_distribution_drawn_from(model, temperature):
    sampling = Sampling(max_new_tokens=7, num_samples=2, temperature=temperature, end_token=5)
    found = generate(model, prompts_of(LENGTHS), sampling, num_places=5)
    mask = generated_mask(found.prompt_lengths, found.lengths, found.tokens.shape[1])
    hidden = model(select_asked(found.tokens, mask))
    expected, _ = log_probs(model, hidden, found.tokens, mask, temperature or 1.0)
    torch.testing.assert_close(found.log_probs, expected, rtol=0, atol=1e-12)
    assert (found.log_probs[mask] < 0).all()
    assert not found.log_probs[~mask].any()


def test_tokens_are_the_draws_of_their_own_numbers(model):
    sampling = Sampling(max_new_tokens=6, num_samples=3, temperature=0.8, seed=11)
    ids = torch.tensor([7, 1, 2**40, 3, 900, 4])
    found = generate(model, prompts_of([4, 2]), sampling, sample_ids=ids, step=5)
    numbers = uniforms(11, 5, ids, 6)
    for k, (row, start) in enumerate(zip(found.tokens, found.prompt_lengths, strict=True)):
        logits = model(row[None, :-1])[0] @ model.head_weight.t() / 0.8
        tokens, _ = draw(logits[start - 1 : start + 5], numbers[k])
        assert tokens.tolist() == row[start : start + 6].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_same_for_any_number_of_places(model, temperature):
    sampling = Sampling(
        max_new_tokens=9, num_samples=1 + int(temperature), temperature=temperature, end_token=7
    )
    whole = generate(model, prompts_of(LENGTHS), sampling)
    assert len(set(whole.lengths.tolist())) > 1, "no sample ended early: the test says nothing"
    for num_places in (1, 3, 7, 300):
        found = generate(model, prompts_of(LENGTHS), sampling, num_places=num_places)
        assert torch.equal(found.tokens, whole.tokens)
        assert torch.equal(found.lengths, whole.lengths)
        torch.testing.assert_close(found.log_probs, whole.log_probs, rtol=0, atol=1e-12)


def test_a_sample_is_the_same_in_any_order_and_subset(model):
    prompts = prompts_of(LENGTHS)
    sampling = Sampling(max_new_tokens=8, num_samples=2, end_token=3, seed=4)
    ids = torch.arange(2 * len(prompts)) + 100
    whole = responses(generate(model, prompts, sampling, sample_ids=ids, step=2))
    order = [4, 0, 5]
    chosen = torch.cat([ids[2 * k : 2 * k + 2] for k in order])
    found = generate(
        model, [prompts[k] for k in order], sampling, sample_ids=chosen, step=2, num_places=2
    )
    assert responses(found) == [whole[2 * k + j] for k in order for j in range(2)]
    # Other steps, seeds and samples draw other numbers.
    for change in ({"step": 3}, {"sample_ids": ids + 1}):
        asked = {"sample_ids": ids, "step": 2, **change}
        assert responses(generate(model, prompts, sampling, **asked)) != whole
    other = Sampling(max_new_tokens=8, num_samples=2, end_token=3, seed=5)
    assert responses(generate(model, prompts, other, sample_ids=ids, step=2)) != whole


def deviation(seen, expected):
    """Standard deviations of chi-square by which counts are above its mean."""
    # The approximation is for five and more: rarer tokens go together.
    order = np.argsort(-expected)
    kept = max(1, int((expected >= 5).sum()))
    seen, expected = (np.add.reduceat(c[order], range(kept)) for c in (seen, expected))
    freedom = kept - 1
    return (((seen - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_frequencies_follow_the_distribution(model, temperature):
    (prompt,) = prompts_of([4])
    num_samples = 6000
    sampling = Sampling(max_new_tokens=1, num_samples=num_samples, temperature=temperature, seed=3)
    drawn = generate(model, [prompt], sampling).tokens[:, -1]
    logits = model(prompt[None])[0, -1] @ model.head_weight.t() / temperature
    expected = torch.softmax(logits, -1).numpy() * num_samples
    seen = torch.bincount(drawn, minlength=VOCABULARY).numpy()
    assert deviation(seen, expected) < 4
    # Another temperature is told apart, so the test can fail.
    wrong = torch.softmax(logits * 0.8, -1).numpy() * num_samples
    assert deviation(seen, wrong) > 8


def often(model):
    """A token that is drawn often, so that samples end at many different lengths."""
    sampling = Sampling(max_new_tokens=9, num_samples=4, temperature=1.5, seed=2)
    made = [
        token for row in responses(generate(model, prompts_of(LENGTHS), sampling)) for token in row
    ]
    return max(set(made), key=made.count)


@pytest.fixture(scope="module")
def end(model):
    return often(model)


def simulated_steps(response_lengths, num_places):
    """Passes over the newest tokens: a place goes to the next sample when its own ends.

    The first token of a sample comes from its prompt's pass, not from one of these.
    """
    waiting = list(response_lengths)
    left = []
    num_steps = 0
    while True:
        while waiting and len(left) < num_places:
            if (more := waiting.pop(0) - 1) > 0:
                left.append(more)
        if not left:
            return num_steps
        num_steps += 1
        left = [more - 1 for more in left if more > 1]


@pytest.mark.parametrize("num_places", [1, 3, 50])
def test_number_of_steps_is_that_of_the_schedule(model, end, num_places):
    sampling = Sampling(max_new_tokens=9, num_samples=4, temperature=1.5, end_token=end, seed=2)
    done = []
    found = generate(
        model, prompts_of(LENGTHS), sampling, num_places=num_places, on_token=done.append
    )
    lengths = (found.lengths - found.prompt_lengths).tolist()
    assert {1, 9} < set(lengths)
    assert found.num_steps == simulated_steps(lengths, num_places) == len(done)
    assert done == sorted(done)
    assert done[-1] == 4 * len(LENGTHS)


STAGED = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
STAGED_RUNS = [
    # Sampling, and places: fewer than stages, not a multiple of them, more than samples.
    (Sampling(max_new_tokens=9, temperature=0.0), 6),
    (Sampling(max_new_tokens=4, num_samples=1, temperature=1.5, end_token=48, seed=2), 1),
    (Sampling(max_new_tokens=9, num_samples=4, temperature=1.5, end_token=48, seed=2), 5),
    (Sampling(max_new_tokens=9, num_samples=4, temperature=1.5, end_token=48, seed=2), 300),
    (Sampling(max_new_tokens=1, num_samples=2, seed=3), 4),
]


def staged(num_stages=1, stages=None):
    """What each run gives on this stage; a model of five layers, which nothing divides."""
    config = read_config(STAGED)
    shard = Shard(config, 0 if stages is None else stages.rank, num_stages)
    model = Decoder(config, shard, dtype=torch.float64)
    pieces.initialize(model, 4)
    model.requires_grad_(False)
    return [
        generate(model, prompts_of(LENGTHS), sampling, step=3, num_places=count, stages=stages)
        for sampling, count in STAGED_RUNS
    ]


def on_a_stage(num_stages):
    world = Group.world()
    if world.rank >= num_stages:
        return None
    return staged(num_stages, Group.of(range(num_stages), members_only=True))


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_stages_give_what_the_whole_model_gives(num_stages, ranks):
    whole = staged()
    made = whole[2].lengths - whole[2].prompt_lengths
    assert len(set(made.tolist())) > 5, "few samples ended early: little is refilled"
    for found in ranks.run(on_a_stage, num_stages).results[:num_stages]:
        for ours, wanted in zip(found, whole, strict=True):
            assert torch.equal(ours.tokens, wanted.tokens)
            assert torch.equal(ours.lengths, wanted.lengths)
            torch.testing.assert_close(ours.log_probs, wanted.log_probs, rtol=0, atol=1e-12)


def test_a_stage_without_its_pipeline_is_refused():
    config = read_config(STAGED)
    model = Decoder(config, Shard(config, 0, 2), dtype=torch.float64)
    with pytest.raises(ConfigError, match="one of 2 stages, and `stages` has 1"):
        generate(model, prompts_of([3]), Sampling(max_new_tokens=2))


def test_one_token_needs_no_step(model):
    found = generate(model, prompts_of([3, 2]), Sampling(max_new_tokens=1, num_samples=2))
    assert found.num_steps == 0
    assert (found.lengths - found.prompt_lengths).tolist() == [1, 1, 1, 1]


def test_rows_hold_their_prompt_and_zeros_after_their_end(model):
    prompts = prompts_of(LENGTHS)
    found = generate(model, prompts, Sampling(max_new_tokens=9, num_samples=2, end_token=7))
    for k, row in enumerate(found.tokens):
        prompt = prompts[k // 2]
        assert row[: len(prompt)].tolist() == prompt.tolist()
        assert not row[found.lengths[k] :].any()
        made = row[len(prompt) : found.lengths[k]].tolist()
        assert 7 not in made[:-1]
        assert made[-1] == 7 or len(made) == 9
    assert found.tokens.shape[1] == int(found.lengths.max())


def test_bad_prompts_are_refused(model):
    sampling = Sampling(max_new_tokens=4)
    with pytest.raises(DataError, match="got an empty one at 1"):
        generate(model, [torch.tensor([1]), torch.tensor([], dtype=torch.int64)], sampling)
    with pytest.raises(DataError, match="got none"):
        generate(model, [], sampling)
    sampled = Sampling(max_new_tokens=4, num_samples=2)
    with pytest.raises(DataError, match="expected 4 sample_ids, 2 for each prompt, got 3"):
        generate(model, prompts_of([3, 2]), sampled, sample_ids=torch.arange(3))
    with pytest.raises(ConfigError, match="65 positions, and the model has 64"):
        generate(model, prompts_of([61, 2]), sampling)
    assert generate(model, prompts_of([60]), sampling).lengths.tolist() == [64]
