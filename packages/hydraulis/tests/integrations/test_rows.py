"""Rows as they come: pads, labels, position ids, collators and lengths."""

import numpy as np
import pytest
import torch
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import hydraulis as hy
from hydraulis.integrations.rows import DocumentRows, collate, count_tokens
from shared.errors import ConfigError, DataError

LENGTHS = (5, 9, 3, 12)
COST = hy.Cost(a=1e-3, b=1e-2)
PAD = 0


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": PAD, "a": 1}, unk_token="a")),
        pad_token="<pad>",
    )


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in LENGTHS]


def padded(ids, side, labels=None):
    pads = 12 - len(ids)
    before, after = (pads, 0) if side == "left" else (0, pads)
    labels = ids if labels is None else labels
    return {
        "input_ids": [PAD] * before + ids + [PAD] * after,
        "attention_mask": [0] * before + [1] * len(ids) + [0] * after,
        "labels": [-100] * before + labels + [-100] * after,
    }


def first_loss(rows, tmp_path, balanced, *, model=None, kind=Trainer, accumulation=1, **settings):
    """The first step's loss, of all rows at once."""
    args = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=len(rows), report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, logging_steps=1, optim="sgd",
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    trainer = kind(model or make_model(), args, train_dataset=rows, **settings)
    if balanced:
        trainer = hy.balance(trainer, max_tokens=64, cost=COST)
    trainer.train()
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_prompt_masked", [False, True])
def test_padded_rows_are_learned_as_the_trainer_learns_them(tmp_path, side, is_prompt_masked):
    rows = []
    for ids in make_documents():
        labels = [-100, -100, *ids[2:]] if is_prompt_masked else ids
        rows.append(padded(ids, side, labels))
    alone = first_loss(rows, tmp_path, balanced=False)
    assert first_loss(rows, tmp_path, balanced=True) == pytest.approx(alone, rel=1e-5)


def test_position_ids_of_rows_count(tmp_path):
    rows = [
        {"input_ids": ids, "labels": ids, "position_ids": list(range(4, 4 + len(ids)))}
        for ids in make_documents()
    ]
    (batch,) = [collate([make_rows(rows)[i] for i in range(2)])]
    assert batch["position_ids"].tolist() == [[*range(4, 9), *range(4, 13)]]


def test_token_types_of_rows_count():
    rows = [{"input_ids": [5, 6], "token_type_ids": [0, 1]}, {"input_ids": [7]}]
    documents = make_rows(rows[:1])
    assert collate([documents[0]])["token_type_ids"].tolist() == [[0, 1]]
    with pytest.raises(DataError, match=r"same values, got .*token_type_ids.* give all rows"):
        collate([documents[0], make_rows(rows[1:])[0]])


@pytest.mark.parametrize("kind", ["language modelling", "seq2seq"])
def test_a_collator_of_the_users_makes_the_labels(tmp_path, tokenizer, kind):
    documents = make_documents()
    if kind == "seq2seq":
        rows = [{"input_ids": ids, "labels": [-100] * 2 + ids[2:]} for ids in documents]
        collator = DataCollatorForSeq2Seq(tokenizer)
    else:
        rows = [{"input_ids": [*ids, PAD, 7]} for ids in documents]
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    alone = first_loss(rows, tmp_path, balanced=False, data_collator=collator)
    found = first_loss(rows, tmp_path, balanced=True, data_collator=collator)
    assert found == pytest.approx(alone, rel=1e-5)


def make_rows(rows, lengths=None, collator=None, *, keeps_columns=False, relative=True, cap=64):
    lengths = np.array(count_tokens(rows, "length") if lengths is None else lengths)
    return DocumentRows(
        rows, lengths, cap, collator=collator, keeps_columns=keeps_columns,
        arguments=["input_ids", "inputs_embeds", "labels", "token_type_ids"], has_relative_positions=relative,
    )  # fmt: skip


def test_pads_of_rows_without_labels_are_not_learned():
    row = padded([5, 6, 7], "right")
    del row["labels"]
    (batch,) = [collate([make_rows([row])[0]])]
    assert batch["input_ids"].tolist() == [[5, 6, 7]]
    assert batch["labels"].tolist() == [[-100, 6, 7]]
    row = padded([5, 6, 7], "left")
    del row["labels"]
    assert collate([make_rows([row])[0]])["labels"].tolist() == [[-100, 6, 7]]


def test_a_pad_from_which_a_token_is_learned_is_a_document_that_sees_nothing():
    batch = collate([make_rows([padded([5, 6], "left")])[0]])
    assert batch["input_ids"].tolist() == [[PAD, 5, 6]]
    assert batch["labels"].tolist() == [[-100, 5, 6]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 1, 3]
    assert batch["position_ids"].tolist() == [[0, 0, 1]]


def test_a_left_padded_row_of_the_most_tokens_keeps_its_last_one():
    batch = collate([make_rows([padded([5, 6, 7, 8], "left")], cap=4)[0]])
    assert batch["input_ids"].tolist() == [[PAD, 5, 6, 7, 8]]
    batch = collate([make_rows([padded([5, 6, 7, 8], "left")], cap=3)[0]])
    assert batch["labels"].tolist() == [[-100, 5, 6, 7]]


