"""Old checkpoints go but for those at an interval and the best; all is known after a restart."""

import math

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bytecheckpoint as bcp
from bytecheckpoint.saving.retention import Retention
from bytecheckpoint.storage import open_storage
from bytecheckpoint.storage.files import commit
from shared.errors import ConfigError


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0.0, 0.5, 1.0, math.nan])), min_size=1),
    st.integers(1, 4),
    st.none() | st.integers(1, 7),
    st.none() | st.integers(1, 3),
    st.sampled_from(["max", "min"]),
    st.integers(0, 40),
)
def test_what_stays_is_what_each_part_of_the_rule_keeps(rows, keep, every, keep_best, best, newest):
    metrics = dict(rows) | {newest: 0.25}
    steps = sorted(metrics)
    rule = Retention(keep=keep, keep_every=every, keep_best=keep_best, best=best)
    gone = rule.find_removable(steps, newest, metrics)
    stays = [step for step in steps if step not in gone]
    assert newest in stays
    for step in steps:
        younger = sum(other > step for other in steps if other != newest) + 1
        is_new = step == newest or younger < keep
        is_at_interval = every is not None and step % every == 0
        worth = metrics[step] if best == "max" else -metrics[step]
        better = [
            other
            for other in steps
            for its in ((metrics[other] if best == "max" else -metrics[other]),)
            if its > worth or (its == worth and other > step)
        ]
        is_best = bool(keep_best) and not math.isnan(worth) and len(better) < (keep_best or 0)
        assert (step in stays) == (is_new or is_at_interval or is_best), step


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, "keep: expected at least 1, got 0"),
        ({"keep": 1, "keep_every": 0}, "keep_every: expected at least 1, got 0"),
        ({"keep_best": 2}, "keep_best: expected keep with it.*give keep=1"),
    ],
)
def test_rules_that_are_none_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        bcp.Checkpointer(tmp_path, **settings)


def test_a_kind_of_best_that_is_none_is_refused(tmp_path):
    # What users run: no types are checked at calls.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ConfigError, match="best: expected 'max' or 'min', got 'low'"):
            bcp.Checkpointer(tmp_path, keep=1, best="low")
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_the_best_are_known_after_a_restart(tmp_path):
    state = {"x": torch.ones(3)}
    losses = {10: 0.9, 20: 0.2, 30: 0.5, 40: 0.7, 50: 0.1, 60: 0.8}
    for steps in ((10, 20), (30, 40), (50, 60)):
        with bcp.Checkpointer(tmp_path, keep=1, keep_every=30, keep_best=2, best="min") as ckpt:
            ckpt.load_latest(state)
            for step in steps:
                ckpt.save(step, state, metric=losses[step]).committed.result()
    assert bcp.Checkpointer(tmp_path).steps() == [20, 30, 50, 60]
    storage = open_storage(tmp_path)
    assert commit.read_manifest(storage, commit.format_step(20)).metric == 0.2


def test_the_best_cannot_be_kept_without_metrics(tmp_path):
    state = {"x": torch.ones(3)}
    with bcp.Checkpointer(tmp_path, keep=1, keep_best=1) as ckpt:
        for step, metric in ((1, 0.5), (2, math.nan)):
            ckpt.save(step, state, metric=metric).committed.result()
        with pytest.raises(
            ConfigError, match=r"keep_best: expected a metric with each save, got no"
        ):
            ckpt.save(3, state)
        ckpt.save(4, state, metric=0.25).committed.result()
        assert ckpt.steps() == [1, 4]


def test_a_step_that_is_saved_again_has_its_new_metric(tmp_path):
    state = {"x": torch.ones(3)}
    with bcp.Checkpointer(tmp_path, keep=1, keep_best=1, overwrite=True) as ckpt:
        for step, metric in ((1, 0.9), (1, 0.1), (2, 0.5), (3, 0.4)):
            ckpt.save(step, state, metric=metric).committed.result()
        assert ckpt.steps() == [2, 3]


def test_a_manifest_without_a_metric_is_what_it_always_was(tmp_path):
    bcp.save(tmp_path / "one", {"x": torch.ones(3)})
    assert b"metric" not in (tmp_path / "one" / "manifest.json").read_bytes()
