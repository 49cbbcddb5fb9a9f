"""Plans answered in turns, their table and their picture."""

from statistics import median

import pytest
import torch

from llmpq.evaluation import StageTiming, Timing, compare_plans
from llmpq.planner.plan import Plan, Stage
from llmpq.report import draw_stages, timing_table
from llmpq.runtime.loader import load
from shared.comms import RankPool
from shared.errors import ConfigError

from .runtime.tiny_models import make

IDS = torch.arange(3, 15).view(4, 3)
NEW_TOKENS = 4


def cut_at(layer, bits, **predicted):
    stages = Stage(rank=1, layers=(0, layer)), Stage(rank=0, layers=(layer, 5))
    return Plan(
        stages=stages, bits=(bits,) * 5, group_size=16, prefill_size=1, decode_size=2,
        predicted=predicted,
    )  # fmt: skip


PLANS = {
    "plan": cut_at(3, 16, seconds=2.0, stage_prefill_s=[0.1, 0.2], stage_decode_s=[0.3, 0.4]),
    "even": cut_at(2, 4),
}


def answer_in_turns(folder):
    mask = torch.ones_like(IDS)
    return compare_plans(PLANS, folder, IDS, mask, new_tokens=NEW_TOKENS, rounds=2)


@pytest.mark.slow
def test_plans_answer_in_turns_as_one_process_does(tmp_path):
    folder = make("llama", tmp_path / "llama")
    with RankPool(2) as pool:
        found, others = pool.run(answer_in_turns, folder).results
    assert others == []
    assert [one.name for one in found] == ["plan", "even"]
    for one, plan in zip(found, PLANS.values(), strict=True):
        whole = load(folder, plan).generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=NEW_TOKENS, do_sample=False,
            min_new_tokens=NEW_TOKENS,
        )  # fmt: skip
        assert torch.equal(one.tokens, whole[:, IDS.shape[1] :])
        assert len(one.turns_s) == 2
        assert one.median_s == median(one.turns_s)
        assert one.tokens_per_s == pytest.approx(16 / one.median_s)
        assert [(stage.rank, stage.layers) for stage in one.stages] == [
            (stage.rank, stage.layers) for stage in plan.stages
        ]
        assert all(0 < s.prefill_s < max(one.turns_s) for s in one.stages)
        assert all(0 < s.decode_s < max(one.turns_s) for s in one.stages)
    assert found[0].predicted_s == 2.0
    assert [stage.predicted_decode_s for stage in found[0].stages] == [0.3, 0.4]
    assert found[1].predicted_s is None
    assert found[1].stages[0].predicted_prefill_s is None


def test_nothing_to_compare_is_refused():
    with pytest.raises(ConfigError, match="expected a plan and a round, got 0 plans, 1 rounds"):
        compare_plans({}, "nowhere", IDS, torch.ones_like(IDS), new_tokens=1, rounds=1)
    with pytest.raises(ConfigError, match="expected the timing of a plan to draw, got none"):
        draw_stages([], "nowhere.svg")


def test_the_table_and_the_picture_name_every_stage(tmp_path):
    stages = (
        StageTiming(rank=1, layers=(0, 3), prefill_s=0.02, decode_s=0.001,
                    predicted_prefill_s=0.03, predicted_decode_s=None),
        StageTiming(rank=0, layers=(3, 5), prefill_s=0.04, decode_s=0.002,
                    predicted_prefill_s=0.05, predicted_decode_s=0.004),
    )  # fmt: skip
    timings = [
        Timing(name=name, turns_s=(3.0, 1.0, 2.0), num_tokens=8, predicted_s=told, stages=stages)
        for name, told in (("plan", 2.5), ("even", None))
    ]
    table = timing_table(timings)
    assert table.splitlines()[1].split() == ["plan", "2", "1", "to", "3", "2.5", "4"]
    assert table.splitlines()[2].split() == ["even", "2", "1", "to", "3", "-", "4"]
    assert table.splitlines()[5].split() == ["plan", "1", "0-2", "20", "(30)", "1", "(-)"]
    draw_stages(timings, tmp_path / "stages.svg")
    text = (tmp_path / "stages.svg").read_text()
    for label in ("plan, rank 1", "even, rank 0", "measured", "predicted"):
        assert label in text  # matplotlib writes each text as a comment beside its glyphs
