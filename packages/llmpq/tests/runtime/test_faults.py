"""A stage that dies or stands still: every rank raises in time, and names it."""

import os
import signal
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch

from llmpq.planner.plan import Plan, Stage
from llmpq.runtime import pipeline
from llmpq.runtime.pipeline import Pipeline
from llmpq.runtime.stage import StageWorker
from shared.comms import Group, RankPool
from shared.errors import CommError, ConfigError, DataError, RankFailure

from .tiny_models import make


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("faults") / "llama")


def three_stages():
    stages = tuple(
        Stage(rank=rank, layers=(at, to)) for rank, at, to in ((0, 0, 2), (2, 2, 4), (1, 4, 5))
    )
    return Plan(stages=stages, bits=(4,) * 5, group_size=16, prefill_size=1, decode_size=2)


def generate_until(path, model, faulty, fault):
    """What this rank is told when one stops in the midst of decoding, and how long that takes."""
    rank = Group.world().rank
    with Pipeline(three_stages(), model) as pipe:
        if rank == faulty:
            calls = []
            module = torch.nn.Module.__call__

            def counted(self, *args, **options):
                if type(self).__name__ == "StageModel":
                    calls.append(1)
                    if len(calls) == 9:
                        os.kill(os.getpid(), signal.SIGKILL) if fault == "dies" else time.sleep(
                            1000
                        )
                return module(self, *args, **options)

            torch.nn.Module.__call__ = counted
        begin = time.monotonic()
        with pytest.raises(CommError) as told:
            pipe.generate(torch.ones(4, 3, dtype=torch.int64), max_new_tokens=50)
        (path / f"told-{rank}").write_text(f"{time.monotonic() - begin}\n{told.value}")


@pytest.mark.parametrize("faulty", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stage_that_dies_is_named_by_the_others(model, tmp_path, faulty):
    limit = timedelta(seconds=90)
    with (
        pytest.raises(RankFailure, match=f"rank {faulty} of 3"),
        RankPool(3, timeout=limit) as pool,
    ):
        pool.run(generate_until, tmp_path, model, faulty, "dies")
    for rank in {0, 1, 2} - {faulty}:
        seconds, text = (tmp_path / f"told-{rank}").read_text().split("\n", 1)
        assert float(seconds) < limit.total_seconds(), "a death is told before any timeout"
        assert f"rank {faulty}" in text


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [0, 1, 2])
def test_a_stage_that_stands_still_is_named_by_all_others(model, tmp_path, faulty):
    limit = timedelta(seconds=4)
    with pytest.raises(RankFailure), RankPool(3, timeout=limit) as pool:
        pool.run(generate_until, tmp_path, model, faulty, "hangs", timeout=timedelta(seconds=20))
    for rank in {0, 1, 2} - {faulty}:
        seconds, text = (tmp_path / f"told-{rank}").read_text().split("\n", 1)
        assert float(seconds) < 18, "below what the call may take"
        assert f"rank {faulty}" in text


def fail_in_one(path, model, faulty):
    """What this rank is told when one raises in the midst of decoding."""
    rank = Group.world().rank
    with Pipeline(three_stages(), model) as pipe:
        if rank == faulty:
            calls = []
            module = torch.nn.Module.__call__

            def counted(self, *args, **options):
                calls.append(type(self).__name__ == "StageModel")
                if sum(calls) == 9:
                    raise MemoryError("no memory left")
                return module(self, *args, **options)

            torch.nn.Module.__call__ = counted
        begin = time.monotonic()
        with pytest.raises(MemoryError if rank == faulty else CommError) as told:
            pipe.generate(torch.ones(4, 3, dtype=torch.int64), max_new_tokens=50)
        (path / f"told-{rank}").write_text(f"{time.monotonic() - begin}\n{told.value}")


