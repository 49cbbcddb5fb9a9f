"""States of every kind, saved and loaded: bit by bit the same, or refused with the path named.

Each odd kind is a test of a few lines; there are so many kinds that the lines are many.
"""

import collections
import enum
import math
import random
from collections import namedtuple
from datetime import timedelta
from itertools import pairwise
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.state.values import decode_tree
from shared.comms import RankPool
from shared.errors import DataError

STAGES = ["arena", "fork"]


def saved(tmp_path, state, stage="arena"):
    """Saves, and returns where."""
    with bcp.Checkpointer(tmp_path / "run", stage=stage, overwrite=True) as ckpt:
        ckpt.save(1, state)
    return tmp_path / "run" / "step_00000001"


def contents(path):
    with bcp.open(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def same_bits(one, other):
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


def of_bytes(dtype, count=24):
    """Elements of every bit pattern that fits; truth values only have two."""
    random_bytes = torch.arange(count * dtype.itemsize, dtype=torch.int64).mul(37).to(torch.uint8)
    return (random_bytes % 2 if dtype is torch.bool else random_bytes).view(dtype)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.complex64, torch.complex128, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_every_type_comes_back_bit_by_bit(tmp_path, stage):
    state = {str(dtype): of_bytes(dtype).view(2, 3, 4) for dtype in DTYPES}
    path = saved(tmp_path, state, stage)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    bcp.load(path, into)
    assert [name for name in state if not same_bits(state[name], into[name])] == []
    assert [
        name for name, found in contents(path).items() if not same_bits(state[name], found)
    ] == []


@pytest.mark.parametrize("stage", STAGES)
def test_every_shape_and_stride_comes_back(tmp_path, stage):
    base = torch.arange(60.0).view(3, 4, 5)
    state = {
        "transposed": base.permute(2, 0, 1),
        "strided": base[:, ::2, 1::3],
        "expanded": torch.arange(3.0).view(3, 1).expand(3, 7),
        "scalar": torch.tensor(2.5),
        "one": torch.ones(1, 1, 1),
        "empty": torch.empty(0),
        "empty rows": torch.empty(4, 0, 3, dtype=torch.int16),
        "view": base[1:],
        "parameter": nn.Parameter(torch.full((2, 2), 7.0)),
    }
    path = saved(tmp_path, state, stage)
    found = contents(path)
    assert found.keys() == state.keys()
    assert [
        name for name in state if not same_bits(state[name].detach().contiguous(), found[name])
    ] == []
    # And into destinations that are not contiguous.
    into = {
        name: torch.full((*tensor.shape, 2), -1, dtype=tensor.dtype)[..., 0]
        for name, tensor in state.items()
    }
    bcp.load(path, into)
    assert all(torch.equal(into[name], state[name]) for name in state)


@pytest.mark.parametrize("stage", STAGES)
def test_lazily_conjugated_and_negated_tensors(tmp_path, stage):
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {
        "plain": numbers,
        "conjugated": numbers.conj(),
        "imag": numbers.imag,
        "negated": numbers.conj().imag,
    }
    path = saved(tmp_path, state, stage)
    found = contents(path)
    assert [name for name, tensor in state.items() if not torch.equal(tensor, found[name])] == []


def test_numpy_arrays_come_back_as_they_were_and_in_place(tmp_path):
    arrays = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "columns": np.arange(6, dtype=np.uint16).reshape(2, 3).T,
        "scalar": np.array(3, dtype=np.int8),
        "complex": np.array([1j, 2]),
        "truth": np.array([True, False]),
    }
    state = {"arrays": arrays, "number": np.float64(0.1), "count": np.int32(7)}
    path = saved(tmp_path, state)
    own = {name: np.zeros_like(array) for name, array in arrays.items()}
    into = {"arrays": dict(own), "number": 0.0, "count": 0}
    bcp.load(path, into)
    for name, array in arrays.items():
        assert into["arrays"][name] is own[name]
        assert own[name].dtype == array.dtype
        assert np.array_equal(own[name], array)
    assert (into["number"], into["count"]) == (0.1, 7)
    with bcp.open(path) as checkpoint:
        assert np.array_equal(checkpoint.extra["arrays"]["columns"][...], arrays["columns"])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=4) | st.integers() | st.booleans() | st.binary(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def exactly(value):
    """A form in which values are equal only if their types are as well."""
    if isinstance(value, dict):
        return ["dict", *sorted((repr((type(k), k)), exactly(v)) for k, v in value.items())]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(exactly, value)]
    return repr((type(value), value))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES, stale=VALUES)
