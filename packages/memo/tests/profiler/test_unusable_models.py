"""Models, calls and stores that nothing can be planned for: each is told before anything is measured."""

import pytest
import torch

import memo
from memo.profiler.autotune import measure_profile
from shared.errors import ConfigError, DataError

from ..runtime.models import make_model, train
from .inputs import batch_of


def test_a_model_in_evaluation_is_named(model, monkeypatch, caplog):
    """As `from_pretrained` gives it: without its dropout it saves less."""
    monkeypatch.setattr("memo.profiler.autotune.capture_calls", lambda *_: None)
    for is_training in (False, True):
        model.train(is_training)
        with pytest.raises(TypeError):
            measure_profile(model, batch_of(16), None)
    (said,) = caplog.messages
    assert said == (
        "LlamaForCausalLM: expected a model in training mode, got one in evaluation, whose dropout is off; if your loop "
        "calls model.train(), call it before you plan"
    )


@pytest.mark.parametrize("inside", ["model", "batch", "call"])
def test_what_inference_mode_made_or_runs_is_refused(inside):
    with torch.inference_mode(inside == "model"):
        model = make_model("llama", num_layers=1)
    with torch.inference_mode(inside == "batch"):
        batch = {"input_ids": torch.zeros(1, 16, dtype=torch.int64), "use_cache": False}
    with torch.inference_mode(inside == "call"), pytest.raises(ConfigError) as caught:
        memo.autotune(model, batch, memo.Budget(device="1TiB"))
    assert str(caught.value) == (
        "batch['input_ids']: expected a tensor that a backward may use, got one from torch.inference_mode(); make it "
        "outside, or give a clone"
        if inside == "batch"
        else "LlamaForCausalLM: expected a model and a call outside of torch.inference_mode(), in which nothing runs "
        "backward, got one inside; leave it, and load the model outside of it"
    )


def test_a_store_that_cannot_be_opened_is_told_before_anything_is_measured(
    model, tmp_path, monkeypatch
):
    measured = []
    monkeypatch.setattr("memo.profiler.autotune.capture_calls", lambda *_: measured.append(1))
    (tmp_path / "file").write_text("no folder")
    budget = memo.Budget("1TiB", store="1GiB", store_at=f"file:{tmp_path}/file")
    with pytest.raises(DataError, match=f"{tmp_path}/file: expected a folder with room for its"):
        memo.autotune(model, batch_of(16), budget)
    assert measured == []


def test_models_with_a_plan_and_models_without_parameters_to_train_are_refused():
    model, budget = make_model("llama"), memo.Budget(device="1TiB")
    with memo.apply(model, memo.Plan.fixed(alpha=0.5)):
        with pytest.raises(ConfigError, match="close the run that was applied before"):
            memo.autotune(model, batch_of(16), budget)
        train(model, num_batches=1)
    with memo.apply(model, memo.Plan.fixed(alpha=0.5)):
        pass
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="expected parameters to train, got none"):
        memo.autotune(model, batch_of(16), budget)