def test_token_types_that_a_model_has_no_use_for_are_left_out(tmp_path):
    rows = [{"input_ids": ids, "token_type_ids": [0] * len(ids)} for ids in make_documents()]
    bare = [{"input_ids": ids} for ids in make_documents()]
    found = first_loss(rows, tmp_path, balanced=True)
    assert found == first_loss(bare, tmp_path, balanced=True)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "attention_mask of ones without gaps"),
        ({"input_ids": [5, 6], "attention_mask": [1, 2]}, r"got \[1, 2\]; give each document a row"),
        ({"input_ids": [5, 6], "position_ids": [0, 0]}, "position_ids that rise by one"),
        ({"input_ids": [5, 6], "labels": [5]}, r"as labels, got .* of shape \(1,\) beside 2 input_ids"),
        ({"input_ids": [5, 6], "inputs_embeds": [[0.1]]}, "got inputs_embeds too, which cannot"),
        ({"input_ids": [0.5, 0.6]}, "whole number for each of its tokens as input_ids"),
        ({"ids": [5, 6]}, "row 0.* input_ids, got ids"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_packed_are_named(row, told):
    with pytest.raises(DataError, match=told):
        make_rows([row])


def test_left_pads_under_learned_positions_are_refused():
    with pytest.raises(DataError, match="row 0: expected pads after the tokens, got 10 before"):
        make_rows([padded([5, 6], "left")], relative=False)
    assert len(make_rows([padded([5, 6], "right")], relative=False)) == 1
    placed = {**padded([5, 6], "left"), "position_ids": [0] * 10 + [0, 1]}
    assert len(make_rows([placed], relative=False)) == 1


def test_lengths_are_compared_with_rows():
    rows = [{"input_ids": [5] * n} for n in LENGTHS]
    with pytest.raises(ConfigError, match="one for each of 4 rows, got 3"):
        make_rows(rows, LENGTHS[:3])
    with pytest.raises(DataError, match="row 0: expected 20 tokens, as its length says, got 5"):
        make_rows(rows, [4 * n for n in LENGTHS])
    many = [{"input_ids": [5] * 4} for _ in range(100)]
    documents = make_rows(many, [4] * 7 + [3] + [4] * 92)
    with pytest.raises(DataError, match="row 7: expected 3 tokens"):
        documents.__getitems__([6, 7])
    assert len(make_rows([padded([5, 6], "right")], [12])) == 1, "a length may count pads"


def test_a_collator_is_not_given_text_unless_the_trainer_keeps_it():
    seen = []

    def collator(rows):
        seen.append(sorted(rows[0]))
        return {"input_ids": torch.tensor([rows[0]["input_ids"]])}

    row = {"input_ids": [5, 6], "text": "a b", "completion_mask": [0, 1], "note": None}
    make_rows([row], collator=collator)
    make_rows([row], collator=collator, keeps_columns=True)
    assert seen == [["completion_mask", "input_ids"], sorted(row)]


def test_comparing_rows_leaves_the_random_numbers_of_training():
    def collator(rows):
        return {"input_ids": torch.tensor([rows[0]["input_ids"]]) + torch.randint(2, ())}

    before = torch.get_rng_state()
    make_rows([{"input_ids": [5, 6]}], collator=collator)
    assert torch.equal(torch.get_rng_state(), before)


def test_collators_that_only_pad_are_left_out(tmp_path, tokenizer):
    rows = [{"input_ids": ids, "labels": ids} for ids in make_documents()]
    losses = {
        first_loss(rows, tmp_path, balanced=True, data_collator=collator)
        for collator in (None, DataCollatorWithPadding(tokenizer))
    }
    assert len(losses) == 1


def test_a_step_without_a_label_learns_nothing(tmp_path):
    rows = [{"input_ids": [5, 6], "labels": [-100, -100]}]
    model = make_model()
    before = model.lm_head.weight.detach().clone()
    first_loss(rows, tmp_path, balanced=True, model=model)
    assert torch.equal(model.lm_head.weight, before)


class MeanLoss(LlamaForCausalLM):
    accepts_loss_kwargs = False


def test_a_loss_that_is_a_mean_of_each_micro_batch_is_refused(tmp_path):
    rows = [{"input_ids": ids, "labels": ids} for ids in make_documents()[:1]]
    model = MeanLoss(make_model().config)
    with pytest.raises(ConfigError, match="loss takes num_items_in_batch, got MeanLoss"):
        first_loss(rows, tmp_path, balanced=True, model=model, accumulation=2)
    with pytest.raises(ConfigError, match="several in a step"):
        first_loss(rows, tmp_path, balanced=True, kind=MeanTrainer, accumulation=2)
    # A step of one micro-batch has the mean that is asked for.
    alone = first_loss(rows, tmp_path, balanced=False, kind=MeanTrainer)
    assert first_loss(rows, tmp_path, balanced=True, kind=MeanTrainer) == pytest.approx(alone)


class MeanTrainer(Trainer):
    loss_is_scaled_for_ga = False

    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)


def test_an_order_that_is_replaced_is_logged(tmp_path, caplog):
    rows = [{"input_ids": [5, 6]}]
    first_loss(rows, tmp_path, balanced=True)
    assert "in place of" not in caplog.text
    first_loss(rows, tmp_path, balanced=True, kind=MeanTrainer)
    assert "shuffled and balanced in place of MeanTrainer._get_train_sampler" in caplog.text
