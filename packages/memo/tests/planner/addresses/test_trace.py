import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import memo
from shared.errors import DataError


def test_events_become_intervals():
    trace = memo.Trace.from_events(
        [("alloc", "a", 10), ("alloc", "b", 5), ("free", "a"), ("alloc", "a", 7), ("free", "b")]
    )
    assert trace.intervals == ((0, 2, 10), (1, 4, 5), (3, 5, 7))  # the last lives to the end
    assert trace.sizes == (10, 5, 7)
    assert trace.load_bytes == 15


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 99)), max_size=40))
def test_load_is_the_most_alive_at_once(steps):
    alive, most, events = {}, 0, []
    for key, num_bytes in steps:
        if key in alive:
            events.append(("free", key))
            del alive[key]
        else:
            events.append(("alloc", key, num_bytes))
            alive[key] = num_bytes
        most = max(most, sum(alive.values()))
    assert memo.Trace.from_events(events).load_bytes == most


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([("alloc", "x", 1), ("free", "x"), ("free", "x")], "event 2: key 'x' is freed"),
        ([("free", "y")], "event 0: key 'y' is freed"),
        ([("alloc", "x", 1), ("alloc", "x", 1)], "event 1: key 'x' is allocated.*since event 0"),
        ([("alloc", "x", -1)], "event 0: expected bytes of 'x' from 0, got -1"),
        ([("alloc", "x", 1.5)], "event 0: expected whole bytes of 'x'"),
        ([("alloc", "x")], "event 0: expected"),
        ([("keep", "x", 1)], "event 0: expected"),
    ],
)
def test_bad_events_are_refused_by_key_and_index(events, text):
    with pytest.raises(DataError, match=text):
        memo.Trace.from_events(events)


@pytest.mark.parametrize(
    "text",
    [
        "id,lower,upper,size\n0,0,3,10\n1,2,5,20\n",
        "size, upper, id, lower\n20,5,b,2\n10,3,a,0\n",
        "\ufeffID,LOWER,UPPER,SIZE,note\r\n7,0,3,10,x\r\n8,2,5,20,y\r\n",
    ],
)
def test_csv_columns_come_in_any_order(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8", newline="")
    trace = memo.Trace.from_csv(path)
    assert trace.intervals == ((0, 3, 10), (2, 5, 20))
    assert trace.load_bytes == 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected intervals, the file is empty"),
        ("id,lower,upper\n0,1,2\n", "expected columns"),
        ("id,lower,upper,size\n0,1,2,many\n", "line 2: expected whole numbers"),
        ("id,lower,upper,size\n0,1,2\n", "line 2: expected whole numbers"),
        ("id,lower,upper,size\n0,1,2,3\n1,5,2,3\n", "line 3: expected lower <= upper"),
        ("id,lower,upper,size\n0,1,2,-3\n", "line 2: expected lower <= upper and size"),
    ],
)
def test_bad_csv_is_refused_by_line(tmp_path, text, expected):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=expected):
        memo.Trace.from_csv(path)


class Square(torch.nn.Module):
    """One matmul and a sum: few enough tensors to be counted by hand."""

    def __init__(self, width, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width, width, device=device))

    def forward(self, x):
        return (x @ self.weight).sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fake_step_counts_products_losses_and_gradients(device):
    model = Square(64, device)
    trace = memo.Trace.from_fake(model, torch.zeros(16, 64, device=device))
    product, loss = 16 * 64 * 4, 4
    assert sorted(set(trace.sizes)) == [loss, product, 64 * 64 * 4]
    # The gradient of the weight is the only one that lives to the end.
    end = max(stop for _, stop, _ in trace.intervals)
    assert [size for _, stop, size in trace.intervals if stop == end] == [64 * 64 * 4]
    assert model.weight.grad is None
    assert model.weight.device.type == device


def tiny_llama(**changes):
    config = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 4096, **changes,
    }  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16).train()


def llama_trace(model, tokens):
    ids = torch.empty(1, tokens, dtype=torch.long, device="meta")
    return memo.Trace.from_fake(model, {"input_ids": ids, "labels": ids})


@pytest.mark.slow
@pytest.mark.unchecked
def test_fake_step_of_a_language_model_grows_by_a_layer_and_by_a_token():
    loads = {
        (layers, tokens): llama_trace(tiny_llama(num_hidden_layers=layers), tokens).load_bytes
        for layers, tokens in ((1, 512), (2, 512), (3, 512), (1, 1024), (2, 1024))
    }
    layer = {tokens: loads[2, tokens] - loads[1, tokens] for tokens in (512, 1024)}
    assert layer[512] == loads[3, 512] - loads[2, 512]
    # At least the table's tensors, and nothing that grows with the square of the length.
    table = memo.skeleton(tiny_llama().config).bytes_per_token()
    assert layer[512] > table * 512 * 0.9
    assert layer[1024] == pytest.approx(2 * layer[512], rel=0.05)


@pytest.mark.slow
@pytest.mark.unchecked
def test_fake_step_keeps_less_with_checkpoints_and_tied_weights_once():
    plain = llama_trace(tiny_llama(num_hidden_layers=4), 1024)
    model = tiny_llama(num_hidden_layers=4)
    model.gradient_checkpointing_enable()
    assert llama_trace(model, 1024).load_bytes < 0.8 * plain.load_bytes
    tied = llama_trace(tiny_llama(num_hidden_layers=1, tie_word_embeddings=True), 64)
    untied = llama_trace(tiny_llama(num_hidden_layers=1), 64)
    ends = [
        sum(
            size
            for _, stop, size in trace.intervals
            if stop == max(s for _, s, _ in trace.intervals)
        )
        for trace in (untied, tied)
    ]
    assert ends[0] - ends[1] == 100 * 64 * 2  # one gradient of the embedding less


def test_fake_step_wants_a_loss():
    model = tiny_llama()
    ids = torch.empty(1, 8, dtype=torch.long, device="meta")
    with pytest.raises(DataError, match=r"expected the model to return a loss.*pass labels"):
        memo.Trace.from_fake(model, {"input_ids": ids})
    assert all(p.device.type == "meta" for p in model.parameters())
