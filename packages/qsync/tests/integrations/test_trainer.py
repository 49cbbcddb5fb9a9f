from datetime import timedelta

import pytest
import torch
from torch import distributed, nn

import qsync
from qsync.planner.plan import RankPlan, describe_operators
from qsync.runtime.modules import get_precision, list_operators
from shared.comms.launch import RankPool
from shared.errors import ConfigError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.last = nn.Linear(16, 1)
        self.seen = []

    def forward(self, x, labels=None):
        self.seen.append(get_precision(self.first))
        out = self.last(self.first(x).relu())
        return {"loss": (out[:, 0] - labels).square().mean(), "logits": out}


def _train(folder, precision, callback=True, **settings):
    from qsync.integrations.trainer import QsyncCallback

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 6, generator=generator)
    rows = [{"x": row, "labels": row.sum()} for row in x]
    model = Model()
    plan = qsync.Plan.uniform(model, precision)
    arguments = transformers.TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=4, save_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_steps=1, max_grad_norm=1.0, learning_rate=0.01,
        **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows, callbacks=[QsyncCallback(plan)] if callback else []
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    after = {get_precision(module) for module in list_operators(model).values()}
    return losses, [each.detach().clone() for each in model.parameters()], set(model.seen), after


def test_a_trainer_computes_by_the_plan_and_saves_masters(tmp_path):
    losses, masters, seen, after = _train(str(tmp_path / "low"), "int8")
    assert seen == {"int8"}
    assert after == {"fp32"}
    expected, _, _, _ = _train(str(tmp_path / "plain"), "fp32", callback=False)
    assert losses != expected
    torch.testing.assert_close(losses, expected, rtol=0.1, atol=0.02)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "low" / "checkpoint-4" / "model.safetensors")
    assert list(saved) == sorted(name for name, _ in Model().named_parameters())
    assert {each.dtype for each in saved.values()} == {torch.float32}
    assert torch.equal(saved["first.weight"], masters[0])


def test_a_float32_plan_trains_as_the_trainer_alone(tmp_path):
    ways = [_train(str(tmp_path / str(flag)), "fp32", flag) for flag in (True, False)]
    assert ways[0][0] == ways[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ways[0][1], ways[1][1], strict=True))


def _begin(plan, model, folder):
    from qsync.integrations.trainer import QsyncCallback

    arguments = transformers.TrainingArguments(str(folder), report_to=[], use_cpu=True)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    QsyncCallback(plan).on_train_begin(arguments, state, control, model=model)


def test_half_precision_is_refused_as_no_loss_is_scaled(tmp_path):
    with pytest.raises(ConfigError, match="got fp16 for 'first' on rank 0; plan with bf16"):
        _train(str(tmp_path), "fp16")
    model = Model()
    ranks = (RankPlan(lowered={}), RankPlan(lowered={"last": "fp16"}))
    plan = qsync.Plan(operators=describe_operators(model), ranks=ranks)
    with pytest.raises(ConfigError, match="got fp16 for 'last' on rank 1; plan with bf16"):
        _begin(plan, model, tmp_path)


def test_an_autocast_that_would_lower_what_the_plan_keeps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="TrainingArguments: expected neither bf16 nor fp16"):
        _train(str(tmp_path), "int8", bf16=True)


def test_ranks_agree_on_the_plan_before_the_first_step(tmp_path, monkeypatch):
    from qsync.integrations import trainer

    agreed = []
    monkeypatch.setattr(trainer, "agree_on_model", lambda *each: agreed.append(each))
    model = Model()
    plan = qsync.Plan.uniform(model, "int8")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        _begin(plan, model, tmp_path)
    finally:
        distributed.destroy_process_group()
    assert [(each[0], each[2]) for each in agreed] == [(model, plan.fingerprint())]
    assert get_precision(model.first) == "int8"


def _train_unlike(folder):
    rank = distributed.get_rank()
    try:
        _train(f"{folder}/{rank}", ("int8", "bf16")[rank])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_with_unlike_plans_are_refused_together(tmp_path):
    with RankPool(2, timeout=timedelta(seconds=90)) as pool:
        for text in pool.run(_train_unlike, str(tmp_path)).results:
            assert "plan: expected the same on all ranks" in text