@pytest.mark.parametrize("faulty", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_stage_that_raises_is_named_at_once_by_all_others(model, tmp_path, faulty):
    limit = timedelta(seconds=90)
    with RankPool(3, timeout=limit) as pool:
        pool.run(fail_in_one, tmp_path, model, faulty)
    for rank in {0, 1, 2} - {faulty}:
        seconds, text = (tmp_path / f"told-{rank}").read_text().split("\n", 1)
        assert float(seconds) < 60, "before any timeout"
        assert f"rank {faulty}" in text


def try_bad_input(model):
    plan = three_stages()
    with Pipeline(plan, model) as pipe:
        with pytest.raises(
            DataError, match="expected a token in each prompt, got none in prompt 1"
        ):
            pipe.generate(torch.ones(2, 3, dtype=torch.int64),
                          torch.tensor([[1, 1, 0], [0, 0, 0]]), max_new_tokens=1)  # fmt: skip
        with pytest.raises(ConfigError, match="max_new_tokens: expected at least 1, got 0"):
            pipe.generate(torch.ones(2, 3, dtype=torch.int64), max_new_tokens=0)
        with pytest.raises(ConfigError, match="temperature: expected 0 or more"):
            pipe.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=1, temperature=-1.0)
        one = pipe.generate(torch.ones(3, 3, dtype=torch.int64), max_new_tokens=1)
        assert one is None or one.shape == (3, 1)


def test_bad_input_is_refused_before_anything_is_sent(model):
    with RankPool(3) as pool:
        pool.run(try_bad_input, model)


def start_with_too_few(model):
    with pytest.raises(
        ConfigError, match="expected at least 3 ranks, as a stage is on rank 2, got 2"
    ):
        Pipeline(three_stages(), model)


def test_a_plan_for_more_ranks_is_refused(model):
    with RankPool(2) as pool:
        pool.run(start_with_too_few, model)


def load_slowly(model, slow_s):
    """Rank 1 takes longer to load its stage than messages may take."""
    read = pipeline.load_stage

    def slowly(*args):
        time.sleep(slow_s if Group.world().rank == 1 else 0)
        return read(*args)

    with (
        mock.patch.object(pipeline, "load_stage", slowly),
        Pipeline(three_stages(), model) as pipe,
    ):
        found = pipe.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2)
    return None if found is None else tuple(found.shape)


@pytest.mark.slow
def test_a_stage_may_load_for_longer_than_a_message_may_take(model):
    with RankPool(3, timeout=timedelta(seconds=4)) as pool:
        found = pool.run(load_slowly, model, 8, timeout=timedelta(seconds=60)).results
    assert found == [(1, 2), None, None]


def fail_to_load(model):
    is_broken = Group.world().rank == 1
    broken = mock.Mock(side_effect=DataError("a weight is missing"))
    begin = time.monotonic()
    with (
        mock.patch.object(pipeline, "load_stage", broken if is_broken else pipeline.load_stage),
        pytest.raises(DataError if is_broken else CommError, match=r"rank 1|missing"),
        Pipeline(three_stages(), model),
    ):
        pass
    return time.monotonic() - begin


def test_a_stage_that_cannot_be_loaded_is_told_to_all(model):
    with RankPool(3) as pool:
        assert max(pool.run(fail_to_load, model).results) < 30


def answer_slowly(model, seconds):
    """The first stage is on rank 1, and rank 0 has none."""
    plan = Plan(
        stages=(Stage(rank=1, layers=(0, 5)),), bits=(16,) * 5, prefill_size=1, decode_size=2
    )
    decode = StageWorker.decode

    def slowly(self, *args):
        time.sleep(seconds)
        if seconds > 1:
            raise MemoryError("no memory left")
        return decode(self, *args)

    ids = torch.ones(2, 3, dtype=torch.int64)
    with mock.patch.object(StageWorker, "decode", slowly), Pipeline(plan, model) as pipe:
        try:
            found = pipe.generate(ids, max_new_tokens=8)
        except (CommError, MemoryError) as error:
            return str(error)
    return None if found is None else tuple(found.shape)


@pytest.mark.slow
def test_answers_may_take_longer_than_a_message_to_a_rank_without_a_stage(model):
    with RankPool(2, timeout=timedelta(seconds=4)) as pool:
        found = pool.run(answer_slowly, model, 0.9, timeout=timedelta(seconds=60)).results
        assert found == [(2, 8), None]
        found = pool.run(answer_slowly, model, 1.1, timeout=timedelta(seconds=60)).results
    assert found[0].startswith("expected answers of rank 1; it failed")
    assert found[1] == "no memory left"
