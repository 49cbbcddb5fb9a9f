"""What goes wrong in a training loop, beside what plain autograd does then."""

import contextlib
import copy
import gc
import io
import os
import resource
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memo import DoesNotFit, Plan, apply
from memo.planner.layer_plan import LayerPlan
from memo.runtime.stores import FileStore
from shared.errors import ConfigError, DataError

from .runtime.models import (
    Block,
    Stack,
    assert_same_gradients,
    assert_same_step,
    gradients,
    make_batch,
    make_input,
    make_model,
    make_stack,
    train,
    train_stack,
)

HALF = Plan.fixed(alpha=0.5)
WHOLE = Plan(layers=(LayerPlan(mode="whole"),))
BOTH = pytest.mark.parametrize("plan", [HALF, WHOLE], ids=["restore", "whole"])


def loss_of(model, number=0, **settings):
    ids = make_batch(number, **settings)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


# The store.


def test_a_disk_that_fills_up_is_named(tmp_path):
    """RLIMIT_FSIZE stands for a full disk: writes fail in the same place."""
    model = make_model("llama")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with apply(model, Plan.fixed(alpha=1.0, store=f"file:{tmp_path}")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
        try:
            with pytest.raises(DataError, match=f"{tmp_path}: expected a folder with room"):
                loss_of(model).backward()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        model.zero_grad()
        gc.collect()
        found = train(model)
    assert_same_step(found, train(model))


def test_a_disk_with_too_little_room_is_refused_before_any_step(tmp_path):
    disk = os.statvfs(tmp_path)
    too_much = disk.f_blocks * disk.f_frsize * 4
    prediction = {"store_bytes": too_much}
    plan = Plan(layers=HALF.layers, store=f"file:{tmp_path}", prediction=prediction)
    model = make_model("llama")
    with pytest.raises(DataError, match=r"expected a folder with room for .* free\)"):
        apply(model, plan)
    assert "forward" not in vars(model.model.layers[0])
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match="expected a folder with room"):
        apply(make_model("llama"), Plan.fixed(alpha=0.5, store=f"file:{tmp_path}/file"))


def test_a_store_whose_folder_is_deleted_goes_on(tmp_path):
    model = make_model("llama")
    expected = train(model)
    folder = tmp_path / "store"
    with apply(model, Plan.fixed(alpha=0.5, store=f"file:{folder}")):
        assert os.listdir(folder) == [], "unlinked at once"
        folder.rmdir()
        assert_same_step(train(model), expected)


def test_a_slow_disk_is_waited_for(tmp_path, monkeypatch):
    """Nothing is written before the first layer waits for the third: then all is."""
    model = make_model("llama", num_layers=4)
    expected = train(model, num_batches=1)
    may_write, write = threading.Event(), FileStore.write

    def slow(store, offset, data):
        may_write.wait()
        write(store, offset, data)

    monkeypatch.setattr(FileStore, "write", slow)
    with apply(model, Plan.fixed(alpha=0.5, store=f"file:{tmp_path}")) as run:
        timer = threading.Timer(0.2, may_write.set)
        timer.start()
        found = train(model, num_batches=1)
        assert run.times.wait_s > 0.1
        timer.join()
    assert_same_step(found, expected)


def test_a_failing_read_reaches_the_training_loop(tmp_path, monkeypatch):
    model = make_model("llama")
    with apply(model, Plan.fixed(alpha=0.5, store=f"file:{tmp_path}")):
        loss = loss_of(model)
        with monkeypatch.context() as patch:

            def broken(*_):
                raise OSError(5, "Input/output error")

            patch.setattr("memo.runtime.stores.file.move_all", broken)
            with pytest.raises(DataError, match="Input/output error"):
                loss.backward()
        del loss
        found = train(model)
    assert_same_step(found, train(model))


