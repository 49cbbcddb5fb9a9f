"""End tokens: what may be given, the defaults that models name, and that all generators agree."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hybridflow as hy
from hybridflow.models.config import read_config
from hybridflow.models.end_tokens import find_token
from hybridflow.roles.state.export import export
from hybridflow.rollout import hf
from hybridflow.rollout.end_tokens import resolve_by_config
from hybridflow.rollout.sampling import Sampling
from hybridflow.rollout.servers.server import ServerRollout
from hybridflow.tasks.prompts import Prompts
from hybridflow.tasks.tokenizer_files import write_tokenizer
from hybridflow.tasks.tokenizers import ByteTokenizer
from hybridflow.training.config import Recipe
from hybridflow.training.runtime import Run, start_workers
from shared.errors import ConfigError, RankFailure

from .stand_in import StandIn

SIZES = {
    "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODEL = {"model_type": "llama", **SIZES}


def hugging_face(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder whose settings name no end token."""
    folder = tmp_path_factory.mktemp("model")
    hugging_face().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    return folder


@pytest.fixture
def folder(source, tmp_path):
    """A copy, which a test may change."""
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def write(path, **tree):
    path.write_text(json.dumps(tree))


def prompts_of(count=6):
    chosen = torch.Generator().manual_seed(1)
    return [torch.randint(1, 19, (1 + k % 4,), generator=chosen) for k in range(count)]


def batch_of(prompts):
    rows = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return hy.Batch(prompts=rows, prompt_lengths=lengths, sample_ids=torch.arange(len(prompts)))


def responses_of(found):
    rows = zip(found.tokens, found.prompt_lengths, found.lengths, strict=True)
    return [row[start:stop].tolist() for row, start, stop in rows]


def cut(response, ends):
    """The reference: the response up to its first end token."""
    stops = [k for k, token in enumerate(response, 1) if token in ends]
    return response[: stops[0]] if stops else response


@pytest.mark.parametrize(
    "given",
    [[], (), -1, [3, -1], True, [False], np.bool_(True), torch.tensor(True), 1.5, [2.0], [3, None],
     "", [""], b"x", {3: 4}, [[3]], np.zeros(0, int)],
)  # fmt: skip
def test_what_is_no_end_token_is_refused_by_name(given):
    with pytest.raises(ConfigError, match=r"^sampling\.end_token: expected"):
        Sampling(max_new_tokens=2, end_token=given)


