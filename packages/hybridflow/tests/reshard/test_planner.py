"""Plans of many ranks: one of each kind of group is planned, and the others do as it does."""

import pytest

from hybridflow.models.config import read_config
from hybridflow.reshard import planner
from hybridflow.workers.batch.layout import Layout, generation_groups

LLAMA_70B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(("train", "generate"), [("1-8-4", "1-2"), ("2-4-4", "1-4")])
def test_a_plan_of_one_group_of_each_kind_is_the_plan_of_all(train, generate):
    """On 32 ranks, against each group planned for itself."""
    layout = Layout.parse(train)
    groups = generation_groups(layout, generate)
    config = read_config({**LLAMA_70B, "num_hidden_layers": 4})
    ranks = range(layout.num_ranks)
    full = planner.plan_boxes(
        [planner.find_held_boxes(config, layout, rank) for rank in ranks],
        [planner.find_wanted_boxes(config, groups, rank) for rank in ranks],
        2,
        groups.micro_dp,
    )
    found = planner.plan(train, generate, {**LLAMA_70B, "num_hidden_layers": 4})
    assert found == full
    assert found.received_bytes == full.received_bytes


def test_groups_of_a_thousand_ranks_are_planned_once_for_each_kind(monkeypatch):
    planned, plan = [], planner.reshard.plan
    monkeypatch.setattr(
        planner.reshard,
        "plan",
        lambda *given, **options: planned.append(1) or plan(*given, **options),
    )
    found = planner.plan("4-8-32", "1-8", {**LLAMA_70B, "num_hidden_layers": 4})
    assert len(found) == 1024
    num_kinds = len(generation_groups(Layout.parse("4-8-1"), "1-8").micro_dp)
    assert len(planned) == num_kinds * len(found.transfers)
    (received,) = set(found.received_bytes[:8])
    assert received > 0
    assert found.received_bytes[:32] * 32 == found.received_bytes
