"""Passes that are captured and replayed: on the CPU by stand-ins for graphs, and on a CUDA device."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.models.decoder import Shard
from hybridflow.rollout.native import cuda_graphs as native_graphs
from hybridflow.rollout.native.generator import generate
from hybridflow.rollout.sampling import Sampling

from .test_native import LENGTHS, often, pair, prompts_of, responses

# They wait for the device, or copy from the host: a capture refuses them.
FORBIDDEN = {
    "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::lift_fresh",
    "aten::masked_select", "aten::nonzero",
}  # fmt: skip


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recorded(TorchDispatchMode):
    """Operations on memory that stays where it is; recorded without effect, done by `replay`.

    As in a CUDA graph, the host is not asked again: what it decided and the numbers that it knew are
    those of the capture.
    """

    def __init__(self, run, pool=None):
        super().__init__()
        self.operations, self.before, self.num_replays = [], {}, 0
        with self:
            run()
        for storage, values in self.before.values():
            storage.copy_(values)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema, kwargs = func._schema, kwargs or {}
        assert schema.name not in FORBIDDEN, schema.name
        if schema.name in ("aten::index", "aten::index_put_"):
            assert all(at is None or at.dtype == torch.int64 for at in args[1]), "a mask waits"
        for argument, value in zip(schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                storage = value.untyped_storage()
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        made = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, tensors(made)))
        return made

    def replay(self):
        self.num_replays += 1
        for func, args, kwargs, made in self.operations:
            for ours, fresh in zip(made, tensors(func(*args, **kwargs)), strict=True):
                if ours.data_ptr() != fresh.data_ptr():
                    ours.copy_(fresh)

    def pool(self):
        return "memory"


class Called(SimpleNamespace):
    """A pass as it is, for kernels that torch does not know of."""

    def __init__(self, run, pool=None):
        super().__init__(replay=run, pool=lambda: "memory")


@pytest.fixture
def captures(monkeypatch):
    """Has passes captured on the CPU by a stand-in, the second time already; what was captured."""

    def by(stand_in):
        def capture(run, pool=None):
            made.append(stand_in(run, pool))
            return made[-1]

        made = []
        monkeypatch.setattr(native_graphs, "can_capture", lambda device, shard: True)
        monkeypatch.setattr(native_graphs, "capture", capture)
        monkeypatch.setattr(native_graphs, "NUM_UNCAPTURED", 1)
        return made

    return by


@pytest.fixture(scope="module")
def models():
    return pair()


def settings(model, temperature):
    """Samples that end at many lengths, so that places are refilled and given up."""
    end = often(model) if temperature else None
    return Sampling(max_new_tokens=9, num_samples=3, temperature=temperature, seed=2, end_token=end)


def assert_equal(found, expected, atol):
    assert torch.equal(found.tokens.cpu(), expected.tokens.cpu())
    assert torch.equal(found.lengths.cpu(), expected.lengths.cpu())
    assert found.num_steps == expected.num_steps
    torch.testing.assert_close(found.log_probs.cpu(), expected.log_probs.cpu(), rtol=0, atol=atol)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("num_places", [6, 300])
def test_what_is_replayed_gives_what_is_run(captures, models, temperature, num_places):
    _, model = models
    sampling = settings(model, temperature)
    asked = {"num_places": num_places, "step": 3}
    plain = generate(model, prompts_of(LENGTHS), sampling, **asked)
    made = captures(Recorded)
    assert_equal(generate(model, prompts_of(LENGTHS), sampling, **asked), plain, 1e-12)
    assert sum(graph.num_replays for graph in made) >= plain.num_steps // 2 > 3
    count = len(made)
    without = generate(model, prompts_of(LENGTHS), sampling, has_graphs=False, **asked)
    assert_equal(without, plain, 0)
    assert len(made) == count


def test_what_is_replayed_gives_the_tokens_of_hugging_face(captures, models):
    theirs, model = models
    (prompt,) = prompts_of([9])
    expected = theirs.generate(
        prompt[None], attention_mask=torch.ones(1, 9), max_new_tokens=12, do_sample=False
    )
    made = captures(Recorded)
    sampling = Sampling(max_new_tokens=12, num_samples=3, temperature=0)
    assert torch.equal(generate(model, [prompt], sampling).tokens, expected.expand(3, -1))
    assert [graph.num_replays for graph in made] == [10]


def test_idle_places_change_nothing_in_float32(captures):
    """Where a kernel of its own attends."""
    model = pair()[1].float()
    sampling = settings(model, 1.5)
    plain = generate(model, prompts_of(LENGTHS), sampling, num_places=7)
    made = captures(Called)
    assert_equal(generate(model, prompts_of(LENGTHS), sampling, num_places=7), plain, 1e-5)
    assert len(made) > 1


def test_weights_may_change_and_move_between_generations(captures):
    _, model = pair()
    captures(Recorded)
    sampling = settings(model, 0.0)
    found = []
    for change in (lambda w: w, lambda w: w.mul_(1.1), lambda w: w.clone() * 0.9):
        for weight in model.parameters():
            weight.data = change(weight.data)
        found.append(generate(model, prompts_of(LENGTHS), sampling))
        plain = generate(model, prompts_of(LENGTHS), sampling, has_graphs=False)
        assert_equal(found[-1], plain, 1e-12)
    assert len({str(responses(each)) for each in found}) == 3


def test_a_capture_a_power_of_two(captures):
    made, run = captures(Called), []
    replayed = native_graphs.Replayed(run.append, 6)
    for num_used in (6, 5, 5, 4, 3, 2, 1, 1, 1, 2):
        replayed(num_used)
    assert run == [6, 6, 6, 4, 4, 2, 1, 1, 1, 2]
    assert len(made) == 4


def test_a_capture_that_fails_is_told_and_done_without(captures, models, monkeypatch):
    def fails(run, pool=None):
        raise RuntimeError("operation not permitted when stream is capturing")

    _, model = models
    sampling = settings(model, 0.0)
    plain = generate(model, prompts_of(LENGTHS), sampling)
    captures(Called)
    monkeypatch.setattr(native_graphs, "capture", fails)
    with pytest.warns(RuntimeWarning, match="no CUDA graph .* not permitted") as told:
        found = generate(model, prompts_of(LENGTHS), sampling)
    assert len(told) == 1
    assert_equal(found, plain, 1e-12)


@pytest.mark.parametrize(
    ("device", "num_stages", "backend", "expected"),
    [
        ("cuda", 1, None, True),
        ("cuda", 1, "nccl", True),
        ("cuda", 1, "gloo", False),
        ("cuda", 2, None, False),
        ("cpu", 1, None, False),
    ],
)
def test_only_kernels_on_one_gpu_are_captured(
    monkeypatch, models, device, num_stages, backend, expected
):
    shard = Shard(models[1].config, num_stages=num_stages)
    if backend is not None:
        monkeypatch.setattr(shard, "group", SimpleNamespace(backend=backend))
    assert native_graphs.can_capture(torch.device(device), shard) is expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("num_places", [1, 6, 300])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-3)])
def test_a_gpu_gives_what_the_cpu_gives(monkeypatch, temperature, num_places, dtype, atol):
    captured, capture = [], native_graphs.capture
    monkeypatch.setattr(
        native_graphs, "capture", lambda *args: captured.append(capture(*args)) or captured[-1]
    )
    model = pair()[1].to(dtype)
    sampling = settings(model, temperature)
    for factor in (1.0, 1.1):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(factor)
        there = pair()[1].to("cuda", dtype)
        there.load_state_dict(model.state_dict())
        count = len(captured)
        expected = generate(model, prompts_of(LENGTHS), sampling, num_places=num_places)
        for has_graphs in (True, False):
            found = generate(
                there, prompts_of(LENGTHS), sampling, num_places=num_places,
                has_graphs=has_graphs,
            )  # fmt: skip
            assert_equal(found, expected, atol)
        assert len(captured) > count