@pytest.mark.parametrize(
    "given",
    [[5, 6], (6, 5), [5, 5, 6], {5, 6}, np.array([6, 5]), torch.tensor([5, 6]), iter([5, 6]),
     [np.int64(5), torch.tensor(6)]],
)  # fmt: skip
def test_several_are_taken_in_any_form(given):
    found = resolve_by_config(Sampling(max_new_tokens=2, end_token=given), read_config(MODEL))
    assert found.end_tokens == (5, 6)
    assert hash(found) == hash(resolve_by_config(found, read_config(MODEL)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_generator_ends_at_the_first_of_several(source, temperature):
    theirs = LlamaForCausalLM.from_pretrained(source)
    with hy.Workers.inline() as workers:
        actor = hy.Actor(str(source), workers.pool(1))
        free = Sampling(max_new_tokens=12, temperature=temperature, end_token=None)
        whole = actor.generate(batch_of(prompts_of()), free).result()
        responses = [
            row[mask].tolist() for row, mask in zip(whole["tokens"], whole["mask"], strict=True)
        ]
        ends = {responses[0][3], responses[1][5]}
        wanted = [cut(response, ends) for response in responses]
        assert len({response[-1] for response in wanted} & ends) == 2
        sampling = Sampling(max_new_tokens=12, temperature=temperature, end_token=sorted(ends))
        roll = actor.generate(batch_of(prompts_of()), sampling).result()
    made = [row[mask].tolist() for row, mask in zip(roll["tokens"], roll["mask"], strict=True)]
    assert made == wanted
    assert roll["lengths"].tolist() == [
        len(prompt) + len(response) for prompt, response in zip(prompts_of(), wanted, strict=True)
    ]
    is_after = torch.arange(roll["tokens"].shape[1]) >= roll["lengths"][:, None]
    assert not roll["tokens"][is_after].any()
    assert (roll["rollout_log_probs"] != 0).equal(roll["mask"])
    assert responses_of(hf.generate(theirs, prompts_of(), sampling)) == wanted


def name_in_generation_config(folder):
    write(folder / "generation_config.json", eos_token_id=[7, 3])


def name_in_config(folder):
    write(
        folder / "config.json",
        **json.loads((folder / "config.json").read_text()) | {"eos_token_id": 3},
    )


def name_in_both(folder):
    name_in_config(folder)
    write(folder / "generation_config.json", eos_token_id=7)


def name_in_tokenizer(folder):
    write_tokenizer(ByteTokenizer(), folder)


def name_in_old_tokenizer(folder):
    entry = {"content": "</s>", "lstrip": False}
    write(folder / "tokenizer_config.json", eos_token=entry, added_tokens_decoder={"4": entry})


def name_in_special_tokens(folder):
    write(folder / "special_tokens_map.json", eos_token="<eos>")
    write(folder / "vocab.json", **{"a": 1, "<eos>": 6})


def name_in_all(folder):
    name_in_both(folder)
    name_in_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        (name_in_generation_config, (3, 7)), (name_in_config, (3,)), (name_in_both, (7,)),
        (name_in_tokenizer, (1,)), (name_in_old_tokenizer, (4,)), (name_in_special_tokens, (6,)),
        (name_in_all, (1, 7)),
    ],
)  # fmt: skip
def test_the_tokens_that_a_folder_names_are_the_default(folder, name, ends):
    assert read_config(folder).end_tokens == ()
    name(folder)
    assert read_config(folder).end_tokens == ends
    sampling = Sampling(max_new_tokens=2)
    assert resolve_by_config(sampling, read_config(folder)).end_tokens == ends
    assert (
        hf.resolve_by_model(sampling, LlamaForCausalLM.from_pretrained(folder)).end_tokens == ends
    )
    server = StandIn("vllm", folder, MODEL)
    try:
        assert ServerRollout(server.url, kind="vllm").resolve(sampling).end_tokens == ends
    finally:
        server.close()
    asked = Sampling(max_new_tokens=2, end_token=9)
    assert resolve_by_config(asked, read_config(folder)).end_tokens == (9,)
    assert (
        resolve_by_config(
            Sampling(max_new_tokens=2, end_token=None), read_config(folder)
        ).end_tokens
        == ()
    )


def test_a_model_object_names_its_own_and_its_export_names_them_too(tmp_path):
    theirs = hugging_face(eos_token_id=2)
    assert read_config(theirs.config).end_tokens == (2,)
    theirs.generation_config.eos_token_id = [4, 5]
    assert read_config(theirs).end_tokens == (4, 5)
    with hy.Workers.inline() as workers:
        export(hy.Actor(theirs, workers.pool(1)), tmp_path / "out")
    assert read_config(tmp_path / "out").end_tokens == (4, 5)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [
        4,
        5,
    ]


def test_those_of_the_prompts_tokenizer_join_the_models(folder):
    name_in_generation_config(folder)
    prompts = Prompts(
        ["0", "1"],
        ByteTokenizer(),
        batch_size=2,
        seed=0,
        max_prompt_tokens=4,
    )
    model = {**MODEL, "vocab_size": 272}
    with hy.Workers.inline() as workers:
        actor = hy.Actor(model, workers.pool(1))
        free = actor.generate(
            prompts.batch(0), Sampling(max_new_tokens=60, num_samples=9, end_token=None)
        ).result()
        roll = actor.generate(prompts.batch(0), Sampling(max_new_tokens=60, num_samples=9)).result()
    made = [row[mask].tolist() for row, mask in zip(free["tokens"], free["mask"], strict=True)]
    assert any(1 in response for response in made)
    assert roll["mask"].sum(1).tolist() == [len(cut(response, {1})) for response in made]
    batch = batch_of(prompts_of(2))
    batch.meta.update(prompts.batch(0).meta)
    ends = resolve_by_config(
        Sampling(max_new_tokens=2), read_config(folder), batch.meta["end_tokens"]
    )
    assert ends.end_tokens == (1, 3, 7)


