"""When a profile is read, added to, measured, or refused."""

from dataclasses import replace

import pytest
import torch

from llmpq.config import ModelSpec, Workload
from llmpq.profiler import layer_times
from llmpq.profiler.cache import find_profile, find_sensitivity, profile_path
from llmpq.profiler.profile import DeviceProfile
from shared.errors import ConfigError

from ..runtime.tiny_models import make
from .planted import planted_profile


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("model"))


class Device:
    """Stands for the device: each measurement has the next factor of slowness."""

    def __init__(self, model):
        self.asked, self._model = [], model

    def __call__(self, folder, *, kind, bits, group_size, dtype, prompt_tokens, **_):
        self.asked.append((tuple(bits), prompt_tokens))
        return planted_profile(
            bits, slow=float(len(self.asked)), longest=prompt_tokens, kind=kind, dtype=dtype,
            group_size=group_size, model=ModelSpec.from_hf(self._model).fingerprint,
            torch=torch.__version__, processor=layer_times.read_processor(torch.device("cpu")),
        )  # fmt: skip


@pytest.fixture
def device(model, monkeypatch):
    found = Device(model)
    monkeypatch.setattr(layer_times, "measure_device", found)
    return found


def find(folder, model, bits, *, tokens=32, is_here=True, force=False):
    workload = Workload(num_prompts=4, prompt_tokens=tokens, new_tokens=4)
    return find_profile(
        folder, model, "a", bits=bits, group_size=64, dtype="float32", workload=workload,
        is_here=is_here, force=force,
    )  # fmt: skip


def test_a_profile_is_measured_once_and_widths_are_added(tmp_path, model, device):
    first = find(tmp_path, model, (4, 16))
    assert find(tmp_path, model, (4,)) == first
    both = find(tmp_path, model, (3, 4))
    assert device.asked == [((4, 16), 32), ((3,), 32)]
    assert sorted(both.prefill) == [3, 4, 16]
    assert both.prefill[4] == first.prefill[4]
    assert find(tmp_path, model, (3, 4, 16), is_here=False) == both


def test_much_longer_prompts_are_measured_too(tmp_path, model, device):
    find(tmp_path, model, (4,))
    find(tmp_path, model, (4,), tokens=64)
    assert len(device.asked) == 1
    find(tmp_path, model, (4,), tokens=65, is_here=False)  # extrapolated where it cannot be
    find(tmp_path, model, (4,), tokens=65)
    assert device.asked[1:] == [((4,), 65)]


def test_what_is_missing_elsewhere_is_named(tmp_path, model):
    with pytest.raises(
        ConfigError, match=r"--kind a --bits 4 --group-size 64 --dtype float32 --activations float`"
    ):
        find(tmp_path, model, (4,), is_here=False)


@pytest.mark.parametrize("field", ["torch", "processor"])
def test_another_machine_is_refused_unless_forced(tmp_path, model, device, field):
    path = profile_path(tmp_path, model, "a", "float32", 64, "float")
    other = replace(find(tmp_path, model, (4,)), **{field: "other"})
    other.save(path)
    with pytest.raises(ConfigError, match=rf"{field}: expected .*, got other.*--force"):
        find(tmp_path, model, (4,))
    assert find(tmp_path, model, (4,), force=True) == other


def test_the_processor_counts_only_where_it_is(tmp_path, model, device):
    path = profile_path(tmp_path, model, "a", "float32", 64, "float")
    other = replace(find(tmp_path, model, (4,)), processor="other")
    other.save(path)
    assert find(tmp_path, model, (4,), is_here=False) == other


def test_another_model_is_refused_even_if_forced(tmp_path, model, device):
    path = profile_path(tmp_path, model, "a", "float32", 64, "float")
    replace(find(tmp_path, model, (4,)), model="another").save(path)
    with pytest.raises(
        ConfigError, match=r"model: expected .*, got another; it is another model's"
    ):
        find(tmp_path, model, (4,), force=True)
    assert DeviceProfile.load(path).model == "another"


def test_noise_is_measured_anew_for_other_text(tmp_path, model):
    texts = [torch.arange(24).view(2, 12) % 20]
    common = {"bits": (4,), "group_size": 16}
    first = find_sensitivity(tmp_path, model, texts, **common)
    assert find_sensitivity(tmp_path, model, texts, **common).noise.tolist() == first.noise.tolist()
    assert len(list(tmp_path.glob("sensitivity-*"))) == 1
    other = find_sensitivity(tmp_path, model, [texts[0].flip(1)], **common)
    assert other.noise.tolist() != first.noise.tolist()


def test_a_damaged_measurement_of_noise_is_named(tmp_path, model):
    texts, common = [torch.arange(24).view(2, 12) % 20], {"bits": (4,), "group_size": 16}
    find_sensitivity(tmp_path, model, texts, **common)
    (path,) = tmp_path.glob("sensitivity-*")
    for damaged in ('{"noise": [[1', '{"noise": [[1.0]]}', "[]"):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=r"sensitivity-.*delete the file"):
            find_sensitivity(tmp_path, model, texts, **common)
