"""A backend takes a stored plan for the graph and the torch that it was made for, and no other."""

import pytest
import torch
from lancet_models import RowsModel, SmallModel, divide, small_batch

import lancet
from lancet.graph.operations import Op
from lancet.planner.plan import make_plan, save_plans
from shared.comms import Group
from shared.errors import DataError


def step(kind, path):
    """The plan that a backend runs after a step with a plan's file loaded, and its sentences."""
    torch._dynamo.reset()
    group = Group.world()
    backend = lancet.Backend(group, partition=None)
    # Other ranks' files do not count.
    backend.load_plan(path if group.rank == 0 else "nowhere.json")
    run = torch.compile(divide(kind, group), backend=backend, fullgraph=True)
    run(small_batch(group.rank)).backward()
    backend.save_plan(f"{path}.new{group.rank}")
    (plan,) = backend.plans.values()
    return plan, backend.report().sentences


def load(kind, folder):
    ops = [Op("one", "compute", 1.0)]
    others = [
        make_plan("backward 1", "0123456789", torch.__version__, ops, [], None),
        make_plan("backward 1", "abcdefghij", "2.0", ops, [], None),
    ]
    save_plans(f"{folder}/others.json", others)
    anew = step(kind, f"{folder}/others.json")
    loaded = step(kind, f"{folder}/others.json.new0")
    if Group.world().rank == 0:
        with pytest.raises(DataError, match=r"nowhere.json: expected a plan, there is nothing"):
            lancet.Backend(Group.world()).load_plan("nowhere.json")
    return anew, loaded


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", [RowsModel, pytest.param(SmallModel, marks=pytest.mark.slow)])
def test_a_loaded_plan_is_taken_for_its_own_graph_and_torch(pool, tmp_path, kind):
    results = pool.run(load, kind, str(tmp_path)).results
    for rank, ((anew, refusals), (loaded, sentences)) in enumerate(results):
        assert len(anew.ops) > 40
        # Seconds never repeat: a plan that is made anew has others.
        assert loaded == anew == results[0][0][0]
        assert sentences == ()
        assert len(refusals) == (rank == 0)
    (refusal,) = results[0][0][1]
    assert f"expected a loaded plan of the graph {anew.digest[:8]} of torch {anew.torch}" in refusal
    assert f"got those of 01234567 of torch {anew.torch}, abcdefgh of torch 2.0" in refusal
    assert "it is planned anew" in refusal