@pytest.mark.parametrize("outside", [128001, 19, -1])
def test_named_tokens_outside_the_vocabulary_are_left_out_and_told(folder, caplog, outside):
    write(folder / "generation_config.json", eos_token_id=[outside, 3])
    assert resolve_by_config(Sampling(max_new_tokens=2), read_config(folder)).end_tokens == (3,)
    assert str(outside) in caplog.text


def test_asked_tokens_outside_the_vocabulary_are_refused(source):
    sampling = Sampling(max_new_tokens=2, end_token=[3, 19])
    with pytest.raises(ConfigError, match="expected ids below 19, the model's vocabulary, got 19"):
        hf.generate(LlamaForCausalLM.from_pretrained(source), prompts_of(), sampling)
    with hy.Workers.inline() as workers:
        actor = hy.Actor(str(source), workers.pool(1))
        with pytest.raises(RankFailure, match="expected ids below 19"):
            actor.generate(batch_of(prompts_of()), sampling).result()
        with pytest.raises(RankFailure, match="expected ids below 19"):
            actor.greedy(batch_of(prompts_of()), sampling).result()


def test_texts_are_read_by_the_tokenizer_of_the_folder(folder):
    config = read_config(folder)
    with pytest.raises(ConfigError, match="could not read one"):
        resolve_by_config(Sampling(max_new_tokens=2, end_token="!"), config)
    name_in_tokenizer(folder)
    asked = Sampling(max_new_tokens=2, end_token=["<|end|>", 3])
    assert resolve_by_config(asked, config).end_tokens == (1, 3)
    for text in ("ab", "!?"):
        with pytest.raises(ConfigError, match="which is 2; give one token"):
            resolve_by_config(Sampling(max_new_tokens=2, end_token=text), config)
    outside = 3 + ord("!")
    with pytest.raises(ConfigError, match=f"got {outside}"):
        resolve_by_config(Sampling(max_new_tokens=2, end_token="!"), config)
    with pytest.raises(ConfigError, match="no folder with a tokenizer, got the text '</s>'"):
        resolve_by_config(Sampling(max_new_tokens=2, end_token="</s>"), read_config(MODEL))


def test_texts_are_read_without_what_a_tokenizer_adds_or_does_not_know(tmp_path):
    names = ["<unk>", "<s>", "</s>", "yes"]
    words = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, "<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    assert [find_token(tmp_path, name) for name in names] == [0, 1, 2, 3]
    for text, count in (("no", "none"), ("yes yes", "2")):
        with pytest.raises(ConfigError, match=f"got '{text}', which is {count}; give one token"):
            find_token(tmp_path, text)


def test_a_server_whose_model_is_not_here_asks_for_the_ids():
    server = StandIn("sglang", "org/name-on-the-hub", MODEL)
    try:
        rollout = ServerRollout(server.url, kind="sglang")
        with pytest.raises(
            ConfigError, match="serves 'org/name-on-the-hub', which is no folder here"
        ):
            rollout.generate(prompts_of(), Sampling(max_new_tokens=3))
        rollout.generate(prompts_of(1), Sampling(max_new_tokens=3, end_token=[5, 6]))
        (asked,) = [body for path, body in server.seen if path == "/generate"]
        assert asked["sampling_params"]["stop_token_ids"] == [5, 6]
        assert rollout.resolve(Sampling(max_new_tokens=3), prompts_end=[4]).end_tokens == (4,)
    finally:
        server.close()


@pytest.mark.parametrize(("task", "ends"), [("digit-sort:2", ()), ("arithmetic:9", (1,))])
def test_a_recipes_task_says_what_ends_its_responses(task, ends):
    recipe = Recipe(algorithm="grpo", model="config:tiny-llama", task=task, num_samples=2, steps=1)
    with start_workers(recipe) as workers:
        sampling = Run.set_up(recipe, workers).algorithm.sampling
    assert resolve_by_config(sampling, read_config(MODEL)).end_tokens == ends
