import copy
from functools import cache

import pytest
import torch
from small_models import (
    controlled,
    controlled_inputs,
    dit,
    dit_inputs,
    flux,
    flux_inputs,
    image_unet,
    image_unet_inputs,
    sd3,
    sd3_inputs,
    text_unet,
    text_unet_inputs,
    xl_unet,
    xl_unet_inputs,
)
from torch import nn

import diffusionpipe as dp
from diffusionpipe.job.batches import flatten
from shared.errors import ConfigError, DataError

FAMILIES = {
    "text": (text_unet, text_unet_inputs),
    "text, deeper": (
        lambda: text_unet(channels=(8, 8, 16), layers_per_block=2),
        text_unet_inputs,
    ),
    "xl": (xl_unet, xl_unet_inputs),
    "images": (image_unet, image_unet_inputs),
    "images, resnet samplers": (
        lambda: image_unet(
            downsample_type="resnet",
            upsample_type="resnet",
            down_block_types=("AttnDownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "AttnUpBlock2D"),
        ),
        image_unet_inputs,
    ),
    "images, classes": (
        lambda: image_unet(num_class_embeds=10),
        lambda rows=2: {**image_unet_inputs(rows), "class_labels": torch.arange(rows)},
    ),
    "sd3": (sd3, sd3_inputs),
    "flux": (flux, flux_inputs),
    "flux, not distilled": (
        lambda: flux(guidance=False),
        lambda rows=2: flux_inputs(rows, guidance=False),
    ),
    "dit": (dit, dit_inputs),
}


@cache
def _family(name):
    """A model that no test changes, and its arguments."""
    build, make_inputs = FAMILIES[name]
    return build(), make_inputs()


def _gradients(model, output):
    model.zero_grad()
    torch.manual_seed(3)
    (output * torch.randn(output.shape)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (gradient is None) == (ours[name] is None), name
        assert gradient is None or torch.equal(ours[name], gradient), name


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_the_models_own_to_the_bit(family):
    model, inputs = _family(family)
    chain = dp.chain(model)
    chain.check(**inputs)
    expected = model(**inputs, return_dict=False)[0]
    theirs = _gradients(model, expected)
    output = chain.run(chain.flatten(inputs))["output"]
    assert torch.equal(output, expected)
    _assert_same(_gradients(model, output), theirs)
    assert all(theirs[name] is not None for name in chain.trained)


@pytest.mark.parametrize("family", ["text, deeper", "images, classes", "sd3", "flux", "dit"])
def test_spans_run_apart_give_the_same_and_name_what_travels(family):
    model, inputs = _family(family)
    chain = dp.chain(model)
    state = chain.flatten(inputs)
    with torch.no_grad():
        expected = chain.run(state)["output"]
        # Of long chains, every other cut.
        for middle in range(1, len(chain), 1 + len(chain) // 12):
            front = chain.run({k: state[k] for k in chain.list_reads(0, middle)}, 0, middle)
            assert tuple(front) == chain.list_writes(0, middle)
            read = chain.list_reads(middle, len(chain))
            values = {key: front[key] if key in front else state[key] for key in read}
            assert torch.equal(chain.run(values, middle)["output"], expected)


@pytest.mark.parametrize("is_xl", [False, True])
def test_a_controlnet_and_its_locked_unet_are_diffusers_training_step(is_xl):
    model, inputs = controlled(is_xl=is_xl), controlled_inputs(is_xl=is_xl)
    chain = dp.chain(model)
    state = {k: t for name, value in inputs.items() for k, t in flatten(name, value).items()}
    half = dp.chain(model.unet)
    names = [layer.name for layer in half.layers]
    with torch.no_grad():
        locked = flatten("locked", half.run(state, 0, names.index("middle") + 1))
    used = {key: tensor for key, tensor in {**state, **locked}.items() if key in chain.inputs}
    assert set(used) == set(chain.inputs)
    expected = model(**inputs)
    theirs = _gradients(model, expected)
    output = chain.run(used)["output"]
    assert torch.equal(output, expected)
    # Exits run behind their steps, not behind the last one, so sums of gradients round otherwise.
    for name, gradient in _gradients(model, output).items():
        if gradient is not None:
            scale = theirs[name].abs().max()
            assert (gradient - theirs[name]).abs().max() <= 2e-5 * scale, name
    trained = [name for name, gradient in theirs.items() if gradient is not None]
    assert trained
    assert all(name.startswith("controlnet.") for name in trained)
    assert {n for n, g in theirs.items() if n.startswith("controlnet.") and g is None} == set()


def _add_lora(model, targets):
    from peft import LoraConfig

    torch.manual_seed(4)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return model


@pytest.mark.parametrize(
    "family",
    ["text", "sd3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("xl", "flux"))],
)
def test_adapters_of_peft_train_alone(family):
    build, make_inputs = FAMILIES[family]
    model, inputs = _add_lora(build(), ["to_q", "to_k", "to_v", "to_out.0"]), make_inputs()
    chain = dp.chain(model)
    chain.check(**inputs)
    theirs = _gradients(model, model(**inputs, return_dict=False)[0])
    _assert_same(_gradients(model, chain.run(chain.flatten(inputs))["output"]), theirs)
    assert all("lora_" in name for name in chain.trained)
    assert all(theirs[name] is not None for name in chain.trained)


def test_a_wrapper_of_peft_is_cut_like_its_model():
    from peft import LoraConfig, get_peft_model

    model, inputs = text_unet(), text_unet_inputs()
    torch.manual_seed(4)
    wrapped = get_peft_model(
        model, LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    )
    chain = dp.chain(wrapped)
    chain.check(**inputs)
    assert all(name.startswith("base_model.") for name in chain.trained)


def test_cuts_are_what_spans_have_to_hand_over():
    model, inputs = _family("text, deeper")
    chain = dp.chain(model)
    state = chain.flatten(inputs)
    with torch.no_grad():
        for index, cut in enumerate(chain.cuts(**inputs), 1):
            values = chain.run(state, 0, index)
            total = sum(tensor.nbytes for tensor in values.values())
            assert cut.hidden_bytes + cut.skip_bytes + cut.shared_bytes == total
            assert cut.hidden_bytes == values[chain.layers[index - 1].writes[0]].nbytes


def test_folded_cuts_count_what_does_not_reach_over_the_fold():
    """A skip of the second half, written and read there, crosses its cuts in any placement."""
    layers = [
        dp.ChainLayer("a", lambda s: {"a": s["x"] + 1, "k": s["x"]}, ("x",), ("a", "k"), ()),
        dp.ChainLayer("b", lambda s: {"b": s["a"] * 2}, ("a",), ("b",), ()),
        dp.ChainLayer(
            "c", lambda s: {"c": s["b"] + s["k"], "l": s["b"]}, ("b", "k"), ("c", "l"), ()
        ),
        dp.ChainLayer("d", lambda s: {"d": s["c"]}, ("c",), ("d",), ()),
        dp.ChainLayer("e", lambda s: {"output": s["d"] + s["l"]}, ("d", "l"), ("output",), ()),
    ]
    chain = dp.chain(layers)
    x = torch.zeros(3, 2)
    size = x.nbytes
    assert [cut.skip_bytes for cut in chain.cuts(x=x)] == [0, size, 0, size]
    assert [cut.skip_bytes for cut in chain.cuts("folded", x=x)] == [0, 0, 0, size]
    with pytest.raises(ConfigError, match="placement: expected 'chain' or 'folded', got 'ring'"):
        chain.cuts("ring", x=x)


def test_a_skip_that_begins_at_the_fold_stays_on_its_device():
    layers = [
        dp.ChainLayer(
            "a", lambda s: {"a": s["x"], "k": s["x"].repeat(1, 9)}, ("x",), ("a", "k"), ()
        ),
        dp.ChainLayer("b", lambda s: {"b": s["a"] * 2}, ("a",), ("b",), ()),
        dp.ChainLayer("c", lambda s: {"c": s["b"] + s["k"][:, :2]}, ("b", "k"), ("c",), ()),
        dp.ChainLayer("d", lambda s: {"output": s["c"] + s["b"]}, ("c", "b"), ("output",), ()),
    ]
    x = torch.zeros(3, 2)
    assert [cut.skip_bytes for cut in dp.chain(layers).cuts(x=x)] == [0, 9 * x.nbytes, x.nbytes]
    assert [cut.skip_bytes for cut in dp.chain(layers).cuts("folded", x=x)] == [0, 0, 0]


def test_the_first_layer_that_differs_is_named(monkeypatch):
    model, inputs = text_unet(), text_unet_inputs()
    chain = dp.chain(model)
    attention = model.up_blocks[1].attentions[0]
    forward = type(model).forward

    def drifted(self, *args, **keywords):
        handle = attention.register_forward_pre_hook(lambda _, x: (x[0] * 1.001, *x[1:]))
        try:
            return forward(self, *args, **keywords)
        finally:
            handle.remove()

    monkeypatch.setattr(type(model), "forward", drifted)
    with pytest.raises(
        ConfigError, match=r"layer up1\.0: expected what UNet2DConditionModel's own"
    ):
        chain.check(**inputs)


def test_a_forward_that_only_ends_differently_names_the_tail(monkeypatch):
    model, inputs = text_unet(), text_unet_inputs()
    chain = dp.chain(model)
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, *a, **k: (forward(self, *a, **k).sample + 1,)
    )
    with pytest.raises(ConfigError, match="layer tail: expected the output of"):
        chain.check(**inputs)


def test_a_forward_of_another_type_is_refused(monkeypatch):
    model, inputs = text_unet(), text_unet_inputs()
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, *a, **k: (forward(self, *a, **k).sample.double(),)
    )
    with pytest.raises(ConfigError, match="layer tail: expected the output of"):
        dp.chain(model).check(**inputs)


def test_a_configuration_that_no_adapter_knows_is_refused_by_comparison():
    chain = dp.chain(image_unet(time_embedding_type="fourier"))
    with pytest.raises(ConfigError, match="layer tail: expected the output of UNet2DModel's own"):
        chain.check(**image_unet_inputs())


def test_random_draws_in_a_forward_are_refused():
    model = dit().train()
    with pytest.raises(ConfigError, match="expected a forward without random draws"):
        # Labels are dropped with a tenth's probability: of many rows, some are.
        dp.chain(model).check(**dit_inputs(64))


def test_arguments_that_no_layer_reads_or_that_are_missing_are_named():
    chain, inputs = dp.chain(text_unet()), text_unet_inputs()
    with pytest.raises(ConfigError, match="leave out encoder_attention_mask"):
        chain.check(**inputs, encoder_attention_mask=torch.ones(2, 5))
    del inputs["timestep"]
    with pytest.raises(ConfigError, match="do add timestep"):
        chain.check(**inputs)
    with pytest.raises(ConfigError, match=r"layers down0\.0 to down1\.0: expected values h0, emb"):
        chain.run({"encoder_hidden_states": inputs["encoder_hidden_states"]}, 1, 4)


def test_uneven_images_are_refused():
    chain, inputs = dp.chain(text_unet()), text_unet_inputs(size=7)
    with pytest.raises(DataError, match=r"multiples of 2, got \[7, 7\]"):
        chain.run(chain.flatten(inputs))


def test_batch_norms_in_training_are_refused():
    model = nn.ModuleList([nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)])
    chain = dp.chain(model)
    with pytest.raises(
        ConfigError, match="1: expected no BatchNorm in training mode, got BatchNorm2d"
    ):
        chain.validate()
    model[1].eval()
    chain.check(sample=torch.randn(2, 3, 4, 4))


def test_parameters_in_no_layer_or_in_two_are_refused():
    model = text_unet()
    chain = dp.chain(model)
    _add_lora(model, ["conv_in"])
    with pytest.raises(ConfigError, match=r"got conv_in\.lora_A\.default\.weight, .* in none"):
        chain.validate()
    dp.chain(model).validate()
    linear = nn.Linear(3, 3)
    tied = dp.chain([linear, nn.SiLU(), linear])
    with pytest.raises(ConfigError, match="expected each trainable parameter in one layer"):
        tied.validate()
    linear.requires_grad_(False)
    tied.validate()


def test_unknown_models_and_blocks_are_refused():
    with pytest.raises(
        ConfigError, match=r"backbone: expected one of UNet2DConditionModel, .*Linear"
    ):
        dp.chain(nn.Linear(2, 2))
    with pytest.raises(
        ConfigError, match="expected a list of ChainLayer or of modules, got Linear, int"
    ):
        dp.chain([nn.Linear(2, 2), 3])
    blocks = {"down_block_types": ("SkipDownBlock2D", "DownBlock2D")}
    with pytest.raises(ConfigError, match="down0: expected a block of the kinds AttnDownBlock2D"):
        dp.chain(image_unet(**blocks))


def test_lists_of_modules_are_chains():
    torch.manual_seed(0)
    modules = [nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 2)]
    chain = dp.chain(modules)
    x = torch.randn(4, 3)
    chain.check(sample=x)
    assert torch.equal(chain.run({"sample": x})["output"], nn.Sequential(*modules)(x))
    assert list(chain.trained) == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("writes", "match"),
    [(("h", "output"), "expected a new key to write, got 'h'"), (("z",), "writes 'output'")],
)
def test_layers_that_write_twice_or_no_output_are_refused(writes, match):
    first = dp.ChainLayer("first", lambda s: {"h": s["x"]}, ("x",), ("h",), ())
    second = dp.ChainLayer("second", lambda s: dict.fromkeys(writes, s["h"]), ("h",), writes, ())
    with pytest.raises(ConfigError, match=match):
        dp.chain([first, second])