def test_any_value_comes_back_exactly(tmp_path, value, stale):
    path = tmp_path / "values"
    bcp.save(path, {"x": value, "deep": {"er": [value]}}, overwrite=True)
    with bcp.open(path) as checkpoint:
        assert exactly(checkpoint.extra) == exactly({"x": value, "deep": {"er": [value]}})
    into = {"x": stale if not isinstance(stale, dict) else None, "deep": {"er": None}}
    if not isinstance(stale, list | tuple):  # what stands in lists is checked by position
        bcp.load(path, into)
        assert exactly(into) == exactly({"x": value, "deep": {"er": [value]}})


def test_numbers_that_json_cannot_say(tmp_path):
    values = [math.inf, -math.inf, math.nan, -0.0, 1e-320, 2**100]
    path = saved(tmp_path, {"v": list(values)})
    into = {"v": [0.0] * 6}
    bcp.load(path, into)
    assert list(map(repr, into["v"])) == list(map(repr, values))


def test_values_that_look_like_the_formats_own_marks(tmp_path):
    state = {
        "a": {"$tensor": "b"},
        "b": torch.ones(2),
        "$tuple": [1],
        "c": {"$dict": [[1, 2]], "$x": {"$bytes": "!"}},
    }
    path = saved(tmp_path, state)
    into = {
        "a": {"$tensor": ""},
        "b": torch.zeros(2),
        "$tuple": [0],
        "c": {"$dict": [[0, 0]], "$x": {"$bytes": ""}},
    }
    bcp.load(path, into)
    assert torch.equal(into.pop("b"), state.pop("b"))
    assert into == state


Pair = namedtuple("Pair", ["first", "second"])


class Colour(enum.Enum):
    RED = "red"


class Count(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


NUMBERS = [
    np.float32(0.1),
    np.float64(0.1),
    np.float16(-0.0),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.float64("nan"),
    bytearray(b"\x00ab"),
]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: type(value).__name__)
def test_a_number_keeps_its_type_and_bits(tmp_path, value):
    path = saved(tmp_path, {"a": {"b": value, "c": [value]}})
    state = {"a": {"b": 0, "c": [0]}}
    bcp.load(path, state)
    for found in (state["a"]["b"], state["a"]["c"][0]):
        assert type(found) is type(value)
        assert bytes(memoryview(found)) == bytes(memoryview(value))


def test_a_number_is_a_key(tmp_path):
    path = saved(tmp_path, {"a": {np.int64(3): 1, 4: 2}})
    state = {"a": {}}
    bcp.load(path, state)
    assert state["a"] == {3: 1, 4: 2}
    assert [type(key) for key in state["a"]] == [np.int64, int]


@pytest.mark.parametrize(
    "content", [["<f4", "AAA="], ["|O", "AAAAAAAAAAA="], ["x", ""], "AA", [3, 4]]
)
def test_a_damaged_number_is_told(content):
    with pytest.raises(DataError, match=r"\$scalar"):
        decode_tree({"$scalar": content}, lambda name: None)


