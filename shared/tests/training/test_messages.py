"""Sentences that every training run shares."""

import logging
import re

import pytest
import torch

from shared.errors import ConfigError, DataError, DivergenceError
from shared.training import (
    check_device,
    check_loss,
    check_num_nodes,
    check_shapes,
    log_resumed,
    show_resumed,
)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_diverged_is_named_with_its_step(loss):
    with pytest.raises(DivergenceError) as caught:
        check_loss(loss, "epoch 3, batch 7")
    assert str(caught.value) == (
        f"epoch 3, batch 7: expected a finite loss, got {loss}; lower the learning rate, clip "
        "gradients, or look for features of extreme size"
    )


def test_a_finite_loss_passes():
    check_loss(1e30, "step 1")


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"a": (2,), "b": (3, 4)}, "expected b of shape [3, 5] as in this run, got shape [3, 4]; "),
        ({"a": (2,)}, "expected b of shape [3, 5] as in this run, got none; "),
        (
            {"a": (2,), "b": (3, 5), "c": ()},
            "expected c of none as in this run, got shape []; ",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_told_by_its_first_key(saved, told):
    with pytest.raises(DataError) as caught:
        check_shapes("run1", saved, {"a": (2,), "b": torch.Size((3, 5))})
    assert str(caught.value) == (
        f"run1: {told}resume with the model's settings that it was written with, or give another "
        "folder"
    )


def test_a_checkpoint_of_the_same_model_passes():
    check_shapes("run1", {"b": (3, 5), "a": [2]}, {"a": (2,), "b": torch.Size((3, 5))})


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_device("device", "cpu")
    check_device("device", "cuda")
    check_device("device", "cuda:0")
    with pytest.raises(
        ConfigError, match=r"^device: expected a GPU for 'cuda:1', got 1 that torch"
    ):
        check_device("device", "cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        check_device("place", "cuda")
    assert str(caught.value) == (
        "place: expected a GPU for 'cuda', got 0 that torch can use; give cpu, or install a driver "
        "and a build of torch with CUDA"
    )


def test_ids_that_memory_cannot_hold_are_refused():
    check_num_nodes(1000, 56)
    with pytest.raises(DataError) as caught:
        check_num_nodes(10**12 + 1, 56)
    assert re.fullmatch(
        r"nodes: expected ids whose rows fit into this machine's [\d.]+ \w+, got ids up to "
        r"1,000,000,000,000 at 56 bytes each; number sparse ids from 0, for instance by "
        r"pandas\.factorize",
        str(caught.value),
    )


@pytest.mark.parametrize("device", ["gpu", "cuda:first", ""])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(ConfigError, match=f"device: expected cpu, cuda or cuda:N, got {device!r}"):
        check_device("device", device)


def test_a_resumption_is_printed_where_it_is_shown_only(capsys):
    log_resumed(1, "run0")
    with show_resumed("yard"), show_resumed("rank"):
        log_resumed(12, "run1")
    log_resumed(3, "run2")
    assert capsys.readouterr() == ("", "yard: resumed from step 12 of run1\n")
    assert not logging.getLogger("shared.training.messages").handlers