KILLED = """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    from memo import Plan, apply
    from models import make_model, make_batch
    model = make_model("llama")
    with apply(model, Plan.fixed(alpha=1.0, store="file:" + sys.argv[2])):
        ids = make_batch()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_file(tmp_path):
    here = os.path.join(os.path.dirname(__file__), "runtime")
    command = [sys.executable, "-c", textwrap.dedent(KILLED), here, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == -9, done.stderr
    assert os.listdir(tmp_path) == []


def test_a_store_that_is_too_small_says_so_and_training_goes_on_after():
    model = make_model("llama")
    expected = train(model)
    with apply(model, Plan.fixed(alpha=0.5)) as run:
        assert_same_step(train(model), expected)
        needed = run.store_bytes
    plan = Plan(layers=HALF.layers, store_limit_bytes=needed)
    with apply(model, plan) as run:
        assert_same_step(train(model), expected)
        assert run.store_bytes == needed
        with pytest.raises(DoesNotFit, match="store in memory: expected at most"):
            loss_of(model, length=96)
        gc.collect()
        assert_same_step(train(model), expected)
        assert run.store_bytes <= needed


# The training loop.


@BOTH
@pytest.mark.parametrize("lengths", [(48, 96, 32, 96), (96, 17, 48)])
def test_batches_may_grow_and_shrink(plan, lengths):
    model = make_model("llama")
    expected = [train(model, num_batches=1, length=one) for one in lengths]
    with apply(model, plan):
        for length, wanted in zip(lengths, expected, strict=True):
            assert_same_step(train(model, num_batches=1, length=length), wanted)


class Interrupted(Exception):
    pass


@BOTH
@pytest.mark.parametrize("at", [0, 1, 2])
def test_training_goes_on_after_an_exception_in_a_forward(plan, at):
    model = make_model("gpt2")
    expected = train(model)
    with apply(model, plan) as run:
        hook = model.transformer.h[at].mlp.register_forward_hook(_interrupt)
        with pytest.raises(Interrupted):
            loss_of(model)
        hook.remove()
        gc.collect()
        assert_same_step(train(model), expected)
        assert run.num_spare_buffers == 0


def _interrupt(*_):
    raise Interrupted


@BOTH
def test_training_goes_on_after_an_exception_in_a_backward(plan):
    model = make_model("llama")
    expected = train(model)
    with apply(model, plan) as run:
        loss = loss_of(model)
        hook = model.model.layers[1].mlp.register_full_backward_hook(_interrupt)
        with contextlib.suppress(Interrupted):
            loss = loss_of(model)
            loss.backward()
        hook.remove()
        del loss
        gc.collect()
        assert_same_step(train(model), expected)
        assert run.num_spare_buffers == 0


@BOTH
def test_forwards_without_backward_give_their_slots_back(plan):
    model = make_model("llama")
    expected = train(model)
    with apply(model, plan) as run:
        train(model)
        needed = run.store_bytes
        for number in range(5):
            loss_of(model, number)
        assert_same_step(train(model), expected)
        assert run.store_bytes <= 2 * needed, "one may be alive while the next runs"
        assert run.num_spare_buffers == 0


@BOTH
def test_backward_may_run_twice_where_the_graph_is_retained(plan):
    model = make_model("llama")

    def step():
        model.zero_grad()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.item()], gradients(model)

    expected = step()
    with apply(model, plan):
        assert_same_step(step(), expected)


@BOTH
def test_a_second_backward_is_refused_as_by_autograd(plan):
    model = make_model("llama")
    with apply(model, plan):
        loss = loss_of(model)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@BOTH
def test_a_backward_that_is_differentiated_again_is_refused(plan):
    model = make_model("llama", attention="eager")
    with (
        apply(model, plan),
        pytest.raises(RuntimeError, match="got create_graph=True; run it outside"),
    ):
        loss_of(model).backward(create_graph=True)


@BOTH
@pytest.mark.parametrize("order", ["first in, first out", "last in, first out", "interleaved"])
def test_several_forwards_may_come_before_their_backwards(plan, order):
    model = make_model("llama", num_layers=5)

    def step():
        model.zero_grad()
        if order == "interleaved":  # one forward ahead
            ahead = loss_of(model, 0)
            for number in (1, 2):
                loss, ahead = ahead, loss_of(model, number)
                loss.backward()
            ahead.backward()
        else:
            losses = [loss_of(model, number) for number in range(3)]
            for loss in losses if order.startswith("first") else losses[::-1]:
                loss.backward()
        return [], gradients(model)

    expected = step()
    with apply(model, plan):
        assert_same_step(step(), expected)
        assert_same_step(step(), expected)


def test_the_first_forwards_backward_finds_buffers_free():
    """Forwards before other forwards' backwards fetch nothing for a backward that is not next."""
    model = make_model("llama", num_layers=5)
    with apply(model, HALF) as run:
        losses = [loss_of(model, number) for number in range(3)]
        for loss in losses:
            loss.backward()
        # Only the last layers of the last forward, which were fetched before the others came, wait.
        assert run.num_spare_buffers == 0


@BOTH
def test_forwards_without_gradients_run_as_they_were(plan):
    model = make_model("gpt2")
    ids = make_batch()
    model.eval()
    with torch.no_grad():
        expected = model(ids).logits
    with apply(model, plan) as run:
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected)
        with torch.inference_mode():
            assert torch.equal(model(ids).logits, expected)
        assert run.store_bytes == 0
        assert torch.equal(model(ids).logits, expected), "with gradients, in eval mode"
        assert run.store_bytes > 0