@pytest.mark.parametrize(
    ("full", "empty"),
    [
        (collections.Counter(a=2, b=1), collections.Counter()),
        (collections.OrderedDict(b=1, a=2), collections.OrderedDict()),
        (collections.defaultdict(list, a=[1]), collections.defaultdict(list)),
    ],
    ids=["Counter", "OrderedDict", "defaultdict"],
)
def test_a_dictionary_keeps_its_class(tmp_path, full, empty):
    path = saved(tmp_path, {"a": {"full": full}})
    for into in (empty, full.copy()):
        state = {"a": {"full": into}}
        bcp.load(path, state)
        assert state["a"]["full"] is into
        assert into == full
        assert list(into) == list(full)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({1, 2}, "set"),
        (torch.float32, "dtype"),
        (object(), "object"),
        (len, "builtin"),
        (np.array(["text"]), "str"),
        (np.array([object()]), "object"),
        (np.arange(4, dtype=">i4"), "byte order"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        ({(1, 2): 3}, "tuple"),
        (Colour.RED, "enum"),
        (Count.ONE, "enum"),
        (Text("a"), "Text"),
        (np.str_("a"), "str_"),
        (np.datetime64("2020-01-01"), "datetime64"),
    ],
    ids=["set", "dtype", "object", "function", "numpy text", "numpy objects", "byte order",
         "sparse", "meta", "key", "enum", "int enum", "text", "numpy str", "numpy time"],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused_with_its_path(tmp_path, value, word):
    with pytest.raises(DataError, match=r"^outer\.inner\b") as raised:
        bcp.save(tmp_path / "no", {"outer": {"inner": value}})
    assert word in str(raised.value)
    assert not (tmp_path / "no").exists()


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantised_tensors_are_refused_with_what_to_do(tmp_path):
    quantised = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8)
    with pytest.raises(DataError, match=r"^m\.w: .*quantized.*put its parts into the state"):
        bcp.save(tmp_path / "no", {"m": {"w": quantised}})


