"""Forwards and backwards in other orders than one after another, and those that are never finished."""

import contextlib
import gc

import pytest
import torch

from memo import apply

from ..runtime.models import (
    assert_same_step,
    gradients,
    make_batch,
    make_model,
    plain_step,
    train,
)
from .steps import BOTH, HALF, loss_of

pytestmark = pytest.mark.unchecked  # models are trained


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
@pytest.mark.parametrize("at", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_goes_on_after_an_exception_in_a_forward(plan, at):
    model, expected = make_model("gpt2"), plain_step("gpt2")
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
    model, expected = make_model("llama"), plain_step("llama")
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
    model, expected = make_model("llama"), plain_step("llama")
    with apply(model, plan) as run:
        train(model)
        needed = run.store_bytes
        for number in range(5):
            loss_of(model, number)
        assert_same_step(train(model), expected)
        assert run.store_bytes <= 2 * needed, "one may be alive while the next runs"
        assert run.num_spare_buffers == 0


@BOTH
def test_a_training_loop_that_is_left_in_the_middle_gives_its_slots_back(plan):
    """A generator that waits between a forward and its backward, and is dropped there."""
    model, expected = make_model("llama"), plain_step("llama")

    def steps():
        for number in range(3):
            loss = loss_of(model, number)
            yield loss
            loss.backward()

    with apply(model, plan) as run:
        assert_same_step(train(model), expected)
        needed = run.store_bytes
        loop = steps()
        next(loop)
        loop.close()
        loop = steps()
        next(loop), next(loop)  # one backward is over, the other never comes
        del loop
        gc.collect()
        assert_same_step(train(model), expected)
        assert run.store_bytes == needed
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
@pytest.mark.parametrize(
    "order",
    [
        "first in, first out",
        pytest.param("last in, first out", marks=pytest.mark.slow),
        "interleaved",
    ],
)
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


def test_forwards_of_a_single_layer_are_told_apart():
    """The last one's backward comes first: none of the others has taken its buffer ahead."""
    model = make_model("llama", num_layers=1)
    with apply(model, HALF) as run:
        losses = [loss_of(model, number) for number in range(3)]
        for loss in reversed(losses):
            loss.backward()
        assert run.num_spare_buffers == 0


def test_a_forward_that_comes_between_backwards_takes_no_buffer_from_them():
    model = make_model("llama", num_layers=5)
    with apply(model, HALF) as run:
        first, second = loss_of(model, 0), loss_of(model, 1)
        first.backward()
        third = loss_of(model, 2)  # both buffers are free, and the next backward is not its own
        second.backward()
        third.backward()
        assert run.num_spare_buffers == 0


@BOTH
def test_another_backward_may_come_between_two_parts_of_one(plan):
    """What the first part left in its layer's buffer is still there when the second asks for it."""
    model = make_model("llama")

    def step():
        model.zero_grad()
        seen = []
        attention = model.model.layers[-1].self_attn
        hook = attention.register_forward_hook(lambda *given: seen.append(given[-1][0]))
        first = loss_of(model, 0)
        hook.remove()
        second = loss_of(model, 1)
        (grad,) = torch.autograd.grad(
            first, seen, retain_graph=True
        )  # as far as attention's result
        second.backward()
        seen[0].backward(grad)
        return [], gradients(model)

    expected = step()
    with apply(model, plan):
        assert_same_step(step(), expected)


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