def test_generation_keeps_its_cache():
    model = make_model("llama").eval()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(make_batch(rows=1), **settings)
    with apply(model, HALF):
        assert torch.equal(model.generate(make_batch(rows=1), **settings), expected)


@BOTH
@pytest.mark.parametrize("frozen", ["embedding", "first layers", "all but biases", "everything"])
def test_frozen_parameters(plan, frozen):
    model = make_model("gpt2")
    for name, parameter in model.named_parameters():
        is_early = "wte" in name or "wpe" in name or (".h.0." in name or ".h.1." in name)
        parameter.requires_grad_(
            {
                "embedding": "wte" not in name and "wpe" not in name,
                "first layers": not is_early,
                "all but biases": name.endswith("bias"),
                "everything": False,
            }[frozen]
        )
    if frozen == "everything":
        with apply(model, plan) as run:
            assert not loss_of(model).requires_grad
            assert run.store_bytes == 0
        return
    expected = train(model)
    with apply(model, plan):
        assert_same_step(train(model), expected)


@BOTH
def test_tied_embeddings(plan):
    model = make_model("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = train(model)
    with apply(model, plan):
        assert_same_step(train(model), expected)


class Adapted(nn.Module):
    """A frozen projection with a low-rank one beside it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 4, bias=False)
        self.up = nn.Linear(4, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + 0.5 * self.up(self.down(x))


@BOTH
def test_low_rank_adapters(plan):
    model = make_model("llama").requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    expected = train(model)
    assert len(expected[1]) == 3 * 4
    with apply(model, plan):
        assert_same_step(train(model), expected)


# Changes in place.


@BOTH
def test_an_input_that_is_changed_after_its_layer_is_refused_as_by_autograd(plan):
    def step(model):
        x = model.first(make_input())
        y = model.layers[0](x)
        x.add_(1)
        y.sum().backward()

    model = make_stack()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)
    with apply(model, plan), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)


@BOTH
@pytest.mark.parametrize("name", ["up.weight", "norm.weight", "down.weight"])
def test_a_parameter_that_is_changed_before_the_backward_is_refused_as_by_autograd(plan, name):
    def step(model):
        loss = model(make_input())
        with torch.no_grad():
            model.layers[1].get_parameter(name).add_(1)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(make_stack())
    model = make_stack()
    with apply(model, plan), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)


def test_a_changed_parameter_that_autograd_does_not_need_is_refused_where_it_is_run_again():
    """Plain autograd may not save a first layer's weight; running the layer again needs it."""
    model = make_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    with apply(model, HALF):
        loss = loss_of(model)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"self_attn.q_proj.weight is at version"):
            loss.backward()


def test_activations_in_place_are_recomputed():
    model = make_stack(lambda: Block(inner=lambda: nn.ReLU(inplace=True)))
    expected = train_stack(model)
    for plan in (Plan.fixed(alpha=1.0), HALF, WHOLE):
        with apply(model, plan):
            assert_same_step(train_stack(model), expected)


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        return self.up(x.mul_(2)).sigmoid() * 3


def test_a_layer_that_changes_its_input_is_refused_with_a_way_out():
    model = make_stack(ChangesItsInput)
    expected = train_stack(model)
    with apply(model, HALF), pytest.raises(ConfigError, match="writes to its input in place"):
        train_stack(model)
    with apply(model, WHOLE):
        assert_same_step(train_stack(model), expected)


# Layers that another forward would change.


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

    def forward(self, x):
        return x + self.norm(self.up(x).flatten(0, 1)).view_as(x).sigmoid()


def test_batch_norm_is_refused_while_it_trains_and_whole_keeps_it():
    model = make_stack(Normed)
    start = copy.deepcopy(model.state_dict())
    expected, after = train_stack(model), copy.deepcopy(model.state_dict())
    model.load_state_dict(start)
    with apply(model, HALF), pytest.raises(ConfigError, match=r"writes to norm\."):
        train_stack(model)
    model.load_state_dict(start)
    with apply(model, WHOLE):
        assert_same_step(train_stack(model), expected)
    assert all(torch.equal(one, after[name]) for name, one in model.state_dict().items())
    model.eval()
    expected = train_stack(model)
    with apply(model, HALF):
        assert_same_step(train_stack(model), expected)


class OwnNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.generator)
        return x + (self.up(x) * noise).sigmoid()