class Wrapped(torch.Tensor):
    """A tensor subclass of two inner tensors, as torchao's quantised ones are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # pyrefly: ignore
        raise NotImplementedError(func)


def test_wrapper_subclasses_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"^w: .*Wrapped.*inner tensors"):
        bcp.save(tmp_path / "no", {"w": Wrapped(torch.ones(2, dtype=torch.int8))})


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)},
        {"a": {1: torch.ones(1), "1": torch.zeros(1)}},
        {"a": [torch.ones(1)], "a.0": np.ones(1)},
        {"m": nn.Linear(1, 1), "m.weight": torch.ones(1)},
    ],
    ids=["dot", "type of key", "list", "module"],
)
def test_two_tensors_of_one_name_are_refused(tmp_path, state):
    with pytest.raises(DataError, match=r"two values of the state are named '(a|m)\."):
        bcp.save(tmp_path / "no", state)


def test_tied_weights_are_stored_once_and_load_tied_and_untied(tmp_path):
    def tied():
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        model[1].weight = model[0].weight
        return model

    model = tied()
    nn.init.normal_(model[0].weight)
    path = saved(tmp_path, {"model": model})
    with bcp.open(path) as checkpoint:
        assert checkpoint.index.total_bytes == 6 * 4 * 4
        assert checkpoint.names == ["model.0.weight", "model.1.weight"]
        assert torch.equal(checkpoint["model.1.weight"][2:4], model[0].weight[2:4])
    again = tied()
    bcp.load(path, {"model": again})
    assert again[1].weight is again[0].weight
    assert torch.equal(again[0].weight, model[0].weight)
    apart = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    bcp.load(path, {"model": apart})
    assert torch.equal(apart[0].weight, model[0].weight)
    assert torch.equal(apart[1].weight, model[0].weight)


def test_views_that_share_memory_but_not_elements_are_not_taken_for_tied(tmp_path):
    base = torch.arange(16.0)
    state = {
        "whole": base,
        "half": base[:8],
        "square": base.view(4, 4),
        "transposed": base.view(4, 4).t(),
        "integers": base.view(torch.int32),
        "flat": bcp.FlatShard(base, (4, 4), 0),
    }
    path = saved(tmp_path, state)
    found = contents(path)
    state |= {"flat": base.view(4, 4)}
    assert [name for name, tensor in state.items() if not torch.equal(tensor, found[name])] == []


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model, optimizer, scheduler=None, num_steps=3):
    for at in range(num_steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), 0.1 * (at + 1))).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "sgd without momentum": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "adamw amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, centered=True, momentum=0.5),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.1),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.1),
    "lr tensor": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.1)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_if_never_stopped(tmp_path, kind):
    """Into an optimizer that has no state yet, with a scheduler, bit by bit."""

    def build():
        model = net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return model, optimizer, scheduler

    def state_of(model, optimizer, scheduler):
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    first = build()
    train(*first)
    path = saved(tmp_path, state_of(*first))
    train(*first)

    second = build()
    bcp.load(path, state_of(*second))
    train(*second)
    for one, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)
    assert first[2].get_last_lr() == second[2].get_last_lr()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=20),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda at: 0.9**at),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
            ],
            [2],
        ),
    ],
    ids=["one cycle", "plateau", "lambda", "sequential"],
)
def test_schedulers(tmp_path, schedule):
    def build():
        optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
        return optimizer, schedule(optimizer)

    def go(optimizer, scheduler):
        for _ in range(3):
            optimizer.step()
            scheduler.step(*[1.0][: type(scheduler).__name__.startswith("Reduce")])
        return [group["lr"] for group in optimizer.param_groups]

    first, second = build(), build()
    go(*first)
    path = saved(tmp_path, dict(zip("os", first, strict=True)))
    bcp.load(path, dict(zip("os", second, strict=True)))
    assert go(*first) == go(*second)


def test_reordered_parameter_groups_keep_their_own_state(tmp_path):
    def build(order):
        model = net()
        named = dict(model.named_parameters())
        groups = [
            {"params": [named[name] for name in names], "lr": lr, "weight_decay": wd}
            for names, lr, wd in order
        ]
        return model, torch.optim.AdamW(groups)

    decay, plain = ["0.weight", "2.weight"], ["2.bias", "0.bias"]
    model, optimizer = build([(decay, 0.1, 0.5), (plain, 0.2, 0.0)])
    train(model, optimizer)
    path = saved(tmp_path, {"model": model, "optimizer": optimizer})
    train(model, optimizer)

    again, other = build([(plain[::-1], 7, 7), (decay[1:], 7, 7), (decay[:1], 7, 7)])
    bcp.load(path, {"model": again, "optimizer": other})
    assert [(g["lr"], g["weight_decay"]) for g in other.param_groups] == [
        (0.2, 0.0),
        (0.1, 0.5),
        (0.1, 0.5),
    ]
    train(again, other)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)

    mixed = build([(decay + plain, 1, 1)])
    with pytest.raises(DataError, match="group 0 joins parameters whose settings differed"):
        bcp.load(path, {"model": mixed[0], "optimizer": mixed[1]})


def test_a_failed_load_leaves_a_new_optimizer_without_state(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    path = saved(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(DataError, match="more: not in the checkpoint"):
        bcp.load(path, {"model": model, "optimizer": fresh, "more": torch.ones(1)})
    assert not fresh.state


class Halved(nn.Linear):
    """Keeps its weight at twice what its state says, and copies every tensor."""

    def state_dict(self, *args, **kwargs):
        return {name: value / 2 for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state, *args, **kwargs):
        twice = {name: value * 2 for name, value in state.items()}
        return super().load_state_dict(twice, *args, **kwargs)


def hooked():
    """Copies by a hook, beside a module that has none."""
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def copy(_module, state, prefix, _metadata):
        for key in [key for key in state if key.startswith(prefix)]:
            state[key] = state[key].detach().clone()

    module[0].register_state_dict_post_hook(copy)
    return module


@pytest.mark.parametrize("build", [lambda: Halved(3, 2), hooked], ids=["override", "hook"])
@pytest.mark.parametrize("atomic", [False, True])
def test_modules_whose_state_is_a_copy_load_by_their_own_method(tmp_path, build, atomic):
    first, second = build(), build()
    path = saved(tmp_path, {"model": first})
    bcp.load(path, {"model": second}, atomic=atomic)
    own = [*first.parameters(), *first.buffers()]
    assert all(map(torch.equal, own, [*second.parameters(), *second.buffers()]))


class Several(torch.optim.Optimizer):
    """One optimizer made of two, each with a state of its own."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})

    def step(self, closure=None):  # pyrefly: ignore[bad-override]
        for one in self.optimizers:
            one.step(closure)

    def state_dict(self):
        return {"optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state_dict):
        for one, own in zip(self.optimizers, state_dict["optimizers"], strict=True):
            one.load_state_dict(own)


def test_an_optimizer_made_of_others_keeps_their_moments(tmp_path):
    def build():
        model = net()
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        return model, Several(
            torch.optim.AdamW(weights, lr=0.1), torch.optim.SGD(biases, lr=0.1, momentum=0.9)
        )

    first, second = build(), build()
    train(*first)
    path = saved(tmp_path, dict(zip(("model", "optimizer"), first, strict=True)))
    train(*first)
    bcp.load(path, dict(zip(("model", "optimizer"), second, strict=True)))
    train(*second)
    assert all(map(torch.equal, first[0].parameters(), second[0].parameters()))


def zero_redundancy(path):
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    train(model, optimizer)
    with pytest.raises(DataError, match=r"opt: .*ZeroRedundancyOptimizer"):
        bcp.save(path, {"model": model, "opt": optimizer})


class Counter:
    """What saves itself, with a tensor that grows."""

    def __init__(self, count=0):
        self.count, self.history = count, torch.arange(float(count))

    def state_dict(self):
        return {"count": self.count, "history": self.history}

    def load_state_dict(self, state):
        self.count, self.history = state["count"], state["history"].clone()


def test_objects_that_save_themselves_with_tensors_of_changing_size(tmp_path):
    path = saved(tmp_path, {"counter": Counter(5), "others": [Counter(2), {"x": Counter(3)}]})
    state = {"counter": Counter(), "others": [Counter(9), {"x": Counter(3)}]}
    bcp.load(path, state)
    counters = [state["counter"], state["others"][0], state["others"][1]["x"]]
    assert [one.count for one in counters] == [5, 2, 3]
    assert [one.history.tolist() for one in counters] == [
        [0.0, 1.0, 2.0, 3.0, 4.0],
        [0.0, 1.0],
        [0.0, 1.0, 2.0],
    ]


def test_one_key_is_loaded_without_the_others(tmp_path):
    state = {"a": {"w": torch.ones(1 << 16), "n": 1}, "b": {"w": torch.ones(1 << 20)}, "c": 3}
    path = saved(tmp_path, state)
    into = {"a": {"w": torch.zeros(1 << 16), "n": 0}}
    report = bcp.load(path, into)
    assert torch.equal(into["a"]["w"], state["a"]["w"])
    assert into["a"]["n"] == 1
    assert not report.unexpected
    # Whole blocks of 256 KiB, with the table and the header.
    assert report.num_bytes_read < (1 << 18) + 3 * (1 << 18)
    into = {"c": 0}
    bcp.load(path, into)
    assert into == {"c": 3}


def test_everything_that_does_not_fit_is_in_one_message(tmp_path):
    path = saved(
        tmp_path, {"x": {"a": torch.ones(2), "b": torch.ones(2), "d": torch.ones(2), "n": 1}}
    )
    state = {
        "x": {
            "a": torch.zeros(3),
            "b": torch.zeros(2, dtype=torch.float64),
            "c": torch.zeros(2),
            "d": torch.zeros(2),
            "m": 5,
        }
    }
    with pytest.raises(DataError) as raised:
        bcp.load(path, state)
    text = str(raised.value)
    for part in [
        "x.a: shape [2] in the checkpoint, [3] here",
        "x.b: float32 in the checkpoint, float64 here",
        "x.c: not in the checkpoint",
        "x.m: not in the checkpoint",
        "x.n: in the checkpoint, not in the state",
    ]:
        assert part in text
    assert "x.d:" not in text
    assert state["x"]["d"].sum() == 0
    assert state["x"]["m"] == 5


def test_without_strict_names_of_one_side_are_reported_once(tmp_path):
    path = saved(tmp_path, {"x": {"a": torch.ones(2), "b": torch.ones(2), "n": 1, "o": 2}})
    state = {"x": {"a": torch.zeros(2), "c": torch.zeros(2), "m": 5, "o": 0}}
    report = bcp.load(path, state, strict=False)
    assert sorted(report.missing) == ["x.c", "x.m"]
    assert sorted(report.unexpected) == ["x.b", "x.n"]
    assert state["x"]["a"].sum() == 2
    assert state["x"]["o"] == 2
    assert state["x"]["c"].sum() == 0
    # Another shape is never let pass.
    with pytest.raises(DataError, match=r"x\.a: shape"):
        bcp.load(path, {"x": {"a": torch.zeros(3)}}, strict=False)


@pytest.mark.parametrize("atomic", [False, True])
def test_cast_converts_elements(tmp_path, atomic):
    values = torch.tensor([1.0, -2.5, 1e30])
    path = saved(tmp_path, {"a": values, "b": torch.arange(3)})
    into = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(3, dtype=torch.int8)}
    bcp.load(path, into, cast=True, atomic=atomic)
    assert torch.equal(into["a"], values.bfloat16())
    assert into["b"].tolist() == [0, 1, 2]