def test_a_layer_that_writes_something_else_is_named():
    layer = dp.ChainLayer("only", lambda s: {"out": s["x"]}, ("x",), ("output",), ())
    with pytest.raises(ConfigError, match="layer only: expected it to write output, got out"):
        dp.chain([layer]).run({"x": torch.zeros(1)})


def test_checkpointed_activations_change_no_gradient():
    model, inputs = text_unet(), text_unet_inputs()
    chain = dp.chain(model)
    state = chain.flatten(inputs)
    kept = _gradients(model, chain.run(state)["output"])
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.nbytes) or t, lambda t: t
    )
    with hooks:
        chain.run(state)
    before = sum(saved)
    model.enable_gradient_checkpointing()
    saved.clear()
    with hooks:
        chain.run(state)
    assert sum(saved) < before / 4
    _assert_same(_gradients(model, chain.run(state)["output"]), kept)


def test_layers_leave_what_they_read_alone():
    """A value may be on its way to another rank while the next layers run."""
    for family in FAMILIES:
        model, inputs = _family(family)
        chain = dp.chain(model)
        values = chain.flatten(inputs)
        with torch.no_grad():
            for layer in chain.layers:
                before = {key: copy.deepcopy(values[key]) for key in layer.reads}
                values.update(layer.call(values))
                assert all(torch.equal(values[key], before[key]) for key in layer.reads), layer.name