def test_a_generator_of_a_layers_own_is_refused_and_whole_keeps_it():
    expected = train_stack(make_stack(OwnNoise))
    with (
        apply(model := make_stack(OwnNoise), HALF),
        pytest.raises(ConfigError, match="rand with a generator"),
    ):
        train_stack(model)
    with apply(model := make_stack(OwnNoise), WHOLE):
        assert_same_step(train_stack(model), expected)


class Alternating(nn.Module):
    """Takes another way each time that it is called."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.count = 0

    def forward(self, x):
        self.count += 1
        return x + (self.down(self.up(x).sigmoid()) if self.count % 2 else self.up(x))


def test_a_layer_that_takes_another_way_is_noticed_and_whole_keeps_it():
    expected = train_stack(make_stack(Alternating))
    with (
        apply(model := make_stack(Alternating), HALF),
        pytest.raises(ConfigError, match="saved 3 tensors at first, and 1 the second"),
    ):
        train_stack(model)
    with apply(model := make_stack(Alternating), WHOLE):
        assert_same_step(train_stack(model), expected)


# What else may be at work on a model.


def test_two_plans_on_one_model_are_refused():
    model = make_model("llama")
    for plan in (HALF, WHOLE, Plan(layers=(LayerPlan(),))):
        with (
            apply(model, plan),
            pytest.raises(ConfigError, match="close the run"),
        ):
            apply(model, HALF)
    with apply(model, HALF):
        pass


def test_gradient_checkpointing_is_refused():
    model = make_model("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="gradient_checkpointing_disable"):
        apply(model, HALF)


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_checkpoint_inside_a_layer_is_refused():
    model = make_stack(Checkpointed)
    expected = train_stack(model)
    with apply(model, HALF), pytest.raises(ConfigError, match=r"torch\.utils\.checkpoint"):
        train_stack(model)
    with apply(model, Plan(layers=(LayerPlan(),))):
        assert_same_step(train_stack(model), expected)


def test_compiled_models_are_refused():
    model = make_stack()
    with pytest.raises(ConfigError, match=r"under torch\.compile"):
        apply(torch.compile(model, backend="eager"), HALF)
    with apply(model, HALF), pytest.raises(ConfigError, match=r"under torch\.compile"):
        torch.compile(model, backend="eager")(make_input())
    torch._dynamo.reset()
    expected = train_stack(make_stack())
    with apply(model, HALF):
        assert_same_step(train_stack(model), expected)


def test_capture_of_a_cuda_graph_is_refused(monkeypatch):
    model = make_stack()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with apply(model, HALF), pytest.raises(ConfigError, match="capture of a CUDA graph"):
        model(make_input())


def test_a_backward_after_the_plan_was_taken_off_is_refused():
    model = make_model("llama")
    with apply(model, HALF):
        loss = loss_of(model)
    with pytest.raises(RuntimeError, match="close the run, or leave its `with` block, when"):
        loss.backward()


def test_a_plan_for_another_number_of_layers_is_refused():
    plan = Plan(layers=HALF.layers * 4)
    with pytest.raises(ConfigError, match=r"plans of the model's 3 layers, got 4"):
        apply(make_model("llama"), plan)


def test_layers_that_are_not_the_models_are_refused():
    with pytest.raises(ConfigError, match="got 1 of which 1 are not"):
        apply(make_stack(), HALF, layers=[Block()])
    with pytest.raises(ConfigError, match="expected a list of layers"):
        apply(nn.Linear(3, 3), HALF)


def test_pinned_memory_without_a_gpu_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="expected a GPU for 'pinned'"):
        apply(make_model("llama"), Plan.fixed(alpha=0.5, store="pinned"))


class Keyword(Block):
    def forward(self, x):
        return super().forward(x.float())


def test_a_layer_without_a_floating_point_input_is_refused():
    model = Stack([Keyword()])
    with apply(model, HALF), pytest.raises(ConfigError, match="given a floating-point tensor"):
        model.layers[0](torch.ones(2, 32, dtype=torch.int64))


def test_copies_of_a_model_run_on_their_own():
    model = make_stack()
    with apply(model, HALF) as run:
        other = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        for one in (other, read):
            for parameter in one.parameters():
                parameter.data.mul_(2)
            train_stack(one)
        assert run.num_restored == 0
        found = train_stack(model)
    assert_same_step(found, train_stack(model))
    doubled = make_stack()
    for parameter in doubled.parameters():
        parameter.data.mul_(2)
    assert_same_gradients(gradients(other), train_stack(doubled)[1])
    assert_same_gradients(gradients(read), gradients(other))