@settings(max_examples=10)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    others=st.lists(st.floats(0, 1), max_size=4),
)
def test_any_flat_cut_into_any_other(shape, cuts, others):
    """Several shards of one tensor in one process: saved by one cut, loaded by another."""
    numel = math.prod(shape)
    whole = torch.arange(float(numel))

    def ranges(fractions):
        ends = sorted({0, numel, *(int(part * numel) for part in fractions)})
        return list(pairwise(ends)) or [(0, 0)]

    with TemporaryDirectory() as folder:
        state = {"whole": bcp.FlatShard(whole, shape, 0)}
        bcp.save(f"{folder}/one", state)
        with bcp.open(f"{folder}/one") as checkpoint:
            assert torch.equal(checkpoint.read("whole").reshape(-1), whole)
        for start, stop in (*ranges(cuts), *ranges(others)):
            part = torch.full((stop - start,), -1.0)
            bcp.load(f"{folder}/one", {"whole": bcp.FlatShard(part, shape, start)})
            assert torch.equal(part, whole[start:stop])


def cut(numel, rank, size, seed):
    """Uneven ranges, some of them empty."""
    ends = sorted(random.Random(seed).randrange(numel + 1) for _ in range(size - 1))
    ends = [0, *ends, numel]
    return ends[rank], ends[rank + 1]


