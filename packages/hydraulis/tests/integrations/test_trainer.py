"""transformers' Trainer with balanced batches, beside plain steps that compute each document alone."""

import json
from datetime import timedelta
from itertools import chain

import pytest
import torch

from hydraulis.config import Cost, SequenceTooLong
from shared.comms import RankPool
from shared.errors import ConfigError, DataError

from ..runtime.conftest import MODULES
from ..runtime.test_attention import documents, make_model, one_by_one

LENGTHS = (7, 40, 30, 2, 13, 5, 6, 11, 3, 28, 9, 4, 17, 21)
COST = Cost(a=1e-3, b=1e-2, c=0.1)


def make_trainer(
    out, *, checkpoints=False, accumulate=2, recompute=False, epochs=2, max_tokens=40, **settings
):
    from transformers import Trainer, TrainingArguments

    from hydraulis.integrations.trainer import balance

    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(out), num_train_epochs=epochs, gradient_accumulation_steps=accumulate,
        learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0,
        save_strategy="steps" if checkpoints else "no", save_steps=2, logging_steps=1,
        report_to=[], disable_tqdm=True, use_cpu=True, seed=3, activation_checkpointing=recompute,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    rows = [{"input_ids": text.tolist()} for text in documents(LENGTHS)]
    trainer = Trainer(make_model("llama"), args, train_dataset=rows)
    return balance(trainer, max_tokens=max_tokens, cost=COST, **settings)


def train(out, accumulate, recompute):
    trainer = make_trainer(out, accumulate=accumulate, recompute=recompute)
    loader = trainer.get_train_dataloader()
    taken = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        taken.append(list(loader.batch_sampler))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    state = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    return taken, losses, state


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, modules=(*MODULES, "transformers.trainer")) as pool:
        yield pool


@pytest.mark.parametrize(
    ("accumulate", "recompute"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)]
)
def test_the_trainers_steps_are_those_of_one_process(ranks, tmp_path, accumulate, recompute):
    results = ranks.run(
        train, tmp_path, accumulate, recompute, timeout=timedelta(minutes=2)
    ).results
    (mine, losses, state), (theirs, *_) = results
    model = make_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts, told = documents(LENGTHS), []
    for first, second in zip(mine, theirs, strict=True):
        assert len(first) == len(second)
        assert sorted(chain(*first, *second)) == list(range(len(LENGTHS))), "each document once"
        for at in range(0, len(first), accumulate):
            step = [*chain(*first[at : at + accumulate], *second[at : at + accumulate])]
            loss = one_by_one(model, [texts[i] for i in step]) / sum(LENGTHS[i] - 1 for i in step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.append(loss.item())
    assert mine[0] != mine[1], "another order in the second epoch"
    assert losses == pytest.approx(told, rel=1e-3)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_resumed_trainer_ends_as_if_it_had_not_stopped(tmp_path):
    whole = make_trainer(tmp_path / "a", checkpoints=True)
    whole.train()
    resumed = make_trainer(tmp_path / "b", checkpoints=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert resumed.state.global_step == whole.state.global_step > 2
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value)
    config = json.loads((tmp_path / "a" / "checkpoint-2" / "config.json").read_text())
    assert "hydraulis" not in json.dumps(config), "others load it as it was"


def test_evaluation_attends_as_before(tmp_path):
    trainer = make_trainer(tmp_path)
    rows = [{"input_ids": text.tolist(), "labels": text.tolist()} for text in documents((9, 9))]
    expected = trainer.evaluate(rows)["eval_loss"]
    trainer.train()
    model = trainer.model
    assert model is not None
    with torch.no_grad():
        losses = [model(ids[None], labels=ids[None]).loss for ids in documents((9, 9))]
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(float(sum(losses)) / 2, rel=1e-4)
    assert trainer.evaluate(rows)["eval_loss"] < expected


def test_what_cannot_be_balanced_is_refused_before_training(tmp_path):
    with pytest.raises(SequenceTooLong, match=r"sequence 1: expected at most 40 tokens, got 41"):
        make_trainer(tmp_path, lengths=[3, 41, *[5] * 12])
    trainer = make_trainer(tmp_path)
    from hydraulis.integrations.trainer import balance

    trainer.train_dataset = [{"text": "not tokenised"}]
    with pytest.raises(DataError, match="row 0 to have input_ids, got text; tokenise"):
        balance(trainer, max_tokens=40)
    trainer.train_dataset = iter([{"input_ids": [1, 2]}])
    with pytest.raises(ConfigError, match="training set with a length"):
        balance(trainer, max_tokens=40)


@pytest.mark.parametrize(("too_long", "expected"), [("drop", 30), ("truncate", 35)])
def test_documents_too_long_are_dropped_or_cut_if_asked(tmp_path, too_long, expected):
    trainer = make_trainer(tmp_path, max_tokens=35, too_long=too_long)
    loader = trainer.get_train_dataloader()
    longest = max(int(batch["cu_seq_lens_q"].diff().max()) for batch in loader)
    assert longest == expected
    assert (1 in chain(*loader.batch_sampler)) == (too_long == "truncate")