def flat_round_trip(path, shape, num_seeds):
    rank, size, numel = dist.get_rank(), dist.get_world_size(), math.prod(shape)
    whole = torch.arange(float(numel))
    for seed in range(num_seeds):
        start, stop = cut(numel, rank, size, seed)
        shard = bcp.FlatShard(whole[start:stop].clone(), shape, start)
        bcp.save(f"{path}/{seed}", {"x": shard, "all": whole})
        start, stop = cut(numel, rank, size, seed + 1000)
        part = torch.full((stop - start,), -1.0)
        into = {"x": bcp.FlatShard(part, shape, start), "all": torch.zeros(numel)}
        bcp.load(f"{path}/{seed}", into, dedupe=("always", "never")[seed % 2])
        assert torch.equal(part, whole[start:stop]), (seed, rank)
        assert torch.equal(into["all"], whole)


def values_by_rank(path):
    rank, size = dist.get_rank(), dist.get_world_size()
    state = {
        "same": {"lr": 0.1, "x": [1, 2]},
        "own": {"rank": rank, "list": [rank, "same", {"deep": -rank}]},
        "only": {f"of {rank}": rank},
        "pair": (0, rank),
    }
    bcp.save(path, state)
    into = {
        "same": {"lr": 0, "x": [0, 0]},
        "own": {"rank": None, "list": [None, None, {"deep": None}]},
        "only": {f"of {rank}": None},
        "pair": (None, None),
    }
    bcp.load(path, into)
    return into == state, into, size


def values_of_one_path(path):
    rank = dist.get_rank()
    with pytest.raises(DataError, match=r"two values that differ between ranks are named 'a\.b'"):
        bcp.save(path, {"a.b": rank, "a": {"b": 10 + rank}})


def random_numbers():
    return random.random(), float(np.random.rand()), torch.rand(2).tolist(), random.gauss(0, 1)


def seed_all():
    rank = dist.get_rank() if dist.is_initialized() else 0
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    random.gauss(0, 1)  # leaves its pair behind


def save_rng(path):
    seed_all()
    bcp.save(path, {"rng": bcp.rng_state()})
    return random_numbers()


def load_rng(path):
    for _ in range(5):
        random_numbers()
    bcp.load(path, {"rng": bcp.rng_state()})
    return random_numbers()


def partial_and_submesh(path):
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [0, 1])
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(DataError, match=r"^rank \d of 2: m\.w: .*Shard and Replicate.*Partial"):
        bcp.save(path + "/partial", {"m": {"w": partial}})
    alone = DeviceMesh("cpu", [1])
    value = torch.arange(6.0)
    # Built by hand on rank 0, which is not in the mesh.
    inside = DTensor.from_local(
        value if rank == 1 else torch.empty(0), alone, [Replicate()], run_check=False,
        shape=value.shape, stride=(1,),
    )  # fmt: skip
    bcp.save(path + "/submesh", {"x": inside, "y": torch.ones(2)})
    both = distribute_tensor(torch.zeros(6), mesh, [Shard(0)])
    bcp.load(path + "/submesh", {"x": both, "y": torch.zeros(2)})
    assert torch.equal(both.full_tensor(), value)
    again = DTensor.from_local(
        torch.zeros(6 if rank == 1 else 0), alone, [Replicate()], run_check=False,
        shape=value.shape, stride=(1,),
    )  # fmt: skip
    report = bcp.load(path + "/submesh", {"x": again, "y": torch.zeros(2)}, dedupe="always")
    if rank == 1:
        assert torch.equal(again.to_local(), value)
    return report.num_bytes


def of_no_dimension(path):
    """Tensors of shape [] that only one rank holds: a DTensor on a part of the ranks, a shard."""
    rank = dist.get_rank()
    alone = DeviceMesh("cpu", [1])

    def build(value):
        scalar = distribute_tensor(torch.tensor(value), alone, [Replicate()])
        flat = torch.full((1 - rank,), value)
        return {"scalar": scalar, "flat": bcp.FlatShard(flat, (), rank)}

    bcp.save(path, build(3.0))
    into = build(0.0)
    bcp.load(path, into)
    held = into["scalar"].to_local() if rank == 1 else into["flat"].tensor[0]
    whole = {"scalar": torch.tensor(0.0), "flat": torch.tensor(0.0)}
    bcp.load(path, whole)
    return [held.item(), *(value.item() for value in whole.values())]


def tied_with_an_empty_part(path):
    """A tied tensor of which one rank's part is empty: it cannot see there that it is tied."""
    mesh = DeviceMesh("cpu", [0, 1])
    one = distribute_tensor(torch.full((1, 4), 3.0), mesh, [Shard(0)])
    bcp.save(path, {"a": one, "b": one})
    two = distribute_tensor(torch.zeros(1, 4), mesh, [Shard(0)])
    bcp.load(path, {"a": two, "b": two})
    assert two.full_tensor().tolist() == [[3.0] * 4]


def different_keys(path):
    """Pipeline stages: each rank has its own names; then everything on one."""
    rank = dist.get_rank()
    stage = {f"layer{rank}": torch.full((3,), float(rank))}
    bcp.save(path, {"model": stage})
    into = {"model": {f"layer{rank}": torch.zeros(3)}}
    bcp.load(path, into)
    assert torch.equal(into["model"][f"layer{rank}"], stage[f"layer{rank}"])
    swapped = {"model": {f"layer{1 - rank}": torch.zeros(3)}}
    bcp.load(path, swapped)
    assert swapped["model"][f"layer{1 - rank}"].tolist() == [1 - rank] * 3
    if rank == 0:
        into = {"model": {"layer0": torch.zeros(3), "layer1": torch.zeros(3)}}
    else:
        into = {"model": {"layer0": torch.zeros(3), "layer9": torch.zeros(1)}}
    with pytest.raises(DataError) as raised:
        bcp.load(path, into)
    return str(raised.value)


def disagreeing(path):
    rank = dist.get_rank()
    with pytest.raises(DataError) as raised:
        bcp.save(path, {"x": torch.ones(2 + rank)})
    return str(raised.value)


def one_bad_value(path):
    rank = dist.get_rank()
    with pytest.raises(DataError) as raised:
        bcp.save(path, {"x": torch.ones(2), "y": {"z": object() if rank == 1 else 1}})
    return str(raised.value)


def test_states_over_two_ranks(tmp_path, pool):
    pool.run(flat_round_trip, str(tmp_path / "flat"), (3, 5, 2), 6)

    for is_equal, found, _ in pool.run(values_by_rank, tmp_path / "values").results:
        assert is_equal, found

    pool.run(values_of_one_path, tmp_path / "clash")

    partial = pool.run(partial_and_submesh, str(tmp_path)).results
    assert partial == [8, 24 + 8]

    assert pool.run(of_no_dimension, tmp_path / "scalar").results == [[3.0] * 3] * 2

    pool.run(zero_redundancy, tmp_path / "zero")

    pool.run(tied_with_an_empty_part, tmp_path / "tied")

    texts = pool.run(different_keys, tmp_path / "keys").results
    assert texts[0] == texts[1]
    assert "model.layer9: not in the checkpoint" in texts[0]

    texts = pool.run(disagreeing, tmp_path / "disagree").results
    assert texts[0] == texts[1]
    assert "x" in texts[0]
    assert "[2]" in texts[0]
    assert "[3]" in texts[0]

    texts = pool.run(one_bad_value, tmp_path / "bad").results
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 1 of 2: y.z: ")


def test_random_numbers_go_on_where_they_were(tmp_path, pool):
    numbers = pool.run(save_rng, tmp_path / "rng").results
    assert numbers[0] != numbers[1]
    assert pool.run(load_rng, tmp_path / "rng").results == numbers


@pytest.mark.slow
def test_random_numbers_go_on_on_other_numbers_of_ranks(tmp_path, pool):
    numbers = pool.run(save_rng, tmp_path / "rng").results
    with RankPool(1, timeout=timedelta(seconds=60)) as one:
        assert one.run(load_rng, tmp_path / "rng").results == numbers[:1]
    # Three: two as they were, the third with its own numbers.
    with RankPool(3, timeout=timedelta(seconds=60)) as three:
        more = three.run(load_rng, tmp_path / "rng").results
    assert more[:2] == numbers
    assert more[2] not in numbers


def test_a_namedtuple_stays_one(tmp_path):
    path = saved(tmp_path, {"pair": Pair(1, [2])})
    state = {"pair": Pair(0, [0])}
    bcp.load(path, state)
    assert state["pair"] == Pair(1, [2])
    assert type(state["pair"]) is Pair


def test_an_array_that_must_not_be_written_is_no_destination(tmp_path):
    path = saved(tmp_path, {"a": {"b": np.arange(4)}})
    frozen = np.zeros(4, dtype=np.int64)
    frozen.setflags(write=False)
    with pytest.raises(DataError, match=r"a\.b"):
        bcp.load(path, {"a": {"b": frozen}})
    assert frozen.sum() == 0


def test_a_destination_that_overlaps_itself_is_refused_before_anything_is_touched(tmp_path):
    path = saved(tmp_path, {"a": torch.ones(4), "b": torch.ones(4)})
    state = {"a": torch.zeros(4), "b": torch.zeros(1).expand(4)}
    with pytest.raises(DataError, match=r"b: its elements share memory"):
        bcp.load(path, state, atomic=True)
    assert state["a"].sum() == 0


def test_a_tie_that_was_stored_apart_is_told(tmp_path, caplog):
    path = saved(tmp_path, {"e": torch.ones(2), "h": torch.zeros(2)})
    tied = torch.full((2,), 5.0)
    bcp.load(path, {"e": tied, "h": tied})
    assert tied.tolist() == [1.0, 1.0]
    assert "h is tied to e" in caplog.text
